"""What the user gets back: outputs, and what speculation did for each request."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, partial
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from guided_spec.engine.prompt import Prompt
from guided_spec.errors import ConfigError, GuidedSpecError, TextCutShortError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.choice_tree import ChoicePaths
from guided_spec.grammar.value import parse_partial, parse_value
from guided_spec.home import once_per_process
from guided_spec.kinds import require_one_of
from guided_spec.trace.record import StepTrace, Trace
from guided_spec.types import SamplingParams, TokenLogprobs

_LOG = logging.getLogger(__name__)


class Load(NamedTuple):
    """How busy an engine is.

    running: samples that hold a slot, of ``num_slots``. waiting: those that do not yet, for want of
        a slot or of their grammar.
    used_blocks: of keys and values that texts hold, of ``num_blocks``; slots on a stock model. The
        prefix cache may hold text in the others until they are taken.
    """

    num_slots: int
    running: int
    waiting: int
    num_blocks: int
    used_blocks: int


@dataclass(slots=True)
class RequestStats:
    """Counters of one request, final when it ends.

    prompt_tokens, output_tokens: lengths, the end-of-text token included.
    cached_tokens: of the prompt, found in the prefix cache and not read again.
    steps: target forwards that decoded this request, prefill not counted.
    drafted, accepted: [K] draft tokens proposed and accepted at each position of a draft.
    forced, forced_accepted: those of them that the grammar left no choice about.
    reasoning, reasoning_accepted: those that stood before the marker of ``GrammarSpec.after``, as
        reasoning does, where the grammar does not bind yet.
    starved: draft positions at which a draft head's smaller vocabulary had no legal token.
    steered: output tokens chosen where the mask lacked tokens after which the text could not have
    ended within its budget, see ``SamplingParams.complete``.
    ends_lost: 1 where no ending of the text within its budget was known any more, so that it may
    be cut off. The grammar holds all the same.
    tabled: output tokens that a grammar's table judged: no matcher was asked for their masks, see
        ``EngineConfig.grammar_tables``.
    device_steps: of the steps, those whose masks a device took from the table itself, see
        ``EngineConfig.device_table_bytes``.
    resyncs: matchers rebuilt from the committed tokens because they disagreed with them.
    mask_seconds: host time spent on filling masks, this request's share of its batches.
    seconds: from the start of the request's prefill to its end.
    seed: the seed that was used, the request's own or a random one.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    forced: int = 0
    forced_accepted: int = 0
    reasoning: int = 0
    reasoning_accepted: int = 0
    starved: int = 0
    steered: int = 0
    ends_lost: int = 0
    tabled: int = 0
    device_steps: int = 0
    resyncs: int = 0
    mask_seconds: float = 0.0
    seconds: float = 0.0
    seed: int = 0
    _started: float = field(default=0.0, repr=False, compare=False)

    @property
    def acceptance_length(self) -> float:
        """Tokens per target forward: 1.0 without speculation."""
        return self.output_tokens / self.steps if self.steps else 0.0

    @property
    def forwards_per_token(self) -> float:
        """Target forwards per output token: 1.0 without speculation."""
        return self.steps / self.output_tokens if self.output_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of ``seconds``."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Every counter and every ratio, for JSON."""
        counters = {f.name: getattr(self, f.name) for f in fields(self) if f.repr}
        ratios = ("acceptance_length", "forwards_per_token", "tokens_per_second")
        return counters | {name: getattr(self, name) for name in ratios}

    def start(self) -> None:
        """Start the clock, unless it runs: a request that went back to the queue began before."""
        self._started = self._started or time.perf_counter()

    def stop(self) -> None:
        """Stop the clock; a request that never ran took no time."""
        if self._started:
            self.seconds = time.perf_counter() - self._started

    def count_step(
        self, drafted: int, accepted: int, forced: list[int], reasoning: int = 0
    ) -> None:
        """Add one step: ``accepted`` of ``drafted`` tokens, those at ``forced`` being forced.

        reasoning: how many, from the first on, stood before the marker; the forced ones among them
            count as forced.
        """
        if reasoning:
            chosen = [position for position in range(reasoning) if position not in forced]
            self.reasoning += len(chosen)
            self.reasoning_accepted += sum(position < accepted for position in chosen)
        self.steps += 1
        if drafted:
            _count(self.drafted, drafted)
            _count(self.accepted, accepted)
        if forced:
            self.forced += len(forced)
            self.forced_accepted += sum(position < accepted for position in forced)


def _count(positions: list[int], length: int) -> None:
    if len(positions) < length:
        positions.extend([0] * (length - len(positions)))
    for position in range(length):
        positions[position] += 1


