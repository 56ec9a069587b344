"""``POST /v1/responses``: what OpenAI's clients send, as the chat that it asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from guided_spec.engine.chats.messages import plain_text, read_content, require_arguments
from guided_spec.engine.chats.pictures import TEXT_ALONE, PictureRules, require_few
from guided_spec.errors import ConfigError
from guided_spec.kinds import require_kind, require_known_fields, require_one_of
from guided_spec.server.endpoints.bodies import ChatBody, ResponsesBody
from guided_spec.server.endpoints.values import USUAL_OF_TOOL, chat_of, require_usual
from guided_spec.server.faults import ApiError, invalid_value

_LOGPROBS = "message.output_text.logprobs"


def own_items(body: ResponsesBody) -> Sequence[Mapping[str, Any]]:
    """What the request itself says of the conversation, as items."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": body.input}]
    return body.input


def as_chat(
    body: ResponsesBody,
    earlier: Sequence[Mapping[str, Any]] = (),
    pictures: PictureRules = TEXT_ALONE,
) -> ChatBody:
    """The chat that a body asks for.

    earlier: the items of the response that it goes on from. pictures: which of them are read.
    Raises ApiError, ConfigError and UnknownOptionError for what a chat has not.
    """
    if body.background:
        fix = "this server answers while its client waits; leave it out, and stream long answers"
        raise _fault("background", fix)
    if body.include and _LOGPROBS in body.include:
        raise _fault("include", f"{_LOGPROBS}: ask /v1/chat/completions for these")
    items = [*earlier, *own_items(body)]
    require_few("input", items)
    tools = None if body.tools is None else [_tool(at, t) for at, t in enumerate(body.tools)]
    fields = {
        "model": body.model,
        "messages": _messages(body.instructions, items, len(earlier), pictures),
        "tools": tools,
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "max_tokens": body.max_output_tokens,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "on_short": body.on_short,
        "response_format": _response_format(body.text or {}),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "verbosity": _verbosity(body.text or {}),
    }
    return chat_of(fields)


_ITEM = frozenset({"type", "id", "status"})
_OF_ITEM = {
    "message": _ITEM | {"role", "content", "phase"},
    "reasoning": _ITEM | {"content", "summary"},
    "function_call": _ITEM | {"call_id", "name", "arguments", "parsed_arguments", "caller"},
    "function_call_output": _ITEM | {"call_id", "output", "name", "caller"},
    "custom_tool_call": _ITEM | {"call_id", "name", "input", "caller"},
    "custom_tool_call_output": _ITEM | {"call_id", "output", "caller"},
}
_ROLES = ("system", "developer", "user", "assistant")
_OF_TOOL = ("name", "description", "parameters", "strict")
_OF_CUSTOM = ("name", "description", "format")
_VERBOSITIES = ("low", "medium", "high")


def _kind_of(item: Mapping[str, Any], where: str) -> Any:
    """The type of an item, whose fields are looked at."""
    kind = item.get("type", "message")
    if isinstance(kind, str) and kind in _OF_ITEM:
        require_known_fields(where, item, _OF_ITEM[kind])
    require_usual(where, item)
    if kind == "reasoning" and item.get("summary"):
        raise _fault(f"{where}.summary", "is not read here; send content instead")
    return kind


def _messages(
    instructions: str | None,
    items: Sequence[Mapping[str, Any]],
    num_earlier: int,
    pictures: PictureRules,
) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    reasoning = ""
    for index, item in enumerate(items, -num_earlier):
        where = f"input[{index}]"
        match _kind_of(item, where):
            case "message":
                messages.append(_said(item, where, pictures))
            case "reasoning":
                reasoning = plain_text(item.get("content"), f"{where}.content")
                continue
            case "function_call":
                _add_call(messages, item, where, "function", "arguments")
            case "custom_tool_call":
                _add_call(messages, item, where, "custom", "input")
            case "function_call_output" | "custom_tool_call_output":
                known = {"role": "tool", "tool_call_id": _call_id(where, item.get("call_id"))}
                text = _given(item.get("output"), f"{where}.output", pictures)
                messages.append({**known, "content": text})
            case other:
                require_one_of(f"{where}.type", other, _OF_ITEM)
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = reasoning
        reasoning = ""
    if not messages:
        raise ConfigError("input", items, "must hold at least one item")
    return messages


