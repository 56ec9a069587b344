"""Rules with several readings of one text: what is reported has them, by counting derivations."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from guided_spec.cli.main import app
from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.backends.redundancy import redundancies_of
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.pipeline import GrammarCompileQueue
from guided_spec.grammar.spec import GrammarSpec
from tests.masks.walks import BYTES
from tests.tiers import examples

BACKEND = XGrammarBackend(BYTES)
LONGEST, DEEPEST = 8, 8

ITSELF = "begins and ends with the rule itself"
AGAIN = "repeats a repetition"
EMPTY = "repeats what may be empty"
TWICE = "two repetitions of the same"


def reasons(grammar: str) -> list[tuple[str, str]]:
    found = redundancies_of(BACKEND.compile(GrammarSpec.ebnf(grammar)))
    return [(one.rule, one.reason) for one in found]


@pytest.mark.parametrize(
    ("grammar", "rule", "reason"),
    [
        ('root ::= expr\nexpr ::= expr "+" expr | [0-9]', "expr", ITSELF),
        ('root ::= s\ns ::= s s | "a"', "s", ITSELF),
        ('root ::= item ("," item)*\nitem ::= "i" | item "." item', "item", ITSELF),
        ('root ::= (a*)* "!"\na ::= "x" | "yz"', "root", EMPTY),
        ('root ::= ("x"? "y"?)* "!"', "root", EMPTY),
        ('root ::= ("x"+)* "!"', "root", AGAIN),
        ('root ::= a* a* "!"\na ::= "x" [a-z]', "root", TWICE),
        ("root ::= [a-z]* [a-z]*", "root", TWICE),
    ],
)
def test_these_are_reported(grammar: str, rule: str, reason: str) -> None:
    ((found, text),) = reasons(grammar)
    assert found == rule
    assert reason in text


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= [0-9] ("+" [0-9])*',
        'root ::= ("x" "y")+ "z"',
        'root ::= ws "a" ws\nws ::= [ \\n]*',
        'root ::= "a"? "b"',
        "root ::= value\n"
        'value ::= object | array | [0-9]\nobject ::= "{" (pair ("," pair)*)? "}"\n'
        'pair ::= [a-z] ":" value\narray ::= "[" (value ("," value)*)? "]"',
        'root ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" root ")"',
        'root ::= [a-z]* "," [a-z]*',
    ],
)
def test_these_are_not(grammar: str) -> None:
    assert reasons(grammar) == []


ITEM = st.sampled_from(["r", "s", '"a"', '"b"', '"a"?', '"b"*', "s*", '("a" s)+'])
OPTION = st.lists(ITEM, min_size=1, max_size=3).map(" ".join)
RULE = st.lists(OPTION, min_size=1, max_size=2).map(" | ".join)


@settings(max_examples=examples(60), deadline=None)
@given(RULE, RULE)
def test_what_is_reported_has_several_readings(first: str, second: str) -> None:
    grammar = f'root ::= r\nr ::= {first} | "b"\ns ::= {second} | "a"'
    try:
        compiled = BACKEND.compile(GrammarSpec.ebnf(grammar))
    except GrammarCompileError:  # no text at all
        return
    found = {one.rule for one in redundancies_of(compiled)}
    rules = _expanded({"r": f'{first} | "b"', "s": f'{second} | "a"'})
    for name in found & {"r", "s"}:
        assert max(_derivations(rules, name, DEEPEST, {}).values()) > 1, (grammar, name)


def _expanded(rules: dict[str, str]) -> dict[str, list[list[str]]]:
    """Alternatives of rules and bytes, with a rule for each ``x?``, ``x*`` and ``("a" s)+``."""
    made: dict[str, list[list[str]]] = {}
    for name, body in rules.items():
        options = []
        for option in body.replace('("a" s)+', "plus").split(" | "):
            items = []
            for item in option.split():
                part = item.rstrip("?*").strip('"')
                if item.endswith("?"):
                    made[item] = [[], [part]]
                elif item.endswith("*"):
                    made[item] = [[], [part, item]]
                items.append(item if item[-1] in "?*" else part)
            options.append(items)
        made[name] = options
    made["plus"] = [["a", "s", "plus"], ["a", "s"]]
    return made


def _derivations(
    rules: dict[str, list[list[str]]], item: str, depth: int, known: dict[Any, Counter[str]]
) -> Counter[str]:
    """Texts of up to LONGEST letters, and by how many trees of this depth."""
    if item not in rules:
        return Counter([item])
    if depth == 0:
        return Counter()
    if (item, depth) not in known:
        total: Counter[str] = Counter()
        for option in rules[item]:
            texts = Counter([""])
            for part in option:
                ways = _derivations(rules, part, depth - 1, known)
                joined: Counter[str] = Counter()
                for (left, m), (right, n) in itertools.product(texts.items(), ways.items()):
                    if len(left + right) <= LONGEST:
                        joined[left + right] += m * n
                texts = joined
            total += texts
        known[item, depth] = total
    return known[item, depth]


def test_an_engine_says_so_once_it_has_compiled(caplog: pytest.LogCaptureFixture) -> None:
    queue = GrammarCompileQueue(BACKEND)
    with caplog.at_level(logging.WARNING):
        queue.submit(GrammarSpec.ebnf('root ::= s\ns ::= s s | "a"')).result()
        queue.submit(GrammarSpec.ebnf('root ::= "a"*')).result()
    (record,) = caplog.records
    assert record.getMessage().startswith("s: an alternative begins and ends with the rule itself")


@pytest.mark.parametrize(("suffix", "says"), [(".gbnf", ITSELF), (".lark", "compiles with")])
def test_check_takes_grammars(tmp_path: Path, suffix: str, says: str) -> None:
    path = tmp_path / f"grammar{suffix}"
    path.write_text('root ::= s\ns ::= s s | "a"' if suffix == ".gbnf" else 'start: "a" "b"*\n')
    result = CliRunner().invoke(app, ["check", str(path)])
    assert result.exit_code == 0, result.output
    assert says in " ".join(result.output.split())
    assert "additional_properties" not in result.output


def test_check_of_a_broken_grammar_fails(tmp_path: Path) -> None:
    path = tmp_path / "grammar.gbnf"
    path.write_text("root ::= nowhere")
    result = CliRunner().invoke(app, ["check", str(path)])
    assert result.exit_code == 1
    assert "GrammarCompileError" in result.output
