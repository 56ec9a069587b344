"""``guided-spec check``: does a schema compile, and what would be enforced of it?"""

from __future__ import annotations

import json
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from guided_spec.cli.console import failures_as_messages, print_json, stdout
from guided_spec.cli.grammar import read_text
from guided_spec.engine.setup import bundled_asset
from guided_spec.errors import (
    GrammarCompileError,
    UnsatisfiableGrammarError,
    UnsupportedSchemaError,
)
from guided_spec.grammar.auto_backend import build_backend
from guided_spec.grammar.protocol import CompiledGrammar, GrammarBackend
from guided_spec.grammar.schema import Unenforced, find_unenforced
from guided_spec.grammar.schema_keys import free_keys
from guided_spec.grammar.schema_lower import lower
from guided_spec.grammar.schema_prepare import examine_schema
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.models.loading import load_tokenizer

__all__ = ["check"]


def check(
    schema: Annotated[Path, typer.Argument(help="JSON schema file.")],
    tokenizer: Annotated[str | None, typer.Option(help="Hub id or folder of a model.")] = None,
    grammar_backend: Annotated[
        str, typer.Option(help="xgrammar, llguidance, auto (the first that enforces it), or yours.")
    ] = "auto",
    unsupported: Annotated[
        str, typer.Option(help="What is not enforced: error, rewrite (admit less), or warn.")
    ] = "error",
    key_order: Annotated[
        str, typer.Option(help="Of objects: schema, as it lists them, or any.")
    ] = "schema",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Compile a schema and say what would be enforced; exit code 1 if it is not all of it."""
    with failures_as_messages():
        text = read_text("SCHEMA", schema)
        vocabulary = _vocabulary(tokenizer or bundled_asset("target"))
        backend = build_backend(grammar_backend, vocabulary)
        started = time.perf_counter()
        spec = replace(
            GrammarSpec.json_schema(text),
            unsupported=unsupported,  # type: ignore[arg-type]
            key_order=key_order,  # type: ignore[arg-type]
        )
        compiled = _compile(spec, backend)
        seconds = time.perf_counter() - started
    error = compiled if isinstance(compiled, GrammarCompileError) else None
    findings = _findings(text, compiled, grammar_backend)
    left_out = unsupported == "warn" and any(entry.level == "error" for entry in findings)
    report = {
        "compiles": error is None,
        "backend": None if error is not None else getattr(compiled, "backend", ""),
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "seconds": seconds,
        "validates": error is None and not left_out,
        "findings": [finding._asdict() for finding in findings],
    }
    print_json(report) if as_json else _print(report)
    if error is not None:
        raise typer.Exit(1)


def _vocabulary(path: str) -> Vocabulary:
    tokenizer = load_tokenizer(path)
    stop = 0 if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    return Vocabulary.from_tokenizer(tokenizer, len(tokenizer), [stop])


def _compile(spec: GrammarSpec, backend: GrammarBackend) -> CompiledGrammar | GrammarCompileError:
    """The compiled schema, or why no backend took it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the findings say it
            return backend.compile(spec)
    except GrammarCompileError as error:
        return error


def _findings(
    text: str, compiled: CompiledGrammar | GrammarCompileError, asked: str
) -> list[Unenforced]:
    """About xgrammar, llguidance or both, as it was compiled; nothing is known about others."""
    backend = getattr(compiled, "backend", asked)  # an error names none
    if backend not in ("auto", "llguidance", "xgrammar"):
        return []
    if isinstance(compiled, GrammarCompileError) and not isinstance(
        compiled, UnsatisfiableGrammarError | UnsupportedSchemaError
    ):
        return []
    schema = json.loads(text)
    if isinstance(compiled, GrammarCompileError):
        return list(find_unenforced(schema))
    notes = [*getattr(compiled, "notes", ()), *_about_tags(schema)]
    entries = lower(schema).entries if backend == "llguidance" else find_unenforced(schema)
    return [*entries, *notes]


def _about_tags(schema: Any) -> list[Unenforced]:
    """Where its keys cannot be told apart: what is around a tag's JSON is none."""
    if not free_keys(examine_schema(schema).schema).are_there:
        return []
    reason = "as part of a tool or tag, a key that is not listed may be written twice"
    return [Unenforced("", "additionalProperties", reason, "list the keys there", "note")]


def _print(report: dict[str, Any]) -> None:
    console = stdout()
    if report["findings"]:
        names = ("level", "pointer", "keyword", "reason", "fix")
        table = Table(*names)
        for finding in report["findings"]:
            table.add_row(*(str(finding[name]) for name in names))
        console.print(table)
    if report["compiles"]:
        took = f"compiles with {report['backend']} in {report['seconds']:.3f} s"
        promise = "every output will validate"
        if not report["validates"]:
            promise = "outputs may break what is of level error above"
        console.print(f"{took}; {promise}")
    else:
        console.print(report["error"])
