"""The messages of a conversation: what a chat template is given of them, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from guided_spec.engine.chats.pictures import (
    PICTURE_PARTS,
    TEXT_ALONE,
    VIDEO_PARTS,
    PictureRules,
    refuse_media,
    require_few,
)
from guided_spec.engine.chats.template import EACH, THINKING, TemplateReads, template_reads
from guided_spec.engine.chats.videos import OpenMedia, read_video
from guided_spec.errors import ConfigError, PromptError, UnknownOptionError
from guided_spec.kinds import did_you_mean, require_kind, require_known_fields, require_one_of

ROLES = ("system", "developer", "user", "assistant", "tool")
_OF_ALL = frozenset({"role", "content", "name", "cache_control"})
_OF_ROLE = {
    # The last two are how clients send back what they were sent: it stands in the content too.
    "assistant": _OF_ALL | {"tool_calls", "reasoning_content", "refusal", "annotations", "parsed"},
    "tool": _OF_ALL | {"tool_call_id"},
}
_OF_CALL = frozenset({"id", "type", "function", "custom", "index"})
_OF_FUNCTION = frozenset({"name", "arguments", "parsed_arguments"})
_OF_CUSTOM = frozenset({"name", "input"})
_PARTS = ("text", "input_text", "output_text", "reasoning_text")
_OF_PART = frozenset({"type", "text", "annotations", "logprobs", "parsed"})
_OF_CACHES = frozenset({"cache_control", "prompt_cache_breakpoint"})  # they change nothing
_MESSAGE = 'must be a dict such as {"role": "user", "content": "..."}'


def read_messages(
    messages: Any, template: str, pictures: PictureRules = TEXT_ALONE
) -> list[dict[str, Any]]:
    """Messages as chat templates read them: with text for content, and roles that they know.

    A role that the template does not know, "developer", becomes "system". Content in parts stays so
    where the template reads parts; text becomes one where it reads nothing else. What was read may
    be read again.

    pictures: which of them are read; each becomes {"type": "image", "image": OpenPicture}, and a
    video {"type": "video", "video": OpenVideo}.

    Raises ConfigError for what is no conversation, and UnknownOptionError for a field that neither
    the interface has nor the template reads.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        fix = 'must be one conversation, a list of {"role": ..., "content": ...}'
        raise ConfigError("messages", messages, fix)
    reads = template_reads(template)
    if pictures.refusal is None:
        require_few("messages", messages)
    return [_read_one(f"messages[{at}]", one, reads, pictures) for at, one in enumerate(messages)]


def pictures_of(messages: Sequence[Mapping[str, Any]]) -> list[OpenMedia]:
    """Those of messages that were read, and the videos, in their order."""
    contents = [message["content"] for message in messages]
    parts = [part for one in contents if isinstance(one, list) for part in one]
    return [part[part["type"]] for part in parts if part["type"] in ("image", "video")]


def _read_one(
    path: str, message: Any, reads: TemplateReads, pictures: PictureRules
) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ConfigError(path, message, _MESSAGE)
    role, read = message.get("role"), reads.fields()
    known = _OF_ROLE.get(role, _OF_ALL) if isinstance(role, str) else _OF_ALL
    require_known_fields(path, message, known | read)
    require_role(f"{path}.role", role, reads.roles)
    for name in ("name", "tool_call_id", "reasoning_content", "refusal"):
        if name in known | read:
            require_kind(f"{path}.{name}", message.get(name), str | None)
    _require_calls(f"{path}.tool_calls", message.get("tool_calls"), reads)
    require_kind(f"{path}.cache_control", message.get("cache_control"), dict | None)
    content, refusal = message.get("content"), message.get("refusal")
    if refusal:  # what an assistant says instead
        if content not in (None, "", [], refusal):
            raise ConfigError(f"{path}.refusal", refusal, "content is there too: send one of them")
        content = refusal
    if content is None and role != "assistant" and not message.keys() - _OF_ALL:
        raise ConfigError(f"{path}.content", content, "must be text")
    if isinstance(content, list | tuple) and reads.takes_parts:
        content = [
            _read_part(f"{path}.content[{at}]", part, pictures) for at, part in enumerate(content)
        ]
    else:
        content = plain_text(content, f"{path}.content", pictures)
        if reads.takes_parts_alone and not (content == "" and role == "assistant"):
            content = [{"type": "text", "text": content}]
    if role == "developer" and role not in reads.roles:
        role = "system"
    return {**message, "role": role, "content": content}


def require_role(path: str, role: object, others: Collection[str] = ()) -> None:
    """Raise ConfigError, naming its path, for what is no role. others: that a template knows."""
    require_one_of(path, role, [*ROLES, *sorted({*others} - {*ROLES})])


def num_letters(messages: Sequence[Mapping[str, Any]]) -> int:
    """Of the contents of messages that were read."""
    contents = [message["content"] for message in messages]
    parts = [part.get("text") for one in contents if isinstance(one, list) for part in one]
    return sum(len(text) for text in [*parts, *contents] if isinstance(text, str))


def _read_part(path: str, part: Any, pictures: PictureRules) -> dict[str, Any]:
    if _is_picture(part):
        return _read_picture(path, part, pictures)
    return {"type": "text", "text": _part_text(path, part)}


def _read_picture(path: str, part: Mapping[str, Any], pictures: PictureRules) -> dict[str, Any]:
    if part["type"] in VIDEO_PARTS:
        return {"type": "video", "video": read_video(pictures, path, part)}
    return {"type": "image", "image": pictures.read(path, part)}


