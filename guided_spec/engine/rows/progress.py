"""A bar on stderr: how far a call is, and how fast."""

from __future__ import annotations

import time
from typing import Any

from tqdm.auto import tqdm

from guided_spec.engine.outputs import Completion, RequestStats


class Speed:
    """Counts what texts took: tokens a second, and the share of draft tokens that was accepted."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.num_tokens = self.num_drafted = self.num_accepted = 0

    def count(self, stats: RequestStats) -> None:
        """Add a text that has ended."""
        self.num_tokens += stats.output_tokens
        self.num_drafted += sum(stats.drafted)
        self.num_accepted += sum(stats.accepted)

    @property
    def seconds(self) -> float:
        """Since this began to count."""
        return time.perf_counter() - self._began

    @property
    def tokens_per_second(self) -> float:
        """Of all texts together."""
        return self.num_tokens / max(self.seconds, 1e-9)

    @property
    def acceptance(self) -> float:
        """From 0 to 1; 0 where nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0


class ProgressBar:
    """A context manager.

    total: units of the call, None if unknown. is_shown: None shows it on a terminal alone.
    num_done: units that need no work.
    """

    def __init__(
        self, total: int | None, *, is_shown: bool | None, unit: str = "prompt", num_done: int = 0
    ) -> None:
        is_hidden = None if is_shown is None else not is_shown
        self._bar: Any = tqdm(total=total, unit=unit, initial=num_done, disable=is_hidden)
        self.speed = Speed()

    def count(self, completion: Completion) -> None:
        """A text has ended."""
        self.speed.count(completion.stats)

    def advance(self, **shown: Any) -> None:
        """A unit is done. shown: further figures."""
        speed = self.speed
        shown = {"tokens": speed.num_tokens, "tok/s": f"{speed.tokens_per_second:.0f}"} | shown
        if speed.num_drafted:
            shown["accepted"] = f"{speed.acceptance:.0%}"
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()
