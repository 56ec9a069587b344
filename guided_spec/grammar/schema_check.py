"""Whether a JSON schema is one: the common ones seen at a glance, all others by jsonschema.

Validating a schema against its metaschema takes milliseconds, far longer than compiling it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jsonschema

__all__ = ["check_schema", "is_plainly_valid"]

DRAFT = "https://json-schema.org/draft/2020-12/schema"
TYPES = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})
LOCAL_REFERENCE = re.compile(r"#(?:/[\w.$-]*)*")
DEEPEST = 32


def check_schema(schema: Any) -> None:
    """Raise jsonschema.SchemaError where ``schema`` is not valid under its metaschema.

    Its ``$schema`` names that, draft 2020-12 by default.
    """
    if not is_plainly_valid(schema):
        draft = jsonschema.Draft202012Validator
        validator = jsonschema.validators.validator_for(schema, default=draft)
        validator.check_schema(schema)


def is_plainly_valid(schema: Any) -> bool:
    """True only for schemas of draft 2020-12 that its metaschema admits; False where unsure."""
    if isinstance(schema, dict) and schema.get("$schema", DRAFT) != DRAFT:
        return False
    return _is_schema(schema, DEEPEST)


def _is_schema(schema: Any, depth: int) -> bool:
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, dict) or depth == 0:
        return False
    for keyword, value in schema.items():
        check = _VALUES.get(keyword)
        if check is not None:
            if not check(value):
                return False
        elif keyword in _ONE:
            if not _is_schema(value, depth - 1):
                return False
        elif not _are_schemas(keyword, value, depth - 1):
            return False
    return True


def _are_schemas(keyword: str, value: Any, depth: int) -> bool:
    if keyword in _LISTS:
        return isinstance(value, list) and bool(value) and all(_is_schema(v, depth) for v in value)
    if keyword in _MAPS:
        return isinstance(value, dict) and all(_is_schema(v, depth) for v in value.values())
    return False


def _is_type(value: Any) -> bool:
    if isinstance(value, str):
        return value in TYPES
    return _is_name_list(value) and bool(value) and TYPES.issuperset(value)


def _is_name_list(value: Any) -> bool:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return False
    return len(set(value)) == len(value)


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) is int or type(value) is float


def _is_pattern(value: Any) -> bool:
    try:
        return isinstance(value, str) and re.compile(value) is not None
    except (re.error, RecursionError, OverflowError):
        return False


_ONE = frozenset({"additionalProperties", "items", "propertyNames", "not", "contains"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_MAPS = frozenset({"properties", "$defs"})
_VALUES: dict[str, Callable[[Any], bool]] = {
    "$schema": lambda value: value == DRAFT,
    "$ref": lambda value: isinstance(value, str) and bool(LOCAL_REFERENCE.fullmatch(value)),
    "type": _is_type,
    "required": _is_name_list,
    "enum": lambda value: isinstance(value, list),
    "const": lambda _: True,
    "default": lambda _: True,
    "title": _is_string,
    "description": _is_string,
    "format": _is_string,
    "pattern": _is_pattern,
    "uniqueItems": lambda value: isinstance(value, bool),
    "multipleOf": lambda value: _is_number(value) and value > 0,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _is_number),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _is_size),
    **dict.fromkeys(("minProperties", "maxProperties"), _is_size),
}
