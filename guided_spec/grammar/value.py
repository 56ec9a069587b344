"""The value that a text of a JSON grammar stands for: an instance of the type it came from."""

from __future__ import annotations

import json
import re
from functools import lru_cache, partial
from inspect import isroutine
from typing import Any, get_origin

from guided_spec.errors import ConfigError

_TAKES = """pass a GrammarSpec, a type (a pydantic model, dataclass, TypedDict, Enum, Literal, \
list[...] or union), a compiled regex, a list of strings, or a JSON schema as a dict"""


def parse_value(text: str, value_type: Any) -> Any:
    """A whole JSON text as an instance of ``value_type``, or as plain JSON where that is None.

    Raises pydantic.ValidationError where the type asks for more than its schema says, as by a
    validator of its own, and ValueError for a text that is not valid JSON.
    """
    if value_type is None:
        return json.loads(text)
    return _adapter(value_type).validate_json(text)


def parse_partial(text: str) -> Any:
    """The JSON value of a text that is still being written; None where nothing of it is there yet.

    Strings and numbers may lack their end, objects and arrays what follows.
    """
    from pydantic_core import from_json

    try:
        return from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return None


def schema_of(value_type: Any) -> dict[str, Any]:
    """The JSON schema of a type, by pydantic.

    A set is an array of unique items. Raises ConfigError for what is no type that pydantic knows.
    """
    from pydantic import PydanticSchemaGenerationError, PydanticUserError

    if isroutine(value_type) or isinstance(value_type, partial):  # pydantic would call it
        fix = f"is a function, which goes into the tools of a chat; {_TAKES}"
        raise ConfigError("grammar", value_type, fix)
    try:
        schema: dict[str, Any] = _adapter(value_type).json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError, TypeError) as error:
        is_type = isinstance(value_type, type) or get_origin(value_type) is not None
        reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        fix = f"{reason}; {_TAKES}" if is_type else f"is not a grammar: {_TAKES}"
        raise ConfigError("grammar", value_type, fix) from error
    return schema


def regex_of(pattern: re.Pattern[Any]) -> str:
    """The source of a compiled regex. Raises ConfigError for flags and for one of bytes."""
    source = pattern.pattern
    if not isinstance(source, str) or pattern.flags != re.UNICODE:
        fix = "must be of text and without flags; write them out in the pattern"
        raise ConfigError("grammar", pattern, fix)
    return source


@lru_cache(maxsize=256)
def _adapter(value_type: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(value_type)
