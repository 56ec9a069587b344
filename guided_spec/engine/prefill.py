"""How prompts are read: which by one forward, how much beside texts that decode, and only once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from guided_spec.models.packed.blocks import BLOCK
from guided_spec.text import GuidedText

__all__ = ["PromptGroup", "begin_alike", "group_prompts", "tokens_along"]

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


# Prompt tokens that a verify forward may always read besides: so few cost a GPU little, and
# less than a forward of their own, which reads the weights again. No text waits long for them.
ALONG = 512
# Steps that what waits to be read is spread over, where that is more and few texts wait for it.
STEPS_TO_READ = 16


def tokens_along(unread: Sequence[int], num_decoding: int, most: int) -> int:
    """Prompt tokens, of ``most``, that the next verify forward reads besides.

    unread: of each text that waits for its prompt. num_decoding: texts that wait for the forward.
    The more tokens wait, and the more texts for each one that decodes, the longer may these wait
    for a forward: all end sooner so.
    """
    share = (len(unread) + num_decoding) / num_decoding
    return min(max(ALONG, int(sum(unread) * share) // STEPS_TO_READ), most)


def begin_alike(text: GuidedText, other: GuidedText, length: int) -> bool:
    """Whether texts that may share have the same first tokens."""
    if other.params.cache_salt != text.params.cache_salt:
        return False
    last = slice(length - BLOCK, length)  # where prompts that differ do so most often
    return other.tokens[last] == text.tokens[last] and (
        other.tokens[:length] == text.tokens[:length]
    )
