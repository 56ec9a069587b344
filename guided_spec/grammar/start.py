"""Where in a text its constraint begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from guided_spec.errors import ConfigError

__all__ = ["Start"]


@dataclass(frozen=True, slots=True)
class Start:
    """The constraint binds behind the first ``marker``; up to there the text is free.

    marker: text, or token ids (kept as a tuple); None is the marker of the model's own chat
        template.
    reasoning_budget: free tokens at most, then the marker is written; None leaves it to the model.

    Raises ConfigError for a value of the wrong type or range.
    """

    marker: str | Sequence[int] | None = None
    reasoning_budget: int | None = None

    def __post_init__(self) -> None:
        marker, budget = self.marker, self.reasoning_budget
        fix = "must be a non-empty str, token ids, or None for the model's own"
        if marker is not None and not isinstance(marker, str):
            if not isinstance(marker, Sequence) or not all(map(_is_natural, marker)):
                raise ConfigError("marker", marker, fix)
            object.__setattr__(self, "marker", tuple(marker))
        if marker is not None and len(marker) == 0:
            raise ConfigError("marker", marker, fix)
        if budget is not None and not _is_natural(budget):
            raise ConfigError("reasoning_budget", budget, "must be an int of at least 0, or None")


def _is_natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
