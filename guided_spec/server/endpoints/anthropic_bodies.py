"""``POST /v1/messages``: what Anthropic's clients send, as the chat that it asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from guided_spec.engine.chats.messages import plain_text, read_content
from guided_spec.engine.chats.pictures import (
    TEXT_ALONE,
    OpenPicture,
    PictureRules,
    base64_bytes,
    refuse_media,
    require_few,
)
from guided_spec.engine.chats.template import template_reads
from guided_spec.errors import ConfigError
from guided_spec.kinds import did_you_mean, require_kind, require_known_fields, require_one_of
from guided_spec.server.endpoints.bodies import ChatBody, Number, Objects, Stops, Strict, Whole
from guided_spec.server.endpoints.values import USUAL_OF_TOOL, chat_of, require_usual
from guided_spec.server.faults import ApiError, invalid_value

CALL = "toolu_"  # before the id that the chat template knows
_CACHE = "cache_control"  # accepted everywhere, and changes nothing
_OF_TEXT = ("type", "text", _CACHE, "citations")
_OF_RESULT = ("type", "tool_use_id", "content", "is_error", _CACHE)
_OF_USE = ("type", "id", "name", "input", _CACHE, "caller")
_OF_IMAGE = ("type", "source", _CACHE)
_OF_SOURCE = ("type", "media_type", "data", "url", "file_id")
_OF_THOUGHT = ("type", "thinking", "signature")
_OF_TOOL = ("type", "name", "description", "input_schema", "strict", _CACHE, *USUAL_OF_TOOL)
_EAGER = "eager_input_streaming"  # as all arguments are streamed here


class CacheControl(Strict):
    """What may be kept of a prompt; it changes nothing."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Sender(Strict):
    """Anthropic's ``metadata``; it changes nothing."""

    user_id: str | None = None


class CountBody(Strict):
    """The body of ``POST /v1/messages/count_tokens``. The last one changes nothing."""

    elsewhere = {
        **{"input": "messages", "prompt": "messages", "instructions": "system"},
        **{"reasoning_effort": "output_config.effort", "response_format": "output_config.format"},
        **{"max_output_tokens": "max_tokens", "stop": "stop_sequences", "reasoning": "thinking"},
    }

    model: str | None = None
    messages: Annotated[Objects, Field(min_length=1)]
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None

    cache_control: CacheControl | None = None


class MessagesBody(CountBody):
    """The body of ``POST /v1/messages``. The last two change nothing."""

    max_tokens: Whole = Field(ge=1)
    stop_sequences: Stops | None = None
    stream: bool | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Whole | None = None

    # Ours, as in other bodies.
    on_short: Literal["error", "return"] | None = None

    metadata: Sender | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


def as_chat(body: MessagesBody, template: str, pictures: PictureRules = TEXT_ALONE) -> ChatBody:
    """The chat that a body asks for.

    template: of the chat, which says whether the model can think. pictures: which of them are
    read. Raises ApiError, ConfigError and UnknownOptionError for what a chat has not.
    """
    chat = counted_chat(body, template, pictures)
    fields = {
        "max_tokens": body.max_tokens,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences,
        "on_short": body.on_short,
    }
    return chat_of({**chat, **fields})


def counted_chat(body: CountBody, template: str, pictures: PictureRules) -> dict[str, Any]:
    """What of a chat's fields makes its prompt. Raises as ``as_chat`` does."""
    require_few("messages", body.messages)
    messages: list[dict[str, Any]] = []
    if body.system is not None:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for index, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{index}]", pictures)
    choice = dict(body.tool_choice or {})
    is_single = choice.pop("disable_parallel_tool_use", None)
    require_kind("tool_choice.disable_parallel_tool_use", is_single, bool | None)
    is_parallel = False if is_single else None
    output = body.output_config or {}
    require_known_fields("output_config", output, ("format", "effort"))
    require_kind("output_config.effort", output.get("effort"), str | None)
    return {
        "model": body.model,
        "messages": messages,
        "tools": None if body.tools is None else [_tool(i, t) for i, t in enumerate(body.tools)],
        "tool_choice": _choice(choice, body.tools),
        "parallel_tool_calls": is_parallel,
        "response_format": _response_format(output.get("format")),
        "reasoning_effort": _effort(output.get("effort"), template),
        "chat_template_kwargs": _thinking(body.thinking, template),
    }


