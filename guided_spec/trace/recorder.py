"""Fills traces: what the engine saw of each step, with the tokens' texts and places."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from guided_spec.core import DecodeBatch
from guided_spec.grammar.markers import Marker
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.masks.lookahead import Turn
from guided_spec.ops.sampling.step_probs import PositionProbs
from guided_spec.step import Step
from guided_spec.trace.record import FORCED, TARGET, Outcome, StepTrace, TokenTrace, Trace
from guided_spec.types import SamplingParams

__all__ = ["JsonPath", "SeenStep", "TraceRecorder", "TraceSource", "see_step"]

_WHITESPACE = b" \t\n\r"


class TraceSource(NamedTuple):
    """What wrote a text: the proposer by its name, and the verifier."""

    proposer: str
    verifier: str


class SeenStep(NamedTuple):
    """One request's part of a step.

    request: its place in the batch. num_drafted, num_accepted: tokens. drawn: the token behind the
    accepted ones, -1 for none. positions: K + 1. forced: positions whose tokens were forced.
    num_legal: draft tokens before the first illegal one. num_rows: mask rows that were filled; None
    for free text. turns: of a chain's members. started, ended: of ``time.perf_counter``.
    mask_seconds, num_requests: of the batch.
    """

    request: int
    num_drafted: int
    num_accepted: int
    drawn: int
    positions: list[PositionProbs]
    forced: list[int]
    num_legal: int
    num_rows: int | None
    turns: list[Turn]
    started: float
    ended: float
    mask_seconds: float
    num_requests: int

    def author(self, position: int) -> str | None:
        """Who drafted a token, as far as that is known; None for the proposer as a whole."""
        if position in self.forced:
            return FORCED
        if position >= self.num_legal:  # illegal: whose turn it was is not written down
            return None
        begun = [turn.proposer for turn in self.turns if turn.starts[self.request] <= position]
        return begun[-1] if begun else None

    def allowed(self, position: int) -> int | None:
        """Tokens that the grammar allows there; None where it was not asked."""
        if self.num_rows is None or position >= self.num_rows:
            return None
        return self.positions[position].allowed

    def is_judged(self, position: int) -> bool:
        """Whether the target's probabilities there are those under the grammar."""
        return self.num_rows is None or position < self.num_rows


def see_step(step: Step, batch: DecodeBatch, started: float) -> list[SeenStep | None]:
    """[B]: what the requests of ``batch.traced`` see of a committed step; None for the others.

    started: when the step began, by ``time.perf_counter``.
    """
    seen: list[SeenStep | None] = [None] * len(batch)
    if step.probs is None:
        return seen
    ended, ahead = time.perf_counter(), step.lookahead
    drafted, packed = step.num_drafted.wait().tolist(), step.packed.wait().tolist()
    for request, positions in zip(batch.traced, step.probs.rows(), strict=True):
        num_accepted, *token_ids = packed[request]
        is_free = batch.constraints[request] is None
        num_rows = None if is_free else ahead.num_rows[request]
        # Behind a complete text of a grammar there is no row, and what is drawn there is dropped.
        has_ended = num_rows is not None and num_accepted >= num_rows
        seen[request] = SeenStep(
            request=request,
            num_drafted=drafted[request],
            num_accepted=num_accepted,
            drawn=-1 if has_ended else token_ids[num_accepted],
            positions=positions,
            forced=ahead.forced[request],
            num_legal=drafted[request] if is_free else len(ahead.drafted[request]),
            num_rows=num_rows,
            turns=ahead.turns,
            started=started,
            ended=ended,
            mask_seconds=ahead.fill_seconds,
            num_requests=len(batch),
        )
    return seen


