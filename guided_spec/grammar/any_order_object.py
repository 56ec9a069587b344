"""One object's rules in a Lark grammar of llguidance, its keys in any order."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from guided_spec.grammar.any_order_parts import matches
from guided_spec.grammar.schema_report import escape

__all__ = ["Objects", "RuleWriter", "Spelling"]

_MOST_KEYS = 63  # of 64 bits; one more marks further keys
_STRING = r'/"([^"\\\x00-\x1f\x7f]|\\[nrbtf"\\])*"/'
_PLAIN = r'/"[^"\\\x00-\x1f\x7f]*"/'


class Spelling(NamedTuple):
    """What stands between items, and between a key and its value, as Lark literals."""

    item: str
    key: str


class RuleWriter(Protocol):
    """What writes the rules of a whole schema."""

    rules: list[str]

    def rule(self, node: Any, pointer: str) -> str | None:
        """The name of the rule for the values of ``node``; None where it has none."""

    def keep_order(self, node: dict[str, Any], pointer: str, reason: str) -> str:
        """``node`` in the schema's order, with a note."""


class _Pair(NamedTuple):
    """key, value: what a rule calls them."""

    key: str
    value: str


class Objects:
    """Writes object rules. Their parameter holds a bit for each listed key, required ones first."""

    def __init__(self, writer: RuleWriter, spelling: Spelling) -> None:
        self._writer = writer
        self._spelling = spelling
        self._count = 0

    def write(self, node: dict[str, Any], pointer: str) -> str | None:
        """What matches the objects of ``node``, which has keywords of objects only; None: none."""
        required = dict.fromkeys(node.get("required", ()))
        patterns = node.get("patternProperties", {})
        extra = node.get("additionalProperties", True)
        declared = _declared(node, extra)
        is_open = bool(patterns) or extra is not False
        if len(declared) > _MOST_KEYS:
            reason = f"an object lists more than {_MOST_KEYS} keys"
            return self._writer.keep_order(node, pointer, reason)
        low = max(int(node.get("minProperties", 0)), len(required))
        if "maxProperties" in node or (is_open and low > max(1, len(required))):
            return self._writer.keep_order(node, pointer, "keys are counted")
        pairs: list[_Pair] = []
        for name in sorted(declared, key=lambda name: name not in required):
            value = self._writer.rule(declared[name], f"{pointer}/properties/{escape(name)}")
            if value is None and name in required:
                return None
            if value is not None:
                pairs.append(_Pair(_literal(name), value))
        others = self._others(list(declared), patterns, extra, pointer)
        return self._rules(pairs, len(required), others, low)

    def _others(
        self, names: list[str], patterns: dict[str, Any], extra: Any, pointer: str
    ) -> list[_Pair]:
        """The keys that are not listed, which may come again and again."""
        pairs = []
        for pattern, part in patterns.items():
            value = self._writer.rule(part, f"{pointer}/patternProperties/{escape(pattern)}")
            if value is None:
                continue
            if any(matches(pattern, name) for name in names):
                key = self._terminal(f"{_PLAIN} & ({_quoted(pattern)})", map(_literal, names))
                pairs.append(_Pair(key, value))
            else:
                name = self._writer.rule({"type": "string", "pattern": pattern}, pointer)
                pairs += [] if name is None else [_Pair(name, value)]
        value = self._writer.rule(extra, f"{pointer}/additionalProperties")
        if value is not None:
            # What a string without escapes decodes to is what it is.
            taken = [*map(_literal, names), *map(_quoted, patterns)]
            key = self._terminal(_PLAIN if patterns else _STRING, taken)
            pairs.append(_Pair(key, value))
        return pairs

    def _terminal(self, text: str, taken: Iterable[str]) -> str:
        """The name of a terminal for keys as ``text`` has them, but for those ``taken``."""
        self._count += 1
        options = " | ".join(taken)
        without = f" & ~({options})" if options else ""
        self._writer.rules.append(f"K{self._count}: {text}{without}")
        return f"K{self._count}"

    def _rules(
        self, pairs: list[_Pair], num_required: int, others: list[_Pair], low: int
    ) -> str | None:
        """``x``, a pair behind a comma or the brace, and ``y``, what comes behind a pair.

        low: how many keys there are at least.
        """
        if not others and low > len(pairs):
            return None
        if not pairs and not others:
            return '"{" "}"'
        self._count += 1
        x, y = f"x{self._count}", f"y{self._count}"
        colon = self._spelling.key
        more = [
            f"{key} {colon} {value} {y}::set_bit({bit}) %if bit_clear({bit})"
            for bit, (key, value) in enumerate(pairs)
        ]
        # Whether there is any further key matters only where keys are counted.
        then = f"set_bit({len(pairs)})" if low > num_required else "_"
        more += [f"{key} {colon} {value} {y}::{then}" for key, value in others]
        ends = [f"is_ones([0:{num_required}])"] if num_required else []
        if low > num_required:
            ends.append(f"bit_count_ge([0:{len(pairs) + 1}], {low})")
        end = f" %if {_all(ends)}" if ends else ""
        again = "" if others else f" %if not(is_ones([0:{len(pairs)}]))"
        self._writer.rules.append(f"{x}::_ : {' | '.join(more)}")
        self._writer.rules.append(f'{y}::_ : "}}"{end} | {self._spelling.item} {x}::_{again}')
        begin = f'"{{" {x}::0x0'
        return begin if low else f'{begin} | "{{" "}}"'


def _declared(node: dict[str, Any], extra: Any) -> dict[str, Any]:
    """By the name of each key that is listed, all that its value must be."""
    listed = node.get("properties", {})
    patterns = node.get("patternProperties", {})
    declared = {}
    for name in [*listed, *(name for name in node.get("required", ()) if name not in listed)]:
        parts = [part for pattern, part in patterns.items() if matches(pattern, name)]
        parts += [listed[name]] if name in listed else [] if parts else [extra]
        declared[name] = parts[0] if len(parts) == 1 else {"allOf": parts}
    return declared


def _all(conditions: list[str]) -> str:
    return conditions[0] if len(conditions) == 1 else f"and({', '.join(conditions)})"


def _quoted(pattern: str) -> str:
    """A pattern of keys as part of a terminal."""
    return f'"\\"" /(?:{pattern[1:-1]})/ "\\""'


def _literal(name: str) -> str:
    """A Lark literal of a key as JSON has it, quotes and escapes included."""
    text = json.dumps(json.dumps(name, ensure_ascii=False), ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")
