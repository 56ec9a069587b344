"""``guided-spec check`` says which backend took the schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from guided_spec.cli import verdict
from guided_spec.cli.main import app
from guided_spec.errors import UnsupportedSchemaError
from guided_spec.grammar import document
from guided_spec.grammar.backends.registry import GRAMMAR_BACKENDS
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.schema.lowered import Lowered
from guided_spec.grammar.schema.prepare import lower_checked
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.tables.table import Difference
from tests.grammar.backends.own_backends import Listed

TWO_PATTERNS = {"type": "string", "pattern": "^[a-c]+$", "minLength": 2, "maxLength": 4}


@pytest.mark.parametrize(
    ("schema", "backend", "took"),
    [
        ({"type": "integer"}, "auto", "xgrammar"),
        ({"type": "integer"}, "xgrammar", "xgrammar"),
        (TWO_PATTERNS, "xgrammar", None),
        ({"type": "integer"}, "llguidance", "llguidance"),
        (TWO_PATTERNS, "auto", "llguidance"),
    ],
)
def test_check_names_the_backend(
    tmp_path: Path, schema: object, backend: str, took: str | None
) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(schema))
    arguments = ["check", str(path), "--grammar-backend", backend]
    report = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert (report["compiles"], report["backend"]) == (took is not None, took)
    levels = {finding["level"] for finding in report["findings"]}
    assert ("error" in levels) == (took is None)
    printed = CliRunner().invoke(app, arguments)
    assert printed.exit_code == (0 if took else 1)
    assert took is None or f"compiles with {took} in" in printed.stdout


@pytest.mark.parametrize("is_closed", [False, True])
def test_check_says_where_keys_may_come_twice(tmp_path: Path, *, is_closed: bool) -> None:
    path = tmp_path / "schema.json"
    inside = {"a": {"type": "object", "properties": {}, "additionalProperties": not is_closed}}
    schema = {"type": "object", "properties": inside, "additionalProperties": False}
    path.write_text(json.dumps(schema))
    report = json.loads(CliRunner().invoke(app, ["check", str(path), "--json"]).stdout)
    assert report["compiles"]
    assert report["validates"]
    reasons = [finding["reason"] for finding in report["findings"]]
    assert any("written twice" in reason for reason in reasons) is not is_closed


@pytest.mark.parametrize("backend", ["auto", "llguidance"])
def test_check_lowers_a_schema_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    lowered: list[object] = []

    def counted(schema: object, *arguments: Any, **options: Any) -> Lowered:
        lowered.append(schema)
        return lower_checked(schema, *arguments, **options)

    monkeypatch.setattr(document, "lower_checked", counted)
    path = tmp_path / "schema.json"
    items = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    path.write_text(json.dumps({"type": "object", "properties": {"a": items}, "oneOf": [{}]}))
    arguments = ["check", str(path), "--json", "--grammar-backend", backend]
    report = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert report["compiles"]
    assert any("refused over many values" in one["reason"] for one in report["findings"])
    assert len(lowered) == 1


@pytest.mark.parametrize("makes", ["a grammar", "an error"])
def test_check_asks_a_registered_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, makes: str
) -> None:
    class Own(Listed):
        def compile(self, spec: GrammarSpec) -> CompiledGrammar:
            assert spec.kind == "json_schema"
            if makes == "an error":
                raise UnsupportedSchemaError("no table for it")
            return super().compile(GrammarSpec.choice(["1", "22"]))

    monkeypatch.setitem(GRAMMAR_BACKENDS, "own", Own)
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(TWO_PATTERNS))
    arguments = ["check", str(path), "--grammar-backend", "own"]
    report = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert report["findings"] == []  # nothing is said about xgrammar
    if makes == "a grammar":
        assert (report["compiles"], report["backend"], report["error"]) == (True, "own", None)
    else:
        assert report["error"] == {"type": "UnsupportedSchemaError", "message": "no table for it"}
        assert CliRunner().invoke(app, arguments).exit_code == 1


def test_check_refuses_an_unknown_backend(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text("{}")
    result = CliRunner().invoke(app, ["check", str(path), "--grammar-backend", "outlines"])
    assert result.exit_code == 1
    assert "--grammar-backend='outlines'" in " ".join(result.stderr.split())


def test_check_says_which_keys_are_written(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    one, other = ({"type": "object", "properties": {name: {"type": "null"}}} for name in "ab")
    for parts, said in (
        ([one, other], "closed: only declared keys, unless the schema asks for others\n"),
        (
            [{"properties": {"x": one}}, {"properties": {"x": other}}],
            "not below (the whole schema)",
        ),
    ):
        path.write_text(json.dumps({"allOf": parts}))
        printed = CliRunner().invoke(app, ["check", str(path)]).stdout
        assert "--additional-properties=closed: only declared keys" in printed
        assert said in printed
    arguments = ["check", str(path), "--additional-properties", "schema"]
    report = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert (report["additional_properties"], report["left_open"]) == ("schema", [])
    assert "open where the schema leaves them open" in CliRunner().invoke(app, arguments).stdout


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
def test_check_compares_a_table(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps({"enum": ["a", "bb"]}))
    arguments = ["check", str(path), "--grammar-backend", backend, "--table", "--steps", "50"]
    printed = CliRunner().invoke(app, arguments)
    assert printed.exit_code == 0
    table = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["table"]
    if backend == "llguidance":
        assert table == {"reason": "its backend does not expose its rules", "equal": None}
        assert "no table: its backend does not expose its rules" in printed.stdout
    else:
        assert (table["equal"], table["whole"], table["steps"]) == (True, True, 50)
        assert "table of the whole grammar: " in printed.stdout


def test_check_says_where_a_table_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "schema.json"
    path.write_text("{}")
    difference = Difference((1, 2), (3,), ())
    monkeypatch.setattr(verdict, "compare_steps", lambda *_: difference)
    result = CliRunner().invoke(app, ["check", str(path), "--table"])
    assert result.exit_code == 1
    assert "it differs from the matcher: Difference(" in " ".join(result.stdout.split())