class TraceRecorder:
    """One text's trace as it grows.

    marker: behind which the grammar binds; None where it binds at once.
    """

    def __init__(
        self,
        source: TraceSource,
        params: SamplingParams,
        vocabulary: Vocabulary,
        marker: Marker | None = None,
    ) -> None:
        self._source = source
        self._params = params
        self._vocabulary = vocabulary
        self._marker = marker
        self._marker_state = 0
        self._steps: list[StepTrace] = []
        self._num_tokens = 0
        self._began: float | None = None
        is_json = params.grammar is not None and params.grammar.is_json
        self._path = JsonPath() if is_json else None

    def steps(self, start: int = 0) -> tuple[StepTrace, ...]:
        """Those so far, from the ``start``-th on."""
        return tuple(self._steps[start:])

    def add(self, seen: SeenStep, num_kept: int) -> None:
        """One more step, of whose accepted and drawn tokens the text has ``num_kept``."""
        self._began = seen.started if self._began is None else self._began
        places = self._places(seen)
        drafted = tuple(self._drafted(seen, at, places[at]) for at in range(seen.num_drafted))
        drawn = self._drawn(seen, places[seen.num_accepted])
        step = StepTrace(
            start=self._num_tokens,
            drafted=drafted,
            drawn=drawn,
            num_kept=num_kept,
            at=seen.ended - self._began,
            seconds=seen.ended - seen.started,
            mask_seconds=seen.mask_seconds,
            num_requests=seen.num_requests,
        )
        self._steps.append(step)
        self._num_tokens += num_kept
        self._advance([token.id for token in step.tokens])

    def finish(self, text: str, finish_reason: str, prompt_tokens: int) -> Trace:
        """The whole trace; what is passed are its fields."""
        grammar = self._params.grammar
        return Trace(
            proposer=self._source.proposer,
            verifier=self._source.verifier,
            temperature=self._params.temperature,
            grammar=None if grammar is None else grammar.kind,
            vocab_size=self._vocabulary.vocab_size,
            prompt_tokens=prompt_tokens,
            stop_token_ids=tuple(self._vocabulary.stop_token_ids),
            text=text,
            finish_reason=finish_reason,
            steps=self.steps(),
        )

    def _drafted(self, seen: SeenStep, at: int, place: str | None) -> TokenTrace:
        found = seen.positions[at]
        outcome: Outcome = "accepted" if at < seen.num_accepted else "rejected"
        is_judged = seen.is_judged(at)
        return TokenTrace(
            id=found.draft_id,
            text=self._text(found.draft_id),
            source=seen.author(at) or self._source.proposer,
            outcome=outcome if at <= seen.num_accepted else "unused",
            draft_prob=_known(found.draft_prob),
            target_prob=_known(found.draft_masked) if is_judged else None,
            processed_prob=_known(found.draft_processed) if is_judged else None,
            allowed=seen.allowed(at),
            place=place,
        )

    def _drawn(self, seen: SeenStep, place: str | None) -> TokenTrace | None:
        if seen.drawn < 0:
            return None
        found = seen.positions[seen.num_accepted]
        return TokenTrace(
            id=seen.drawn,
            text=self._text(seen.drawn),
            source=TARGET,
            outcome="bonus" if seen.num_accepted == seen.num_drafted else "replacement",
            target_prob=_known(found.masked),
            processed_prob=_known(found.processed),
            allowed=seen.allowed(seen.num_accepted),
            place=place,
        )

    def _text(self, token_id: int) -> str:
        return self._vocabulary.text_bytes[token_id].decode("utf-8", "backslashreplace")

    def _places(self, seen: SeenStep) -> list[str | None]:
        """The pointer before each draft token, and behind the last one."""
        if self._path is None or self._is_before_marker:
            return [None] * (seen.num_drafted + 1)
        ahead = self._path.fork()
        places: list[str | None] = [ahead.pointer]
        for found in seen.positions[: seen.num_legal]:
            ahead.feed(self._vocabulary.text_bytes[found.draft_id])
            places.append(ahead.pointer)
        return places + [None] * (seen.num_drafted - seen.num_legal)

    @property
    def _is_before_marker(self) -> bool:
        return self._marker is not None and self._marker_state < len(self._marker)

    def _advance(self, token_ids: Sequence[int]) -> None:
        """The text goes on: in its free part, or in the JSON behind it."""
        for token_id in token_ids:
            if self._is_before_marker:
                assert self._marker is not None
                self._marker_state = self._marker.step(self._marker_state, token_id) or 0
            elif self._path is not None:
                self._path.feed(self._vocabulary.text_bytes[token_id])


def _known(probability: float) -> float | None:
    return None if math.isnan(probability) else probability


class JsonPath:
    """Where a JSON text that is being written stands: it follows the bytes, cut anywhere.

    It reads the text alone and checks nothing: it is for texts that a grammar keeps to JSON.
    """

    def __init__(self) -> None:
        self._open: list[_Container] = []
        self._string: bytearray | None = None  # its bytes so far, inside of one
        self._is_escaped = False
        self._key = ""

    @property
    def pointer(self) -> str:
        """RFC 6901: "" is the whole text; inside of a key, the object that it belongs to."""
        steps = [str(container.at) for container in self._open if container.at is not None]
        return "".join("/" + step.replace("~", "~0").replace("/", "~1") for step in steps)

    def feed(self, data: bytes) -> None:
        """The text goes on with ``data``."""
        for byte in data:
            if self._string is None:
                self._read(byte)
            else:
                self._read_in_string(self._string, byte)

    def fork(self) -> JsonPath:
        """A copy that goes its own way."""
        other = JsonPath()
        other._open = [replace(container) for container in self._open]
        other._string = None if self._string is None else bytearray(self._string)
        other._is_escaped, other._key = self._is_escaped, self._key
        return other

    def _read(self, byte: int) -> None:
        match bytes([byte]):
            case b":":
                if self._open:
                    self._open[-1].at = self._key
            case b",":
                self._end_value()
                if self._open and self._open[-1].count is not None:
                    self._open[-1].at = self._open[-1].count
            case b"}" | b"]":
                del self._open[-1:]
                self._end_value()
            case _ if byte in _WHITESPACE:
                pass
            case char:
                self._begin_value(char)

    def _begin_value(self, char: bytes) -> None:
        """A value's first byte, one of a number or word, or the quote before a key."""
        if self._open and self._open[-1].at is None:
            self._open[-1].at = self._open[-1].count
        if char == b'"':
            self._string = bytearray()
        elif char in (b"{", b"["):
            self._open.append(_Container(count=0 if char == b"[" else None))

    def _end_value(self) -> None:
        """What stood at ``at`` is whole."""
        if not self._open or self._open[-1].at is None:
            return
        top = self._open[-1]
        top.at = None
        if top.count is not None:
            top.count += 1

    def _read_in_string(self, string: bytearray, byte: int) -> None:
        if byte != ord('"') or self._is_escaped:
            string.append(byte)
            self._is_escaped = byte == ord("\\") and not self._is_escaped
            return
        self._string = None
        if self._open and self._open[-1].at is None:
            quoted = '"' + string.decode("utf-8", "replace") + '"'
            self._key = json.loads(quoted, strict=False)
        else:
            self._end_value()


@dataclass(slots=True)
class _Container:
    """An object or array that is open.

    at: key or index of the value that is being written, None between two of them. count: of an
    array's items that are done; None for an object.
    """

    at: str | int | None = None
    count: int | None = None
