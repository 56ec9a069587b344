"""What ``guided-spec check`` finds out about a schema."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from typing import Any

from guided_spec.bundled import named_model
from guided_spec.cli import collect_again
from guided_spec.errors import (
    GrammarCompileError,
    UnsatisfiableGrammarError,
    UnsupportedSchemaError,
)
from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.backends.llguidance import LLGuidanceGrammar
from guided_spec.grammar.backends.llguidance_schema import narrower_scalars
from guided_spec.grammar.backends.redundancy import redundancies_of
from guided_spec.grammar.backends.xgrammar import XGrammarGrammar
from guided_spec.grammar.completion.spelling import Spelling
from guided_spec.grammar.document import SpecDocument
from guided_spec.grammar.limits import NoTableError, TableLimits
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.schema.keys import free_keys
from guided_spec.grammar.schema.lowered import Unenforced
from guided_spec.grammar.schema.misspelt import misspelt
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.tables.table import compare_steps, compare_texts, proven_table, tabled_part
from guided_spec.grammar.text.unique_keys import NotedGrammar
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.models.tokenizer import load_tokenizer


def report_schema(
    spec: GrammarSpec, tokenizer: str | None, grammar_backend: str, table_steps: int | None = None
) -> dict[str, Any]:
    """Compile it and say what would be enforced of it.

    spec: a schema; or EBNF or Lark, of which all is enforced. tokenizer: a hub id or folder; None
        is the bundled model's.
    table_steps: tokens of the random texts on which its table is compared; None for no table.

    Raises ConfigError and ModelError; what is wrong with the schema is under ``error``.
    """
    vocabulary = _vocabulary(named_model(tokenizer))
    collect_again()
    backend = BackendChoice(grammar_backend, vocabulary)
    started = time.perf_counter()
    document = SpecDocument(spec)  # read once, by whatever compiles it and for the findings
    compiled = _compile(document, backend)
    seconds = time.perf_counter() - started
    error = compiled if isinstance(compiled, GrammarCompileError) else None
    findings = _findings(document, compiled, grammar_backend)
    left_out = spec.unsupported == "warn" and any(entry.level == "error" for entry in findings)
    return {
        "compiles": error is None,
        "backend": _backend_of(compiled),
        "error": None if error is None else {"type": type(error).__name__, "message": str(error)},
        "seconds": seconds,
        "validates": error is None and not left_out,
        "additional_properties": spec.additional_properties,
        "left_open": document.lowered.open_at if error is None and spec.is_json else (),
        "findings": [finding._asdict() for finding in findings],
        "table": _table(compiled, vocabulary, table_steps)
        if table_steps is not None and not isinstance(compiled, GrammarCompileError)
        else None,
    }


def _backend_of(compiled: CompiledGrammar | GrammarCompileError) -> str | None:
    if isinstance(compiled, NotedGrammar):
        return compiled.backend
    kinds = {XGrammarGrammar: "xgrammar", LLGuidanceGrammar: "llguidance"}
    return next((name for kind, name in kinds.items() if isinstance(compiled, kind)), None)


def _table(compiled: CompiledGrammar, vocabulary: Vocabulary, steps: int) -> dict[str, Any]:
    """What its table takes, and whether it equals the matcher."""
    part, spelling = tabled_part(compiled), Spelling(vocabulary)
    started = time.perf_counter()
    try:
        table = proven_table(part, spelling, TableLimits())
    except NoTableError as error:
        return {"reason": str(error), "equal": None}
    seconds = time.perf_counter() - started
    difference = compare_steps(table, part)
    compared = compare_texts(table, part, 0 if difference else steps, seed=0)
    return {
        "reason": None,
        "equal": (difference or compared.difference) is None,
        "difference": difference or compared.difference,
        "whole": table.is_whole,
        "keys_by_matcher": part is not compiled,
        "states": table.num_states,
        "classes": table.then.shape[1],
        "rows": len(table.rows),
        "bytes": table.memory_size_bytes,
        "seconds": seconds,
        "steps": compared.steps,
        "texts": compared.texts,
    }


def _vocabulary(path: str) -> Vocabulary:
    tokenizer = load_tokenizer(path)
    stop = 0 if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    return Vocabulary.from_tokenizer(tokenizer, len(tokenizer), [stop])


def _compile(
    document: SpecDocument, backend: BackendChoice
) -> CompiledGrammar | GrammarCompileError:
    """The compiled schema, or why no backend took it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the findings say it
            return backend.compile_document(document)
    except GrammarCompileError as error:
        return error


def _findings(
    document: SpecDocument, compiled: CompiledGrammar | GrammarCompileError, asked: str
) -> list[Unenforced]:
    """About xgrammar, llguidance or both, as it was compiled; nothing is known about others."""
    if not document.spec.is_json:
        if isinstance(compiled, GrammarCompileError):
            return []
        slow = "so masks take longer, the longer the text is"
        return [
            Unenforced(one.rule, "rule", f"{one.reason}, {slow}", one.fix, "warning")
            for one in redundancies_of(compiled)
        ]
    backend = compiled.backend if isinstance(compiled, NotedGrammar) else asked
    if backend not in ("auto", "llguidance", "xgrammar"):
        return []
    if isinstance(compiled, GrammarCompileError) and not isinstance(
        compiled, UnsatisfiableGrammarError | UnsupportedSchemaError
    ):
        return []
    found = [*misspelt(document.value)]
    if isinstance(compiled, GrammarCompileError):
        return [*found, *document.examined.entries]
    own = compiled.notes if isinstance(compiled, NotedGrammar) else ()
    notes = [*own, *_about_tags(document)]
    if backend == "llguidance":
        lowered = document.lowered
        return [*found, *lowered.entries, *narrower_scalars(lowered), *notes]
    return [*found, *document.examined.entries, *notes]


def _about_tags(document: SpecDocument) -> list[Unenforced]:
    """Notes if unlisted keys may repeat, or items must not: filters see no tags around the JSON."""
    found: list[Unenforced] = []
    if document.spec.additional_properties != "closed":  # as objects of tags are
        document = SpecDocument(replace(document.spec, additional_properties="closed"))
    lowered = document.lowered
    # Says yes too often; whether it is so takes seconds to see in a large schema.
    are_free = free_keys(lowered.schema).are_there
    if are_free and (document.is_large or free_keys(document.examined.schema).are_there):
        reason = "as part of a tool or tag, a key that is not listed may be written twice"
        found.append(Unenforced("", "additionalProperties", reason, "list the keys there", "note"))
    if lowered.items is not None:
        reason, fix = "as part of a tool or tag, it is refused over many values", "list few values"
        found.append(Unenforced("", "uniqueItems", reason, fix, "note"))
    return found
