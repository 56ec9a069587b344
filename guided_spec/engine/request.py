"""One sample in the engine, and its text, which grows by whole characters."""

from __future__ import annotations

import codecs
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from guided_spec.engine.outputs import (
    Chunk,
    Completion,
    FinishReason,
    RequestStats,
    RoutedExperts,
    warn_of_shortening,
)
from guided_spec.engine.target.routes import TextRoutes
from guided_spec.errors import GrammarError, GuidedSpecError, ModelError, TextCutShortError
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.text.choice_tree import ChoiceTree, TokenRow
from guided_spec.grammar.text.markers import Marker
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.guide import GuidedText
from guided_spec.models.pictures.picture import PicturePrompt, TextAfter
from guided_spec.ops.sampling.adjust import Words
from guided_spec.step import Committed, Step
from guided_spec.trace.record import SeenStep, StepTrace, Trace, TraceRecorder, TraceSource
from guided_spec.types import SamplingParams, TokenLogprobs, Verifier

if TYPE_CHECKING:  # these load transformers
    from guided_spec.grammar.completion.completion import EndingsCache
    from guided_spec.grammar.pipeline import PendingGrammar

_LOG = logging.getLogger(__name__)


class TextDecoder:
    """Turns one request's tokens into text, holding a character back until all its bytes are in.

    The pieces returned, joined, are ``vocabulary.decode`` of all tokens fed.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._text_bytes = vocabulary.text_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """Append tokens and return the text they complete; bytes that are no UTF-8 give U+FFFD."""
        return self._decoder.decode(b"".join(self._text_bytes[i] for i in token_ids))

    def flush(self) -> str:
        """End the text: whatever was held back, as U+FFFD. The decoder may then be used anew."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


