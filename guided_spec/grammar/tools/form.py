"""Texts that are calls or an answer of a given form: one grammar, and the reader of its texts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import jsonschema

from guided_spec.errors import ConfigError
from guided_spec.grammar.schema.misspelt import require_spelled
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.tools.delimited import DelimitedFormat
from guided_spec.grammar.tools.format import (
    OWNER,
    BegunText,
    MarkedText,
    ReadText,
    Tool,
    ToolRules,
    begun_length,
)
from guided_spec.grammar.tools.formats import ToolFormat

_KINDS = "json_schema, json_object, regex, choice and structural_tag"


def form_content(form: GrammarSpec) -> dict[str, Any]:
    """The texts of a grammar as a part of a structural tag.

    Raises ConfigError for a grammar, or an option of one, that a tag does not have.
    """
    for one in fields(form):
        given = getattr(form, one.name)
        if one.name not in ("kind", "source", "strict", "value_type") and given != one.default:
            fix = "cannot be set together with tools; leave it out"
            raise ConfigError(f"response_format.{one.name}", given, fix)
    match form.kind:
        case "json_schema":
            schema = _parsed(form)
            if form.strict:
                require_spelled("response_format", schema, strict=True)
            return {"type": "json_schema", "json_schema": schema, OWNER: ["the response_format"]}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": form.source}
        case "choice":
            return {"type": "regex", "pattern": "|".join(map(re.escape, _parsed(form)))}
        case "structural_tag" if isinstance(content := _parsed(form).get("format"), dict):
            return content
    fix = f'together with tools it can be {_KINDS} with a "format"; use one, or tool_choice="none"'
    raise ConfigError("response_format", form.kind, fix)


def _parsed(form: GrammarSpec) -> Any:
    try:
        return json.loads(form.source)
    except (ValueError, RecursionError) as error:
        raise ConfigError("response_format", form.source, f"is not valid JSON: {error}") from error


@dataclass(frozen=True)
class FormedFormat:
    """Calls in a family's form, or else a text of ``form``: never one beside the other.

    A text that is both, as JSON may be where calls are plain JSON, is a call.
    """

    calls: ToolFormat
    form: GrammarSpec

    @property
    def name(self) -> str:
        """Of the family's form."""
        return self.calls.name

    @property
    def literals(self) -> tuple[str, ...]:
        """What the family's form writes besides names and arguments."""
        return self.calls.literals

    @property
    def holds_reasoning(self) -> bool:
        """Whether the reasoning is part of the family's form."""
        return self.calls.holds_reasoning

    @property
    def frames_text(self) -> bool:
        """Whether every text is of the family's form, with calls or without."""
        return self.calls.frames_text

    def content(self, rules: ToolRules) -> dict[str, Any]:
        """The format of a structural tag. Raises ConfigError naming the tool, or the form."""
        return self.calls.content(rules._replace(form=form_content(self.form)))

    def read(self, text: str, tools: Sequence[Tool], marks: MarkedText) -> ReadText:
        """Take apart what the grammar has written and ``marks`` has read."""
        if self.frames_text:
            return self.calls.read(text, tools, marks)
        is_call = text.startswith(marks.mark(self._trigger))
        read = self.calls.read(text, tools, marks) if is_call else None
        if read is None or not read.calls:
            return ReadText(marks.show(text), ())
        if self._is_certain(marks) or (not read.text and _is_valid(read, tools)):
            return read
        return ReadText(marks.show(text), ())

    def read_begun(self, text: str, tools: Sequence[Tool], marks: MarkedText) -> BegunText:
        """``read`` of an unfinished text. What may turn out to be either is held back."""
        if self.frames_text:
            return self.calls.read_begun(text, tools, marks)
        trigger = marks.mark(self._trigger)
        if text.startswith(trigger):
            is_certain = self._is_certain(marks)
            return self.calls.read_begun(text, tools, marks) if is_certain else BegunText("")
        return BegunText("" if begun_length(text, trigger) == len(text) else text)

    @property
    def _trigger(self) -> str:
        return self.calls.trigger if isinstance(self.calls, DelimitedFormat) else ""

    def _is_certain(self, marks: MarkedText) -> bool:
        """Whether no text of the form begins as a call does."""
        trigger, kind = self._trigger, self.form.kind
        if self.form.is_json:
            return not trigger.startswith("{")
        if kind == "choice":
            return not any(option.startswith(trigger) for option in _parsed(self.form))
        # Regexes hold no added tokens.
        return kind == "regex" and marks.mark(trigger)[:1] != trigger[:1]


def _is_valid(read: ReadText, tools: Sequence[Tool]) -> bool:
    """Whether all arguments match their schemas, as those of a call always do."""
    schemas = {tool.name: tool.parameters for tool in tools}
    return all(
        jsonschema.validators.validator_for(schemas[call.name])(schemas[call.name]).is_valid(
            call.arguments
        )
        for call in read.calls
    )
