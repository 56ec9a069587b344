"""What the user gets back."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from guided_spec.engine.stats import RequestStats
from guided_spec.errors import GuidedSpecError
from guided_spec.grammar.choice_tree import ChoicePaths
from guided_spec.types import TokenLogprobs

__all__ = ["ChoiceOutput", "Chunk", "Completion", "FinishReason", "RequestOutput"]

FinishReason = Literal["stop", "length", "error"]


class Completion(NamedTuple):
    """One finished sample.

    text: without the end-of-text token and without the stop string; behind the prompt's text if the
        request asked for its echo.
    token_ids: every token generated, the one that ended the text included.
    finish_reason: "stop" (end of text, end of the grammar, a stop string or token), "length"
        (max_tokens or the context was reached first; constrained text is then a valid prefix), or
        "error", with ``error`` set.
    logprobs: in step with ``token_ids``; None if the request did not ask.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    error: GuidedSpecError | None
    stats: RequestStats
    logprobs: list[TokenLogprobs] | None = None


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
    def logprobs(self) -> list[TokenLogprobs] | None:
        """In step with ``token_ids``; None if the request did not ask."""
        return self.completions[0].logprobs


class Chunk(NamedTuple):
    """A piece of a stream: text that was committed since the last one.

    completion is set on a sample's last chunk and holds the whole of it.
    logprobs: of the tokens that were committed since the last chunk, () if the request did not ask.
        Their text may still be held back, as the beginning of a stop string or of a character.
    """

    prompt_index: int
    sample_index: int
    text: str
    completion: Completion | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


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