class StopStrings:
    """The search for the string that is complete first, in a text that comes letter by letter.

    strings: non-empty. Where two are complete at the same letter, the longer one counts.

    State is the end of the text that begins one of them, the longest such end. A text of any length
    costs at most two comparisons with the sorted strings for each of its letters.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(sorted(set(strings)))
        self._first_letters = frozenset(string[0] for string in self._strings)

    def __bool__(self) -> bool:
        return bool(self._strings)

    def may_begin_in(self, text: str) -> bool:
        """Whether a string could begin in the text; no state is needed to see that none does."""
        return not self._first_letters.isdisjoint(text)

    def longest_begun(self, end: str) -> str:
        """The longest end of ``end`` that a string begins with, or is."""
        while not self._is_begun(end):
            end = end[1:]
        return end

    def length_at(self, end: str) -> int:
        """Letters of the longest string that ``end`` ends with; 0 for none."""
        if not end.endswith(self._strings):
            return 0
        return max(len(string) for string in self._strings if end.endswith(string))

    def _is_begun(self, text: str) -> bool:
        at = bisect_left(self._strings, text)  # strings that begin with it sort right after it
        return at < len(self._strings) and self._strings[at].startswith(text)


class OutputText:
    """Decodes tokens into text and watches for stop strings, also across token boundaries.

    prefix: what the text begins with; stop strings are not searched in it.
    """

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str], prefix: str = "") -> None:
        self.is_stopped = False
        self._text = prefix
        self._released: list[str] = []  # and not yet a part of the text, which is long to copy
        self._decoder = TextDecoder(vocabulary)
        self._stop = StopStrings(stop)
        self._held = ""  # what a stop string begins with
        self._unread: list[int] = []

    @property
    def text(self) -> str:
        """What has been released.

        Text that could still turn out to be the beginning of a stop string, or of a character, is
        held back until that is known.
        """
        self._read()
        return self._text

    def feed(self, token_id: int) -> bool:
        """Append a token; returns whether a stop string is now complete, which ends the text."""
        if not self._stop:
            self._unread.append(token_id)  # nobody may want the text before its end
            return False
        if self.is_stopped:
            return True
        piece = self._decoder.feed([token_id])
        if self._held or self._stop.may_begin_in(piece):
            self._search(piece)
        else:
            self._released.append(piece)
        return self.is_stopped

    @property
    def length(self) -> int:
        """Characters of the text, those that are held back included."""
        self._read()
        return len(self._text) + len(self._held)

    def finish(self) -> None:
        """The text ends here: release what was held back, unless a stop string ended it."""
        if not self.is_stopped:
            self._read()
            self._text += self._held + self._decoder.flush()
            self._held = ""

    def _read(self) -> None:
        if self._unread:
            self._released.append(self._decoder.feed(self._unread))
            self._unread.clear()
        if self._released:
            self._text += "".join(self._released)
            self._released.clear()

    def _search(self, piece: str) -> None:
        """Release the piece but for what a stop string begins with, up to the first string."""
        held = self._held
        for letter in piece:
            grown = held + letter
            held = self._stop.longest_begun(grown)
            length = self._stop.length_at(held)
            self._released.append(grown[: len(grown) - (length or len(held))])
            if length:
                self.is_stopped = True
                break
        self._held = held


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
    prompt_index, sample_index: the request's index in the caller's list.
    echo: what the text begins with.
    bad_words: the token sequences that ``params.bad_words`` stand for.
    marker: after which the grammar binds; None where it binds at once.
    scoring: None where it writes.
    is_streamed: whether text is reported as it grows, or only once it is complete. Waking another
        thread at every step costs as much as a small model's forward.
    traced: what to call the writer in the text's trace; None records none.
    verifier: of the engine that writes it. pending: the request's part in ``grammar``; None where
        somebody else keeps that. pictures: the prompt with its pictures; None without any.
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
    bad_words: Words = ()
    marker: Marker | None = None
    scoring: Scoring | None = None
    is_streamed: bool = True
    traced: TraceSource | None = None
    verifier: Verifier = "rejection"
    pending: PendingGrammar | None = None
    pictures: PicturePrompt | None = None


class Request:
    """One sample's text and statistics as they grow.

    text: its tokens and constraint, and why it ended.
    fed: its tokens as the target reads them. named: as they are known by their content, see
        ``PicturePrompt``. Both are ``text.tokens`` where there are no pictures.
    spans: of its tokens, none of which is read without all the others of it.
    trace: its record so far; None where there is none. routes: likewise, of its tokens' experts.
    prompt_hash: of the tokens of its prompt.
    on_cancel: called with it in the thread that cancels it, for its engine. It must not hold the
        request: a circle of the two is left to the garbage collector.
    num_trials: how often steps of it and others raised, see ``guided_spec.engine.steps.suspects``.
    scores: of each row of ``job.scoring`` so far, by node, the log-probabilities of its branches.
    report: called with every chunk, from the engine's thread.
    """

    def __init__(self, job: Job, vocabulary: Vocabulary, report: Callable[[Chunk], None]) -> None:
        self.job = job
        self.text = GuidedText.begin(
            job.prompt_ids,
            job.params,
            vocabulary,
            max_length=job.max_length,
            seed=job.seed,
            bad_words=job.bad_words,
            verifier=job.verifier,
        )
        self.state = State.WAITING
        self.number = 0  # in the order of coming
        self.num_cached = 0
        self.is_begun = False  # whether a proposer has read a part of its prompt
        self.fed: Sequence[int] = self.text.tokens
        self.named: Sequence[int] = self.text.tokens
        self.spans: Sequence[range] = ()
        self.has_pictures_placed = False
        known = job.prompt_ids
        if job.pictures is not None:
            known = job.pictures.named()
            self.named = TextAfter(known, self.text.tokens)
        self.prompt_hash = hash(tuple(known))
        self.num_trials = 0
        self.is_cancelled = False
        self.on_cancel: Callable[[Request], None] | None = None
        self.stats = RequestStats(prompt_tokens=len(job.prompt_ids), seed=job.seed)
        self.scores: list[dict[int, list[float]]] = []
        self._report = report
        self._output = OutputText(vocabulary, job.params.stop, job.echo)
        # Where the constrained part begins in the text; None until the marker is complete.
        self._answer_at: int | None = len(job.echo) if job.marker is None else None
        self._marker_state = 0
        self.trace = job.traced and TraceRecorder(job.traced, job.params, vocabulary, job.marker)
        self.routes = TextRoutes() if job.params.return_routed_experts else None
        self._logprobs: list[TokenLogprobs] = []
        self._sent = self._sent_logprobs = self._sent_steps = 0
        self._sent_tokens = len(job.prompt_ids)

    @property
    def after_prompt(self) -> State:
        """The state that follows ``PREFILL``."""
        return State.DECODE if self.job.scoring is None else State.SCORE

    @property
    def num_unread(self) -> int:
        """Tokens of the text that are to be read before it goes on: all but the last one."""
        return len(self.text.tokens) - 1 - self.num_cached

    @property
    def progress(self) -> int:
        """Grows with each step that gives it anything."""
        return len(self.text.tokens) + len(self.scores)

    @property
    def is_new(self) -> bool:
        """Whether nothing is generated yet."""
        return len(self.text.tokens) == self.text.prompt_length

    @property
    def can_be_taken(self) -> bool:
        """Whether others may take its prompt, with all that is known of it."""
        return self.is_new and not self.is_begun

    def has_prompt_of(self, other: Request) -> bool:
        """Whether the two prompts are the same, and others may share theirs with this one."""
        if self.prompt_hash != other.prompt_hash or not self.is_new:
            return False
        if self.routes is not None and other.routes is None:
            return False
        has_same_ids = self.job.prompt_ids == other.job.prompt_ids
        has_same_ids = has_same_ids and self.job.pictures == other.job.pictures
        return has_same_ids and self.job.params.kin == other.job.params.kin

    def place_pictures(self, ids: Sequence[Sequence[int]]) -> None:
        """From here on its prompt is read with these. ids: of the rows of each of its pictures."""
        assert self.job.pictures is not None
        self.fed = TextAfter(self.job.pictures.placed(ids), self.text.tokens)
        self.job = self.job._replace(pictures=self.job.pictures.read())
        self.has_pictures_placed = True

    def num_before_marker(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens that may come next belong to reasoning, the marker included.

        0 for a text that has no marker, or is past it.
        """
        marker, state = self.job.marker, self._marker_state
        if marker is None or self._answer_at is not None:
            return 0
        for at, token_id in enumerate(token_ids):
            state = marker.step(state, token_id) or 0
            if state == len(marker):
                return at + 1
        return len(token_ids)

    def take_grammar(self) -> None:
        """Bind the text, once, to the grammar that was asked for; it is compiled, or has failed.

        Raises what is wrong with the grammar, and what ``bind`` raises.
        """
        if self.job.grammar is None or self.text.constraint is not None:
            return
        try:
            self.bind(self.job.grammar.result())
        except GuidedSpecError:
            raise
        except Exception as error:  # a backend may raise anything; it concerns this request
            raise GrammarError(f"the grammar could not be compiled: {error}") from error

    def bind(self, grammar: CompiledGrammar) -> None:
        """Constrain the text to a grammar.

        Raises BudgetTooSmallError where no text is known that is short enough.
        """
        self.text.bind(grammar, self.job.endings)
        constraint, complete = self.text.constraint, self.job.params.complete
        if constraint is not None and self.job.endings is not None and complete is not False:
            self.stats.ends_lost = int(not constraint.has_budget)

    def restart(self) -> None:
        """Bring its constraint back to the end of its text, after a step that raised.

        Raises GrammarStateError where that cannot be.
        """
        if self.text.constraint is not None:
            self.text.constraint.restart(len(self.text.output_ids))

    def cancel(self) -> None:
        """Have the engine end it in its next step. Does nothing where it has ended."""
        self.is_cancelled = True
        if self.on_cancel is not None and self.state is not State.FINISHED:
            self.on_cancel(self)

    def report_cancelled(self, on_cancel: Callable[[Request], None]) -> None:
        """Call ``on_cancel`` when the request is cancelled; at once if it already is."""
        self.on_cancel = on_cancel
        if self.is_cancelled:
            self.cancel()

    def append(
        self,
        row: Committed,
        logprobs: Sequence[TokenLogprobs] = (),
        seen: SeenStep | None = None,
    ) -> None:
        """Commit tokens one by one until something ends the text; the rest is dropped.

        logprobs: in step with the tokens; () if the request did not ask. seen: for its trace.
        """
        taken = self.text.append(row, self._read)
        self._logprobs.extend(logprobs[: len(taken)])
        if self.trace is not None and seen is not None:
            self.trace.add(seen, len(taken))
        if self.text.error is not None:
            self.fail(self.text.error)
        elif self.text.ended is not None:
            self.finish(self.text.ended)
        elif self.job.is_streamed:
            self._send(None)

    def finish(self, reason: FinishReason, error: GuidedSpecError | None = None) -> None:
        """End the request and report its completion. Does nothing if it has ended already."""
        if self.state is State.FINISHED:
            return
        text = self.text
        text.end(reason, error)
        reason, error = text.ended or reason, text.error
        self.state = State.FINISHED
        if self.job.pictures is not None:  # whoever keeps a request keeps no arrays with it
            self.job = self.job._replace(pictures=self.job.pictures.read())
        if self.job.pending is not None:
            self.job.pending.release()
        try:
            completion = self._completion(reason, error)
        except Exception as failure:  # of ours; who waits for the request has to hear of it
            _LOG.exception("the completion of a request cannot be made")
            found = ModelError(f"its completion cannot be made: {failure!r}")
            completion = Completion("", text.output_ids, "error", error or found, self.stats)
        self._send(completion)

    def _completion(self, reason: FinishReason, error: GuidedSpecError | None) -> Completion:
        text, params, constraint = self.text, self.job.params, self.text.constraint
        self._output.finish()
        output_ids = text.output_ids
        self.stats.output_tokens = len(output_ids)
        if constraint is not None:
            self.stats.resyncs = constraint.resyncs
            self.stats.tabled = constraint.num_tabled
            self.stats.ends_lost |= int(constraint.has_lost_end)
            self.stats.steered = len(constraint.steered)
        self.stats.stop()
        is_whole = self._is_whole(reason)
        if reason == "stop" and self.stats.steered and not self._output.is_stopped:
            reason = "length"  # the budget ended the text, not the model
        if error is None and self._is_shortened(reason, is_whole=is_whole):
            error = self._shortened()
            reason = reason if error is None else "error"
        return Completion(
            self._output.text,
            output_ids,
            reason,
            error,
            self.stats,
            None if params.logprobs is None else self._logprobs,
            error is None and is_whole,
            self._constrained_text(),
            params.grammar,
            *self._recorded(reason),
        )

    def fail(self, error: GuidedSpecError) -> None:
        """End the request with an error; what it wrote so far is kept.

        The error's traceback is dropped: its frames would keep other requests alive with it.
        """
        self.finish("error", error.with_traceback(None))

    def _read(self, token_id: int) -> bool:
        """One more token of the text; whether a stop string ends it."""
        if self._output.feed(token_id):
            return True
        if self._answer_at is None:
            self._advance_marker(token_id)
        return False

    def _is_shortened(self, reason: FinishReason, *, is_whole: bool) -> bool:
        """Whether its budget ended it. Free text is never shortened."""
        params = self.job.params
        is_cut = reason == "length" and not (is_whole and params.complete is not False)
        return bool(self.stats.steered) or (is_cut and params.grammar is not None)

    def _shortened(self) -> TextCutShortError | None:
        """The error of a text that was ended early; None where it is given as it is."""
        job = self.job
        if job.params.on_short == "error":
            room = job.max_length - len(job.prompt_ids)
            return TextCutShortError(job.params.max_tokens, room)
        if self.stats.steered and job.params.grammar is not None:  # no text of a warm-up
            warn_of_shortening()
        return None

    def _is_whole(self, reason: FinishReason) -> bool:
        """Whether the text is a whole one of its grammar, or was ended by the model."""
        if self.text.constraint is None:
            return reason == "stop" and self.job.params.grammar is None
        return not self._output.is_stopped and self.text.constraint.may_end()

    def _recorded(self, reason: FinishReason) -> tuple[Trace | None, RoutedExperts | None]:
        trace = routed = None
        if self.trace is not None:
            trace = self.trace.finish(self._output.text, reason, len(self.job.prompt_ids))
        if self.routes is not None:
            # The last token is not read, or would not be in steps of single tokens.
            routed = self.routes.result(len(self.text.tokens) - 1)
        return trace, routed

    def _advance_marker(self, token_id: int) -> None:
        marker = self.job.marker
        assert marker is not None
        state = marker.step(self._marker_state, token_id)
        if state == len(marker):
            self._answer_at = self._output.length
        self._marker_state = state or 0

    def _constrained_text(self) -> str:
        return "" if self._answer_at is None else self._output.text[self._answer_at :]

    def _send(self, completion: Completion | None) -> None:
        job, text, logprobs = self.job, "", tuple[TokenLogprobs, ...]()
        token_ids, steps = tuple[int, ...](), tuple[StepTrace, ...]()
        if job.is_streamed:
            text = self._output.text[self._sent :]
            logprobs = tuple(self._logprobs[self._sent_logprobs :])
            token_ids = tuple(self.text.tokens[self._sent_tokens :])
            steps = () if self.trace is None else self.trace.steps(self._sent_steps)
        if completion is not None or text:
            self._sent += len(text)
            self._sent_logprobs += len(logprobs)
            self._sent_tokens += len(token_ids)
            self._sent_steps += len(steps)
            answer = self._constrained_text() if completion is None else completion.answer
            place = (job.prompt_index, job.sample_index)
            grammar = job.params.grammar
            tokens = (token_ids, steps)
            self._report(Chunk(*place, text, completion, logprobs, answer, grammar, *tokens))


def count_step(requests: Sequence[Request], step: Step, committed: Sequence[Committed]) -> None:
    """Enter a step into its requests' statistics."""
    lookahead = step.lookahead
    share = lookahead.fill_seconds / len(requests)
    ahead = (lookahead.forced, lookahead.starved, lookahead.is_tabled)
    accepted = [row.num_accepted for row in committed]
    rows = zip(step.num_drafted.wait().tolist(), accepted, *ahead, strict=True)
    for request, row, known in zip(requests, rows, lookahead.drafted, strict=True):
        num_drafted, num_accepted, forced, starved, is_tabled = row
        stats = request.stats
        reasoning = request.num_before_marker(known[:num_drafted])
        stats.count_step(num_drafted, num_accepted, forced, reasoning)
        stats.mask_seconds += share
        stats.starved += starved
        stats.device_steps += is_tabled
