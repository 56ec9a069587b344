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

    The first prompts come first; those that exceed the budget are in no group. A prompt longer
    than the budget is cut to it, and then alone.
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


# Prompt tokens that a verify forward may always read as well: so few cost a GPU little, and less
# than a separate forward, which reads the weights again. No text waits long for them.
MIN_PROMPT_TOKENS = 512
# Steps over which longer prompts are spread while few texts wait for them. A few prompts of
# thousands of tokens must not make steps longer, whole books must. Pieces keep their size to the
# last: smaller ones take longer for each of their tokens.
STEPS_TO_READ = 64
# From so many texts waiting for their prompts on, these are read in fewer steps. Short prompts of
# many texts take no longer than a few drafts, and a forward generates more with all of them in it.
MANY = 8


def prompt_tokens_per_step(
    unread: Sequence[int],
    backlog: int,
    num_decoding: int,
    num_own: int,
    most: int,
    sizes: Sequence[int],
) -> int:
    """Prompt tokens, at most ``most``, that the next verify forward reads with its drafts.

    unread: prompt tokens left of each waiting text, in reading order. backlog: the largest sum of
    these since no text waited. num_decoding: texts that wait for the forward. num_own: their
    tokens. sizes: of the graphs.

    The count grows with the waiting tokens, with the waiting texts, and with their ratio to texts
    that decode: all end sooner so. It is cut to fill a graph: one token more would take as long
    as the next graph does.
    """
    share = (len(unread) + num_decoding) / num_decoding * max(1, len(unread) / MANY)
    wanted = min(max(MIN_PROMPT_TOKENS, int(backlog * share) // STEPS_TO_READ), most)
    # A prompt that ends here adds one token, whose logits are needed.
    others = num_own + sum(end <= wanted for end in accumulate(unread))
    room = filled(wanted + others, sizes) - others
    return room if 2 * room >= wanted else wanted