def _effort(effort: Any, template: str) -> Any:
    """What to tell the template; Anthropic's default asks for nothing where it reads none."""
    return None if effort == "high" and not _reads("reasoning_effort", template) else effort


def _reads(name: str, template: str) -> bool:
    return name in template_reads(template).variables


def _response_format(wanted: Any) -> Any:
    if wanted is None:
        return None
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        raise _fault("output_config.format", 'must be {"type": "json_schema", "schema": {...}}')
    require_known_fields("output_config.format", wanted, ("type", "schema"))
    if wanted.get("schema") is None:
        raise _fault("output_config.format.schema", "must be a JSON schema")
    return wanted


def _thinking(wanted: Mapping[str, Any] | None, template: str) -> dict[str, Any] | None:
    """A variable of the template; None where there is nothing to turn on or off."""
    if wanted is None:
        return None
    require_known_fields("thinking", wanted, ("type", "budget_tokens", "display"))
    require_kind("thinking.budget_tokens", wanted.get("budget_tokens"), int | None)
    require_kind("thinking.display", wanted.get("display"), str | None)
    kind, is_known = wanted.get("type"), _reads("enable_thinking", template)
    require_one_of("thinking.type", kind, ("enabled", "disabled", "adaptive"))
    if kind == "enabled" and not is_known:
        raise _fault("thinking.type", "this model's thinking cannot be turned on; leave it out")
    is_told = is_known and kind != "adaptive"
    return {"enable_thinking": kind == "enabled"} if is_told else None


def _choice(choice: Mapping[str, Any], tools: Any) -> Any:
    require_known_fields("tool_choice", choice, ("type", "name"))
    match choice:
        case {"type": "auto" | "none" as kind}:
            return kind
        case {"type": "any"} if tools:
            return "required"
        case {"type": "any" | "tool" as kind} if not tools:
            raise ConfigError("tool_choice.type", kind, "needs a tool; pass tools")
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    if not choice:
        return None
    require_one_of("tool_choice.type", choice.get("type"), ("auto", "any", "none", "tool"))
    raise ConfigError("tool_choice.name", choice.get("name"), "must be a str, the tool's name")


def _tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    path = f"tools[{index}]"
    if tool.get("type") not in (None, "custom"):
        raise _fault(f"{path}.type", f"{tool['type']!r:.40}: only tools of the client run here")
    require_known_fields(path, tool, (*_OF_TOOL, _EAGER))
    require_kind(f"{path}.{_EAGER}", tool.get(_EAGER), bool | None)
    require_usual(path, tool)
    _require_cache(path, tool)
    if not isinstance(tool.get("input_schema"), dict):
        raise _fault(f"{path}.input_schema", "must be a JSON schema")
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _messages(
    message: Mapping[str, Any], path: str, pictures: PictureRules
) -> list[dict[str, Any]]:
    """The messages of a chat that one of these is: results of tools are messages of their own."""
    require_known_fields(path, message, ("role", "content"))
    role, content = message.get("role"), message.get("content")
    require_one_of(f"{path}.role", role, ("user", "assistant", "system"))
    if role == "system":
        return [{"role": role, "content": _text(content, f"{path}.content")}]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise _fault(f"{path}.content", "must be a str, or a list of blocks")
    place = f"{path}.content"
    blocks = [(_block(one, f"{place}[{at}]", pictures), one) for at, one in enumerate(content)]
    return _user(blocks, place, pictures) if role == "user" else _assistant(blocks, place)


def _block(block: Any, path: str, pictures: PictureRules = TEXT_ALONE) -> str:
    """The kind of a block, whose fields are looked at."""
    kind = block.get("type") if isinstance(block, dict) else type(block).__name__
    fields = {
        "text": _OF_TEXT,
        "tool_result": _OF_RESULT,
        "tool_use": _OF_USE,
        "thinking": _OF_THOUGHT,
    }
    if pictures.refusal is None:
        fields["image"] = _OF_IMAGE
    if kind not in fields:
        refuse_media(path, str(kind))
        told = f"this model reads text, calls and their results, not {kind!r:.40}"
        meant = f": {pictures.refusal}" if kind == "image" else did_you_mean(kind, fields)
        raise _fault(path, told + meant)
    require_known_fields(path, block, fields[kind])
    _require_cache(path, block)
    require_kind(f"{path}.is_error", block.get("is_error"), bool | None)
    require_kind(f"{path}.caller", block.get("caller"), dict | None)
    require_kind(f"{path}.citations", block.get("citations"), dict | list | None)
    for name in ("text", "thinking", "tool_use_id", "id", "name"):
        if name in fields[kind] and not isinstance(block.get(name), str):
            raise _fault(f"{path}.{name}", "must be a str")
    return str(kind)


