"""One sample on its way through the engine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from enum import Enum, auto
from typing import NamedTuple

from guided_spec.engine.acceptance import OwnAcceptance
from guided_spec.engine.output_text import OutputText
from guided_spec.engine.outputs import Chunk, Completion, FinishReason
from guided_spec.engine.stats import RequestStats
from guided_spec.errors import GuidedSpecError
from guided_spec.grammar.choice_tree import ChoiceTree, TokenRow
from guided_spec.grammar.completion import CompletingGrammar, EndingsCache
from guided_spec.grammar.constraint import Constraint
from guided_spec.grammar.marker import Marker
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.ops.noise import noise_key
from guided_spec.ops.token_rules import TokenRules
from guided_spec.types import SamplingParams, TokenLogprobs

__all__ = ["Job", "Request", "Scoring", "State"]


class State(Enum):
    """Where a request is: in the queue, reading its prompt, writing or scoring, or done."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    SCORE = auto()
    FINISHED = auto()


class Scoring(NamedTuple):
    """What a request scores instead of writing: rows of ``tree``, one a step."""

    tree: ChoiceTree
    rows: Sequence[TokenRow]


class Job(NamedTuple):
    """What one request is to do; never changes.

    prompt_ids: at least one token. max_length: prompt and output tokens at most.
    seed: of this sample. grammar: the grammar being compiled, None for free text.
    endings: how texts of grammars end, to end this one in time; None never does.
    prompt_index, sample_index: the request's place in the caller's list.
    echo: what the text begins with.
    bad_words: the token sequences that ``params.bad_words`` stand for.
    marker: behind which the grammar binds; None where it binds at once.
    scoring: None where it writes.
    is_streamed: whether text is reported as it grows, or only once it is complete. Waking another
        thread at every step costs as much as a small model's forward.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    max_length: int
    seed: int = 0
    grammar: Future[CompiledGrammar] | None = None
    endings: EndingsCache | None = None
    prompt_index: int = 0
    sample_index: int = 0
    echo: str = ""
    bad_words: tuple[tuple[int, ...], ...] = ()
    marker: Marker | None = None
    scoring: Scoring | None = None
    is_streamed: bool = True


class Request:
    """One sample's tokens, text, constraint and statistics as they grow.

    scores: of each row of ``job.scoring`` so far, by node, the log-probabilities of its branches.
    report: called with every chunk, from the engine's thread.
    noise_key: see ``guided_spec.ops.noise``; the engine may set another before the first step.
    """

    def __init__(self, job: Job, vocabulary: Vocabulary, report: Callable[[Chunk], None]) -> None:
        self.job = job
        self.params = job.params
        self.constraint: Constraint | None = None
        self.state = State.WAITING
        self.slot = -1
        self.tokens = list(job.prompt_ids)
        self.prompt_length = len(job.prompt_ids)
        self.noise_key = noise_key(job.seed, self.tokens, job.params.grammar)
        self.num_cached = 0
        self.prefill: Hashable = object()  # the same for all that share one, see ``DecodeBatch``
        self._prompt_hash = hash(tuple(job.prompt_ids))
        self.is_cancelled = False
        self.acceptance = OwnAcceptance()
        self.stats = RequestStats(prompt_tokens=self.prompt_length, seed=job.seed)
        self.scores: list[dict[int, list[float]]] = []
        self._report = report
        self._max_length = min(job.max_length, self.prompt_length + job.params.max_tokens)
        self._output = OutputText(vocabulary, job.params.stop, job.echo)
        # Where the answer begins in the text; behind a marker that is not known yet.
        self._answer_at: int | None = len(job.echo) if job.marker is None else None
        self._marker_state = 0
        self._logprobs: list[TokenLogprobs] = []
        self._sent = 0
        self._sent_logprobs = 0
        self._stop_ids = frozenset(job.params.stop_token_ids)
        if not job.params.ignore_eos:
            self._stop_ids |= frozenset(vocabulary.stop_token_ids)
        self._grammar_ends = vocabulary.stop_token_ids  # ``ignore_eos`` or not
        ends = self._stop_ids
        if job.grammar is not None:
            ends |= frozenset(self._grammar_ends)
        self.rules = TokenRules(job.params, job.bad_words, tuple(sorted(ends)))

    @property
    def after_prompt(self) -> State:
        """The state behind ``PREFILL``."""
        return State.DECODE if self.job.scoring is None else State.SCORE

    @property
    def draft_room(self) -> int:
        """Draft tokens that may be of use: one more token always follows the accepted ones."""
        return self._max_length - len(self.tokens) - 1

    def has_prompt_of(self, other: Request) -> bool:
        """Whether the two prompts are the same."""
        is_alike = self._prompt_hash == other._prompt_hash
        return is_alike and self.job.prompt_ids == other.job.prompt_ids

    def bind(self, grammar: CompiledGrammar) -> None:
        """Constrain the text to a grammar.

        Raises BudgetTooSmallError where no text is known that is short enough.
        """
        endings, complete = self.job.endings, self.params.complete
        if endings is not None and complete is not False:
            budget = self._max_length - self.prompt_length
            grammar = endings.bound(grammar, budget, is_required=complete is True)
            self.stats.ends_lost = int(not isinstance(grammar, CompletingGrammar))
        self.constraint = Constraint(grammar, self._grammar_ends)

    def append(self, token_ids: list[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """Commit tokens one by one until something ends the text; the rest is dropped.

        logprobs: in step with ``token_ids``; () if the request did not ask.
        """
        before = len(self.tokens)
        reason = self._take(token_ids)
        if logprobs:
            self._logprobs.extend(logprobs[: len(self.tokens) - before])
        if reason is not None:
            self.finish(reason)
        elif self.job.is_streamed:
            self._send(None)

    def finish(self, reason: FinishReason, error: GuidedSpecError | None = None) -> None:
        """End the request and report its completion. Does nothing if it has ended already."""
        if self.state is State.FINISHED:
            return
        if self.constraint is not None and error is None:
            error = self.constraint.settle()
            reason = reason if error is None else "error"
        self.state = State.FINISHED
        self._output.finish()
        output_ids = self.tokens[self.prompt_length :]
        self.stats.output_tokens = len(output_ids)
        if self.constraint is not None:
            self.stats.resyncs = self.constraint.resyncs
            self.stats.ends_lost |= int(self.constraint.has_lost_end)
            # A stop string may have dropped what was committed last.
            self.stats.steered = sum(at < len(output_ids) for at in self.constraint.steered)
        self.stats.stop()
        logprobs = None if self.params.logprobs is None else self._logprobs
        is_complete = error is None and self._is_whole(reason)
        if reason == "stop" and self.stats.steered and not self._output.is_stopped:
            reason = "length"  # the budget ended the text, not the model
        self._send(
            Completion(
                self._output.text,
                output_ids,
                reason,
                error,
                self.stats,
                logprobs,
                is_complete,
                self._answer(),
                self.params.grammar,
            )
        )

    def fail(self, error: GuidedSpecError) -> None:
        """End the request with an error; what it wrote so far is kept.

        The error's traceback is dropped: its frames would keep other requests alive with it.
        """
        self.finish("error", error.with_traceback(None))

    def _take(self, token_ids: list[int]) -> FinishReason | None:
        """Append tokens up to one that ends the text; returns why it does.

        The grammar stands behind all of them, so it can only speak of the last.
        """
        tokens, stop_ids, feed = self.tokens, self._stop_ids, self._output.feed
        room, last = self.draft_room, len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            tokens.append(token_id)
            is_over = token_id in stop_ids or (index == last and self._is_complete())
            if is_over or feed(token_id):
                return "stop"
            if self._answer_at is None:
                self._follow_marker(token_id)
            if index >= room:
                return "length"
        return None

    def _is_complete(self) -> bool:
        return self.constraint is not None and self.constraint.is_terminated

    def _is_whole(self, reason: FinishReason) -> bool:
        """Whether the text is a whole one of its grammar, or was ended by the model."""
        if self.constraint is None:
            return reason == "stop" and self.params.grammar is None
        return not self._output.is_stopped and self.constraint.may_end()

    def _follow_marker(self, token_id: int) -> None:
        marker = self.job.marker
        assert marker is not None
        state = marker.step(self._marker_state, token_id)
        if state == len(marker):
            self._answer_at = self._output.length
        self._marker_state = state or 0

    def _answer(self) -> str:
        return "" if self._answer_at is None else self._output.text[self._answer_at :]

    def _send(self, completion: Completion | None) -> None:
        job, text, logprobs = self.job, "", tuple[TokenLogprobs, ...]()
        if job.is_streamed:
            text = self._output.text[self._sent :]
            logprobs = tuple(self._logprobs[self._sent_logprobs :])
        if completion is not None or text:
            self._sent += len(text)
            self._sent_logprobs += len(logprobs)
            answer = self._answer() if completion is None else completion.answer
            place = (job.prompt_index, job.sample_index)
            self._report(Chunk(*place, text, completion, logprobs, answer, self.params.grammar))
