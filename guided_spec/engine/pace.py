"""Whether steps draft: what drafts bring, held against what it takes to make and to verify them.

Many texts at a time, or a head that a text is strange to, make drafts cost more than they save.
Steps draft as long as half of what they draft is accepted. Where less is, a few steps without
drafts show what those take, and the way that writes more tokens a second is gone for a while. Then
the other one is tried again: texts change. Where prompts are read besides, each token costs time
whoever's it is, and what a step takes tells nothing: there only drafts of which half is accepted
are made.

What a step drafts must not depend on other texts where a text depends on what it drafts: see
docs/exactness.md. Who asks sees to that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from guided_spec.models.packed.graph_pool import ROW_SIZES, bucket

FEW, SAMPLES = 4, 64  # steps of a trial at least, and texts that drafted in them
SHORTEST, LONGEST = 64, 1024  # steps until the other way is tried again
MARGIN = 1.05  # times as fast have steps without drafts to be
FORGETS = 1 / 16  # weight of the last step in a mean
SOON = 1e-9  # seconds, where a clock shows none


@dataclass(slots=True)
class Mean:
    """Of the last steps that went one way: their seconds, and the tokens that a text got in one."""

    steps: int = 0
    seconds: float = 0.0
    tokens: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens of a text in a second; of one step or more."""
        return self.tokens / max(self.seconds, SOON)

    def add(self, seconds: float, tokens: float) -> None:
        """One step more."""
        self.steps += 1
        weight = max(FORGETS, 1 / self.steps)
        self.seconds += weight * (seconds - self.seconds)
        self.tokens += weight * (tokens - self.tokens)


@dataclass(slots=True)
class _Way:
    """How steps of about as many texts go on. left: steps until that is asked again.

    is_trial: only steps that tell what they take count. is_first: what the last way left to do is
    done in the next step. wait: ``left`` of the next long stretch.
    """

    drafts: bool = True
    is_trial: bool = True
    left: int = 0
    is_first: bool = True
    wait: int = SHORTEST
    gained: Mean = field(default_factory=Mean)  # of all steps with drafts; its seconds say nothing
    drafted: Mean = field(default_factory=Mean)
    plain: Mean = field(default_factory=Mean)

    def turn(self, *, drafts: bool, left: int, is_trial: bool) -> None:
        self.is_first = drafts != self.drafts
        self.drafts, self.left, self.is_trial = drafts, left, is_trial


class Pace:
    """Of the steps of one engine. num_draft_tokens: K of those that draft."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._most = num_draft_tokens
        self._ways: dict[int, _Way] = {}

    def num_draft_tokens(self, num_texts: int, *, is_reading: bool = False) -> int:
        """K of the next step, of so many texts; 0 where it drafts nothing.

        is_reading: whether prompts are read in it.
        """
        way, trial = self._way(num_texts), max(FEW, -(-SAMPLES // num_texts))
        if is_reading:
            if way.drafts and way.gained.steps >= trial and not self._is_good(way):
                way.plain = Mean()
                way.turn(drafts=False, left=trial, is_trial=True)
        elif way.left == 0:
            self._choose(way, trial)
        return self._most if way.drafts else 0

    def stays_plain(self, num_texts: int) -> bool:
        """Whether the step is without drafts, and the next one of as many texts will be."""
        way = self._way(num_texts)
        return not way.drafts and way.left > 1

    def count(self, num_texts: int, num_tokens: int, seconds: float | None) -> None:
        """That step is done. num_tokens: what its texts got. seconds: None where it did more."""
        way = self._way(num_texts)
        if way.drafts:
            way.gained.add(0.0, num_tokens / num_texts)
        if way.is_first:
            way.is_first = False
            return
        if seconds is not None:
            (way.drafted if way.drafts else way.plain).add(seconds, num_tokens / num_texts)
        if seconds is not None or not way.is_trial:
            way.left = max(0, way.left - 1)

    def _way(self, num_texts: int) -> _Way:
        return self._ways.setdefault(bucket(num_texts, ROW_SIZES), _Way())

    def _is_good(self, way: _Way) -> bool:
        """Whether half of a draft is accepted, as far as is known."""
        gained = way.gained
        return gained.steps == 0 or gained.tokens - 1 >= self._most / 2

    def _choose(self, way: _Way, steps: int) -> None:
        """steps: of a trial."""
        drafted, plain = way.drafted, way.plain
        if way.drafts and self._is_good(way) and not (way.is_trial and plain.steps):
            way.plain, way.wait = Mean(), SHORTEST
            way.turn(drafts=True, left=steps, is_trial=True)
        elif not way.is_trial or plain.steps == 0:  # the other way is measured, perhaps anew
            if way.drafts:
                way.plain = Mean()
            else:
                way.gained, way.drafted = Mean(), Mean()
            way.turn(drafts=not way.drafts, left=steps, is_trial=True)
        else:
            drafts = drafted.speed * MARGIN >= plain.speed
            way.turn(drafts=drafts, left=way.wait, is_trial=False)
            way.wait = min(2 * way.wait, LONGEST)
