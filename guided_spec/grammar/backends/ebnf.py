"""xgrammar's own grammar of a prepared JSON schema, as text; its keys may come in any order.

A grammar of this kind has no memory but its rules: an object of n keys gets a rule for every set of
keys that may have been written, 2**n in all. So only objects of few keys are written out like that.
Everything else is left to xgrammar's own converter, in one call: it gets the schema with each such
object replaced by a string, and that string is then replaced by the object's rule.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import xgrammar

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.backends.any_order import AnyOrder
from guided_spec.grammar.backends.json_rules import key_literal
from guided_spec.grammar.characters import Ranges, complement, intersect, normalize
from guided_spec.grammar.schema.lowered import Report, Unenforced, change_parts, escape
from guided_spec.grammar.steps import spend, spend_on_text, spend_on_value

_TEXT = r'"(?:[^"\\]|\\.)*"'
_IN_JSON = re.compile(rf"(Regex\({_TEXT}), json_string=true(?=\))|{_TEXT}", re.DOTALL)
_ESCAPED = re.compile(r"\\(?:x([0-9a-fA-F]{2})|.)", re.DOTALL)


def schema_ebnf(prepared: Any, *, any_whitespace: bool) -> str:
    """The grammar, with the rule ``root``. Raises RuntimeError where xgrammar does not take it."""
    spend_on_value(prepared)
    return json_ebnf(json.dumps(prepared), any_whitespace=any_whitespace)


def json_ebnf(source: str, *, any_whitespace: bool) -> str:
    """As ``schema_ebnf``, of the schema's text."""
    grammar = xgrammar.Grammar.from_json_schema(
        source, any_whitespace=any_whitespace, strict_mode=False
    )
    text = str(grammar)
    spend_on_text(text)
    # xgrammar 0.2.8 prints "\xe9" before any letter, and reads "\xe9e" as one character.
    text = _ESCAPED.sub(lambda found: f"\\u00{found[1]}" if found[1] else found[0], text)
    # Its own reading of patterns in JSON strings has no escapes; these have them where they must.
    return _IN_JSON.sub(lambda found: found[1] or found[0], text)


def regex_ebnf(pattern: str) -> str:
    """The grammar of a regex that ``to_fullmatch`` has written, with the rule ``root``.

    It is one automaton, which is what xgrammar makes of patterns in a JSON schema. Of a regex as
    such xgrammar makes rules, and where one repeats a group, as in ``(\\w+ )*``, a row looks at the
    whole vocabulary: 30 to 50 ms, not 0.01, with 150,000 tokens.
    """
    text = pattern.replace("\\", "\\\\").replace('"', '\\"')
    return f'root ::= Regex("{text}")\n'


_GBNF = re.compile(
    r'(?P<text>"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\])|(?P<blank>\s+|\#[^\n]*)'
    r"|(?P<is>::=)|(?P<call>[\w.-]+\()|(?P<name>[\w.-]+)|(?P<mark>.)",
    re.DOTALL,
)
_ANY = "[\\u0001-\\uD7FF\\uE000-\\U0010FFFF]"
_ENCODED: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
_MEMBER = re.compile(
    r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\?(.)", re.DOTALL
)
_NAMED = {
    f"\\{letter}": ord(sign) for letter, sign in zip("ntrabfv", "\n\t\r\a\b\f\v", strict=True)
}
_HIGH = re.compile(r"\\u[dD]|\\U|[\uD000-\U0010FFFF]")


def gbnf_ebnf(source: str) -> str:
    """A grammar in llama.cpp's GBNF as xgrammar reads it: ``.`` and empty alternatives written out.

    The rest stays as it is, so that errors are about the user's own lines. Source of the format:
    grammars/README.md of llama.cpp.
    """
    spend_on_text(source)
    parts = [(str(found.lastgroup), found[0]) for found in _GBNF.finditer(source)]
    shown = [at for at, (kind, _) in enumerate(parts) if kind != "blank"]
    written = [_ANY if part == ("name", ".") else _encoded(part[1]) for part in parts]
    for place, at in enumerate(shown):
        if parts[at] not in (("is", "::="), ("mark", "("), ("mark", "|")):
            continue
        following = [parts[after] for after in shown[place + 1 : place + 3]]
        if _ends_alternative(following):
            written[at] += ' ""'
    return "".join(written)


