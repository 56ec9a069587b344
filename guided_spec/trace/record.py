"""What speculation did, token by token: the record of a text, and the recorder that fills it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from guided_spec.core import DecodeBatch
from guided_spec.errors import ConfigError
from guided_spec.grammar.text.markers import Marker
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.masks.lookahead import Turn
from guided_spec.ops.sampling.logprobs import PositionProbs
from guided_spec.step import Step
from guided_spec.types import SamplingParams

Outcome = Literal["accepted", "rejected", "unused", "replacement", "bonus"]

FORCED = "forced"
"""The source of a token that the grammar left no choice about."""
TARGET = "target"
"""The source of a token that was drawn from the target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTrace:
    """One token that was drafted, or drawn from the target.

    id, text: the token; bytes that are no UTF-8 are written as ``\\\\xe4``, and a token that shows
        no text, such as one that ends it, has "".
    source: "forced" by the grammar, the name of the proposer that drafted it, or "target".
    outcome: "accepted", "rejected", or "unused" after a rejected one; "replacement", drawn instead
        of a rejected one, or "bonus", drawn after a draft that was accepted whole.
    draft_prob: what the drafter drew it with; None where it was certain of it: forced, looked up,
        or a greedy choice.
    target_prob: the target's probability under the grammar, before temperature and filters; None
        after a token that the grammar refuses.
    processed_prob: that of the distribution which decided: after penalties, temperature and
        filters.
    allowed: tokens that the grammar allowed there; None for free text, and after a token that it
        refuses.
    place: JSON pointer of the value being written before it; None unless the text is JSON.
    """

    id: int
    text: str
    source: str
    outcome: Outcome
    draft_prob: float | None = None
    target_prob: float | None = None
    processed_prob: float | None = None
    allowed: int | None = None
    place: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTrace:
    """One speculative step of one request.

    start: output tokens before it. drafted: its draft, in order. drawn: the token after what was
    accepted; None where the accepted tokens ended the text, or none was legal.
    num_kept: accepted and drawn tokens that the text has; a stop or ``max_tokens`` drops the rest.
    at: seconds from the start of the request's first step to the end of this one. seconds: that
    this one took, from the making of its batch to its commit. mask_seconds: host time on the masks
    of all its requests, a part of it or during the target's forward. num_requests: in its batch.
    """

    start: int
    drafted: tuple[TokenTrace, ...]
    drawn: TokenTrace | None
    num_kept: int
    at: float
    seconds: float
    mask_seconds: float
    num_requests: int

    @property
    def tokens(self) -> tuple[TokenTrace, ...]:
        """The accepted tokens and the drawn one, as far as the text has them."""
        accepted = [token for token in self.drafted if token.outcome == "accepted"]
        drawn = [] if self.drawn is None else [self.drawn]
        return tuple([*accepted, *drawn][: self.num_kept])


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One text, step by step.

    proposer, verifier, temperature: as it was generated. grammar: its kind, None for free text.
    vocab_size: of the target. prompt_tokens: read before the first step.
    text, finish_reason: of its ``Completion``. stop_token_ids: that end a text of this vocabulary.
    """

    proposer: str
    verifier: str
    temperature: float
    grammar: str | None
    vocab_size: int
    prompt_tokens: int
    stop_token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    steps: tuple[StepTrace, ...]

    @property
    def token_ids(self) -> list[int]:
        """Every token of the text."""
        return [token.id for step in self.steps for token in step.tokens]

    @property
    def seconds(self) -> float:
        """From the start of the first step to the end of the last one."""
        return self.steps[-1].at if self.steps else 0.0

    def drafted_at(self) -> list[int]:
        """How many steps drafted a token at each position."""
        return self._count([len(step.drafted) for step in self.steps])

    def accepted_at(self) -> list[int]:
        """How many of these were accepted, in step with ``drafted_at``."""
        lengths = [sum(t.outcome == "accepted" for t in step.drafted) for step in self.steps]
        counts = self._count(lengths)
        return counts + [0] * (len(self.drafted_at()) - len(counts))

    @staticmethod
    def _count(lengths: Sequence[int]) -> list[int]:
        return [sum(n > at for n in lengths) for at in range(max(lengths, default=0))]


def to_json(traces: Sequence[Trace], *, indent: int | None = None) -> str:
    """A JSON array of traces, which ``from_json`` reads."""
    return _adapter().dump_json(list(traces), indent=indent).decode()


def from_json(text: str) -> list[Trace]:
    """The traces that ``to_json`` wrote. Raises ConfigError for any other text."""
    try:
        return _adapter().validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = "/".join(str(part) for part in first["loc"])
        fix = f"{first['msg']} at {place!r}; pass what to_json wrote"
        raise ConfigError("trace", f"{text[:40]}...", fix) from error


@cache
def _adapter() -> TypeAdapter[list[Trace]]:
    return TypeAdapter(list[Trace])


_WHITESPACE = b" \t\n\r"


class TraceSource(NamedTuple):
    """What wrote a text: the proposer by its name, and the verifier."""

    proposer: str
    verifier: str


class SeenStep(NamedTuple):
    """One request's part of a step.

    request: its index in the batch. num_drafted, num_accepted: tokens. drawn: the token after the
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
        """The proposer of a token, as far as that is known; None for the proposer as a whole."""
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
        # After a complete text of a grammar there is no row, and what is drawn there is dropped.
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

    marker: after which the grammar binds; None where it binds at once.
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
        """The steps so far, from the ``start``-th on."""
        return tuple(self._steps[start:])

    def add(self, seen: SeenStep, num_kept: int) -> None:
        """One more step, of whose accepted and drawn tokens the text has ``num_kept``."""
        self._began = seen.started if self._began is None else self._began
        pointers = self._pointers(seen)
        drafted = tuple(self._drafted(seen, at, pointers[at]) for at in range(seen.num_drafted))
        drawn = self._drawn(seen, pointers[seen.num_accepted])
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

    def _pointers(self, seen: SeenStep) -> list[str | None]:
        """The pointer before each draft token, and after the last one."""
        if self._path is None or self._is_before_marker:
            return [None] * (seen.num_drafted + 1)
        ahead = self._path.fork()
        pointers: list[str | None] = [ahead.pointer]
        for found in seen.positions[: seen.num_legal]:
            ahead.feed(self._vocabulary.text_bytes[found.draft_id])
            pointers.append(ahead.pointer)
        return pointers + [None] * (seen.num_drafted - seen.num_legal)

    @property
    def _is_before_marker(self) -> bool:
        return self._marker is not None and self._marker_state < len(self._marker)

    def _advance(self, token_ids: Sequence[int]) -> None:
        """The text continues: in its free part, or in the JSON after it."""
        for token_id in token_ids:
            if self._is_before_marker:
                assert self._marker is not None
                self._marker_state = self._marker.step(self._marker_state, token_id) or 0
            elif self._path is not None:
                self._path.feed(self._vocabulary.text_bytes[token_id])


def _known(probability: float) -> float | None:
    return None if math.isnan(probability) else probability


class JsonPath:
    """The position in a JSON text that is being written, from its bytes, cut anywhere.

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
        """The text continues with ``data``."""
        for byte in data:
            if self._string is None:
                self._read(byte)
            else:
                self._read_in_string(self._string, byte)

    def fork(self) -> JsonPath:
        """An independent copy."""
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
        """The value at ``at`` is complete."""
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
