"""A JSON schema as llguidance enforces it, or the reasons why it cannot.

llguidance refuses by itself most of what it does not enforce. What it reads differently from the
specification is rewritten here into something narrower, or refused:

- a ``pattern`` is read as Python's ``re`` reads it, U+0000 and classes such as ``\\d`` beyond ASCII
  left out; one that is anchored in the middle covers the whole string;
- an object with ``patternProperties`` gets no keys besides those listed;
- keys may repeat, so ``minProperties`` beyond 1 counts the required ones only;
- numbers are compared as floats, so large integers and decimal steps are refused.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import jsonschema

from guided_spec.errors import GrammarCompileError, UnsupportedSchemaError
from guided_spec.grammar.regex import to_fullmatch
from guided_spec.grammar.schema_check import check_schema

__all__ = ["prepare_for_llguidance"]

_ONE = frozenset({"additionalProperties", "items", "additionalItems"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_REFUSED = frozenset(
    {"not", "if", "then", "else", "contains", "uniqueItems", "propertyNames", "dependencies"}
    | {"dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"}
    | {"$dynamicRef", "$recursiveRef", "minContains", "maxContains"}
)
_OLD_DRAFT = re.compile(r"draft-0[34]")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Keys that match decide which others do not: only what Python and llguidance surely read alike.
_PLAIN_KEY = re.compile(
    r"\^?(?:[\w -]|\\[./-]|(?:\[(?:[a-zA-Z0-9_](?:-[a-zA-Z0-9])?)+\]|\.)[*+]?)*\$?", re.ASCII
)
_LARGEST = 2**53
_MAX_DEPTH = 64


def prepare_for_llguidance(schema: Any) -> dict[str, Any]:
    """The schema as llguidance enforces it; a new value.

    Raises GrammarCompileError where it is broken and UnsupportedSchemaError where some of it would
    go unenforced. llguidance itself may refuse more.
    """
    if not isinstance(schema, dict | bool):
        raise GrammarCompileError("not a JSON schema: it must be an object, true or false")
    try:
        check_schema(schema)
    except jsonschema.SchemaError as error:
        pointer = "/".join(["", *map(str, error.absolute_path)])
        raise GrammarCompileError(f"not a JSON schema: at {pointer!r}: {error.message}") from error
    except (re.error, RecursionError, OverflowError) as error:
        raise GrammarCompileError(f"not a JSON schema: {error}") from error
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    if _OLD_DRAFT.search(str(schema.get("$schema", ""))):
        raise _refusal("", "$schema", "the draft is too old")
    prepared: dict[str, Any] = _rewrite(schema, "", 0)
    return prepared


def _rewrite(schema: Any, pointer: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise _refusal(pointer, "", "it is nested too deeply")
    if not isinstance(schema, dict):
        return schema
    _check(schema, pointer)
    result = {
        keyword: _rewrite_value(keyword, value, f"{pointer}/{keyword}", depth + 1)
        for keyword, value in schema.items()
    }
    if "patternProperties" in schema:
        result["additionalProperties"] = False
    if not isinstance(schema.get("items"), list):
        result.pop("additionalItems", None)  # void there; llguidance takes it for ``items``
    if schema.get("minProperties", 0) <= len(schema.get("required", ())):
        result.pop("minProperties", None)
    return result


def _rewrite_value(keyword: str, value: Any, path: str, depth: int) -> Any:
    if isinstance(value, dict) and keyword in _MAPS:
        return {name: _rewrite(part, f"{path}/{name}", depth) for name, part in value.items()}
    if isinstance(value, list) and keyword in _LISTS | {"items"}:
        return [_rewrite(part, f"{path}/{index}", depth) for index, part in enumerate(value)]
    if keyword in _ONE:
        return _rewrite(value, path, depth)
    return _search(value) if keyword == "pattern" else value


def _check(schema: dict[str, Any], pointer: str) -> None:
    for keyword in sorted(_REFUSED.intersection(schema)):
        raise _refusal(pointer, keyword, "llguidance does not enforce it")
    if "$id" in schema and pointer:
        raise _refusal(pointer, "$id", "references below it are not resolved")
    first, _, rest = str(schema.get("$ref", "#")).partition("/")
    if first != "#" or (rest and rest.partition("/")[0] not in _MAPS | _LISTS | _ONE):
        raise _refusal(pointer, "$ref", "its target is not a subschema of this schema")
    if schema.get("minProperties", 0) > max(1, len(schema.get("required", ()))):
        raise _refusal(pointer, "minProperties", "keys may repeat; list them under required")
    if "prefixItems" in schema and isinstance(schema.get("items"), list):
        raise _refusal(pointer, "items", "a list here and in prefixItems: two drafts at once")
    for pattern in schema.get("patternProperties", {}):
        if not _PLAIN_KEY.fullmatch(pattern):
            raise _refusal(pointer, "patternProperties", f"{pattern!r} is not plain enough")
    _check_numbers(schema, pointer)


def _check_numbers(schema: dict[str, Any], pointer: str) -> None:
    values = [schema[name] for name in _NUMBERS if name in schema]
    values += [schema.get("const"), schema.get("enum")]
    if any(map(_is_inexact, values)):
        raise _refusal(pointer, "", "a number beyond 2**53 is rounded; write it as a string")
    divisor = Fraction(str(schema.get("multipleOf", 1))).denominator
    if divisor & (divisor - 1):
        reason = "a step that no float holds exactly; count in whole steps"
        raise _refusal(pointer, "multipleOf", reason)


def _is_inexact(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_is_inexact, value.values()))
    if isinstance(value, list):
        return any(map(_is_inexact, value))
    return isinstance(value, int | float) and abs(value) > _LARGEST


def _search(pattern: str) -> str:
    """A pattern for the whole string such that ``re.search(pattern, string)`` succeeds."""
    anything = "(?s:.*)"
    for before, after in ((anything, anything), ("", anything), (anything, ""), ("", "")):
        try:
            return f"^(?:{to_fullmatch(f'{before}(?:{pattern}){after}')})$"
        except GrammarCompileError as error:
            reason = str(error)
    raise UnsupportedSchemaError(f"the JSON schema cannot be enforced in full: {reason}")


def _refusal(pointer: str, keyword: str, reason: str) -> UnsupportedSchemaError:
    where = f"{pointer or '/'}: {keyword}: " if keyword else f"{pointer or '/'}: "
    return UnsupportedSchemaError(f"llguidance cannot enforce the JSON schema: {where}{reason}")
