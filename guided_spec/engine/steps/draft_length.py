"""How many tokens steps draft: the gain of drafts against their cost.

A step takes the time of its forward, by its tokens, and the time of the host and the drafter. The
first is measured before the first step, where there are CUDA graphs of forwards; the second is
measured step by step, and without such a table both together. The gain of a draft is how many texts
accept its first token, its second and so on. So gain and cost are known for every draft length,
those not in use as well; a length that may be better, as far as is known, is tried for some steps.

Some proposers draft with K = 0 too, such as text that a grammar forces, and such steps wait for the
host: ``PLAIN`` steps draft nothing at all.

Steps that only decode take the length with the most tokens a second. Where prompts are read in the
same forward, each token of a draft costs more, and its time is worth what the best of the other
steps would generate in it. The host does more in such steps, so their times are kept apart.

Where two halves of the texts take turns, so that one drafts while the other is verified, steps
without drafts have nothing to hide: they are of all texts. So a policy of halves compares half of
the texts with drafts against all of them without.

Where a text depends on its drafts, their length must not depend on other texts: the caller ensures
this (docs/exactness.md).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from guided_spec.core import DecodeBatch
from guided_spec.models.packed.graph_pool import ROW_SIZES, bucket
from guided_spec.step import Committed

FEW, SAMPLES = 4, 32  # steps of a trial at least, and texts in it where drafts get longer
KNOWN = 2  # steps from which the time of others is predicted
STRETCH = 16  # steps until lengths are compared again
SHORTEST, LONGEST = 64, 1024  # steps until measurements of other lengths are forgotten
MARGIN = 1.1  # speedup that another length must promise
GAIN = 0.1  # share of a step with prompts that a shorter draft must save
MEMORY = 256  # texts whose acceptance counts, but at least STRETCH steps
FIXED_TEXTS = 16  # fixed time of a step, as that of so many texts, measured on GPUs
SOON = 1e-9  # seconds, where a clock shows none
PLAIN = -1  # draft length of a step without any draft, where K = 0 leaves some


class ForwardTimes:
    """Seconds of forwards by their tokens, measured at some sizes; none where nothing was."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._sizes = sorted(seconds)
        self._seconds = [seconds[size] for size in self._sizes]

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def of(self, num_tokens: int) -> float:
        """Seconds: linear between sizes, proportional after the last; 0 where there are none."""
        if not self._sizes:
            return 0.0
        at = bisect_left(self._sizes, num_tokens)
        if at == 0:
            return self._seconds[0]
        if at == len(self._sizes):
            return self._seconds[-1] * num_tokens / self._sizes[-1]
        low, high = self._sizes[at - 1], self._sizes[at]
        share = (num_tokens - low) / (high - low)
        return (1 - share) * self._seconds[at - 1] + share * self._seconds[at]


class StepTaken(NamedTuple):
    """A step that is done.

    num_drafted: K, or ``PLAIN``. num_read: of prompts. accepted: [B] of each draft.
    num_new: of the texts, those that begin in this step and have no draft in it, whatever K is.
    num_decoding: texts that decoded at that time, in this step or by turns; None: this step's.
    """

    num_drafted: int
    num_read: int
    accepted: Sequence[int]
    seconds: float
    num_new: int = 0
    num_decoding: int | None = None

    @classmethod
    def of(
        cls,
        batch: DecodeBatch,
        num_drafted: int,
        committed: Sequence[Committed],
        drafted: Sequence[int],
        seconds: float,
        num_decoding: int,
    ) -> StepTaken:
        """Of that batch; a prompt that its drafter reads counts as a token of it.

        drafted: [B] tokens of each draft.
        """
        begun = set(batch.states) - set(batch.slots)
        num_read = sum(len(prompt.token_ids) for prompt in batch.prompts) + len(begun)
        accepted = [row.num_accepted for row in committed]
        coming = {prompt.slot for prompt in batch.prompts}
        pairs = zip(batch.slots, drafted, strict=True)
        num_new = sum(count == 0 and slot in coming for slot, count in pairs)
        return cls(num_drafted, num_read, accepted, seconds, num_new, num_decoding)


