"""What the backend cannot enforce in a JSON schema, found before anything is generated.

xgrammar reads one keyword of a schema and drops its neighbours, mostly without a word. Here a
schema is lowered (see ``schema_lower``) and rewritten, where that is surely right, into the subset
that it enforces in full, and every keyword that stays outside is reported. The rewritten schema
admits no text that the original does not; it may admit fewer, and then says so in a note:

- an object that lists ``properties`` or ``patternProperties`` gets no further keys, unless it asks
  for them, has no patterns and no ``maxProperties``: then they come last, see ``other_keys``;
- an array that lists ``prefixItems`` gets no further items, unless ``minItems`` asks for some;
- a ``pattern`` covers the whole string, one of keys the whole key;
- constraints without a ``type`` mean the type that they constrain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from guided_spec.grammar.schema_closed import AdditionalProperties
from guided_spec.grammar.schema_keys import has_finite_value
from guided_spec.grammar.schema_lower import lower
from guided_spec.grammar.schema_lowering import Lowered
from guided_spec.grammar.schema_merge import any_of, keep_valid, merge
from guided_spec.grammar.schema_object import rewrite_object
from guided_spec.grammar.schema_report import PreparedSchema, Report, Unenforced, find, join
from guided_spec.grammar.schema_scalar import rewrite_number, rewrite_string
from guided_spec.grammar.schema_values import constant

__all__ = ["PreparedSchema", "Unenforced", "find_unenforced", "normalize"]

Rewrite = Callable[[Any, str], Any]
"""Rewrites a subschema, given its path below the current one."""

_BY_TYPE = {
    "object": """properties required additionalProperties patternProperties
        minProperties maxProperties""",
    "array": "items prefixItems minItems maxItems",
    "string": "minLength maxLength pattern format",
    "number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
}
_TYPE_OF = {keyword: kind for kind, words in _BY_TYPE.items() for keyword in words.split()}
_KEPT = frozenset(
    {"type", "enum", "const", "$ref", "anyOf", "allOf", "format", "multipleOf"}
    | {"properties", "required", "additionalProperties", "patternProperties"}
    | {"minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems"}
    | {"minLength", "maxLength", "pattern"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
)
_MAX_DEPTH = 64


def _rewrite_typed(own: dict[str, Any], pointer: str, report: Report, rewrite: Rewrite) -> Any:
    """One schema without combinators; several types become an anyOf of single ones."""
    types = own.get("type")
    if types is None:
        types = sorted({_TYPE_OF[keyword] for keyword in own})
        if not types:
            return {}
        if len(types) > 1:
            report.error(pointer, "type", "constraints of several types and no type", "add type")
            return {}
        fix = "add type to say so"
        report.note(pointer, "type", f"taken for {types[0]!r}, as the constraints are", fix)
    types = [types] if isinstance(types, str) else list(types)
    if "number" in types and "integer" in types:
        types.remove("integer")
    parts = []
    for kind in types:
        words = {k: v for k, v in own.items() if _TYPE_OF.get(k) == _group(kind)}
        part = _rewrite_one(kind, words, pointer, report, rewrite)
        if part is not False:
            parts.append(part)
    if not parts:
        return False
    return parts[0] if len(parts) == 1 else {"anyOf": parts}


def _group(kind: str) -> str:
    return "number" if kind == "integer" else kind


def _rewrite_one(
    kind: str, words: dict[str, Any], pointer: str, report: Report, rewrite: Rewrite
) -> Any:
    if kind == "object":
        return rewrite_object(words, pointer, report, rewrite)
    if kind == "array":
        return _rewrite_array(words, pointer, report, rewrite)
    if kind == "string":
        return rewrite_string(words, pointer, report)
    if kind in ("integer", "number"):
        return rewrite_number(kind, words, pointer, report)
    return {"type": kind}


def _rewrite_array(words: dict[str, Any], pointer: str, report: Report, rewrite: Rewrite) -> Any:
    low, high = int(words.get("minItems", 0)), words.get("maxItems")
    prefix = words.get("prefixItems", [])
    items = words.get("items", True)
    if high is not None and high <= len(prefix):
        prefix, items = prefix[: int(high)], False
    elif prefix and items is not False and low <= len(prefix):
        report.note(pointer, "prefixItems", "no items follow the listed ones", "add items: false")
        items = False
    first = [rewrite(part, f"prefixItems/{index}") for index, part in enumerate(prefix)]
    if False in first:
        first, items = first[: first.index(False)], False
    rest = items if items is False else rewrite(items, "items")
    return _array(first, rest, low, high)


def _array(first: list[Any], rest: Any, low: int, high: Any) -> Any:
    if (rest is False and low > len(first)) or (high is not None and low > high):
        return False
    schema: dict[str, Any] = {"type": "array", "items": rest}
    if first:
        schema["prefixItems"] = first
    if low:
        schema["minItems"] = low
    if high is not None and rest is not False:
        schema["maxItems"] = int(high)
    return schema


def find_unenforced(schema: Any, additional: AdditionalProperties = "closed") -> list[Unenforced]:
    """Every keyword of ``schema`` that generated text might break, and notes on what is narrowed.

    Does not change ``schema``, which must be valid under its metaschema. Entries of level
    ``"error"`` can be broken by the text; those of level ``"note"`` cannot.
    """
    return list(normalize(lower(schema, additional=additional)).unenforced)


def normalize(lowered: Lowered) -> PreparedSchema:
    """A schema rewritten for the backend, with what could not be kept. A new value each time."""
    walk = _Walk(lowered.schema)
    walk.report.entries += [entry._replace(by_backend=False) for entry in lowered.entries]
    return walk.run()


class _Walk:
    """One pass over one schema."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.report = Report()
        self.names: dict[str, str] = {}  # reference -> name under $defs
        self.definitions: dict[str, Any] = {}

    def run(self) -> PreparedSchema:
        schema = self.rewrite(self.root, "", 0)
        if not has_finite_value(schema, self.definitions):
            schema = False
        if self.definitions:
            # Every target is copied under $defs, the root too: xgrammar's mask is too strict for a
            # root rule that refers to itself.
            used = {name: part for name, part in self.definitions.items() if part is not False}
            schema = {**schema, "$defs": used} if isinstance(schema, dict) else schema
        return PreparedSchema(schema, tuple(self.report.entries))

    def rewrite(self, schema: Any, pointer: str, depth: int) -> Any:
        """The subset's spelling of one subschema."""
        if depth > _MAX_DEPTH:
            self.report.error(pointer, "", "it is nested too deeply", "flatten the schema")
            return {}
        if not isinstance(schema, dict):
            return {} if schema is True else schema
        own = {key: value for key, value in schema.items() if key in _KEPT}
        return self._dispatch(own, pointer, depth + 1)

    def _dispatch(self, own: dict[str, Any], pointer: str, depth: int) -> Any:
        if "allOf" in own:
            return self._all_of(own, pointer, depth)
        if "$ref" in own:
            return self._reference(own, pointer, depth)
        if "const" in own or "enum" in own:
            return self._values(own, pointer)
        if "anyOf" in own:
            return self._alternatives(own, pointer, depth)
        return _rewrite_typed(
            own,
            pointer,
            self.report,
            lambda part, path: self.rewrite(part, join(pointer, path), depth),
        )

    def _all_of(self, own: dict[str, Any], pointer: str, depth: int) -> Any:
        merged: dict[str, Any] | None = {k: v for k, v in own.items() if k != "allOf"}
        for part in own["allOf"]:
            target = self._follow(part) if len(own) > 1 or len(own["allOf"]) > 1 else part
            merged = None if merged is None else merge(merged, target)
        if merged is None:
            fix = "write the parts as one schema"
            self.report.error(pointer, "allOf", "its parts cannot be joined into one", fix)
            return {}
        return self.rewrite(merged, pointer, depth)

    def _reference(self, own: dict[str, Any], pointer: str, depth: int) -> Any:
        reference = own["$ref"]
        if len(own) > 1:
            rest = {k: v for k, v in own.items() if k != "$ref"}
            merged = merge(self._follow({"$ref": reference}), rest)
            if merged is None:
                fix = "write the referenced schema out, with these keywords in it"
                names = ", ".join(rest)
                self.report.error(pointer, "$ref", f"the backend ignores {names} beside it", fix)
                return {}
            return self.rewrite(merged, pointer, depth)
        target = self._resolve(reference)
        if target is None:
            reason = f"{reference!r} is not found in the schema, and nothing is fetched"
            self.report.error(pointer, "$ref", reason, "move the target under $defs")
            return {}
        if reference not in self.names:
            self.names[reference] = f"r{len(self.names)}"
            self.definitions[self.names[reference]] = self.rewrite(target, reference[1:], 0)
        if self.definitions.get(self.names[reference]) is False:
            return False
        return {"$ref": f"#/$defs/{self.names[reference]}"}

    def _values(self, own: dict[str, Any], pointer: str) -> Any:
        keyword = "const" if "const" in own else "enum"
        rest = {k: v for k, v in own.items() if k != keyword}
        values = [own["const"]] if keyword == "const" else own["enum"]
        kept = keep_valid(values, rest) if rest else values
        if kept is None:
            reason = f"the backend ignores {', '.join(rest)} beside it"
            self.report.error(pointer, keyword, reason, "list only the values that fit")
            return {}
        if any(_is_inexact(value) for value in kept):
            reason = "an integer beyond 2**53 is written as a rounded number"
            self.report.error(pointer, keyword, reason, "write it as a string")
        # xgrammar writes arrays and objects of an enum without any space.
        plain = [value for value in kept if not isinstance(value, dict | list)]
        parts = [constant(value) for value in kept if isinstance(value, dict | list)]
        parts += [{"enum": plain}] if plain else []
        return any_of(parts)

    def _alternatives(self, own: dict[str, Any], pointer: str, depth: int) -> Any:
        rest = {k: v for k, v in own.items() if k != "anyOf"}
        branches = []
        for branch in own["anyOf"]:
            joined = merge(rest, self._follow(branch)) if rest else branch
            if joined is None:
                reason = f"the backend ignores {', '.join(rest)} beside it"
                fix = "move these keywords into every branch"
                self.report.error(pointer, "anyOf", reason, fix)
                return {}
            branches.append(joined)
        parts = [
            self.rewrite(branch, join(pointer, f"anyOf/{index}"), depth)
            for index, branch in enumerate(branches)
        ]
        parts = [part for part in parts if part is not False]
        if len(parts) < 2:
            return parts[0] if parts else False
        return {"anyOf": parts}

    def _follow(self, schema: Any) -> Any:
        """What ``schema`` refers to, if it is nothing but a reference."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            if len(schema.keys() & _KEPT) > 1:
                break
            target = self._resolve(schema["$ref"])
            if target is None:
                break
            schema = target
        return schema

    def _resolve(self, reference: str) -> Any:
        """The target of a reference as ``lower`` writes them; None where there is none."""
        try:
            return find(self.root, reference)
        except LookupError:
            return None


def _is_inexact(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_is_inexact, value.values()))
    if isinstance(value, list):
        return any(map(_is_inexact, value))
    return isinstance(value, int) and abs(value) > 2**53