@dataclass(frozen=True, eq=False, slots=True)
class RoutedExperts:
    """Which experts each token of a text went to.

    experts: int16 [T, L, K], K experts a token in the order of the router. T is all tokens of the
        prompt and the output but the last one, which nothing was computed of; fewer where an error
        ended the text. As the target's forwards chose them: rejected drafts leave nothing.
    layers: [L] the indices of the decoder layers that have experts, ascending.
    """

    experts: NDArray[np.int16]
    layers: tuple[int, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutedExperts):
            return NotImplemented
        return self.layers == other.layers and np.array_equal(self.experts, other.experts)


FinishReason = Literal["stop", "length", "error"]


class Completion(NamedTuple):
    """One finished sample.

    stats: what speculation did, see ``RequestStats``.
    text: without the end-of-text token and without the stop string; after the prompt's text if the
    request asked for its echo.
    token_ids: every token generated, the one that ended the text included.
    finish_reason: "stop" (the model ended the text, or the grammar left nothing else, or a stop
        string or token came), "length" (max_tokens or the context was reached, or the text was
        steered to its end before), or "error", with ``error`` set.
    logprobs: in step with ``token_ids``; None if the request did not ask.
    is_complete: whether ``answer`` is a whole text of the grammar, whatever ended it; of free text,
    whether the model ended it.
    answer: the part of ``text`` that the grammar is about: without an echo, and without what stands
        before the marker of ``GrammarSpec.after``. "" where that was not reached.
    grammar: of the request.
    trace: of its steps; None if the call did not ask.
    routed_experts: see ``SamplingParams.return_routed_experts``; None if the request did not ask.
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
    trace: Trace | None = None
    routed_experts: RoutedExperts | None = None

    @property
    def was_shortened(self) -> bool:
        """Whether the budget took tokens out of masks: with more of it the text may be another.

        A value in it may then be cut short, such as a number of a telephone.
        """
        return self.stats.steered > 0

    @property
    def parsed(self) -> Any:
        """The value of ``answer`` if it is complete and its grammar is JSON, else None.

        An instance of the type that the grammar came from, plain JSON where it came from none.
        Raises pydantic.ValidationError where the type asks for more than its JSON schema says.
        """
        if not self.is_complete or self.grammar is None or not self.grammar.is_json:
            return None
        return parse_value(self.answer, self.grammar.value_type)


class RequestOutput(NamedTuple):
    """Everything one prompt gave. The properties are those of the first completion.

    prompt_index: of the prompt in the call. completions: ``n`` of them.
    """

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
    def was_shortened(self) -> bool:
        """Whether the budget changed the text, see ``Completion.was_shortened``."""
        return self.completions[0].was_shortened

    @property
    def is_complete(self) -> bool:
        """Whether the text is a whole text of the grammar, see ``Completion.is_complete``."""
        return self.completions[0].is_complete

    @property
    def parsed(self) -> Any:
        """The value of a complete text under a JSON grammar, see ``Completion.parsed``."""
        return self.completions[0].parsed

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """In step with ``token_ids``; None if the request did not ask."""
        return self.completions[0].logprobs

    @property
    def trace(self) -> Trace | None:
        """Of its steps; None if the call did not ask."""
        return self.completions[0].trace

    @property
    def routed_experts(self) -> RoutedExperts | None:
        """Of its tokens; None if the request did not ask."""
        return self.completions[0].routed_experts


class Chunk(NamedTuple):
    """A piece of a stream: text that was committed since the last one.

    prompt_index, sample_index: which prompt, and which of its samples. completion: the whole
        sample, on its last chunk alone.
    logprobs: of the tokens that were committed since the last chunk, () if the request did not ask.
        Their text may still be held back, as the beginning of a stop string or of a character.
    answer: all of it so far, see ``Completion``. grammar: of the request.
    token_ids: the tokens that were committed since the last chunk.
    steps: of the trace, those since the last chunk; () if the call did not ask for one.
    """

    prompt_index: int
    sample_index: int
    text: str
    completion: Completion | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    answer: str = ""
    grammar: GrammarSpec | None = None
    token_ids: tuple[int, ...] = ()
    steps: tuple[StepTrace, ...] = ()

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


OnError = Literal["raise", "return"]
Params = SamplingParams | Sequence[SamplingParams] | None


class Failures(NamedTuple):
    """of_written: whether to raise what ended a text that had begun. of_unwritten: all others."""

    of_unwritten: bool
    of_written: bool

    @classmethod
    def before_the_first_token(cls, on_error: OnError) -> Failures:
        """With "raise" only those that left no text. Raises ConfigError for another word."""
        return cls(_is_raised(on_error), of_written=False)

    @classmethod
    def at_any_time(cls, on_error: OnError) -> Failures:
        """With "raise" all of them. Raises ConfigError for another word."""
        is_raised = _is_raised(on_error)
        return cls(is_raised, is_raised)

    def raises(self, completion: Completion) -> bool:
        """Whether its error is one of these.

        What is refused because it was cut short counts as one that left no text.
        """
        if completion.error is None:
            return False
        is_refused = isinstance(completion.error, TextCutShortError)
        is_written = bool(completion.token_ids) and not is_refused
        return self.of_written if is_written else self.of_unwritten

    def look_at(self, chunk: Chunk, num_prompts: int) -> None:
        """Raise the error of a request's last chunk, if it is one of these.

        Among several prompts a note on the error says which one it was.
        """
        completion = chunk.completion
        if completion is None or completion.error is None:
            return
        if self.raises(completion):
            place = f"prompt {chunk.prompt_index} of {num_prompts}, counted from 0"
            note = f'{place}; on_error="return" serves the others'
            # Set, not added: a grammar's error is remembered, and raised by other calls too.
            completion.error.__notes__ = [note] if num_prompts > 1 else []
            raise completion.error


def _is_raised(on_error: str) -> bool:
    require_one_of("on_error", on_error, get_args(OnError))
    return on_error == "raise"


@cache
def warn_of_shortening() -> None:
    """Say once in a process that a text was shortened, and how to see which ones are."""
    _LOG.warning(
        "a text was ended early to be whole within max_tokens, so that values in it may be cut "
        "short; its output's was_shortened says so. This is said once: allow more tokens"
    )


def match_params(
    params: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> list[SamplingParams]:
    """One for each prompt. Raises ConfigError where that is not what they are."""
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    matched = list(params) if isinstance(params, Sequence) else [params]
    if not all(isinstance(one, SamplingParams) for one in matched):
        fix = "must be a SamplingParams, or a list of them; a schema or type goes into grammar"
        raise ConfigError("params", params, fix)
    if len(matched) != num_prompts:
        fix = f"pass one SamplingParams, or {num_prompts}: one for each prompt"
        raise ConfigError("params", f"{len(matched)} of them", fix)
    return matched


class Manner(NamedTuple):
    """Whether text is reported as it grows, and whether its steps are recorded."""

    is_streamed: bool
    is_traced: bool


class Cancellable(Protocol):
    """A sample that runs or waits."""

    def cancel(self) -> None:
        """It is not wanted any more. Does nothing where it has ended."""


class Submits(Protocol):
    """Queues every sample of every prompt: an engine here, or in another process."""

    def __call__(
        self,
        prompts: Sequence[Prompt],
        params: Params,
        report: Callable[[Chunk], None],
        manner: Manner,
    ) -> Sequence[Cancellable | None]:
        """One entry a sample; None for one that failed at once.

        report: called from another thread with every chunk, the last of a sample has its
            completion.
        """


class LoopMail:
    """What other threads hand to event loops. What comes together is taken in together.

    To wake a loop is a system call, and a step of the engine has a chunk for each of its texts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._boxes = weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, deque[Callable[[], None]]
        ]()

    def call(self, loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
        """Have ``loop`` call the function soon, in the order of coming. Nothing if it is closed."""
        with self._lock:
            box = self._boxes.setdefault(loop, deque())
            box.append(function)
            if len(box) > 1:
                return  # the loop is already woken
            try:
                loop.call_soon_threadsafe(self._empty, box)
            except RuntimeError:  # it is closed
                box.clear()

    def _empty(self, box: deque[Callable[[], None]]) -> None:
        with self._lock:
            functions = list(box)
            box.clear()
        for function in functions:
            function()


@once_per_process
def _mail() -> LoopMail:
    return LoopMail()


async def achunks(
    submit: Submits, prompts: list[Prompt], params: Params, failures: Failures, manner: Manner
) -> AsyncGenerator[Chunk, None]:
    """Every chunk of every sample. Closing it, or cancelling the task, cancels the rest."""
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[Chunk] = asyncio.Queue()

    def report(chunk: Chunk) -> None:
        _mail().call(loop, partial(chunks.put_nowait, chunk))

    samples = submit(prompts, params, report, manner)
    try:
        for _ in samples:
            while (chunk := await chunks.get()).completion is None:
                yield chunk
            failures.look_at(chunk, len(prompts))
            yield chunk
    finally:
        cancel_all(samples)


def cancel_all(samples: Sequence[Cancellable | None]) -> None:
    """None of these samples, as ``Submits`` returns them, is wanted any more."""
    for sample in samples:
        if sample is not None:
            sample.cancel()