def read_content(content: Any, path: str, pictures: PictureRules) -> str | list[dict[str, Any]]:
    """Content in parts where it has pictures or videos, else text.

    Raises as ``read_messages`` does.
    """
    if isinstance(content, list | tuple) and any(map(_is_picture, content)):
        return [_read_part(f"{path}[{at}]", part, pictures) for at, part in enumerate(content)]
    return plain_text(content, path)


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in (*PICTURE_PARTS, *VIDEO_PARTS)


def plain_text(content: Any, path: str, pictures: PictureRules = TEXT_ALONE) -> str:
    """Content that is text, in one piece or in parts. Raises as ``read_messages`` does."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise ConfigError(path, content, 'must be text, or a list of {"type": "text", "text": ...}')
    for at, part in enumerate(content):
        if _is_picture(part):
            _read_picture(f"{path}[{at}]", part, pictures)
            media = "videos" if part["type"] in VIDEO_PARTS else "pictures"
            fix = f"the chat template has no places for {media}; pass chat_template_kwargs="
            fix += '{"chat_template": ...} with one that has'
            raise ConfigError(f"{path}[{at}].type", part["type"], fix)
    return "".join(_part_text(f"{path}[{at}]", part) for at, part in enumerate(content))


def _part_text(path: str, part: Any) -> str:
    if not isinstance(part, Mapping):
        raise ConfigError(path, part, 'must be a dict such as {"type": "text", "text": "..."}')
    kind = part.get("type", "text")
    if kind not in (*_PARTS, "refusal"):
        if isinstance(kind, str):
            refuse_media(path, kind)
        meant = did_you_mean(kind, _PARTS, lead=": ") or ", in parts of the type text"
        raise ConfigError(f"{path}.type", kind, f"this model reads text{meant}")
    name = "refusal" if kind == "refusal" else "text"
    known = {"type", name} if kind == "refusal" else _OF_PART
    require_known_fields(path, part, known | _OF_CACHES)
    for hint in _OF_CACHES:
        require_kind(f"{path}.{hint}", part.get(hint), dict | None)
    text = part.get(name)
    if not isinstance(text, str):
        raise ConfigError(f"{path}.{name}", text, "must be a str")
    return text


def _require_calls(path: str, calls: Any, reads: TemplateReads) -> None:
    if calls is None:
        return
    if not isinstance(calls, list | tuple):
        fix = 'must be a list of {"id": ..., "type": "function", "function": {...}}'
        raise ConfigError(path, calls, fix)
    known = _OF_CALL | reads.fields("tool_calls", EACH)
    for index, call in enumerate(calls):
        _require_call(f"{path}[{index}]", call, known)


def _require_call(path: str, call: Any, known: Collection[str]) -> None:
    if not isinstance(call, Mapping):
        fix = 'must be a dict such as {"type": "function", "function": {"name": ...}}'
        raise ConfigError(path, call, fix)
    require_known_fields(path, call, known)
    require_kind(f"{path}.id", call.get("id"), str | None)
    kind = call.get("type")
    kind = ("custom" if "custom" in call else "function") if kind is None else kind
    require_one_of(f"{path}.type", kind, ("function", "custom"))
    inner, place = call.get(kind), f"{path}.{kind}"
    if inner is None and kind == "function" and "name" in call:  # as some templates take it
        inner, place = {name: call.get(name) for name in ("name", "arguments")}, path
    if not isinstance(inner, Mapping):
        raise ConfigError(place, inner, 'must be a dict such as {"name": ..., "arguments": "{}"}')
    require_known_fields(place, inner, _OF_FUNCTION if kind == "function" else _OF_CUSTOM)
    if not isinstance(inner.get("name"), str):
        raise ConfigError(f"{place}.name", inner.get("name"), "must be a str, the tool's name")
    if kind == "function":
        require_arguments(f"{place}.arguments", inner.get("arguments"))
    elif not isinstance(inner.get("input"), str):
        raise ConfigError(f"{place}.input", inner.get("input"), "must be a str")


def require_arguments(path: str, given: object) -> None:
    """Raise ConfigError, naming the path, for arguments of a call that are no JSON object."""
    if given is None or isinstance(given, Mapping):
        return
    reason = ""
    if isinstance(given, str):
        try:
            if not given.strip() or isinstance(json.loads(given), dict):
                return
        except (ValueError, RecursionError) as error:
            reason = f": {error}"
    raise ConfigError(path, given, f"must be a JSON object, as text or as a dict{reason}")


def require_variables(given: Mapping[str, Any], template: str, others: Collection[str]) -> None:
    """Raise UnknownOptionError for a variable that the template does not read.

    others: names of other options of the rendering. Not to think is nothing to ask of a model that
    does not: clients ask it of every model.
    """
    known = template_reads(template).variables
    for name, value in given.items():
        if name in THINKING and value is False:
            continue
        if name in ("conversation", "messages", "self", "tools"):
            fix = "the chat template gets it from the chat: pass it its messages and tools"
            raise PromptError(f"chat_template_kwargs.{name}={value!r:.80}: {fix}")
        if name not in known and name not in others and value is not None:
            own = sorted(known - {"messages", "tools", "bos_token", "eos_token", *others})
            meant = did_you_mean(name, own) or f"; it reads {', '.join(own) or 'none'}"
            fix = f"this model's chat template does not read it, leave it out{meant}"
            raise UnknownOptionError(f"chat_template_kwargs.{name}", value, fix)
