"""A JSON schema step by step: checked and lowered, then as xgrammar enforces it, or why it cannot.

A backend of another kind begins with ``lower_checked``. Validating a schema against its metaschema
takes milliseconds, far longer than compiling it: most are seen to be valid at a glance.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jsonschema
import jsonschema_rs

from guided_spec.errors import (
    GrammarCompileError,
    UnsatisfiableGrammarError,
    UnsupportedSchemaError,
)
from guided_spec.grammar.regex import ANY_CASE
from guided_spec.grammar.schema.dialect import (
    for_python,
    in_newest,
    objects,
    split_dialects,
    with_draft,
)
from guided_spec.grammar.schema.keys import crowded
from guided_spec.grammar.schema.lower import lower
from guided_spec.grammar.schema.lowered import (
    AdditionalProperties,
    Lowered,
    Unenforced,
    describe,
    narrowing,
)
from guided_spec.grammar.schema.misspelt import misspelt
from guided_spec.grammar.schema.rewrite import normalize
from guided_spec.grammar.steps import spend, spend_on_value
from guided_spec.kinds import did_you_mean

_LOG = logging.getLogger(__name__)

_TOO_DEEP = "the JSON schema, or what its references lead to, is nested too deeply; flatten it"
_MOST_OPTIONAL = 500  # of xgrammar 0.2.8: with 900, it compiles for 3.6 s
_OF_VALIDATING = 150  # steps of one node
_OF_ANY_CASE = 10**6


def check_schema(schema: Any) -> None:
    """Raise jsonschema.SchemaError where ``schema`` is not valid under its metaschema.

    Its ``$schema`` names that, draft 2020-12 by default, or the one that ``with_draft`` finds.
    Schemas in it that name one of their own are held against that.
    """
    spend_on_value(schema)
    schema = for_python(schema)
    dated = with_draft(schema)
    outer, inner = split_dialects(dated)
    if dated is not schema:
        _check_one(in_newest(outer))  # an older draft says nothing of keywords that came later
    for one in (outer, *inner):
        _check_one(one)


def _check_one(schema: Any) -> None:
    if not (_is_valid(schema) and all(map(_compiles, _patterns(schema))) and _has_enums(schema)):
        spend_on_value(schema, _OF_VALIDATING)
        draft = jsonschema.Draft202012Validator
        validator = jsonschema.validators.validator_for(schema, default=draft)
        validator.check_schema(schema)


def _is_valid(schema: Any) -> bool:
    """True only for schemas that their metaschema admits; False where unsure."""
    try:
        return jsonschema_rs.meta.is_valid(schema)
    except (ValueError, jsonschema_rs.ReferencingError):  # no JSON, or a metaschema of its own
        return False


def _patterns(schema: Any) -> Iterator[str]:
    """All patterns, which jsonschema tries to compile as regexes of Python's, and other strings."""
    for node in objects(schema):
        named = node.get("patternProperties")
        yield from named if isinstance(named, dict) else ()
        if isinstance(pattern := node.get("pattern"), str):
            yield pattern


def _has_enums(schema: Any) -> bool:
    """Whether draft 4, of which jsonschema-rs does not know it, admits the enums; or none is of it.

    There must be values, and no two equal ones. False where unsure.
    """
    if not isinstance(schema, dict) or "draft-04" not in str(schema.get("$schema")):
        return True
    enums = (node["enum"] for node in objects(schema) if isinstance(node.get("enum"), list))
    return all(
        enum and all(map(_is_scalar, enum)) and len(set(enum)) == len(enum) for enum in enums
    )


def _is_scalar(value: Any) -> bool:
    """Of those that differ in Python where they differ in JSON."""
    return value is None or type(value) in (str, int, float)


_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")


def _reason(error: jsonschema.SchemaError) -> str:
    """Why a keyword's value is none of its values."""
    given: Any = error.instance
    is_type = error.validator == "anyOf" and list(error.absolute_path)[-1:] == ["type"]
    if is_type:
        listed = given if isinstance(given, list) and given else [given]
        wrong = next((one for one in listed if one not in _TYPES), given)
        near = did_you_mean(wrong.lower(), _TYPES, lead=", ") if isinstance(wrong, str) else ""
        return f"{wrong!r} is no type{near or ':'} the types are {', '.join(_TYPES)}"
    return error.message.replace("is not a 'regex'", "is no regular expression that can be read")


def _compiles(pattern: str) -> bool:
    # Under (?i) ``re`` looks at every character of a range.
    spend(8 + 2 * len(pattern) + (_OF_ANY_CASE if ANY_CASE.search(pattern) else 0))
    try:
        return re.compile(pattern) is not None
    except (re.error, RecursionError, OverflowError):
        return False


def prepare_schema(schema: Any, additional: AdditionalProperties = "closed") -> Any:
    """The schema as xgrammar enforces it without filters; not to be changed.

    additional: see ``GrammarSpec``. Raises GrammarCompileError where it is broken,
    UnsupportedSchemaError where some of it would go unenforced, and UnsatisfiableGrammarError where
    no value is valid.
    """
    return require_enforced(examine_schema(lower_checked(schema, additional, filtered=False)))


def lower_checked(
    schema: Any,
    additional: AdditionalProperties = "closed",
    *,
    filtered: bool = True,
    strict: bool = False,
) -> Lowered:
    """The schema in fewer keywords, see ``lower``; not to be changed.

    Logs keywords that look misspelt. Raises GrammarCompileError where it is broken, or where there
    are such keywords and ``strict`` is set.
    """
    require_schema(schema)
    with _broken_schemas():
        for entry in misspelt(schema):
            where = entry.pointer or "/"
            if strict:
                slip = f"{entry.keyword!r}: {entry.reason}; {entry.fix}"
                raise GrammarCompileError(f"not a JSON schema: at {where!r}: {slip}")
            _LOG.warning("JSON schema: %s: %r: %s", where, entry.keyword, entry.reason)
        return lower(schema, filtered=filtered, additional=additional)


def require_schema(schema: Any) -> None:
    """Raise GrammarCompileError, with the place, for a value that is no JSON schema."""
    if not isinstance(schema, dict | bool):
        raise GrammarCompileError("not a JSON schema: it must be an object, true or false")
    with _broken_schemas():
        check_schema(schema)


def examine_schema(lowered: Lowered) -> Lowered:
    """The schema rewritten for xgrammar, and what could not be kept; not to be changed.

    Raises GrammarCompileError where it is broken.
    """
    with _broken_schemas():
        found = normalize(lowered)
    if reason := crowded(lowered.schema, _MOST_OPTIONAL):
        fix = "leave the backend to 'auto', or list them under required"
        entry = Unenforced("", "properties", reason, fix)
        return found._replace(entries=(*found.entries, entry))
    return found


def require_enforced(prepared: Lowered) -> Any:
    """The schema to pass to xgrammar; raises as ``prepare_schema`` does."""
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
        raise GrammarCompileError(f"not a JSON schema: at {pointer!r}: {_reason(error)}") from error
    except RecursionError as error:
        raise GrammarCompileError(_TOO_DEEP) from error
    except (re.error, OverflowError) as error:
        raise GrammarCompileError(f"not a JSON schema: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of rpds, where it meets a RecursionError
            raise
        raise GrammarCompileError(_TOO_DEEP) from error