def _encoded(part: str) -> str:
    """``part``, without surrogates if it is a class that holds some of them.

    Elsewhere a filter keeps them out. Here nothing else may follow after their first byte.
    """
    if part[0] != "[" or not _HIGH.search(part):
        return part
    is_negated = part.startswith("[^")
    found = [
        (member[0], int(code, 16) if (code := member[1] or member[2] or member[3]) else None)
        for member in _MEMBER.finditer(part, 1 + is_negated, len(part) - 1)
    ]
    codes = [_NAMED.get(text, ord(text[-1])) if code is None else code for text, code in found]
    ranges: list[tuple[int, int]] = []
    at = 0
    while at < len(codes):
        is_range = at + 2 < len(codes) and found[at + 1][0] == "-"
        ranges.append((codes[at], codes[at + 2] if is_range else codes[at]))
        at += 3 if is_range else 1
    if any(low > high for low, high in ranges):
        return part  # for xgrammar to refuse
    held = normalize(ranges)
    held = intersect(complement(held) if is_negated else held, _ENCODED)
    if not held:
        reason = f"the class {part} holds no character that UTF-8 encodes; leave it out"
        raise GrammarCompileError(f"the grammar does not compile: {reason}")
    return f"[{''.join(f'{_escape(low)}-{_escape(high)}' for low, high in held)}]"


def _escape(code: int) -> str:
    return f"\\U{code:08x}"


def _ends_alternative(following: list[tuple[str, str]]) -> bool:
    """Whether the next two parts say that nothing stands in an alternative that has just begun."""
    if not following:
        return True
    is_rule = len(following) == 2 and following[0][0] == "name" and following[1][0] == "is"
    return is_rule or following[0] in (("mark", "|"), ("mark", ")"))


_MOST_KEYS = 8
_MOST_SETS = 1024
_WHITESPACE = r"[ \n\r\t]*"
_TERMINAL = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]\*?')
_NAME = re.compile(r"[\w.:-]+")
_FIX = "the keys of these objects stay in the schema's order"


class _Object(NamedTuple):
    """names: of the keys, the required ones first. values: pieces, one for each name.

    others: pieces of keys by pattern and of their values.
    """

    names: tuple[str, ...]
    num_required: int
    values: tuple[int, ...]
    others: tuple[tuple[int, int], ...]


def any_order_ebnf(prepared: dict[str, Any], *, any_whitespace: bool) -> AnyOrder:
    """The grammar of a schema that ``prepare_schema`` has made, with the rule ``root``.

    The texts are those of the schema, with the keys of each object of up to 8 in any order.
    """
    plan = _Plan(prepared)
    notes = tuple(plan.report.entries)
    if not plan.objects:
        return AnyOrder(None, notes)
    document: dict[str, Any] = {"type": "array", "items": False, "minItems": len(plan.pieces)}
    document |= {"prefixItems": plan.pieces, "$defs": plan.definitions}
    try:
        converted = schema_ebnf(document, any_whitespace=any_whitespace)
    except RuntimeError:  # which the schema itself raises too
        return AnyOrder(None, notes)
    lines = converted.splitlines()
    sequence = next((line for line in lines if line.startswith("root ::= ")), "")
    names = _NAME.findall(_TERMINAL.sub(" ", sequence.removeprefix("root ::= ")))
    if len(names) != len(plan.pieces):
        reason = "the backend's grammar of it is not as expected"
        note = Unenforced("", "properties", reason, _FIX, "note")
        return AnyOrder(None, (*notes, note))
    text = "\n".join(line for line in lines if line is not sequence)
    rules = [f"root ::= {names[plan.top]}"]
    for number, written in enumerate(plan.objects):
        rule = f"{plan.mark}{number}"
        spend_on_text(text)
        text = text.replace(json.dumps(f'"{rule}"'), rule)
        rules += _object_rules(rule, written, names, _WHITESPACE if any_whitespace else None)
    return AnyOrder("\n".join([text, *rules, ""]), notes)


def any_order_notes(prepared: Any) -> tuple[Unenforced, ...]:
    """About the objects of a schema whose keys stay in order; without making the grammar."""
    return tuple(_Plan(prepared).report.entries) if isinstance(prepared, dict) else ()


