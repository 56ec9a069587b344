"""Rows of columns: a prompt with names in braces, one text for each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from guided_spec.batch.inputs import Line
from guided_spec.batch.results import Question, digest_of
from guided_spec.engine.rows.template import PromptTemplate, column_text
from guided_spec.errors import ConfigError, GuidedSpecError, PromptError
from guided_spec.types import SamplingParams

if TYPE_CHECKING:  # this loads torch
    from guided_spec.engine.outputs import Completion, OnError, RequestOutput


class Writer(Protocol):
    """What writes the texts: an ``LLM``."""

    async def agenerate(
        self, prompts: Any, params: SamplingParams, *, on_error: OnError
    ) -> list[RequestOutput]:
        """One output for one prompt."""


@dataclass(frozen=True)
class RowForm:
    """Rows for a prompt with columns.

    model: what is loaded. is_chat: whether the prompt is a message of a chat. id_column: whose
    values are the custom ids; None takes the number of the row, from 1. tell: an error in words.

    Raises ConfigError for a prompt without columns.
    """

    model: str
    template: PromptTemplate
    params: SamplingParams
    is_chat: bool
    id_column: str | None
    tell: Callable[[Exception], str] = str

    def __post_init__(self) -> None:
        if not self.template.columns:
            fix = "names no column in braces, so that all rows would get the same text"
            raise ConfigError("PROMPT", self.template.text, fix)

    @property
    def columns(self) -> Sequence[str]:
        """Those that a row must have."""
        own = [] if self.id_column is None else [self.id_column]
        return list(dict.fromkeys([*self.template.columns, *own]))

    def read(self, index: int, line: Line) -> Question:
        """The prompt of a row. What is at fault is its ``refusal``."""
        custom_id = str(index) if self.id_column is None else None
        settings = (self.model, repr(self.params), self.is_chat)
        try:
            if line.fault is not None:
                raise PromptError(line.fault)
            text = self.template.fill(line.value)
            if self.id_column is not None:
                custom_id = column_text(line.value, self.id_column)
        except GuidedSpecError as error:
            refusal = self.failed(error)
            return Question(custom_id, digest_of(*settings, index), refusal=refusal)
        prompt = [{"role": "user", "content": text}] if self.is_chat else text
        return Question(custom_id, digest_of(*settings, text), prompt)

    def runner(self, llm: Any, watch: Callable[[Completion], None]) -> RowRunner:
        """What answers them. watch: called with each text that has ended."""
        return RowRunner(llm, self, watch)

    def failed(self, error: Exception, text: str | None = None) -> dict[str, Any]:
        """The fields of an answer that an error is."""
        told = {"type": type(error).__name__, "message": self.tell(error)}
        return {"text": text or None, "finish_reason": "error", "error": told}


class RowRunner:
    """Answers rows by texts of an ``LLM``."""

    def __init__(self, llm: Writer, form: RowForm, watch: Callable[[Completion], None]) -> None:
        self._llm = llm
        self._form = form
        self._watch = watch

    async def run(self, question: Question) -> Mapping[str, Any]:
        """The fields of an answer, its error among them."""
        try:
            outputs = await self._llm.agenerate(
                question.content, self._form.params, on_error="return"
            )
        except GuidedSpecError as error:
            return self._form.failed(error)
        (completion,) = outputs[0].completions
        self._watch(completion)
        if completion.error is not None:
            return self._form.failed(completion.error, completion.text)
        return {
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "is_complete": completion.is_complete,
            "was_shortened": completion.was_shortened,
            "output_tokens": completion.stats.output_tokens,
            "error": None,
        }

    def close(self) -> None:
        """Nothing is held."""
