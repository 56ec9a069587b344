"""Training records: one document each, in the shapes people keep them in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from guided_spec.engine.prompt import Message
from guided_spec.errors import ConfigError
from guided_spec.evaluate.workload import GRAMMAR_KEYS, NOTE_KEYS, read_grammar, refuse_unknown
from guided_spec.grammar.spec import GrammarSpec

__all__ = [
    "ANSWER_NAMES",
    "CHAT_NAMES",
    "RECORD_KEYS",
    "SHAREGPT_ROLES",
    "Example",
    "read_example",
]

ANSWER_NAMES = ("response", "completion", "answer")
"""Where the answer to a prompt stands; the first one that is there counts."""

CHAT_NAMES = ("messages", "conversations", "prompt")
"""Where a chat may stand; the first one that is there counts."""

REFUSED = {
    "after": "is not followed in training: write the grammar of the whole answer",
    "reasoning_budget": "is not followed in training: write the grammar of the whole answer",
}
"""What an engine could do, but not a training run; and what to do instead."""

RECORD_KEYS = frozenset(
    {*CHAT_NAMES, "text", "tools", *ANSWER_NAMES, *GRAMMAR_KEYS, *NOTE_KEYS}.difference(REFUSED)
)
"""All that may stand in a record."""

SHAREGPT_ROLES = {
    "assistant": "assistant",
    "function": "tool",
    "gpt": "assistant",
    "human": "user",
    "observation": "tool",
    "system": "system",
    "tool": "tool",
    "user": "user",
}
"""What ``from`` says in ShareGPT's form, as the role of a message."""


class Example(NamedTuple):
    """One document: what is asked, what is answered, and what the answer has to match.

    prompt: text, or chat messages without the answer; None where all of the text is the answer.
    answer: text, or the assistant's last message of a chat; None where there is none yet.
    tools: what the chat template is told that the assistant may call; None for nothing.
    """

    prompt: str | list[Message] | None
    answer: str | Message | None
    grammar: GrammarSpec | None
    tools: list[Any] | None = None


def read_example(record: Mapping[str, Any]) -> Example:
    """Read a record in any of its shapes.

    ``messages`` (or ``prompt``): a chat with roles. ``conversations``: a chat in ShareGPT's form.
    ``prompt``: text. Their answer is the assistant's last message or, behind the prompt,
    ``response``, ``completion`` or ``answer``; one that is no text is written as JSON. ``text``:
    all of it is the answer. ``tools``: of a chat, a list or its JSON. The grammar: see
    ``read_grammar``. Raises ConfigError, also for a key that is none of ``RECORD_KEYS``.
    """
    for key, fix in REFUSED.items():
        if record.get(key):
            raise ConfigError(key, record[key], fix)
    refuse_unknown({**record, **dict.fromkeys(REFUSED)}, RECORD_KEYS)
    grammar = read_grammar(record)
    answer = _answer(record)
    chat, tools = _chat(record), _tools(record)
    if chat is not None:
        if chat[-1]["role"] == "assistant":
            return Example(chat[:-1], chat[-1], grammar, tools)
        reply = None if answer is None else {"role": "assistant", "content": answer}
        return Example(chat, reply, grammar, tools)
    if tools is not None:
        raise ConfigError("tools", tools, "go with a chat: write the prompt as messages")
    if record.get("prompt") is not None:
        return Example(_text("prompt", record["prompt"]), answer, grammar)
    if record.get("text") is not None:
        return Example(None, _text("text", record["text"]), grammar)
    fix = "has none of prompt, messages, conversations and text"
    raise ConfigError("record", sorted(record), fix)


def _answer(record: Mapping[str, Any]) -> str | None:
    for name in ANSWER_NAMES:
        answer = record.get(name)
        if answer is not None:
            return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    return None


def _chat(record: Mapping[str, Any]) -> list[Message] | None:
    for name in CHAT_NAMES:
        turns = record.get(name)
        if turns is None or (name == "prompt" and isinstance(turns, str)):
            continue
        if not isinstance(turns, list) or not turns:
            raise ConfigError(name, turns, "must be a list of messages, at least one")
        return [_message(name, turn) for turn in turns]
    return None


def _tools(record: Mapping[str, Any]) -> list[Any] | None:
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ConfigError("tools", tools, f"is not JSON: {error}") from error
    if not isinstance(tools, list | None):
        raise ConfigError("tools", tools, "must be a list of tools, or its JSON")
    return tools or None


def _message(name: str, turn: Any) -> Message:
    if isinstance(turn, Mapping):
        if isinstance(turn.get("role"), str):
            return turn
        role = SHAREGPT_ROLES.get(str(turn.get("from")))
        if role is not None and isinstance(turn.get("value"), str):
            return {"role": role, "content": turn["value"]}
    fix = f"each message needs role and content, or from ({', '.join(SHAREGPT_ROLES)}) and value"
    raise ConfigError(name, turn, fix)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(name, value, "must be a str")
    return value
