"""``guided-spec check``: does a schema or grammar compile, and what would be enforced of it?"""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from guided_spec.cli.console import Json, Verbose, print_json, stdout, working
from guided_spec.cli.options import read_json, read_text
from guided_spec.cli.words import said
from guided_spec.errors import ConfigError
from guided_spec.grammar.spec import GrammarSpec

LONGEST_LINE = 100  # columns of a sentence
_GRAMMARS = {".gbnf": GrammarSpec.ebnf, ".ebnf": GrammarSpec.ebnf, ".lark": GrammarSpec.lark}


def check(
    schema: Annotated[Path, typer.Argument(help="JSON schema (- is stdin), .gbnf or .lark file.")],
    tokenizer: Annotated[str | None, typer.Option(help="Hub id or folder of a model.")] = None,
    grammar_backend: Annotated[
        str, typer.Option(help="xgrammar, llguidance, auto, or a registered one.")
    ] = "auto",
    unsupported: Annotated[
        str, typer.Option(help="For unsupported keywords: error, rewrite (narrower), or warn.")
    ] = "error",
    key_order: Annotated[
        str, typer.Option(help="Order of object keys: schema (as listed) or any.")
    ] = "schema",
    additional_properties: Annotated[
        str, typer.Option(help="closed: declared keys only; schema: as JSON Schema reads it.")
    ] = "closed",
    resource: Annotated[
        list[Path] | None,
        typer.Option(help="Referenced schema, by file name or $id; can be repeated."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Reject keywords that look misspelt.")
    ] = False,
    table: Annotated[
        bool, typer.Option("--table", help="Build its token table and compare it with the matcher.")
    ] = False,
    steps: Annotated[
        int, typer.Option(help="Number of random tokens to compare on.", min=0)
    ] = 100_000,
    as_json: Json = False,
    _verbose: Verbose = False,
) -> None:
    """Compile a schema or grammar, and say what would be enforced.

    The exit code is 1 if it does not compile, and if a table differs from its matcher.
    """
    options = {"unsupported": unsupported, "key_order": key_order, "strict": strict}
    spec = _spec(schema, resource or [], options | {"additional_properties": additional_properties})
    with working("loading the tokenizer, compiling the schema"):
        from guided_spec.cli.verdict import report_schema

        report = report_schema(spec, tokenizer, grammar_backend, steps if table else None)
    print_json(report) if as_json else _print(report, is_schema=spec.is_json)
    if report["error"] is not None or (report["table"] or {}).get("equal") is False:
        raise typer.Exit(1)


def _spec(schema: Path, resources: list[Path], options: dict[str, Any]) -> GrammarSpec:
    text = read_text("SCHEMA", schema)
    if schema.suffix in _GRAMMARS:
        _refuse_schema_options(schema, {**options, "resource": " ".join(map(str, resources))})
        return _GRAMMARS[schema.suffix](text)
    known = {path.name: read_json("--resource", path) for path in resources}
    return replace(GrammarSpec.json_schema(text, resources=known), **options)


def _refuse_schema_options(grammar: Path, given: dict[str, Any]) -> None:
    """Raise ConfigError for an option that says nothing of a grammar."""
    plain = GrammarSpec.json_schema({})
    for name, value in given.items():
        if value and value != getattr(plain, name, None):
            fix = f"is for JSON schemas, and {grammar.name} is a grammar: leave it out"
            raise ConfigError(f"--{name.replace('_', '-')}", value, fix)


def _print(report: dict[str, Any], *, is_schema: bool) -> None:
    for finding in report["findings"]:
        _print_finding(finding)
    if report["compiles"]:
        took = f"compiles with {report['backend']} in {report['seconds']:.3f} s"
        if not is_schema:
            typer.echo(took)
            _print_table(report)
            return
        promise = "every output will validate"
        if not report["validates"]:
            promise = "outputs may break what is of level error above"
        typer.echo(f"{took}; {promise}")
        closed = f"additional_properties={report['additional_properties']}"
        typer.echo(f"{said(closed)}: {_keys_of(report)}")
        _print_table(report)
    else:
        typer.echo(f"{report['error']['type']}: {said(report['error']['message'])}")


def _print_table(report: dict[str, Any]) -> None:
    if report["table"] is not None:
        typer.echo(_wrapped(_table_of(report["table"]), min(stdout().width, LONGEST_LINE)))


def _table_of(table: dict[str, Any]) -> str:
    if table["reason"] is not None:
        return f"no table: {table['reason']}; its matchers are asked for every mask"
    size = f"{table['states']} states, {table['rows']} rows, {table['bytes'] / 1e6:.1f} MB"
    whole = "the whole grammar" if table["whole"] else "a part of the grammar"
    keys = "; its matcher keeps the keys unique" if table["keys_by_matcher"] else ""
    made = f"table of {whole}: {size}, made in {table['seconds']:.3f} s{keys}"
    if not table["equal"]:
        return f"{made}; it differs from the matcher: {table['difference']}"
    tried = f"after {table['steps']} random tokens of {table['texts']} texts"
    return f"{made}; equal to the matcher after each state's tokens, and {tried}"


def _keys_of(report: dict[str, Any]) -> str:
    if report["additional_properties"] == "schema":
        return "objects are open where the schema leaves them open"
    kept = "only declared keys, unless the schema asks for others"
    pointers = ", ".join(pointer or "(the whole schema)" for pointer in report["left_open"])
    return f"{kept}; not below {pointers}" if pointers else kept


def _print_finding(finding: dict[str, Any]) -> None:
    """Print its pointer in one unbroken line, and sentences below."""
    pointer = finding["pointer"] or "(the whole schema)"
    typer.echo(f"{finding['level']}: {pointer}: {finding['keyword']}")
    width = min(stdout().width, LONGEST_LINE)
    for name in ("reason", "fix"):
        if finding[name]:
            text = f"{name}: {said(finding[name])}"
            typer.echo(_wrapped(text, width))


def _wrapped(text: str, width: int) -> str:
    wrapper = textwrap.TextWrapper(width, initial_indent="  ", subsequent_indent="    ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.fill(text)
