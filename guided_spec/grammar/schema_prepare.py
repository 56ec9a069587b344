"""A JSON schema step by step: checked and lowered, then as xgrammar enforces it, or why it cannot.

A backend of another kind begins with ``lower_checked``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jsonschema

from guided_spec.errors import (
    GrammarCompileError,
    UnsatisfiableGrammarError,
    UnsupportedSchemaError,
)
from guided_spec.grammar.schema import normalize
from guided_spec.grammar.schema_check import check_schema
from guided_spec.grammar.schema_closed import AdditionalProperties
from guided_spec.grammar.schema_lower import lower
from guided_spec.grammar.schema_lowering import Lowered
from guided_spec.grammar.schema_report import PreparedSchema, describe, narrowing

__all__ = ["examine_schema", "lower_checked", "prepare_schema", "require_enforced"]


def prepare_schema(schema: Any, additional: AdditionalProperties = "closed") -> Any:
    """The schema as xgrammar enforces it; not to be changed.

    additional: see ``GrammarSpec``. Raises GrammarCompileError where it is broken,
    UnsupportedSchemaError where some of it would go unenforced, and UnsatisfiableGrammarError where
    no value is valid.
    """
    return require_enforced(examine_schema(lower_checked(schema, additional)))


def lower_checked(schema: Any, additional: AdditionalProperties = "closed") -> Lowered:
    """The schema in fewer keywords, see ``schema_lower``; not to be changed.

    Raises GrammarCompileError where it is broken.
    """
    if not isinstance(schema, dict | bool):
        raise GrammarCompileError("not a JSON schema: it must be an object, true or false")
    with _broken_schemas():
        check_schema(schema)
        return lower(schema, additional=additional)


def examine_schema(lowered: Lowered) -> PreparedSchema:
    """The schema rewritten for xgrammar, and what could not be kept; not to be changed.

    Raises GrammarCompileError where it is broken.
    """
    with _broken_schemas():
        return normalize(lowered)


def require_enforced(prepared: PreparedSchema) -> Any:
    """What xgrammar is given; raises as ``prepare_schema`` does."""
    errors = [entry for entry in prepared.unenforced if entry.level == "error"]
    if errors:
        raise UnsupportedSchemaError(describe(errors))
    if prepared.schema is False:
        lost = narrowing(entry for entry in prepared.unenforced if not entry.by_backend)
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
