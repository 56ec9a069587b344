"""Which prompts a forward reads, and how much of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from guided_spec.models.packed.graph_pool import filled

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
# Steps that what waits to be read is spread over, where that is more and few texts wait for it. A
# few prompts of thousands of tokens must not make steps longer, whole books that wait must. Pieces
# stay as large to the last: smaller ones take longer for each of their tokens.
STEPS_TO_READ = 64
# Texts that wait for their prompts, from which on these are read in fewer steps. Short prompts of
# many texts take no longer than a few drafts, and a forward writes more with all of them in it.
MANY = 8


def tokens_along(
    unread: Sequence[int],
    backlog: int,
    num_decoding: int,
    num_own: int,
    most: int,
    sizes: Sequence[int],
) -> int:
    """Prompt tokens, of ``most``, that the next verify forward reads besides.

    unread: of each text that waits for its prompt, in the order in which they are read. backlog:
    the most that these came to since none waited.
    num_decoding: texts that wait for the forward. num_own: tokens of theirs. sizes: of the graphs.

    The more tokens wait, the more texts, and the more texts for each that decodes, the longer
    may that one wait for a forward: all end sooner so. It is cut so that it fills a graph: one
    token more would take as long as the next graph does.
    """
    share = (len(unread) + num_decoding) / num_decoding * max(1, len(unread) / MANY)
    wanted = min(max(ALONG, int(backlog * share) // STEPS_TO_READ), most)
    # Behind the end of a prompt stands one token more, whose logits are asked for.
    others = num_own + sum(end <= wanted for end in accumulate(unread))
    room = filled(wanted + others, sizes) - others
    return room if 2 * room >= wanted else wanted
