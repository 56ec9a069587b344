"""Schemas without combinators: what constrains one JSON type after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from guided_spec.grammar.schema_object import rewrite_object
from guided_spec.grammar.schema_report import Report
from guided_spec.grammar.schema_scalar import rewrite_number, rewrite_string

__all__ = ["rewrite_typed"]

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


def rewrite_typed(own: dict[str, Any], pointer: str, report: Report, rewrite: Rewrite) -> Any:
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
