"""A JSON schema as a Lark grammar of llguidance whose objects take their keys in any order.

llguidance generates the keys of an object in the order of its schema. Its grammars may give a rule
64 bits as a parameter, though: here one bit for each key, set when it has been written. So the
grammar is as long as the schema, and no key comes twice. What holds no object with listed keys
stays JSON schema inside the grammar.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from guided_spec.grammar.any_order_object import Objects, Spelling
from guided_spec.grammar.any_order_parts import PREFIX, SchemaParts
from guided_spec.grammar.schema_report import Report, Unenforced, unescape

__all__ = ["AnyOrder", "any_order_grammar"]

_KINDS = ("null", "boolean", "number", "string", "array", "object")
_OF_OBJECTS = frozenset(
    {"properties", "required", "additionalProperties", "patternProperties"}
    | {"minProperties", "maxProperties"}
)
_OF_ARRAYS = frozenset({"items", "prefixItems", "minItems", "maxItems"})
_MOST_RULES = 4_000
_IGNORED = '%llguidance {"ignore_once": true}\n%ignore /[\\x20\\x0A\\x0D\\x09]+/\n'


class AnyOrder(NamedTuple):
    """text: of the grammar; None where there is none. notes: whose keys stay in order."""

    text: str | None
    notes: tuple[Unenforced, ...]


def any_order_grammar(prepared: dict[str, Any], options: dict[str, Any]) -> AnyOrder:
    """The grammar of a schema that ``prepare_for_llguidance`` has made.

    options: how JSON is spelled, the ``x-guidance`` of llguidance. The texts are those of the
    schema there, with the keys of each object in any order, those without a name in the schema
    between them. Where both patterns and further keys are allowed, the latter hold no escapes.
    """
    writer = _Writer(SchemaParts(prepared), options)
    try:
        top = writer.rule(writer.parts.root, "")
    except (_KeptError, RecursionError) as error:
        fix = "the keys of all objects stay in the schema's order"
        note = Unenforced("", "properties", str(error), fix, "note")
        return AnyOrder(None, (note,))
    ignored = _IGNORED if options["whitespace_flexible"] else ""
    text = "\n".join([f"{ignored}start: {top}", *writer.rules, ""])
    return AnyOrder(text, tuple(writer.report.entries))


class _KeptError(Exception):
    """Why a schema has no such grammar at all."""


class _Writer:
    """One pass over one schema. rules: lines of the grammar."""

    def __init__(self, parts: SchemaParts, options: dict[str, Any]) -> None:
        self.parts = parts
        self.rules: list[str] = []
        self.report = Report()
        self._options = options
        self._spelling = Spelling(*(json.dumps(options[f"{n}_separator"]) for n in ("item", "key")))
        self._objects = Objects(self, self._spelling)
        self._names: dict[str, str | None] = {}

    def rule(self, node: Any, pointer: str) -> str | None:
        """The name of the rule for the values of ``node``; None where it has none."""
        key = json.dumps(node)
        if key not in self._names:
            if len(self._names) >= _MOST_RULES:
                raise _KeptError("it has too many different parts")
            name = f"v{len(self._names)}"
            self._names[key] = name
            body = self._body(node, pointer)
            if body is None:
                self._names[key] = None
            else:
                self.rules.append(f"{name}: {body}")
        return self._names[key]

    def keep_order(self, node: dict[str, Any], pointer: str, reason: str) -> str:
        """``node`` as it stands, with a note."""
        fix = "the keys of these objects stay in the schema's order"
        self.report.note(pointer, "properties", reason, fix)
        return self._as_schema(node)

    def _body(self, node: Any, pointer: str) -> str | None:
        if node is False:
            return None
        branches = self.parts.branches(node)
        if branches == []:  # llguidance would refuse all of the grammar
            return None
        if not self.parts.is_ordered(node):
            return self._as_schema({} if node is True else node)
        if branches is None:
            return self.keep_order(node, pointer, "its parts cannot be joined into one")
        if len(branches) != 1 or branches[0] != node:
            options = [self.rule(branch, pointer) for branch in branches]
            return _any_of([option for option in options if option is not None])
        if "$ref" in node:
            return self.rule(self.parts.definitions[node["$ref"]], node["$ref"][1:])
        return self._typed(node, pointer)

    def _typed(self, node: dict[str, Any], pointer: str) -> str | None:
        kinds = node.get("type", _KINDS)
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        options: list[str] = []
        rest = node
        for kind, keywords, write in (
            ("object", _OF_OBJECTS, self._objects.write),
            ("array", _OF_ARRAYS, self._array),
        ):
            own = {key: value for key, value in node.items() if key in keywords}
            if kind in kinds and self.parts.is_ordered(own):
                kinds.remove(kind)
                body = write({"type": kind, **own}, pointer)
                options += [] if body is None else [body]
            if kind not in kinds:
                rest = {key: value for key, value in rest.items() if key not in keywords}
        if kinds:
            options.append(self._as_schema({**rest, "type": kinds}))
        return _any_of(options)

    def _array(self, node: dict[str, Any], pointer: str) -> str | None:
        low = int(node.get("minItems", 0))
        high = None if "maxItems" not in node else int(node["maxItems"])
        prefix = node.get("prefixItems", [])[:high]
        first: list[str] = []
        item = None
        for index, part in enumerate(prefix):
            name = self.rule(part, f"{pointer}/prefixItems/{index}")
            if name is None:
                break
            first.append(name)
        else:
            item = self.rule(node.get("items", True), f"{pointer}/items")
        room = len(first) if item is None else float("inf") if high is None else high
        if room < low:
            return None
        body = self._items(first, item, low, room)
        if not body:
            return '"[" "]"'
        return f'"[" {body} "]"' if low else f'"[" ({body})? "]"'

    def _items(self, first: list[str], item: str | None, low: int, room: float) -> str:
        """All items of an array that has any: those listed, then ``item`` again and again."""
        comma = self._spelling.item
        listed = len(first)
        rest = ""
        if item is not None and room > max(listed, 1):
            done = max(listed, 1)
            upper = "" if room == float("inf") else int(room) - done
            rest = f" ({comma} {item}){{{max(low - done, 0)},{upper}}}"
        if not listed:
            return f"{item}{rest}" if item is not None and room > 0 else ""
        for index in range(listed - 1, 0, -1):
            inner = f"{comma} {first[index]}{rest}"
            rest = f" {inner}" if index < low else f" ({inner})?"
        return f"{first[0]}{rest}"

    def _as_schema(self, node: dict[str, Any]) -> str:
        """``node`` as llguidance reads it, with the definitions that it refers to."""
        inside = self.parts.references(node)
        if inside.pop("#", None) is not None and node is not self.parts.root:
            raise _KeptError("part of a schema that refers to the whole cannot be joined into one")
        schema: dict[str, Any] = {**node, "x-guidance": self._options}
        if inside:
            schema["$defs"] = {
                unescape(name.removeprefix(PREFIX)): part for name, part in inside.items()
            }
        return f"%json {json.dumps(schema)}"


def _any_of(options: list[str]) -> str | None:
    return " | ".join(dict.fromkeys(options)) or None
