"""A JSON schema as llguidance enforces it, or the reasons why it cannot.

The schema is lowered first (see ``schema_lower``). llguidance refuses by itself most of what it
does not enforce. What it reads differently from the specification is rewritten here into something
narrower, or refused:

- a ``pattern`` is read as Python's ``re`` reads it, U+0000 and classes such as ``\\d`` beyond ASCII
  left out; one that is anchored in the middle covers the whole string;
- an object with a ``patternProperties`` of such a class gets no keys besides those listed;
- keys may repeat, so ``minProperties`` beyond 1 counts the required ones only;
- numbers are compared as floats, so large integers and decimal steps are refused.
"""

from __future__ import annotations

import importlib
import re
from fractions import Fraction
from typing import Any, NamedTuple

from guided_spec.errors import GrammarCompileError, UnsupportedSchemaError
from guided_spec.grammar.regex import to_fullmatch
from guided_spec.grammar.schema_formats import FORMATS
from guided_spec.grammar.schema_lowering import Lowered

__all__ = ["prepare_for_llguidance"]

_parser: Any = importlib.import_module("re._parser")
_ONE = frozenset({"additionalProperties", "items"})
_LISTS = frozenset({"anyOf", "allOf", "prefixItems"})
_MAPS = frozenset({"properties", "$defs"})
_KEPT = frozenset(
    {"type", "enum", "const", "$ref", "patternProperties", "required", "minProperties"}
    | {"maxProperties", "minItems", "maxItems", "pattern", "minLength", "maxLength"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    | _ONE
    | _LISTS
    | _MAPS
)
_REFUSED = frozenset({"uniqueItems"})
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_LARGEST = 2**53
_MAX_DEPTH = 128
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


def prepare_for_llguidance(lowered: Lowered) -> dict[str, Any]:
    """A schema as llguidance enforces it; a new value.

    Raises UnsupportedSchemaError where some of it would go unenforced. llguidance itself may refuse
    more.
    """
    for entry in lowered.entries:
        if entry.level == "error":
            raise _refusal(entry.pointer, entry.keyword, f"{entry.reason}; {entry.fix}")
    if isinstance(lowered.schema, bool):
        return {} if lowered.schema else {"enum": []}
    prepared: dict[str, Any] = _rewrite(lowered.schema, "", 0)
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
        if keyword in _KEPT
    }
    if schema.get("patternProperties"):
        _rewrite_patterns(schema, result, pointer, depth + 1)
    if schema.get("minProperties", 0) <= len(schema.get("required", ())):
        result.pop("minProperties", None)
    texts = [schema["pattern"]] if "pattern" in schema else []
    texts += [FORMATS[schema["format"]]] if schema.get("format") in FORMATS else []
    if len(texts) > 1:  # both
        result["allOf"] = [*result.get("allOf", []), {"pattern": _search(texts[1])}]
    elif texts:
        result["pattern"] = _search(texts[0])
    return result


def _rewrite_value(keyword: str, value: Any, path: str, depth: int) -> Any:
    if keyword in _MAPS:
        return {name: _rewrite(part, f"{path}/{name}", depth) for name, part in value.items()}
    if keyword in _LISTS:
        return [_rewrite(part, f"{path}/{index}", depth) for index, part in enumerate(value)]
    if keyword in _ONE:
        return _rewrite(value, path, depth)
    return _search(value) if keyword == "pattern" else value


class _Key(NamedTuple):
    """A pattern of keys. exact: whether what it does not match, ``re`` does not match either."""

    pattern: str
    exact: bool
    before_newline: bool


def _rewrite_patterns(
    schema: dict[str, Any], result: dict[str, Any], pointer: str, depth: int
) -> None:
    keys = {pattern: _key(pattern) for pattern in schema["patternProperties"]}
    names = [*schema.get("properties", ()), *schema.get("required", ())]
    is_open = schema.get("additionalProperties", True) is not False
    exact = all(key.exact for key in keys.values())
    if not exact and (len(keys) > 1 or not all(map(str.isascii, names))):
        reason = "a class such as \\w is ASCII here, beside other keys; write it out, as in [a-z]"
        raise _refusal(pointer, "patternProperties", reason)
    path = f"{pointer}/patternProperties"
    written = {
        keys[pattern].pattern: _rewrite(part, f"{path}/{pattern}", depth)
        for pattern, part in schema["patternProperties"].items()
    }
    if is_open and exact:
        for pattern, key in keys.items():
            if key.before_newline:  # Python's $ matches there too
                written[_search(f"{pattern[:-1]}\n\\Z")] = False
    elif is_open:
        result["additionalProperties"] = False
    result["patternProperties"] = written


def _key(pattern: str) -> _Key:
    parsed = _parser.parse(pattern)
    ends = len(parsed) > 0 and str(parsed[-1][1]) == "AT_END"
    return _Key(_search(pattern), not _categories(parsed), ends)


def _categories(items: Any) -> bool:
    """Whether a class such as ``\\w`` stands in the pattern, save where it is negated."""
    for op, value in items:
        name = str(op)
        if name == "IN":
            negated = str(value[0][0]) == "NEGATE"
            kinds = [str(member) for kind, member in value if str(kind) == "CATEGORY"]
            if any(("_NOT_" in kind) == negated for kind in kinds):
                return True
        elif name == "SUBPATTERN":
            if _categories(value[3]):
                return True
        elif name in ("MAX_REPEAT", "MIN_REPEAT"):
            if _categories(value[2]):
                return True
        elif name == "BRANCH" and any(map(_categories, value[1])):
            return True
    return False


def _check(schema: dict[str, Any], pointer: str) -> None:
    for keyword in sorted(_REFUSED.intersection(schema)):
        raise _refusal(pointer, keyword, "llguidance does not enforce it")
    first = str(schema.get("$ref", "#")).split("/")
    if first[0] != "#" or (len(first) > 1 and first[1] not in _MAPS | _LISTS | _ONE):
        raise _refusal(pointer, "$ref", "its target is not a subschema of this schema")
    if schema.get("minProperties", 0) > max(1, len(schema.get("required", ()))):
        raise _refusal(pointer, "minProperties", "keys may repeat; list them under required")
    _check_numbers(schema, pointer)


def _check_numbers(schema: dict[str, Any], pointer: str) -> None:
    values = [schema[name] for name in _NUMBERS if name in schema]
    values += [schema.get("const"), schema.get("enum")]
    if any(map(_is_inexact, values)):
        raise _refusal(pointer, "", "a number beyond 2**53 is rounded; write it as a string")
    if any(map(_has_controls, values[-2:])):
        raise _refusal(pointer, "enum", "a control character in a string; leave the value out")
    divisor = Fraction(str(schema.get("multipleOf", 1))).denominator
    if divisor & (divisor - 1):
        reason = "a step that no float holds exactly; count in whole steps"
        raise _refusal(pointer, "multipleOf", reason)


def _has_controls(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_controls, [*value, *value.values()]))
    if isinstance(value, list):
        return any(map(_has_controls, value))
    return isinstance(value, str) and bool(_CONTROL.search(value))


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
