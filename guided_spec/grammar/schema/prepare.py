"""A JSON schema step by step: checked and lowered, then as xgrammar enforces it, or why it cannot.

A backend of another kind begins with ``lower_checked``. Validating a schema against its metaschema
takes milliseconds, far longer than compiling it: most are seen to be valid at a glance.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import jsonschema

from guided_spec.errors import (
    GrammarCompileError,
    UnsatisfiableGrammarError,
    UnsupportedSchemaError,
)
from guided_spec.grammar.schema.keys import every_part
from guided_spec.grammar.schema.lower import lower
from guided_spec.grammar.schema.lowered import (
    AdditionalProperties,
    Lowered,
    Unenforced,
    describe,
    narrowing,
)
from guided_spec.grammar.schema.rewrite import normalize
from guided_spec.grammar.steps import spend, spend_on_value

DRAFTS = {"https://json-schema.org/draft/2020-12/schema": 2020} | {
    f"http://json-schema.org/draft-0{draft}/schema{end}": draft
    for draft in (4, 6, 7)
    for end in ("", "#")
}
TYPES = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})
LOCAL_REFERENCE = re.compile(r"#(?:/[\w.$:-]*)*")
PLAIN_URI = re.compile(r"(?:https?://)?[\w.-]+(?:/[\w.~-]*)*#?", re.ASCII)
DEEPEST = 32
_TOO_DEEP = "the JSON schema, or what its references lead to, is nested too deeply; flatten it"
_MOST_OPTIONAL = 500  # llguidance ends there; the largest of 541 schemas from the wild has 131
_OF_VALIDATING = 150  # steps of one node
_ANY_CASE, _OF_ANY_CASE = re.compile(r"\(\?[a-zA-Z]*i"), 10**6


def check_schema(schema: Any) -> None:
    """Raise jsonschema.SchemaError where ``schema`` is not valid under its metaschema.

    Its ``$schema`` names that, draft 2020-12 by default.
    """
    if not is_plainly_valid(schema):
        spend_on_value(schema, _OF_VALIDATING)
        draft = jsonschema.Draft202012Validator
        validator = jsonschema.validators.validator_for(schema, default=draft)
        validator.check_schema(schema)


def is_plainly_valid(schema: Any) -> bool:
    """True only for schemas that their metaschema admits; False where unsure."""
    draft: Any = 2020
    if isinstance(schema, dict) and "$schema" in schema:
        name = schema["$schema"]
        draft = DRAFTS.get(name) if isinstance(name, str) else None
    return draft is not None and _is_schema(draft, schema, DEEPEST)


def _is_schema(draft: int, schema: Any, depth: int) -> bool:
    if isinstance(schema, bool):
        return draft > 4
    if not isinstance(schema, dict) or depth == 0:
        return False
    spend(2 + len(schema))
    if draft == 4 and any(
        f"exclusive{m}imum" in schema and f"{m.lower()}imum" not in schema for m in ("Min", "Max")
    ):
        return False
    checks = _checks(draft)
    for keyword, value in schema.items():
        check = checks.get(keyword)  # what no metaschema knows may be anything
        if check is not None and not check(value, depth - 1):
            return False
    return True


Check = Callable[[Any, int], bool]
"""Whether a keyword's value is right; takes the depth that is left, too."""


@cache
def _checks(draft: int) -> dict[str, Callable[[Any, int], bool]]:
    """By keyword, whether its value is right in a draft. Takes the depth that is left, too."""
    one = partial(_is_schema, draft)

    def several(value: Any, depth: int) -> bool:
        return isinstance(value, list) and bool(value) and all(one(v, depth) for v in value)

    def named(value: Any, depth: int) -> bool:
        return isinstance(value, dict) and all(one(v, depth) for v in value.values())

    def needed(value: Any, depth: int) -> bool:
        return isinstance(value, dict) and all(
            (bool(v) and _is_name_list(v)) or one(v, depth) for v in value.values()
        )

    is_old = draft == 4
    return {
        "items": (lambda v, d: one(v, d) or several(v, d)) if draft < 2020 else one,
        "dependencies": needed,
        "patternProperties": lambda v, d: named(v, d) and all(map(_is_pattern, v)),
        "required": lambda v, _: _is_name_list(v) and (bool(v) or not is_old),
        "enum": lambda v, _: isinstance(v, list) and (not is_old or _is_distinct_list(v)),
        **dict.fromkeys(
            ("exclusiveMinimum", "exclusiveMaximum"), _is_flag if is_old else _is_number
        ),
        **dict.fromkeys(
            ("additionalProperties", "additionalItems"), lambda v, d: _is_flag(v) or one(v, d)
        ),
        **dict.fromkeys(("propertyNames", "not", "contains", "if", "then", "else"), one),
        **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), several),
        **dict.fromkeys(("properties", "$defs", "definitions"), named),
        **_VALUES,
        **(_since_2020(one, named) if draft == 2020 else {}),
    }


