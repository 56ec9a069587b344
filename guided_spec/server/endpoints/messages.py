"""What a client tells the chat template besides the messages."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from guided_spec.engine.chats.template import PLAIN, STYLES, THINKING, template_reads
from guided_spec.kinds import did_you_mean
from guided_spec.server.faults import invalid_value

_LOG = logging.getLogger(__name__)


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


def style_variables(
    reasoning_effort: str | None, verbosity: str | None, template: str
) -> dict[str, Any]:
    """What tells the chat template how much to think and to say.

    Where it knows of no effort, it may know whether to think at all. What it does not read changes
    nothing, since clients send it to every model; the log says so once. Raises ApiError for values
    that no template is known to read.
    """
    named = template_reads(template).variables
    quoted = template.replace('"', "'")  # a template may have values of its own
    asked = {"reasoning_effort": reasoning_effort, "verbosity": verbosity}
    variables: dict[str, Any] = {}
    for name, value in asked.items():
        if value is None or (name not in named and value == PLAIN):
            continue
        known = STYLES[name]
        if value not in known and (name not in named or f"'{value}'" not in quoted):
            fix = f"this model's chat template does not read it; {name} is {_listed(known)}"
            fix += did_you_mean(value, known)
            raise invalid_value(f"{name}={value!r:.40}: {fix}", name)
        if name in named:
            variables[name] = value
        elif name == "reasoning_effort" and named & THINKING:
            variables |= dict.fromkeys(named & THINKING, value != "none")
        elif value != "none":
            _say_unread(name, value)
    return variables


def _listed(values: Sequence[str]) -> str:
    return f"{', '.join(values[:-1])} or {values[-1]}"


@lru_cache(maxsize=64)
def _say_unread(name: str, value: str) -> None:
    _LOG.warning("%s=%r changes nothing: this model's chat template does not read it", name, value)
