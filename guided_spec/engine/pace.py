"""How many tokens steps draft: what drafts bring, held against what they take.

A step takes what its forward does, by its tokens, and what the host and the drafter do besides. The
first is measured before the first step, where there are graphs of forwards; the second is seen step
by step, and without such a table the first with it. What a draft brings is how many texts accept
its first token, its second and so on. So it is known what each length of a draft would give and
take, those that are not in use as well; a length that may be better, as far as is known, is tried
for some steps.

Where a proposer drafts without K, as what a grammar forces, steps with K = 0 wait for the host too:
``PLAIN`` steps draft nothing at all.

Steps that do nothing but decode take the length that writes most tokens a second. Where prompts are
read in the same forward, each token of a draft costs more, and its time is worth what the best of
the other steps would write in it.

What a step drafts must not depend on other texts where a text depends on what it drafts: see
docs/exactness.md. Who asks sees to that.
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
KNOWN = 2  # steps that tell what others take
STRETCH = 16  # steps until lengths are compared again
SHORTEST, LONGEST = 64, 1024  # steps until what was seen of the others is forgotten
MARGIN = 1.1  # times as fast have steps of another length to be
GAIN = 0.1  # of a step that reads prompts has a shorter draft to save
MEMORY = 256  # texts whose acceptance counts, and of steps STRETCH at least
BESIDE = 16  # texts whose time a step takes by itself, beside its own: as measured on GPUs
SOON = 1e-9  # seconds, where a clock shows none
PLAIN = -1  # of a step without any draft, where K = 0 leaves some


class ForwardTimes:
    """Seconds of forwards by their tokens, measured at some sizes; none where nothing was."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._sizes = sorted(seconds)
        self._seconds = [seconds[size] for size in self._sizes]

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def of(self, num_tokens: int) -> float:
        """On a line between two sizes, in proportion behind the last; 0 where there are none."""
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
    """

    num_drafted: int
    num_read: int
    accepted: Sequence[int]
    seconds: float
    num_new: int = 0

    @classmethod
    def of(
        cls,
        batch: DecodeBatch,
        num_drafted: int,
        committed: Sequence[Committed],
        drafted: Sequence[int],
        seconds: float,
    ) -> StepTaken:
        """Of that batch; a prompt that its drafter reads counts as a token of it.

        drafted: [B] tokens of each draft.
        """
        num_read = sum(len(prompt.token_ids) for prompt in batch.prompts) + len(batch.begun)
        accepted = [row.num_accepted for row in committed]
        coming = {prompt.slot for prompt in batch.prompts}
        pairs = zip(batch.slots, drafted, strict=True)
        num_new = sum(count == 0 and slot in coming for slot, count in pairs)
        return cls(num_drafted, num_read, accepted, seconds, num_new)


class _Acceptance:
    """Which share of the texts accepts the first token of a draft, the second and so on.

    What is drafted without K is accepted besides: so many tokens for each length.
    """

    def __init__(self, longest: int, *, has_more: bool) -> None:
        self._shares, self._seen = [1.0] * longest, [0] * longest
        self._has_more = has_more
        self._more: dict[int, float] = {}

    @property
    def is_known(self) -> bool:
        return self._seen[0] > 0

    def add(self, num_drafted: int, accepted: Sequence[int], num_new: int) -> None:
        """num_new: of those that accepted none, who says nothing of drafts."""
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
        """Of longer drafts than these."""
        for at in range(max(0, num_drafted), len(self._seen)):
            self._seen[at] = 0
        self._more = {length: more for length, more in self._more.items() if length <= num_drafted}

    def tokens(self, num_drafted: int) -> float:
        """That a text gets; where nothing was seen it goes on as before, and well to begin with."""
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
        last.append(max(seconds, 0.0) / (num_texts + BESIDE))

    def of(self, num_texts: int, *, is_alike: bool) -> float | None:
        """None where nothing is known. is_alike: whether other numbers of texts tell it as well."""
        own = bucket(num_texts, ROW_SIZES)
        known = [size for size, last in self._seen.items() if len(last) >= KNOWN]
        nearest = min(known, key=lambda size: max(size, own) / min(size, own), default=own)
        if nearest not in known or not (is_alike or nearest == own):
            return None
        return median(self._seen[nearest]) * (num_texts + BESIDE)

    def forget(self, num_texts: int) -> None:
        self._seen.pop(bucket(num_texts, ROW_SIZES), None)


@dataclass(slots=True)
class _Way:
    """How steps of about as many texts go on.

    num_drafted: of each. left: steps until lengths are compared again. kept: the last length that
    was better than others when its trial was over. unseen: steps since what was seen of the others
    was forgotten. wait: until it is again, which is longer each time they are no better.
    """

    num_drafted: int
    left: int
    kept: int
    unseen: int = 0
    wait: int = SHORTEST


class Pace:
    """Of the steps of one engine. num_draft_tokens: of the longest draft, K.

    times: of the target's forwards. has_more: whether there are drafts with K = 0 too.

    lengths: that drafts may have, the first of them none.
    """

    def __init__(
        self, num_draft_tokens: int, times: ForwardTimes, *, has_more: bool = False
    ) -> None:
        self._times = times
        lengths = draft_lengths(num_draft_tokens)
        self.lengths = (PLAIN, *lengths) if has_more else lengths
        self._acceptance = _Acceptance(num_draft_tokens, has_more=has_more)
        self._ways: dict[int, _Way] = {}
        self._rest = {length: _Rest() for length in self.lengths}
        self._last = StepTaken(num_draft_tokens, 0, (), 0.0)

    def num_draft_tokens(self, num_texts: int, num_read: int = 0) -> int:
        """Of the next step, of so many texts. num_read: tokens of prompts that are read in it."""
        way = self._way(num_texts)
        if num_read:
            self._refresh(way, num_texts)
            return self._beside_prompts(way.kept, num_texts, num_read)
        if way.left == 0:
            self._refresh(way, num_texts)
            self._choose(way, num_texts)
        return way.num_drafted

    def stays_plain(self, num_texts: int) -> bool:
        """Whether the step is without drafts, and the next one of as many texts will be."""
        way = self._way(num_texts)
        return way.num_drafted == self.lengths[0] and way.left > 1

    def count(self, step: StepTaken) -> None:
        """That step is done."""
        batch, has_read = len(step.accepted), self._last.num_read > 0
        way, self._last = self._way(batch), step
        way.unseen += 1
        self._acceptance.add(step.num_drafted, step.accepted, step.num_new)
        if step.num_read:  # and more is done for a prompt than to read it
            return
        way.left, rest = max(0, way.left - 1), self._rest.get(step.num_drafted)
        # The step behind waits until the drafter has read a prompt: it tells less than others.
        if rest is not None and (not has_read or rest.of(batch, is_alike=False) is None):
            rest.add(batch, step.seconds - self._forward(batch, step.num_drafted))

    def _way(self, num_texts: int) -> _Way:
        key = bucket(num_texts, ROW_SIZES)
        if key not in self._ways:
            longest = self.lengths[-1]
            left = 0 if self._acceptance.is_known else max(STRETCH, -(-SAMPLES // num_texts))
            self._ways[key] = _Way(longest, left, kept=longest)
        return self._ways[key]

    def _refresh(self, way: _Way, num_texts: int) -> None:
        """Forget what has not been seen for long: it is tried again then."""
        if way.unseen < way.wait:
            return
        way.unseen, way.wait = 0, min(2 * way.wait, LONGEST)
        self._acceptance.forget(self._last.num_drafted)
        for length, rest in self._rest.items():
            if length != self._last.num_drafted:
                rest.forget(num_texts)

    def _choose(self, way: _Way, num_texts: int) -> None:
        now = way.num_drafted
        speeds = {length: self._speed(length, num_texts) for length in self.lengths}
        best = max(self.lengths, key=lambda length: speeds[length])
        if speeds[best] <= MARGIN * speeds[now]:
            way.left = STRETCH
            if now != way.kept:
                way.kept, way.wait = now, SHORTEST
        else:
            way.left = FEW if best < now else max(FEW, -(-SAMPLES // num_texts))
            way.num_drafted = best

    def _beside_prompts(self, kept: int, num_texts: int, num_read: int) -> int:
        """What pays in a forward that reads prompts. kept: in other steps of as many texts."""
        longest, tokens = self.lengths[-1], self._acceptance.tokens
        rest = {length: self._rest_of(length, num_texts) for length in self.lengths}
        if all(seconds is None for seconds in rest.values()):  # each step reads
            return longest if tokens(longest) - 1 >= longest / 2 else self.lengths[0]
        least = rest[kept]
        if not self._times or least is None:
            return kept
        worth = num_texts / max(self._speed(length, num_texts) for length in self.lengths)

        def saved(length: int) -> float:
            """Seconds. What was not seen takes as long as what is kept, at most."""
            known = rest[length]
            taken = self._forward(num_texts, length, num_read) + (least if known is None else known)
            return worth * tokens(length) - taken

        best = max((one for one in self.lengths if one <= kept), key=saved)
        whole = least + self._forward(num_texts, kept, num_read)
        return best if saved(best) - saved(kept) > GAIN * whole else kept

    def _speed(self, length: int, num_texts: int) -> float:
        """Tokens a second of steps that read nothing."""
        tokens = num_texts * self._acceptance.tokens(length)
        return tokens / max(self._seconds(length, num_texts), SOON)

    def _seconds(self, length: int, num_texts: int) -> float:
        """Of such a step; the least that it may take, where it was not seen."""
        rest = self._rest_of(length, num_texts)
        if rest is None and length == PLAIN:
            rest = 0.0  # the host may have nothing to do
        elif rest is None:
            # A draft takes some time to begin, and more for each token.
            rest = max(
                (self._rest_of(other, num_texts) or 0.0)
                * (min(1.0, length / other) if other > 0 else 1.0)
                for other in self.lengths
                if other != PLAIN
            )
        return rest + self._forward(num_texts, length)

    def _rest_of(self, length: int, num_texts: int) -> float | None:
        # Without times it holds the forward, which grows otherwise.
        return self._rest[length].of(num_texts, is_alike=bool(self._times))

    def _forward(self, num_texts: int, length: int, num_read: int = 0) -> float:
        own = num_texts * (max(0, length) + 1)
        # Prompts fill a graph up, drafts alone leave some of it unused.
        return self._times.of(own + num_read if num_read else bucket(own))


def draft_lengths(most: int) -> tuple[int, ...]:
    """The lengths that drafts may have, the shortest first: none, about half of the most, the most.

    Each has to be tried, and one in between gives nearly what these do.
    """
    return tuple(sorted({0, -(-most // 2), most}))