class _Plan:
    """What is converted by xgrammar, and what is written here.

    pieces: schemas with a string for each of ``objects``. top: the piece for the root. definitions:
    by name.
    """

    def __init__(self, prepared: dict[str, Any]) -> None:
        spend_on_value(prepared)
        self.mark, text = "object", json.dumps(prepared)
        while self.mark in text:
            self.mark += "_"
        self.pieces: list[Any] = []
        self.objects: list[_Object] = []
        self.report = Report()
        self._numbers: dict[str, int] = {}
        self._num_sets = 0
        self.top = self.piece({k: v for k, v in prepared.items() if k != "$defs"}, "")
        self.definitions = {
            name: self.replace(part, f"/$defs/{name}")
            for name, part in prepared.get("$defs", {}).items()
        }

    def piece(self, schema: Any, pointer: str) -> int:
        """The number of the piece for ``schema``."""
        replaced = self.replace(schema, pointer)
        self.pieces.append(replaced)
        return len(self.pieces) - 1

    def replace(self, node: Any, pointer: str) -> Any:
        """``node`` with a string for each object that is written here."""
        if not isinstance(node, dict):
            return node
        if self._is_free(node, pointer):
            spend_on_value(node)
            key = json.dumps(node)
            if key not in self._numbers:
                written = self._object(node, pointer)  # those inside it come first
                self._numbers[key] = len(self.objects)
                self.objects.append(written)
            return {"const": f"{self.mark}{self._numbers[key]}"}
        return change_parts(node, lambda part, path: self.replace(part, f"{pointer}/{path}"))

    def _is_free(self, node: dict[str, Any], pointer: str) -> bool:
        num_keys = len(node.get("properties", ()))
        patterns = "patternProperties" in node
        if num_keys == 0 or (num_keys == 1 and not patterns):
            return False
        if num_keys > _MOST_KEYS or self._num_sets + 2**num_keys > _MOST_SETS:
            reason = f"an object lists more than {_MOST_KEYS} keys"
            if num_keys <= _MOST_KEYS:
                reason = "there are too many objects"
            self.report.note(pointer, "properties", reason, f"{_FIX}; llguidance frees them")
            return False
        if "minProperties" in node or "maxProperties" in node:
            self.report.note(pointer, "properties", "keys are counted", _FIX)
            return False
        return True

    def _object(self, node: dict[str, Any], pointer: str) -> _Object:
        properties, required = node["properties"], node.get("required", ())
        names = sorted(properties, key=lambda name: name not in required)
        self._num_sets += 2 ** len(names)
        values = [self.piece(properties[n], f"{pointer}/properties/{escape(n)}") for n in names]
        others = [
            (
                self.piece({"type": "string", "pattern": pattern}, pointer),
                self.piece(part, f"{pointer}/patternProperties/{escape(pattern)}"),
            )
            for pattern, part in node.get("patternProperties", {}).items()
        ]
        return _Object(tuple(names), len(required), tuple(values), tuple(others))


def _object_rules(
    rule: str, written: _Object, pieces: list[str], whitespace: str | None
) -> list[str]:
    """``rule``; for each set of keys, rules of what comes after them, and of one other pair."""
    space = "" if whitespace is None else whitespace
    comma = '", "' if whitespace is None else f'{space} "," {space}'
    colon = '": "' if whitespace is None else f'{space} ":" {space}'
    close = f'{space} "}}"'
    pairs = [
        f"{key_literal(name)} {colon} {pieces[value]}"
        for name, value in zip(written.names, written.values, strict=True)
    ]
    more = [f"{pieces[key]} {colon} {pieces[value]}" for key, value in written.others]
    rules = [f"{rule}_{bit} ::= {pair}" for bit, pair in enumerate([*pairs, *more])]
    needed = 2**written.num_required - 1
    spend(2 ** len(pairs) * len(pairs))
    for keys in range(2 ** len(pairs)):
        options = [
            f"{rule}_{bit} {rule}_behind_{keys | 1 << bit}"
            for bit in range(len(pairs))
            if not keys >> bit & 1
        ]
        options += [f"{rule}_{len(pairs) + i} {rule}_behind_{keys}" for i in range(len(more))]
        ends = [close] if keys & needed == needed else []
        if options:
            rules.append(f"{rule}_next_{keys} ::= {' | '.join(options)}")
            ends.append(f"{comma} {rule}_next_{keys}")
        if keys or more:
            rules.append(f"{rule}_behind_{keys} ::= {' | '.join(ends)}")
    begin = f'"{{" {space} {rule}_next_0'
    rules.append(f"{rule} ::= {begin}" + ("" if needed else f' | "{{" {close}'))
    return rules
