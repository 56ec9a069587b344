"""Which prompts are read together: rows of one forward are padded to its longest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["PromptGroup", "group_prompts"]

# Padded tokens that one forward may hold. A forward reads all weights, so that a few hundred tokens
# take hardly longer than a few: that many are wasted before another forward is cheaper.
WORTH_A_FORWARD = 256


class PromptGroup(NamedTuple):
    """Rows of one forward. members: indices into the lengths, ascending. width: tokens a row."""

    members: list[int]
    width: int


def group_prompts(lengths: Sequence[int], budget: int) -> list[PromptGroup]:
    """Deal the prompts that are read next to forwards of rows about as long as each other.

    lengths: tokens that each prompt has left, at least 1. budget: tokens of all forwards together,
        padding included.

    The first prompts come first; those that the budget has no room for are in no group. A prompt
    longer than the budget is cut to it, and then alone.
    """
    chosen: list[int] = []
    width = 0
    for at, length in enumerate(lengths):
        wider = max(width, min(length, budget))
        if chosen and wider * (len(chosen) + 1) > budget:
            break
        chosen.append(at)
        width = wider
    groups: list[PromptGroup] = []
    padding = 0
    for at in sorted(chosen, key=lambda at: lengths[at]):
        length = min(lengths[at], budget)
        if groups:
            last = groups[-1]
            padding += (length - last.width) * len(last.members)
            if padding <= WORTH_A_FORWARD:
                groups[-1] = PromptGroup([*last.members, at], length)
                continue
        groups.append(PromptGroup([at], length))
        padding = 0
    return [PromptGroup(sorted(group.members), group.width) for group in groups]
