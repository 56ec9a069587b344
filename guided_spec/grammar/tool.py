"""Tools that a model may call, read from OpenAI's dicts, typed functions and pydantic models."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from guided_spec.errors import ConfigError

__all__ = ["Tool", "ToolCall", "ToolChoice", "read_choice", "read_tools", "tool_dicts"]

ToolChoice = Literal["auto", "required", "none", "named"]

_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(NamedTuple):
    """parameters: the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]


class ToolCall(NamedTuple):
    """One call of a text.

    id: as the model has written it, or nine letters and digits, as Mistral's templates demand; the
        same text gets the same ids.
    arguments: valid under the tool's schema. raw: the call as it stands in the text.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    raw: str


def tool_dicts(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The tools as OpenAI writes them, for a chat template.

    A dict stays. A function becomes what transformers' ``get_json_schema`` reads in its types and
    its docstring, a pydantic model class a tool of its name, docstring and schema. Raises
    ConfigError naming the tool.
    """
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        fix = 'must be a list of {"type": "function", "function": {...}}, functions or models'
        raise ConfigError("tools", tools, fix)
    return [_tool_dict(f"tools[{index}]", tool) for index, tool in enumerate(tools)]


def read_tools(tools: Sequence[Any]) -> list[Tool]:
    """The tools' names and schemas. Raises ConfigError naming the tool."""
    read = [_read_one(f"tools[{index}]", tool) for index, tool in enumerate(tool_dicts(tools))]
    names = [tool.name for tool in read]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(f"tools[{index}].function.name", name, "is taken; rename one tool")
    return read


def read_choice(tool_choice: object, tools: Sequence[Tool]) -> tuple[ToolChoice, Sequence[Tool]]:
    """The kind of choice, and the tools that are left by it.

    tool_choice: "auto", "required", "none", a tool's name, or
        ``{"type": "function", "function": {"name": ...}}``.

    Raises ConfigError.
    """
    name = tool_choice
    match tool_choice:
        case "auto" | "none":
            return ("auto" if tool_choice == "auto" and tools else "none"), tools
        case "required":
            if not tools:
                raise ConfigError("tool_choice", tool_choice, "needs a tool; pass tools")
            return "required", tools
        case {"type": "function", "function": {"name": str(name)}}:
            pass
    if not isinstance(name, str):
        fix = (
            'must be "auto", "required", "none", a tool\'s name or '
            '{"type": "function", "function": {"name": ...}}'
        )
        raise ConfigError("tool_choice", tool_choice, fix)
    chosen = [tool for tool in tools if tool.name == name]
    if not chosen:
        names = ", ".join(tool.name for tool in tools) or "none"
        raise ConfigError("tool_choice", name, f"is no tool; the tools are {names}")
    return "named", chosen


def _tool_dict(place: str, tool: Any) -> dict[str, Any]:
    if isinstance(tool, Mapping):
        return dict(tool)
    to_schema = getattr(tool, "model_json_schema", None)  # pydantic, not imported
    if callable(to_schema):
        schema: dict[str, Any] = to_schema()
        described = {"name": tool.__name__, "description": inspect.getdoc(tool) or ""}
        return {"type": "function", "function": {**described, "parameters": schema}}
    if callable(tool):
        return _of_function(place, tool)
    fix = 'must be {"type": "function", "function": {...}}, a typed function or a pydantic model'
    raise ConfigError(place, tool, fix)


def _of_function(place: str, function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        described: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # DocstringParsingException, TypeHintParsingException, others
        fix = f"give it type hints and a Google-style docstring: {error}"
        raise ConfigError(place, function, fix) from error
    return described


def _read_one(place: str, tool: Mapping[str, Any]) -> Tool:
    function = tool.get("function")
    if tool.get("type") != "function" or function is None:
        fix = 'must be {"type": "function", "function": {"name": ..., "parameters": {...}}}'
        raise ConfigError(place, tool, fix)
    place = f"{place}.function"
    if not isinstance(function, Mapping):
        raise ConfigError(place, function, 'must be a dict with "name" and "parameters"')
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{place}.name", name, "must be 1 to 64 letters, digits, _, . or -")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = _NO_ARGUMENTS  # OpenAI: a tool without parameters takes none
    if not isinstance(parameters, Mapping):
        fix = f"of the tool {name!r}: must be a JSON schema, a dict"
        raise ConfigError(f"{place}.parameters", parameters, fix)
    return Tool(name, parameters or {"type": "object"})
