"""Does a text match what was asked for? Judged by jsonschema and re, not by the grammar engine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
from jsonschema.validators import validator_for

from guided_spec.bench.workload import WorkItem
from guided_spec.engine.outputs import Completion
from guided_spec.grammar.markers import DEFAULT_MARKERS
from guided_spec.grammar.spec import GrammarSpec

__all__ = ["is_valid", "valid_share"]


def valid_share(completions: Sequence[Completion], items: Sequence[WorkItem]) -> float:
    """The share of the finished texts that match their grammars; 1.0 where none has finished."""
    judged = [
        is_valid(completion.text, item.grammar)
        for completion, item in zip(completions, items, strict=True)
        if completion.finish_reason == "stop"
    ]
    return sum(judged) / len(judged) if judged else 1.0


def is_valid(text: str, grammar: GrammarSpec | None) -> bool:
    """Whether ``text`` satisfies the spec; kinds without an independent judge pass.

    Of a spec with a start the part behind the marker is judged; all of a text without the marker,
    which the prompt held then. A marker of token ids is not seen in a text: it passes.
    """
    if grammar is None:
        return True
    if grammar.start is not None:
        if not isinstance(grammar.start.marker, str | None):
            return True
        known = grammar.start.marker or next((m for m in DEFAULT_MARKERS if m in text), "")
        text = text.partition(known)[2] if known and known in text else text
    match grammar.kind:
        case "json_schema":
            return _is_valid_json(text, json.loads(grammar.source))
        case "json_object":
            return _is_valid_json(text, {"type": "object"})
        case "regex":
            return re.fullmatch(grammar.source, text) is not None
        case "choice":
            return text in json.loads(grammar.source)
        case _:
            return True


def _is_valid_json(text: str, schema: Any) -> bool:
    """Under the draft that the schema names, formats included."""
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return bool(kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(value))
