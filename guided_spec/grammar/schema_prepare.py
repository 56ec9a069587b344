"""A JSON schema as the backend enforces it, or the reasons why it cannot."""

from __future__ import annotations

import re
from typing import Any

import jsonschema

from guided_spec.errors import (
    GrammarCompileError,
    UnsatisfiableGrammarError,
    UnsupportedSchemaError,
)
from guided_spec.grammar.schema import normalize
from guided_spec.grammar.schema_check import check_schema
from guided_spec.grammar.schema_report import Unenforced

__all__ = ["prepare_schema"]

_SHOWN = 5


def prepare_schema(schema: Any) -> Any:
    """The schema as the backend enforces it.

    Raises GrammarCompileError where it is broken, UnsupportedSchemaError where some of it would go
    unenforced, and UnsatisfiableGrammarError where no value is valid.
    """
    if not isinstance(schema, dict | bool):
        raise GrammarCompileError("not a JSON schema: it must be an object, true or false")
    try:
        check_schema(schema)
        prepared = normalize(schema)
    except jsonschema.SchemaError as error:
        pointer = "/".join(["", *map(str, error.absolute_path)])
        raise GrammarCompileError(f"not a JSON schema: at {pointer!r}: {error.message}") from error
    except (re.error, RecursionError, OverflowError) as error:
        raise GrammarCompileError(f"not a JSON schema: {error}") from error
    errors = [entry for entry in prepared.unenforced if entry.level == "error"]
    if errors:
        raise UnsupportedSchemaError(_describe(errors))
    if prepared.schema is False:
        raise UnsatisfiableGrammarError("no value is valid under the JSON schema")
    return prepared.schema


def _describe(errors: list[Unenforced]) -> str:
    lines = [f"{e.pointer or '/'}: {e.keyword}: {e.reason}; {e.fix}" for e in errors[:_SHOWN]]
    if len(errors) > _SHOWN:
        lines.append(f"and {len(errors) - _SHOWN} more (see schema.find_unenforced)")
    return "the JSON schema cannot be enforced in full:\n  " + "\n  ".join(lines)
