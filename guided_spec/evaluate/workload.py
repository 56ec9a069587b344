"""The requests a benchmark sends: a JSON Lines file, one request a line."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from guided_spec.errors import ConfigError
from guided_spec.grammar.spec import GrammarSpec

__all__ = [
    "GRAMMAR_KEYS",
    "NOTE_KEYS",
    "WorkItem",
    "load_workload",
    "read_grammar",
    "refuse_unknown",
]

# How a record names its grammar: the constructor, of one argument or of several.
GRAMMARS: dict[str, Callable[..., GrammarSpec | None]] = {
    "schema": GrammarSpec.json_schema,
    "regex": GrammarSpec.regex,
    "choice": GrammarSpec.choice,
    "ebnf": GrammarSpec.ebnf,
    "lark": GrammarSpec.lark,
    "structural_tag": GrammarSpec.structural_tag,
    "response_format": GrammarSpec.from_response_format,
}
# What may stand beside which of them.
SETTINGS = {
    "any_whitespace": "schema",
    "unsupported": "schema",
    "key_order": "schema",
    "additional_properties": "schema",
    "root": "ebnf",
}
GRAMMAR_KEYS = (*GRAMMARS, *SETTINGS, "after", "reasoning_budget")
"""The members of a record that ``read_grammar`` reads."""

NOTE_KEYS = ("id", "kind", "metadata", "source")
"""What a record may say of itself; nothing reads it."""

REQUEST_KEYS = ("prompt", "messages", "answer", *GRAMMAR_KEYS, *NOTE_KEYS)


class WorkItem(NamedTuple):
    """One request: a prompt (text or chat messages), its grammar, and the right answer if known."""

    prompt: Any
    grammar: GrammarSpec | None
    answer: Any = None


def load_workload(path: Path, limit: int | None = None) -> list[WorkItem]:
    """Read up to ``limit`` requests.

    A line is an object with ``prompt`` or ``messages``, a grammar as ``read_grammar`` takes it, and
    optionally ``answer``. Raises ConfigError naming the line.
    """
    items: list[WorkItem] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("workload", str(path), f"cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if len(items) == limit:
            break
        if line.strip():
            items.append(_parse(line, f"{path.name}:{number}"))
    if not items:
        raise ConfigError("workload", str(path), "holds no requests")
    return items


def read_grammar(record: Mapping[str, Any]) -> GrammarSpec | None:
    """What a record asks of its answer, by the keys of ``GRAMMAR_KEYS``; None for free text.

    At most one of ``schema``, ``regex``, ``choice``, ``ebnf``, ``lark``, ``structural_tag`` and
    ``response_format``; each is the argument of its constructor of ``GrammarSpec``, and so are
    ``any_whitespace``, ``unsupported``, ``key_order`` and ``additional_properties`` beside a schema
    and ``root`` beside EBNF.
    ``after`` and ``reasoning_budget``: of ``GrammarSpec.after``; ``after`` true is the model's own
    marker. Members that are null count as absent. Raises ConfigError for two grammars, for a
    setting without its grammar, and for one of the wrong type.
    """
    given = {key: record[key] for key in GRAMMAR_KEYS if record.get(key) is not None}
    asked = [key for key in GRAMMARS if key in given]
    if len(asked) > 1:
        raise ConfigError("grammar", asked, "a record has at most one; leave one of them")
    settings = {key: given[key] for key in SETTINGS if key in given}
    for key, value in settings.items():
        if SETTINGS[key] not in given:
            raise ConfigError(key, value, f"goes with {SETTINGS[key]} only; leave it out")
    spec = GRAMMARS[asked[0]](given[asked[0]], **settings) if asked else None
    if "after" not in given and "reasoning_budget" not in given:
        return spec
    if spec is None:
        raise ConfigError("after", given.get("after"), "needs a grammar; give one")
    marker = given.get("after", True)
    budget = given.get("reasoning_budget")
    return spec.after(None if marker is True else marker, reasoning_budget=budget)


def refuse_unknown(record: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ConfigError for a member that nothing reads, naming it and ``known``.

    Members that are null count as absent.
    """
    for key, value in record.items():
        if key not in known and value is not None:
            raise ConfigError(key, value, f"is unknown; the keys are {', '.join(sorted(known))}")


def _parse(line: str, place: str) -> WorkItem:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError("workload", place, f"is not JSON: {error}") from error
    if not isinstance(record, Mapping):
        raise ConfigError("workload", place, "must be a JSON object")
    prompt = record.get("prompt", record.get("messages"))
    if prompt is None:
        raise ConfigError("workload", place, "has neither prompt nor messages")
    try:
        refuse_unknown(record, REQUEST_KEYS)
        return WorkItem(prompt, read_grammar(record), record.get("answer"))
    except ConfigError as error:
        raise ConfigError("workload", place, str(error)) from error
