"""Rules that read one text in several ways, which xgrammar pays for at each token.

Only what is proven is reported: the shapes below have several readings whatever else the grammar
says, as long as a text comes through them. A parser that keeps all readings does more work for each
token, the longer the text is (arXiv:2603.05540): after 600 letters a mask of ``(a*)*`` takes
0.3 s, and one of ``a*`` 3 microseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from guided_spec.grammar.backends.xgrammar import XGrammarGrammar
from guided_spec.grammar.protocol import CompiledGrammar

_RULE = re.compile(r"^([\w.:-]+) ::= (.*)$", re.MULTILINE)
_ITEM = re.compile(
    r'\s*("(?:[^"\\]|\\.)*"|Token\([^)]*\)|\[(?:[^\]\\]|\\.)*\]\*?|[\w.:-]+(?:\{[^}]*\})?|\(=?|\)|\|)'
)
_MADE = re.compile(r"(_\d+)+$")  # what xgrammar adds to the names of parts of a rule

_Items = tuple[str, ...]


class Redundancy(NamedTuple):
    """rule: as the user named it. reason: why it reads a text in several ways. fix: another one."""

    rule: str
    reason: str
    fix: str


def redundancies_of(compiled: CompiledGrammar) -> list[Redundancy]:
    """Those of a compiled grammar; none where its backend does not show its rules."""
    if not isinstance(compiled, XGrammarGrammar):
        return []
    return find_redundancies(str(compiled.compiled.grammar))


def find_redundancies(printed: str) -> list[Redundancy]:
    """Those of a grammar as xgrammar prints it; rules in their order, each reason once."""
    found = _Grammar(_read(printed)).redundancies()
    return list(dict.fromkeys(found))


def _read(printed: str) -> dict[str, list[_Items]]:
    """By rule, its alternatives; a rule of another notation, such as a regex, has none."""
    return {name: _alternatives(body) or [] for name, body in _RULE.findall(printed)}


def _alternatives(body: str) -> list[_Items] | None:
    found, items = list[_Items](), list[str]()
    at, depth = 0, 0
    while at < len(body):
        item = _ITEM.match(body, at)
        if item is None:
            return None
        at, text = item.end(), item[1]
        if text == "(=":  # a hint for the masks
            break
        depth += {"(": 1, ")": -1}.get(text, 0)
        if text == "|" or (text == ")" and depth == 0):
            found.append(tuple(items))
            items = []
        elif text not in ("(", ")") and text != '""':
            items.append(text)
    return found if depth == 0 else None


class _Grammar:
    def __init__(self, rules: dict[str, list[_Items]]) -> None:
        self._rules = rules
        self._nullable: set[str] = set()
        size = -1
        while size < len(self._nullable):
            size = len(self._nullable)
            self._nullable |= {
                name for name, options in rules.items() if any(map(self._is_nullable, options))
            }

    def redundancies(self) -> Iterator[Redundancy]:
        for name, options in self._rules.items():
            shown = _MADE.sub("", name) or name
            for reason, fix in self._of_rule(name, options):
                yield Redundancy(shown, reason, fix)

    def _of_rule(self, name: str, options: list[_Items]) -> Iterator[tuple[str, str]]:
        if any(len(one) > 1 and one[0] == one[-1] == name for one in options):
            yield (
                "an alternative begins and ends with the rule itself",
                "repeat its parts instead, as in: item (separator item)*",
            )
        body = self._repeated(name)
        if body is not None and self._is_nullable(body):
            yield "it repeats what may be empty", "let the repeated part have a character at least"
        elif body is not None and len(body) == 1 and self._repeated(body[0]) is not None:
            yield "it repeats a repetition", "keep one of the two"
        for one in options:
            for left, right in zip(one, one[1:], strict=False):
                if self._is_star(left) and self._same(left, right):
                    yield "two repetitions of the same stand side by side", "keep one of them"

    def _is_nullable(self, items: Sequence[str]) -> bool:
        return all(item in self._nullable or item.endswith("]*") for item in items)

    def _repeated(self, name: str) -> _Items | None:
        """What a rule repeats, as xgrammar writes ``x*`` and ``x+``: ``"" | x rule``."""
        options = self._rules.get(name, [])
        if len(options) != 2:  # noqa: PLR2004 - one that goes on and one that ends
            return None
        longer = next((one for one in options if one and one[-1] == name), None)
        if longer is None or name in longer[:-1]:
            return None
        (ending,) = [one for one in options if one is not longer] or [()]
        return longer[:-1] if ending in ((), longer[:-1]) else None

    def _is_star(self, item: str) -> bool:
        return item.endswith("]*") or self._repeated(item) is not None

    def _same(self, left: str, right: str) -> bool:
        """Whether two repetitions have the same parts, and some."""
        if left.endswith("]*"):
            return left == right
        body = self._repeated(left)
        return bool(body) and body == self._repeated(right)