def _said(item: Mapping[str, Any], where: str, pictures: PictureRules) -> dict[str, Any]:
    role, content = item.get("role"), item.get("content")
    if role == "tool":
        raise ConfigError(f"{where}.role", role, "send a function_call_output item")
    require_one_of(f"{where}.role", role, _ROLES)
    if role == "assistant" and content is None:
        content = ""
    return {"role": role, "content": _given(content, f"{where}.content", pictures)}


def _given(given: Any, path: str, pictures: PictureRules) -> str | list[dict[str, Any]]:
    if given is None:
        raise ConfigError(path, given, "must be text, an empty one if there is none")
    return read_content(given, path, pictures)


def _add_call(
    messages: list[dict[str, Any]], item: Mapping[str, Any], where: str, kind: str, given: str
) -> None:
    """Add a call to the last message if that is the assistant's, else to a new message.

    kind: of the tool. given: the field that holds what it is given.
    """
    called = {"name": item.get("name"), given: item.get(given)}
    if not all(isinstance(value, str) for value in called.values()):
        raise _fault(where, f"must have a name and {given}, both str")
    if kind == "function":
        require_arguments(f"{where}.{given}", called[given])
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    call = {"id": _call_id(where, item.get("call_id")), "type": kind, kind: called}
    messages[-1].setdefault("tool_calls", []).append(call)


def _call_id(where: str, value: object) -> str:
    """The call's id as the chat template knows it, without this endpoint's prefix."""
    if not isinstance(value, str):
        raise ConfigError(f"{where}.call_id", value, "must be a str, the id of the call")
    return value.removeprefix("call_")


def _tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    path, kind = f"tools[{index}]", tool.get("type")
    if kind == "function":
        if "function" in tool and "name" not in tool:
            fix = 'is for chats: write {"type": "function", "name": ..., "parameters": {...}}'
            raise ConfigError(f"{path}.function", tool["function"], fix)
        require_known_fields(path, tool, ("type", *_OF_TOOL, *USUAL_OF_TOOL))
        require_usual(path, tool)
        return {"type": kind, kind: {name: tool[name] for name in _OF_TOOL if name in tool}}
    if kind != "custom":
        raise _fault(f"{path}.type", f"{kind!r:.40}: only function and custom tools run here")
    require_known_fields(path, tool, ("type", *_OF_CUSTOM, *USUAL_OF_TOOL))
    require_usual(path, tool)
    custom = {name: tool[name] for name in _OF_CUSTOM if name in tool}
    form = custom.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        require_known_fields(f"{path}.format", form, ("type", "syntax", "definition"))
        rule = {name: form.get(name) for name in ("syntax", "definition")}
        custom["format"] = {"type": "grammar", "grammar": rule}
    return {"type": kind, kind: custom}


def _tool_choice(choice: Any, path: str = "tool_choice") -> Any:
    """A choice in the form of chats; the names of fields are looked at."""
    match choice:
        case {"type": "function" | "custom" as kind} if choice.get(kind) is None:
            require_known_fields(path, choice, ("type", "name"))
            require_kind(f"{path}.name", choice.get("name"), str)
            return {"type": kind, kind: {"name": choice.get("name")}}
        case {"type": "allowed_tools"}:
            require_known_fields(path, choice, ("type", "mode", "tools"))
            listed = choice.get("tools")
            if isinstance(listed, list):
                places = enumerate(listed)
                listed = [_tool_choice(one, f"{path}.tools[{at}]") for at, one in places]
            allowed = {"mode": choice.get("mode"), "tools": listed}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _verbosity(text: Mapping[str, Any]) -> Any:
    given = text.get("verbosity")
    if given is not None:
        require_one_of("text.verbosity", given, _VERBOSITIES)
    return given


def _response_format(text: Mapping[str, Any]) -> dict[str, Any] | None:
    require_known_fields("text", text, ("format", "verbosity"))
    wanted = text.get("format")
    if wanted is None:
        return None
    if not isinstance(wanted, dict):
        raise _fault("text.format", 'must be an object such as {"type": "json_object"}')
    nested = wanted.get("json_schema")  # as chats have it
    if wanted.get("type") == "json_schema" and wanted.get("schema") is None and nested is None:
        raise _fault("text.format.schema", "must be a JSON schema")
    return dict(wanted)


def _fault(param: str, reason: str) -> ApiError:
    return invalid_value(f"{param}: {reason}", param)
