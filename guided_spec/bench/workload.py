"""The requests a benchmark sends: a JSON Lines file, one request a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from guided_spec.errors import ConfigError
from guided_spec.grammar.spec import GrammarSpec

__all__ = ["WorkItem", "load_workload", "read_grammar"]


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
    """What a record asks of its answer: one of ``schema``, ``regex``, ``choice``; None for none.

    ``any_whitespace`` goes with a schema, see ``GrammarSpec``. Members that are null count as
    absent. Raises ConfigError for two grammars, and for one of the wrong type.
    """
    asked = [name for name in ("schema", "regex", "choice") if record.get(name) is not None]
    if len(asked) > 1:
        raise ConfigError("grammar", asked, "a record has at most one; leave one of them")
    match asked:
        case ["schema"]:
            any_whitespace = record.get("any_whitespace") or False
            return GrammarSpec.json_schema(record["schema"], any_whitespace=any_whitespace)
        case ["regex"]:
            return GrammarSpec.regex(record["regex"])
        case ["choice"]:
            return GrammarSpec.choice(record["choice"])
    return None


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
    return WorkItem(prompt, read_grammar(record), record.get("answer"))
