"""OpenAI-style tool lists as structural tags: which calls a text may hold, and how they look."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from guided_spec.errors import ConfigError

__all__ = ["ToolOptions", "tool_tag"]

_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_BEGIN, _END = "<tool_call>", "</tool_call>"


class ToolOptions(NamedTuple):
    """How the model writes calls.

    model: a family that xgrammar knows; None for calls in the style of Hermes and Qwen.
    parallel: whether a text may hold several calls.
    reasoning: whether reasoning comes first, in the family's own form; families only.
    """

    model: str | None = None
    parallel: bool = True
    reasoning: bool = False


class _Tool(NamedTuple):
    name: str
    parameters: Mapping[str, Any]


def tool_tag(
    tools: Sequence[Mapping[str, Any]], tool_choice: object, options: ToolOptions
) -> dict[str, Any]:
    """The structural tag of a tool list.

    tool_choice: "auto" (text and calls), "required" (a call first), "none" (text in which no call
        can begin), or ``{"type": "function", "function": {"name": ...}}`` (one call of that tool).

    Arguments always match their schema, also under ``"strict": false``. Raises ConfigError naming
    the tool.
    """
    parsed = _parse(tools)
    choice, chosen = _choose(tool_choice, parsed)
    if options.model is not None:
        return _of_family(parsed if chosen is None else [chosen], choice, options)
    if options.reasoning:
        fix = 'needs a model family; without one use .after("</think>")'
        raise ConfigError("reasoning", options.reasoning, fix)
    if choice == "none" or not parsed:
        return _tag({"type": "any_text", "excludes": [_BEGIN]})
    if chosen is not None:
        return _tag(_call(chosen))
    return _tag(
        {
            "type": "triggered_tags",
            "triggers": [_BEGIN],
            "tags": [_call(tool) for tool in parsed],
            "at_least_one": choice == "required",
            "stop_after_first": not options.parallel,
        }
    )


def _tag(content: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": content}


def _call(tool: _Tool) -> dict[str, Any]:
    return {
        "type": "tag",
        "begin": f'{_BEGIN}\n{{"name": {json.dumps(tool.name)}, "arguments": ',
        "content": {"type": "json_schema", "json_schema": tool.parameters},
        "end": "}\n" + _END,
    }


def _of_family(tools: list[_Tool], choice: str, options: ToolOptions) -> dict[str, Any]:
    """By xgrammar's own builder; imported late, since it brings torch."""
    import xgrammar
    from xgrammar import builtin_structural_tag

    known = sorted(builtin_structural_tag._structural_tag_registry)
    if options.model not in known:
        raise ConfigError("model", options.model, f"must be None or one of {', '.join(known)}")
    functions: list[Any] = [
        # Not "strict": xgrammar drops the schema of a tool for which that is false.
        {"type": "function", "function": {"name": tool.name, "parameters": dict(tool.parameters)}}
        for tool in tools
    ]
    wanted: Any = choice
    if choice == "named":
        wanted = {"type": "function", "function": {"name": tools[0].name}}
    try:
        tag = xgrammar.get_model_structural_tag(
            options.model,
            tools=functions,
            tool_choice=wanted,
            reasoning="enabled" if options.reasoning else "disabled",
            parallel_tool_calls=options.parallel,
        )
    except (ValueError, NotImplementedError) as error:
        fix = f"{options.model} cannot have them: {error}"
        raise ConfigError("tools", [tool.name for tool in tools], fix) from error
    dumped: dict[str, Any] = tag.model_dump(exclude_none=True)
    return dumped


def _parse(tools: Sequence[Mapping[str, Any]]) -> list[_Tool]:
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        fix = 'must be a list of {"type": "function", "function": {...}}'
        raise ConfigError("tools", tools, fix)
    parsed = [_parse_one(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    names = [tool.name for tool in parsed]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(f"tools[{index}].function.name", name, "is taken; rename one tool")
    return parsed


def _parse_one(place: str, tool: object) -> _Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or function is None:
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
    return _Tool(name, parameters or {"type": "object"})


def _choose(tool_choice: object, tools: list[_Tool]) -> tuple[str, _Tool | None]:
    """The kind of choice, and the tool that it names."""
    if isinstance(tool_choice, str) and tool_choice in ("auto", "required", "none"):
        if tool_choice == "required" and not tools:
            raise ConfigError("tool_choice", tool_choice, "needs a tool; pass tools")
        return tool_choice, None
    fix = 'must be "auto", "required", "none" or {"type": "function", "function": {"name": ...}}'
    if not isinstance(tool_choice, Mapping) or tool_choice.get("type") != "function":
        raise ConfigError("tool_choice", tool_choice, fix)
    function = tool_choice.get("function")
    if not isinstance(function, Mapping):
        raise ConfigError("tool_choice", tool_choice, fix)
    for tool in tools:
        if tool.name == function.get("name"):
            return "named", tool
    names = ", ".join(tool.name for tool in tools) or "none"
    fix = f"is no tool; the tools are {names}"
    raise ConfigError("tool_choice.function.name", function.get("name"), fix)