class _Acceptance:
    """Which share of the texts accepts the first token of a draft, the second and so on.

    Tokens drafted beyond K are counted apart, for each length.
    """

    def __init__(self, longest: int, *, has_more: bool) -> None:
        self._shares, self._seen = [1.0] * longest, [0] * longest
        self._has_more = has_more
        self._more: dict[int, float] = {}

    @property
    def is_known(self) -> bool:
        return self._seen[0] > 0

    def add(self, num_drafted: int, accepted: Sequence[int], num_new: int) -> None:
        """num_new: texts without a draft among ``accepted``, which are not counted."""
        batch = len(accepted) - num_new
        for at in range(num_drafted if batch else 0):
            self._seen[at] = min(self._seen[at] + batch, max(MEMORY, STRETCH * batch))
            share = sum(count > at for count in accepted) / batch
            self._shares[at] += batch / self._seen[at] * (share - self._shares[at])
        if batch and num_drafted != PLAIN and self._has_more:
            more = sum(max(0, count - num_drafted) for count in accepted) / batch
            before = self._more.get(num_drafted, more)
            self._more[num_drafted] = before + (more - before) / STRETCH

    def forget(self, num_drafted: int) -> None:
        """Forget the acceptance of drafts longer than ``num_drafted``."""
        for at in range(max(0, num_drafted), len(self._seen)):
            self._seen[at] = 0
        self._more = {length: more for length, more in self._more.items() if length <= num_drafted}

    def tokens(self, num_drafted: int) -> float:
        """Expected tokens per text; unmeasured positions extrapolate, optimistically at first."""
        own = self._own_tokens(num_drafted)
        if num_drafted == PLAIN or not self._has_more:
            return own
        if num_drafted in self._more:
            return own + self._more[num_drafted]
        # What longer drafts bring may be what comes without K.
        return max([own, *(self._own_tokens(k) + more for k, more in self._more.items())])

    def _own_tokens(self, num_drafted: int) -> float:
        total, share, before = 1.0, 1.0, 1.0
        for at in range(num_drafted):
            seen = self._shares[at] if self._seen[at] else share * share / max(before, SOON)
            share, before = min(seen, share), share
            total += share
        return total


