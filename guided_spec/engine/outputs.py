"""What the user gets back."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from guided_spec.engine.stats import RequestStats
from guided_spec.errors import GuidedSpecError
from guided_spec.grammar.choice_tree import ChoicePaths
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.value import parse_partial, parse_value
from guided_spec.types import TokenLogprobs

__all__ = ["ChoiceOutput", "Chunk", "Completion", "FinishReason", "RequestOutput"]

FinishReason = Literal["stop", "length", "error"]


class Completion(NamedTuple):
    """One finished sample.

    text: without the end-of-text token and without the stop string; behind the prompt's text if the
        request asked for its echo.
    token_ids: every token generated, the one that ended the text included.
    finish_reason: "stop" (the model ended the text, or the grammar left nothing else, or a stop
        string or token came), "length" (max_tokens or the context was reached, or the text was
        steered to its end before), or "error", with ``error`` set.
    logprobs: in step with ``token_ids``; None if the request did not ask.
    is_complete: whether the answer is a whole text of the grammar, whatever ended it; of free text,
        whether the model ended it.
    answer: the part of ``text`` that the grammar is about: without an echo, and without what stands
        before the marker of ``GrammarSpec.after``. "" where that was not reached.
    grammar: of the request.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    error: GuidedSpecError | None
    stats: RequestStats
    logprobs: list[TokenLogprobs] | None = None
    is_complete: bool = False
    answer: str = ""
    grammar: GrammarSpec | None = None

    @property
    def parsed(self) -> Any:
        """The value of a complete answer under a JSON grammar, else None.

        An instance of the type that the grammar came from, plain JSON where it came from none.
        Raises pydantic.ValidationError where the type asks for more than its JSON schema says.
        """
        if not self.is_complete or self.grammar is None or not self.grammar.is_json:
            return None
        return parse_value(self.answer, self.grammar.value_type)


class RequestOutput(NamedTuple):
    """Everything one prompt gave: ``n`` completions. The properties are the first one's."""

    prompt_index: int
    completions: tuple[Completion, ...]

    @property
    def text(self) -> str:
        """The text, without the end-of-text token."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """Every token generated, the one that ended the text included."""
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the text ended."""
        return self.completions[0].finish_reason

    @property
    def error(self) -> GuidedSpecError | None:
        """What went wrong, None for a request that was served."""
        return self.completions[0].error

    @property
    def stats(self) -> RequestStats:
        """What speculation did."""
        return self.completions[0].stats

    @property
    def is_complete(self) -> bool:
        """Whether the answer is a whole text of the grammar, whatever ended it."""
        return self.completions[0].is_complete

    @property
    def parsed(self) -> Any:
        """The value of a complete answer under a JSON grammar, see ``Completion.parsed``."""
        return self.completions[0].parsed

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """In step with ``token_ids``; None if the request did not ask."""
        return self.completions[0].logprobs


class Chunk(NamedTuple):
    """A piece of a stream: text that was committed since the last one.

    completion is set on a sample's last chunk and holds the whole of it.
    logprobs: of the tokens that were committed since the last chunk, () if the request did not ask.
        Their text may still be held back, as the beginning of a stop string or of a character.
    answer: all of the answer so far, see ``Completion``. grammar: of the request.
    """

    prompt_index: int
    sample_index: int
    text: str
    completion: Completion | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    answer: str = ""
    grammar: GrammarSpec | None = None

    @property
    def parsed(self) -> Any:
        """The JSON value so far, with strings, arrays and objects that may still grow.

        On the last chunk the completion's own value. None under a grammar that is not JSON, and
        where nothing is there yet.
        """
        if self.completion is not None:
            return self.completion.parsed
        if self.grammar is None or not self.grammar.is_json:
            return None
        return parse_partial(self.answer)


class ChoiceOutput(NamedTuple):
    """How likely each choice is.

    choice: the most probable one; of equals, the first.
    probabilities: of every choice, in their order; they sum to 1.
    logprobs: their natural logarithms.
    paths: which ways of writing a choice count, see ``LLM.choose``.

    Choices are what was passed: strings, or the members of an Enum class.
    """

    choice: Any
    probabilities: dict[Any, float]
    logprobs: dict[Any, float]
    paths: ChoicePaths