def _since_2020(one: Check, named: Check) -> dict[str, Check]:
    """Keywords that older drafts do not know. one, named: checks of a schema, and of named ones."""

    def lists(value: Any, _: int) -> bool:
        return isinstance(value, dict) and all(map(_is_name_list, value.values()))

    return {
        **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), one),
        **dict.fromkeys(("readOnly", "writeOnly", "deprecated"), _is_flag),
        "dependentSchemas": named,
        "dependentRequired": lists,
    }


def _is_type(value: Any, _: int) -> bool:
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


def _is_flag(value: Any, _: int = 0) -> bool:
    return isinstance(value, bool)


def _is_size(value: Any, _: int) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any, _: int = 0) -> bool:
    return type(value) is int or type(value) is float


def _compiles(pattern: str) -> bool:
    # Under (?i) ``re`` looks at every character of a range.
    spend(8 + 2 * len(pattern) + (_OF_ANY_CASE if _ANY_CASE.search(pattern) else 0))
    return re.compile(pattern) is not None


def _is_pattern(value: Any, _: int = 0) -> bool:
    try:
        return isinstance(value, str) and _compiles(value)
    except (re.error, RecursionError, OverflowError):
        return False


_UNSURE = (
    *("$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveRef", "$recursiveAnchor"),
    *("$vocabulary", "contentSchema", "contentEncoding", "contentMediaType", "readOnly"),
    *("unevaluatedItems", "unevaluatedProperties", "dependentRequired", "dependentSchemas"),
    *("writeOnly", "deprecated"),
)
_VALUES: dict[str, Callable[[Any, int], bool]] = {
    "$schema": lambda value, _: isinstance(value, str) and value in DRAFTS,
    "$ref": lambda value, _: isinstance(value, str) and bool(LOCAL_REFERENCE.fullmatch(value)),
    "$id": lambda value, _: isinstance(value, str) and bool(PLAIN_URI.fullmatch(value)),
    "type": _is_type,
    "examples": lambda value, _: isinstance(value, list),
    "pattern": _is_pattern,
    "uniqueItems": _is_flag,
    "multipleOf": lambda value, _: _is_number(value) and value > 0,
    **dict.fromkeys(
        ("id", "title", "description", "$comment", "format"), lambda v, _: isinstance(v, str)
    ),
    **dict.fromkeys(("minimum", "maximum"), _is_number),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _is_size),
    **dict.fromkeys(("minProperties", "maxProperties", "minContains", "maxContains"), _is_size),
    **dict.fromkeys(_UNSURE, lambda _, __: False),
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
        lowered = lower(schema, additional=additional)
        return lowered._replace(entries=(*lowered.entries, *_crowded(lowered.schema)))


def _crowded(schema: Any) -> Iterator[Unenforced]:
    """An object of so many optional keys that a mask takes seconds, or ends in an error."""
    for part in every_part(schema):
        names = part.get("properties", ()) if isinstance(part, dict) else ()
        if (
            len(names) > _MOST_OPTIONAL
            and len(names) - len(part.get("required", ())) > _MOST_OPTIONAL
        ):
            reason = (
                f"an object lists {len(names):,} keys, such as {next(iter(names))!r}: more than "
            )
            reason += f"{_MOST_OPTIONAL} of them are optional"
            fix = "list them under required, or group them in objects"
            yield Unenforced("", "properties", reason, fix, by_backend=False)
            return


def examine_schema(lowered: Lowered) -> Lowered:
    """The schema rewritten for xgrammar, and what could not be kept; not to be changed.

    Raises GrammarCompileError where it is broken.
    """
    with _broken_schemas():
        return normalize(lowered)


def require_enforced(prepared: Lowered) -> Any:
    """What xgrammar is given; raises as ``prepare_schema`` does."""
    if prepared.errors:
        raise UnsupportedSchemaError(describe(prepared.errors))
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
    except RecursionError as error:
        raise GrammarCompileError(_TOO_DEEP) from error
    except (re.error, OverflowError) as error:
        raise GrammarCompileError(f"not a JSON schema: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of rpds, where it meets a RecursionError
            raise
        raise GrammarCompileError(_TOO_DEEP) from error