class _Rest:
    """Seconds of steps besides their forwards, by how many texts they had."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}  # of a text

    def add(self, num_texts: int, seconds: float) -> None:
        last = self._seen.setdefault(bucket(num_texts, ROW_SIZES), deque(maxlen=STRETCH))
        last.append(max(seconds, 0.0) / (num_texts + FIXED_TEXTS))

    def of(self, num_texts: int, *, may_extrapolate: bool) -> float | None:
        """Seconds, None if unknown. may_extrapolate: whether other numbers of texts count too."""
        own = bucket(num_texts, ROW_SIZES)
        known = [size for size, last in self._seen.items() if len(last) >= KNOWN]
        nearest = min(known, key=lambda size: max(size, own) / min(size, own), default=own)
        if nearest not in known or not (may_extrapolate or nearest == own):
            return None
        return median(self._seen[nearest]) * (num_texts + FIXED_TEXTS)

    def forget(self, num_texts: int) -> None:
        self._seen.pop(bucket(num_texts, ROW_SIZES), None)


@dataclass(slots=True)
class _SizeState:
    """The policy's state for steps of a similar number of texts.

    num_drafted: draft length in use. left: steps until lengths are compared again. kept: the last
    length that won its trial. unseen: steps since the measurements of other lengths were
    forgotten. wait: steps until they are forgotten again; it doubles while no other length wins.
    """

    num_drafted: int
    left: int
    kept: int
    unseen: int = 0
    wait: int = SHORTEST


@dataclass(slots=True)
class _ReadingSteps:
    """Of steps that read prompts: how far they outnumber the others, and whether they draft.

    draft: as the last ``FEW`` of them that agreed.
    """

    count: int = 0
    draft: bool = True
    against: int = 0

    @property
    def are_many(self) -> bool:
        """Whether nearly every step reads."""
        return self.count >= SAMPLES

    def add(self, num_drafted: int, shortest: int) -> None:
        self.count = min(self.count + 1, 2 * SAMPLES)
        self.against = self.against + 1 if (num_drafted != shortest) != self.draft else 0
        if self.against == FEW:
            self.draft, self.against = not self.draft, 0


class DraftLengthPolicy:
    """Chooses the draft length of an engine's steps. num_draft_tokens: of the longest draft, K.

    times: of the target's forwards. has_more: whether there are drafts with K = 0 too. in_halves:
    whether two halves of the texts take turns where there are drafts. ``num_texts``: those that
    decode, in all halves.

    Attributes: lengths: the draft lengths to choose from, the first without a draft.
    """

    def __init__(
        self,
        num_draft_tokens: int,
        times: ForwardTimes,
        *,
        has_more: bool = False,
        in_halves: bool = False,
    ) -> None:
        self._times = times
        self._in_halves = in_halves
        lengths = draft_lengths(num_draft_tokens)
        self.lengths = (PLAIN, *lengths) if has_more else lengths
        self._acceptance = _Acceptance(num_draft_tokens, has_more=has_more)
        self._states: dict[int, _SizeState] = {}
        self._rest = {length: _Rest() for length in self.lengths}
        self._reading = {length: _Rest() for length in self.lengths}  # of steps with prompts
        self._last = StepTaken(num_draft_tokens, 0, (), 0.0)
        self._reads = _ReadingSteps()

    def num_draft_tokens(self, num_texts: int, num_read: int = 0) -> int:
        """Draft length of the next step. num_read: prompt tokens that it reads."""
        state = self._state(num_texts)
        if num_read:
            self._refresh(state, num_texts)
            count = self._with_prompts(state.kept, num_texts, num_read)
            self._reads.add(count, self.lengths[0])
            return count
        self._reads.count = max(0, self._reads.count - STRETCH)
        if state.left == 0:
            self._refresh(state, num_texts)
            self._choose(state, num_texts)
        return state.num_drafted

    def drafts(self, num_texts: int) -> bool:
        """Whether steps draft now: for a few that read prompts, others do not change their ways."""
        if self._reads.are_many:
            return self._reads.draft
        return self._state(num_texts).num_drafted != self.lengths[0]

    def stays_plain(self, num_texts: int) -> bool:
        """Whether this step and the next one have no drafts."""
        state, plain = self._state(num_texts), self.lengths[0]
        return not self.drafts(num_texts) and state.num_drafted == plain and state.left > 1

    def count(self, step: StepTaken) -> None:
        """Record a finished step."""
        batch, has_read = len(step.accepted), self._last.num_read > 0
        num_texts = batch if step.num_decoding is None else step.num_decoding
        state, self._last = self._state(num_texts), step
        state.unseen += 1
        self._acceptance.add(step.num_drafted, step.accepted, step.num_new)
        if not step.num_read or state.num_drafted == state.kept:  # a trial has to be measured
            state.left = max(0, state.left - 1)
        rest = (self._reading if step.num_read else self._rest).get(step.num_drafted)
        # The step after one with prompts waits until the drafter has read them: it counts less.
        counts = step.num_read > 0 or not has_read
        if rest is not None and (counts or rest.of(batch, may_extrapolate=False) is None):
            forward = self._forward(batch, step.num_drafted, step.num_read)
            rest.add(batch, step.seconds - forward)

    def _state(self, num_texts: int) -> _SizeState:
        key = bucket(num_texts, ROW_SIZES)
        if key not in self._states:
            longest = self.lengths[-1]
            left = 0 if self._acceptance.is_known else max(STRETCH, -(-SAMPLES // num_texts))
            self._states[key] = _SizeState(longest, left, kept=longest)
        return self._states[key]

    def _refresh(self, state: _SizeState, num_texts: int) -> None:
        """Forget lengths that have not been used for long, so that they are tried again."""
        is_trial = state.num_drafted != state.kept  # what it measures is kept until it ends
        if state.unseen < (LONGEST if is_trial else state.wait):
            return
        state.unseen, state.wait = 0, min(2 * state.wait, LONGEST)
        self._acceptance.forget(self._last.num_drafted)
        for length in self.lengths:
            if length != self._last.num_drafted:
                batch = self._batch(length, num_texts)
                self._rest[length].forget(batch)
                self._reading[length].forget(batch)

    def _choose(self, state: _SizeState, num_texts: int) -> None:
        now = state.num_drafted
        speeds = {length: self._speed(length, num_texts) for length in self.lengths}
        best = max(self.lengths, key=lambda length: speeds[length])
        if speeds[best] <= MARGIN * speeds[now]:
            state.left = STRETCH
            if now != state.kept:
                state.kept, state.wait = now, SHORTEST
        else:
            state.left = FEW if best < now else max(FEW, -(-SAMPLES // num_texts))
            state.num_drafted = best

    def _with_prompts(self, kept: int, num_texts: int, num_read: int) -> int:
        """Best draft length in a forward with prompts. kept: that of steps without prompts."""
        longest, tokens = self.lengths[-1], self._acceptance.tokens
        batch = self._batch(kept, num_texts)
        own = self._reading[kept].of(batch, may_extrapolate=True)
        if not self._times and all(self._rest_of(one, batch) is None for one in self.lengths):
            # Each step reads, and nothing says what a forward without prompts would take.
            return longest if tokens(longest) - 1 >= longest / 2 else self.lengths[0]
        if not self._times or own is None:
            return kept
        known = {one for one in self.lengths if self._is_known(one, num_texts)}
        of_interest = [one for one in self.lengths if one <= kept or one in known]
        worth, fastest = min((self._seconds_per_token(one, num_texts), one) for one in of_interest)
        if fastest not in known:  # a lower bound tells nothing of the others
            return fastest

        def batch_of(length: int) -> int:
            return self._batch(length, num_texts) if self._reads.are_many else batch

        def seconds(length: int) -> float:
            """A lower bound where it was not measured, so that it is tried."""
            rest = self._reading[length].of(batch_of(length), may_extrapolate=True)
            least = own * max(0, length) / max(1, kept) if rest is None else rest
            return self._forward(batch_of(length), length, num_read) + least

        def gain(length: int) -> float:
            return worth * batch_of(length) * tokens(length) - seconds(length)

        best = max((length for length in self.lengths if length <= kept), key=gain)
        return best if gain(best) - gain(kept) > GAIN * seconds(kept) else kept

    def _batch(self, length: int, num_texts: int) -> int:
        """Texts of a step."""
        return -(-num_texts // 2) if self._in_halves and length != self.lengths[0] else num_texts

    def _speed(self, length: int, num_texts: int) -> float:
        """Tokens a second of steps that read no prompts."""
        batch = self._batch(length, num_texts)
        return batch * self._acceptance.tokens(length) / max(self._seconds(length, batch), SOON)

    def _seconds(self, length: int, batch: int) -> float:
        """Seconds of such a step; a lower bound where it was not measured."""
        rest = self._rest_of(length, batch)
        if rest is None and length == PLAIN:
            rest = 0.0  # the host may have nothing to do
        elif rest is None:
            # A draft takes some time to begin, and more for each token.
            rest = max(
                (self._rest_of(other, batch) or 0.0)
                * (min(1.0, length / other) if other > 0 else 1.0)
                for other in self.lengths
                if other != PLAIN
            )
        return rest + self._forward(batch, length)

    def _is_known(self, length: int, num_texts: int) -> bool:
        """Whether any steps with such drafts were measured."""
        batch = self._batch(length, num_texts)
        own = self._reading[length].of(batch, may_extrapolate=True)
        return own is not None or self._rest_of(length, batch) is not None

    def _seconds_per_token(self, length: int, num_texts: int) -> float:
        """Of such steps, at most: where only steps that read were measured, they take no longer."""
        batch = self._batch(length, num_texts)
        rest = self._reading[length].of(batch, may_extrapolate=True)
        if rest is None or self._rest_of(length, batch) is not None:
            seconds = self._seconds(length, batch)
        else:
            seconds = rest + self._forward(batch, length)
        return seconds / (batch * self._acceptance.tokens(length))

    def _rest_of(self, length: int, batch: int) -> float | None:
        # Without times it holds the forward, which grows otherwise.
        return self._rest[length].of(batch, may_extrapolate=bool(self._times))

    def _forward(self, batch: int, length: int, num_read: int = 0) -> float:
        own = batch * (max(0, length) + 1)
        # Prompts fill a graph up, drafts alone leave some of it unused.
        return self._times.of(own + num_read if num_read else bucket(own))


def draft_lengths(most: int) -> tuple[int, ...]:
    """The lengths that drafts may have, the shortest first: none, about half of the most, the most.

    Each has to be tried, and one in between gives nearly what these do.
    """
    return tuple(sorted({0, -(-most // 2), most}))
