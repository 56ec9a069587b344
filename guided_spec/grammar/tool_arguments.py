"""A call's arguments in the spellings of model families: as JSON, or each one between marks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from guided_spec.errors import ConfigError
from guided_spec.grammar.marked_text import MarkedText
from guided_spec.grammar.tool import Tool

__all__ = ["Arguments", "arguments_content", "read_arguments", "read_json"]

_PLAIN_KEYS = {"type", "title", "description", "default", "examples", "minLength", "maxLength"}
_ENUM_KEYS = {"type", "title", "description", "default", "examples", "enum", "const"}
_ROOT_KEYS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_ROOT_KEYS |= {"title", "description", "default", "examples", "$schema", "$id", "$comment"}


class Arguments(NamedTuple):
    """Arguments that were read. end: where in the text they end."""

    values: dict[str, Any]
    end: int


def arguments_content(tool: Tool, argument: str | None) -> dict[str, Any]:
    """The format of a tool's arguments in a structural tag.

    argument: how one argument is written, such as ``<p={key}>{value}</p>``; None for JSON. In
        marks, strings stand without quotes where their schema bounds nothing but their length or
        lists them, and all else as JSON.

    Raises ConfigError for a schema that cannot be written so.
    """
    if argument is None:
        return {"type": "json_schema", "json_schema": tool.parameters}
    _check_root(tool)
    required = tool.parameters.get("required", [])
    elements = []
    for key, schema in tool.parameters.get("properties", {}).items():
        begin, end = _around(argument, key)
        content = _value_content(tool, schema)
        # The line break apart: xgrammar 0.2.8 confuses free text before a token and more.
        mark, rest = end.rstrip("\n"), end[len(end.rstrip("\n")) :]
        one: dict[str, Any] = {"type": "tag", "begin": begin, "content": content, "end": mark}
        if rest:
            behind = {"type": "const_string", "value": rest}
            one = {"type": "sequence", "elements": [one, behind]}
        elements.append(one if key in required else {"type": "optional", "content": one})
    return {"type": "sequence", "elements": elements or [{"type": "const_string", "value": ""}]}


def read_arguments(
    tool: Tool, argument: str | None, text: str, at: int, marks: MarkedText
) -> Arguments | None:
    """What ``arguments_content`` has written into a text at a place; None where it has not."""
    if argument is None:
        return read_json(text, at)
    values: dict[str, Any] = {}
    for key, schema in tool.parameters.get("properties", {}).items():
        begin, end = map(marks.mark, _around(argument, key))
        if not text.startswith(begin, at):
            continue
        at += len(begin)
        if _is_raw(schema):
            found = text.find(end, at)
            if found < 0:
                return None
            values[key] = text[at:found]
        else:
            found, values[key] = _read_value(text, at)
        if found < 0 or not text.startswith(end, found):
            return None
        at = found + len(end)
    return Arguments(values, at) if {*tool.parameters.get("required", [])} <= {*values} else None


def read_json(text: str, at: int) -> Arguments | None:
    """The JSON object at a place in a text."""
    end, value = _read_value(text, at)
    return Arguments(value, end) if isinstance(value, dict) else None


def _read_value(text: str, at: int) -> tuple[int, Any]:
    """Where the JSON value at a place ends, and what it is; -1 where there is none."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return -1, None
    return end, value


def _around(argument: str, key: str) -> tuple[str, str]:
    begin, end = argument.replace("{key}", key).split("{value}")
    return begin, end


def _is_raw(schema: Any) -> bool:
    """Whether a value is written as text without quotes."""
    if not isinstance(schema, Mapping):
        return False
    options = _options(schema)
    if options is not None:
        is_text = all(isinstance(o, str) and o and "<" not in o for o in options)
        return is_text and schema.keys() <= _ENUM_KEYS
    return schema.get("type") == "string" and schema.keys() <= _PLAIN_KEYS


def _options(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    options = schema.get("enum")
    return options if isinstance(options, list) and options else None


def _value_content(tool: Tool, schema: Any) -> dict[str, Any]:
    if not _is_raw(schema):
        return {"type": "json_schema", "json_schema": _with_definitions(tool, schema)}
    options = _options(schema)
    if options is not None:
        written = [{"type": "const_string", "value": option} for option in options]
        return written[0] if len(written) == 1 else {"type": "or", "elements": written}
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if least == 0 and most is None:
        return {"type": "any_text"}
    # What ends the value begins with "<" or a line break: without "<" it cannot stand inside.
    return {"type": "regex", "pattern": f"[^<]{{{least},{'' if most is None else most}}}"}


def _with_definitions(tool: Tool, schema: Any) -> Any:
    shared = {
        key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters
    }
    return {**shared, **schema} if shared and isinstance(schema, Mapping) else schema


def _check_root(tool: Tool) -> None:
    parameters = tool.parameters
    unknown = sorted(parameters.keys() - _ROOT_KEYS)
    properties = parameters.get("properties", {})
    missing = [key for key in parameters.get("required", []) if key not in properties]
    if unknown or missing or parameters.get("type", "object") != "object":
        reason = (
            f"uses {unknown[0]}" if unknown else f"requires {missing}" if missing else "is none"
        )
        fix = (
            f"of the tool {tool.name!r}: this format writes one argument after another, so the "
            f"schema must be an object that lists its properties; it {reason}"
        )
        raise ConfigError("parameters", dict(parameters), fix)
