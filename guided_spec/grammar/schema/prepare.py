"""A JSON schema step by step: checked and lowered, then as xgrammar enforces it, or why it cannot.

A backend of another kind begins with ``lower_checked``.

Whether a JSON schema is one: the common ones seen at a glance, all others by jsonschema.

Validating a schema against its metaschema takes milliseconds, far longer than compiling it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jsonschema

from guided_spec.errors import (
    GrammarCompileError,
    UnsatisfiableGrammarError,
    UnsupportedSchemaError,
)
from guided_spec.grammar.schema.closed import AdditionalProperties
from guided_spec.grammar.schema.lower import lower
from guided_spec.grammar.schema.report import Lowered, describe, narrowing
from guided_spec.grammar.schema.rewrite import normalize

__all__ = [
    "check_schema",
    "examine_schema",
    "is_plainly_valid",
    "lower_checked",
    "prepare_schema",
    "require_enforced",
]

DRAFTS = {"https://json-schema.org/draft/2020-12/schema": 2020} | {
    f"http://json-schema.org/draft-0{draft}/schema{end}": draft
    for draft in (4, 6, 7)
    for end in ("", "#")
}
TYPES = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})
LOCAL_REFERENCE = re.compile(r"#(?:/[\w.$:-]*)*")
PLAIN_URI = re.compile(r"(?:https?://)?[\w.-]+(?:/[\w.~-]*)*#?", re.ASCII)
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
    """True only for schemas that their metaschema admits; False where unsure."""
    draft: Any = 2020
    if isinstance(schema, dict) and "$schema" in schema:
        name = schema["$schema"]
        draft = DRAFTS.get(name) if isinstance(name, str) else None
    return draft is not None and _is_schema(schema, draft, DEEPEST)


def _is_schema(schema: Any, draft: int, depth: int) -> bool:
    if isinstance(schema, bool):
        return draft > 4
    if not isinstance(schema, dict) or depth == 0:
        return False
    for keyword, value in schema.items():
        check = _VALUES.get(keyword)
        if check is not None:
            if not check(value):
                return False
        elif keyword in _BY_DRAFT:
            if not _is_of_draft(keyword, schema, draft, depth - 1):
                return False
        elif not _holds_schemas(keyword, value, draft, depth - 1):
            return False
    return True


def _holds_schemas(keyword: str, value: Any, draft: int, depth: int) -> bool:
    if keyword in _ONE:
        return _is_schema(value, draft, depth)
    if keyword in _LISTS:
        return _is_schema_list(value, draft, depth)
    if keyword in _MAPS:
        return isinstance(value, dict) and all(_is_schema(v, draft, depth) for v in value.values())
    return keyword not in _UNSURE  # what no metaschema knows may be anything


def _is_of_draft(keyword: str, schema: dict[str, Any], draft: int, depth: int) -> bool:
    """Of a keyword on which the drafts do not agree."""
    value = schema[keyword]
    match keyword:
        case "required":
            return _is_name_list(value) and (bool(value) or draft > 4)
        case "enum":
            return isinstance(value, list) and (draft > 4 or _is_distinct_list(value))
        case "exclusiveMinimum" | "exclusiveMaximum" if draft == 4:
            return isinstance(value, bool) and f"m{keyword[10:]}" in schema
        case "exclusiveMinimum" | "exclusiveMaximum":
            return _is_number(value)
        case "items" if isinstance(value, list):
            return draft < 2020 and _is_schema_list(value, draft, depth)
        case "dependencies":
            return isinstance(value, dict) and all(
                (bool(v) and _is_name_list(v)) or _is_schema(v, draft, depth)
                for v in value.values()
            )
        case "patternProperties":
            names_fit = isinstance(value, dict) and all(map(_is_pattern, value))
            return names_fit and all(_is_schema(v, draft, depth) for v in value.values())
        case "additionalProperties" | "additionalItems" if isinstance(value, bool):
            return True
    return _is_schema(value, draft, depth)


def _is_schema_list(value: Any, draft: int, depth: int) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(_is_schema(v, draft, depth) for v in value)
    )


def _is_type(value: Any) -> bool:
    if isinstance(value, str):
        return value in TYPES
    return _is_name_list(value) and bool(value) and TYPES.issuperset(value)


def _is_name_list(value: Any) -> bool:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return False
    return len(set(value)) == len(value)


def _is_distinct_list(values: list[Any]) -> bool:
    """Whether there are some, all of them scalars but no bools, and none of them twice."""
    if not all(value is None or type(value) in (str, int, float) for value in values):
        return False
    return bool(values) and len(set(values)) == len(values)


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


_ONE = frozenset({"propertyNames", "not", "contains", "if", "then", "else"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_MAPS = frozenset({"properties", "$defs", "definitions"})
_BY_DRAFT = frozenset(
    {"required", "enum", "exclusiveMinimum", "exclusiveMaximum", "items", "dependencies"}
    | {"patternProperties", "additionalProperties", "additionalItems"}
)
_UNSURE = frozenset(
    {"$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveRef", "$recursiveAnchor"}
    | {"$vocabulary", "contentSchema", "contentEncoding", "contentMediaType"}
    | {"unevaluatedItems", "unevaluatedProperties", "dependentRequired", "dependentSchemas"}
    | {"readOnly", "writeOnly", "deprecated"}
)
_VALUES: dict[str, Callable[[Any], bool]] = {
    "$schema": lambda value: isinstance(value, str) and value in DRAFTS,
    "$ref": lambda value: isinstance(value, str) and bool(LOCAL_REFERENCE.fullmatch(value)),
    "$id": lambda value: isinstance(value, str) and bool(PLAIN_URI.fullmatch(value)),
    "type": _is_type,
    "const": lambda _: True,
    "default": lambda _: True,
    "examples": lambda value: isinstance(value, list),
    **dict.fromkeys(("id", "title", "description", "$comment", "format"), _is_string),
    "pattern": _is_pattern,
    "uniqueItems": lambda value: isinstance(value, bool),
    "multipleOf": lambda value: _is_number(value) and value > 0,
    **dict.fromkeys(("minimum", "maximum"), _is_number),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _is_size),
    **dict.fromkeys(("minProperties", "maxProperties", "minContains", "maxContains"), _is_size),
}


def prepare_schema(schema: Any, additional: AdditionalProperties = "closed") -> Any:
    """The schema as xgrammar enforces it; not to be changed.

    additional: see ``GrammarSpec``. Raises GrammarCompileError where it is broken,
    UnsupportedSchemaError where some of it would go unenforced, and UnsatisfiableGrammarError where
    no value is valid.
    """
    return require_enforced(examine_schema(lower_checked(schema, additional)))


def lower_checked(schema: Any, additional: AdditionalProperties = "closed") -> Lowered:
    """The schema in fewer keywords, see ``lower``; not to be changed.

    Raises GrammarCompileError where it is broken.
    """
    if not isinstance(schema, dict | bool):
        raise GrammarCompileError("not a JSON schema: it must be an object, true or false")
    with _broken_schemas():
        check_schema(schema)
        return lower(schema, additional=additional)


def examine_schema(lowered: Lowered) -> Lowered:
    """The schema rewritten for xgrammar, and what could not be kept; not to be changed.

    Raises GrammarCompileError where it is broken.
    """
    with _broken_schemas():
        return normalize(lowered)


def require_enforced(prepared: Lowered) -> Any:
    """What xgrammar is given; raises as ``prepare_schema`` does."""
    errors = [entry for entry in prepared.entries if entry.level == "error"]
    if errors:
        raise UnsupportedSchemaError(describe(errors))
    if prepared.schema is False:
        lost = narrowing(entry for entry in prepared.entries if not entry.by_backend)
        if lost:  # there may be values, but none that is left
            raise UnsupportedSchemaError(describe(lost))
        raise UnsatisfiableGrammarError("no value is valid under the JSON schema")
    return prepared.schema


@contextmanager
def _broken_schemas() -> Iterator[None]:
    """What a schema that is none makes fail, as GrammarCompileError."""
    try:
        yield
    except jsonschema.SchemaError as error:
        pointer = "/".join(["", *map(str, error.absolute_path)])
        raise GrammarCompileError(f"not a JSON schema: at {pointer!r}: {error.message}") from error
    except (re.error, RecursionError, OverflowError) as error:
        raise GrammarCompileError(f"not a JSON schema: {error}") from error
