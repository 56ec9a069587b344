"""The messages of a conversation: what a chat template is given of them, and what is refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from guided_spec.kinds import require_known_fields
from guided_spec.server.faults import invalid_value

_LOG = logging.getLogger(__name__)

_OF_ALL = frozenset({"role", "content", "name"})
_OF_ROLE = {
    # The last two are how clients send back what they were sent: it stands in the content too.
    "assistant": _OF_ALL | {"tool_calls", "reasoning_content", "annotations", "parsed"},
    "tool": _OF_ALL | {"tool_call_id"},
}
_OF_CALL = frozenset({"id", "type", "function", "custom", "index"})
_OF_FUNCTION = frozenset({"name", "arguments", "parsed_arguments"})
_OF_CUSTOM = frozenset({"name", "input"})
_PARTS = ("text", "input_text", "output_text", "reasoning_text")
_OF_PART = frozenset({"type", "text", "annotations", "logprobs", "parsed", "cache_control"})


def plain_messages(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Messages as chat templates read them: text for content, and roles that they know.

    A role that the template does not know, "developer", becomes "system". Raises ApiError, and
    UnknownOptionError for a field that neither the interface nor the template has.
    """
    named = frozenset(re.findall(r"\w+", template))
    read = []
    for index, message in enumerate(messages):
        path, role = f"messages[{index}]", message.get("role")
        if not isinstance(role, str):
            raise invalid_value(f"{path}.role: must be a str", f"{path}.role")
        require_known_fields(path, message, _OF_ROLE.get(role, _OF_ALL) | named)
        _require_calls(message.get("tool_calls"), f"{path}.tool_calls")
        if role == "developer" and role not in named:
            role = "system"
        content = plain_text(message.get("content"), f"{path}.content")
        read.append({**message, "role": role, "content": content})
    return read


def _require_calls(calls: Any, path: str) -> None:
    """Raise UnknownOptionError for fields that calls do not have; the rest is the template's."""
    for index, call in enumerate(calls if isinstance(calls, list) else ()):
        if isinstance(call, dict):
            require_known_fields(f"{path}[{index}]", call, _OF_CALL)
            for kind, fields in (("function", _OF_FUNCTION), ("custom", _OF_CUSTOM)):
                inner = call.get(kind)
                if isinstance(inner, dict):
                    require_known_fields(f"{path}[{index}].{kind}", inner, fields)


def template_variables(
    given: Mapping[str, Any] | None, reserved: Collection[str]
) -> dict[str, Any]:
    """What a client tells the chat template.

    reserved: names that are not the template's. Raises ApiError for one of them: "chat_template"
    would be a program of the client's.
    """
    for name in given or {}:
        if name in reserved:
            param = f"chat_template_kwargs.{name}"
            message = f"{param}: clients cannot bring one of their own; leave it out"
            raise invalid_value(message, "chat_template_kwargs")
    return dict(given or {})


_PLAIN = "medium"  # OpenAI's default, which asks for nothing
_STYLES = {
    "reasoning_effort": ("none", "minimal", "low", _PLAIN, "high", "xhigh", "max"),
    "verbosity": ("low", _PLAIN, "high"),
}


def style_variables(
    reasoning_effort: str | None, verbosity: str | None, template: str
) -> dict[str, Any]:
    """What tells the chat template how much to think and to say.

    Where it knows of no effort, it may know whether to think at all. What it does not read changes
    nothing, since clients send it to every model; the log says so once. Raises ApiError for values
    that no template is known to read.
    """
    named = frozenset(re.findall(r"\w+", template))
    asked = {"reasoning_effort": reasoning_effort, "verbosity": verbosity}
    variables: dict[str, Any] = {}
    for name, value in asked.items():
        if value is None or (name not in named and value == _PLAIN):
            continue
        if name in named:
            variables[name] = value
        elif value not in _STYLES[name]:
            fix = f"this model's chat template does not read it; {name} is {_listed(_STYLES[name])}"
            raise invalid_value(f"{name}={value!r:.40}: {fix}", name)
        elif name == "reasoning_effort" and "enable_thinking" in named:
            variables["enable_thinking"] = value != "none"
        elif value != "none":
            _say_unread(name, value)
    return variables


def _listed(values: Sequence[str]) -> str:
    return f"{', '.join(values[:-1])} or {values[-1]}"


@lru_cache(maxsize=64)
def _say_unread(name: str, value: str) -> None:
    _LOG.warning("%s=%r changes nothing: this model's chat template does not read it", name, value)


def plain_text(content: Any, path: str) -> str:
    """Content that is text, in one piece or several. Raises as ``plain_messages`` does."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid_value(f"{path}: must be text", path)
    pieces = []
    for at, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) else None
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if not isinstance(text, str) or kind not in _PARTS:
            message = f"{path}[{at}]: this model reads text, not {kind!r:.40}"
            raise invalid_value(message, path)
        require_known_fields(f"{path}[{at}]", part, _OF_PART)
        pieces.append(text)
    return "".join(pieces)
