"""Messages of the library in the words of a command line: ``draft=`` is ``--draft`` there."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from guided_spec.errors import (
    BudgetTooSmallError,
    ConfigError,
    GrammarError,
    TextCutShortError,
    without_advice,
)

# The options of the command that runs, by the arguments that messages name.
running: ContextVar[Mapping[str, str]] = ContextVar("running", default={})  # noqa: B039
# The option that its grammar came in, with the value, as in ``--schema='a.json'``.
grammar_option: ContextVar[str] = ContextVar("grammar_option", default="")
# A switch takes no value, and what is repeated or a file is written otherwise here.
_VALUES = re.compile(r"(--[\w-]+)=(?:True\b|\{[^}]*\}|\[[^]]*\])")
# Of a ConfigError: an option that was not given, and a switch.
_NOT_GIVEN = ("=None: ", "=True: ")
# Where the library finds what ``--image`` names.
_PICTURE = re.compile(r"messages\[0\]\.content\[\d+\](\.\w+)*")
# Adapters: that of ``--lora`` is called as its value, those of ``--lora-modules`` have names.
_ADAPTERS = {
    "lora": re.compile(r"loras\[(('|\").*?\2)\]=(?=\1)"),
    "lora_modules": re.compile(r"loras\[('|\").*?\1\]="),
}
# What the library calls the values of some options.
_ALIASES = {
    "algorithm": "--algorithm",
    "allowed_hosts": "--allowed-host",
    "api_keys": "--api-key",
    "marker": "--after",
    "model_names": "--served-model-name",
    "options": "--choice",
    "pattern": "--regex",
    "proposer": "--proposers",
    "resources": "--resource",
}


def option_names(command: Any) -> dict[str, str]:
    """The options of a command of click's, by the arguments that they become."""
    found = {}
    for param in command.params:
        named = [name for name in param.opts if name.startswith("--")]
        found[param.name] = named[0] if named else str(param.metavar or param.name).upper()
    aliases = {name: option for name, option in _ALIASES.items() if option in found.values()}
    return {name: one for name, one in (aliases | found).items() if not name.startswith("_")}


def spoken(message: str, options: Mapping[str, str]) -> str:
    """A message as a command says it: names of arguments become those of its options."""
    message = without_advice(message, options.__contains__)
    if not options:
        return message
    for name, pattern in _ADAPTERS.items():
        message = pattern.sub(f"{options[name]}=", message) if name in options else message
    # A word without "=" is an argument's name for sure only where it has an underscore.
    given = "|".join(map(re.escape, options))
    listed = "|".join(re.escape(name) for name in options if "_" in name)
    named = rf"(?<![\w'\"./-])({given})=( ?)"
    message = re.sub(named, lambda m: options[m[1]] + (m[2] or "="), message)
    if listed:
        message = re.sub(rf"(?<![\w'\"./-])({listed})\b(?!\()", lambda m: options[m[1]], message)
    return _VALUES.sub(r"\1", message)


def said(text: str) -> str:
    """A message of the library in the words of the command that runs."""
    return spoken(text, running.get())


def told(error: Exception) -> str:
    """What the command that runs says of an error: its own option, the value as it is, the fix."""
    options = running.get()
    if isinstance(error, ConfigError):
        value = str(error).removeprefix(error.argument).removesuffix(error.fix)
        value = ": " if value in _NOT_GIVEN else value
        name = options.get(error.argument, error.argument)
        if "image" in options and _PICTURE.fullmatch(name):
            name, value = options["image"], value if name.endswith(".image") else ": "
        return name + value + said(error.fix)
    if isinstance(error, BudgetTooSmallError | TextCutShortError):  # other fixes are Python's
        return f"{options.get('max_tokens', 'max_tokens')}={error.max_tokens}: {error.reason}"
    message = said(str(error))
    if isinstance(error, GrammarError) and (given := grammar_option.get()):
        kind, _, value = given.partition("=")
        return f"{given}: {message.removeprefix(f'{kind[2:]} {value}: ')}"  # regex '(': ...
    return message


@contextmanager
def log_as_spoken(handler: logging.Handler | None, options: Mapping[str, str]) -> Iterator[None]:
    """What a handler writes of this package is in the words of a command; None writes nothing."""

    def speak(record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] == "guided_spec":
            record.msg, record.args = spoken(record.getMessage(), options), ()
        return True

    handler = handler or logging.NullHandler()
    handler.addFilter(speak)
    try:
        yield
    finally:
        handler.removeFilter(speak)
