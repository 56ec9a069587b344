"""OpenAI-style tool lists as structural tags: which calls a text may hold, and how they look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from guided_spec.errors import ConfigError
from guided_spec.grammar.tool import Tool, ToolChoice, read_choice, read_tools
from guided_spec.grammar.tool_format import ToolRules
from guided_spec.grammar.tool_formats import get_tool_format

__all__ = ["ToolOptions", "tool_tag"]


class ToolOptions(NamedTuple):
    """How the model writes calls.

    model: a family that xgrammar knows; None for calls in the style of Hermes and Qwen.
    parallel: whether a text may hold several calls.
    reasoning: whether reasoning comes first, in the family's own form; families only.
    """

    model: str | None = None
    parallel: bool = True
    reasoning: bool = False


def tool_tag(tools: Sequence[Any], tool_choice: object, options: ToolOptions) -> dict[str, Any]:
    """The structural tag of a tool list.

    tools, tool_choice: see ``read_tools`` and ``read_choice``. "auto" is text and calls, "required"
        a call first, "none" text in which no call can begin, a named tool one call of it.

    Arguments always match their schema, also under ``"strict": false``. Raises ConfigError naming
    the tool.
    """
    parsed = read_tools(tools)
    choice, left = read_choice(tool_choice, parsed)
    if options.model is not None:
        return _of_family(left, choice, options)
    if options.reasoning:
        fix = 'needs a model family; without one use .after("</think>")'
        raise ConfigError("reasoning", options.reasoning, fix)
    content = get_tool_format("hermes").content(ToolRules(left, choice, options.parallel))
    return {"type": "structural_tag", "format": content}


def _of_family(tools: Sequence[Tool], choice: ToolChoice, options: ToolOptions) -> dict[str, Any]:
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