_Blocks = Sequence[tuple[str, Mapping[str, Any]]]


def _user(blocks: _Blocks, path: str, pictures: PictureRules) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for at, (kind, block) in enumerate(blocks):
        place = f"{path}[{at}]"
        if kind in ("text", "image"):
            if not messages or messages[-1]["role"] != "user":
                messages.append({"role": "user", "content": []})
            messages[-1]["content"].append(_part(kind, block, place))
        elif kind == "tool_result":
            content = block.get("content")
            given = "" if content is None else content
            parts = _parts(given, f"{place}.content", pictures)
            if block.get("is_error"):
                parts = [{"type": "text", "text": "error: "}, *parts]
            call = block["tool_use_id"].removeprefix(CALL)
            messages.append({"role": "tool", "tool_call_id": call, "content": parts})
        else:
            raise _fault(place, f"{kind!r} is the assistant's")
    for one in messages:
        one["content"] = read_content(one["content"], path, pictures)
    return messages or [{"role": "user", "content": ""}]


def _part(kind: str, block: Mapping[str, Any], path: str) -> dict[str, Any]:
    if kind == "text":
        return {"type": "text", "text": block["text"]}
    source, place = block.get("source"), f"{path}.source"
    if not isinstance(source, dict) or source.get("type") != "base64":
        fix = 'must be {"type": "base64", "media_type": "image/png", "data": ...}'
        raise _fault(place, f"{fix}: no address is fetched, and no files are kept")
    require_known_fields(place, source, _OF_SOURCE)
    require_kind(f"{place}.media_type", source.get("media_type"), str | None)
    if not isinstance(source.get("data"), str):
        raise _fault(f"{place}.data", "must be a str in base64")
    data = base64_bytes(f"{place}.data", source["data"])
    return {"type": "image", "image": OpenPicture.of(f"{place}.data", data)}


def _assistant(blocks: _Blocks, path: str) -> list[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for at, (kind, block) in enumerate(blocks):
        place = f"{path}[{at}]"
        if kind == "text":
            message["content"] += block["text"]
        elif kind == "thinking":
            thought = message.get("reasoning_content", "")
            message["reasoning_content"] = thought + block["thinking"]
        elif kind == "tool_use":
            if not isinstance(block.get("input"), dict):
                raise _fault(f"{place}.input", "must be an object")
            arguments = json.dumps(block["input"], ensure_ascii=False)
            function = {"name": block["name"], "arguments": arguments}
            call = {"id": block["id"].removeprefix(CALL), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        else:
            raise _fault(place, f"{kind!r} is the user's")
    return [message]


def _text(content: Any, path: str) -> str:
    """Text in one piece, or in blocks."""
    return plain_text(_parts(content, path, TEXT_ALONE), path)


def _parts(content: Any, path: str, pictures: PictureRules) -> list[dict[str, Any]]:
    """Text in one piece, or text and pictures in blocks."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise _fault(path, "must be a str, or a list of blocks of text")
    parts = []
    for at, block in enumerate(content):
        place = f"{path}[{at}]"
        kind = _block(block, place, pictures)
        if kind not in ("text", "image"):
            raise _fault(place, "must be a block of text")
        parts.append(_part(kind, block, place))
    return parts


def _require_cache(path: str, holder: Mapping[str, Any]) -> None:
    """Look at what may be kept of a part of the prompt, which changes nothing."""
    given, place = holder.get(_CACHE), f"{path}.{_CACHE}"
    require_kind(place, given, dict | None)
    if given is not None:
        require_known_fields(place, given, ("type", "ttl"))
        require_one_of(f"{place}.type", given.get("type"), ("ephemeral",))
        require_one_of(f"{place}.ttl", given.get("ttl") or "5m", ("5m", "1h"))


def _fault(param: str, reason: str) -> ApiError:
    return invalid_value(f"{param}: {reason}", param)
