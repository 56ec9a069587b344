"""A JSON schema as the backend enforces it, or the reasons why it cannot."""

from __future__ import annotations

import json
import re
from functools import lru_cache
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
from guided_spec.grammar.schema_report import PreparedSchema, describe, narrowing

__all__ = ["examine_schema", "prepare_schema"]


def prepare_schema(schema: Any, additional: AdditionalProperties = "closed") -> Any:
    """The schema as the backend enforces it; not to be changed.

    additional: see ``GrammarSpec``. Raises GrammarCompileError where it is broken,
    UnsupportedSchemaError where some of it would go unenforced, and UnsatisfiableGrammarError where
    no value is valid.
    """
    prepared = examine_schema(schema, additional)
    errors = [entry for entry in prepared.unenforced if entry.level == "error"]
    if errors:
        raise UnsupportedSchemaError(describe(errors))
    if prepared.schema is False:
        lost = narrowing(entry for entry in prepared.unenforced if not entry.by_backend)
        if lost:  # there may be values, but none that is left
            raise UnsupportedSchemaError(describe(lost))
        raise UnsatisfiableGrammarError("no value is valid under the JSON schema")
    return prepared.schema


def examine_schema(schema: Any, additional: AdditionalProperties = "closed") -> PreparedSchema:
    """The schema rewritten, and what could not be kept; not to be changed.

    Raises GrammarCompileError where it is broken.
    """
    if not isinstance(schema, dict | bool):
        raise GrammarCompileError("not a JSON schema: it must be an object, true or false")
    try:
        return _examine(json.dumps(schema), additional)
    except RecursionError as error:
        raise GrammarCompileError(f"not a JSON schema: {error}") from error


@lru_cache(maxsize=32)
def _examine(text: str, additional: AdditionalProperties) -> PreparedSchema:
    schema = json.loads(text)
    try:
        check_schema(schema)
        return normalize(schema, additional)
    except jsonschema.SchemaError as error:
        pointer = "/".join(["", *map(str, error.absolute_path)])
        raise GrammarCompileError(f"not a JSON schema: at {pointer!r}: {error.message}") from error
    except (re.error, OverflowError) as error:
        raise GrammarCompileError(f"not a JSON schema: {error}") from error
