"""Suffix decoding: what followed most often where the text's last tokens stood before.

Oliaro et al., "SuffixDecoding: extreme speculative decoding for emerging AI applications" (2024,
arXiv:2411.04975): two suffix trees, of the request's own text and of finished texts of its kind.
The draft follows the more frequent way from the longest match, and is no longer than the match
and its counts deserve.

Counts of the own text are verified tokens of the same request, as an n-gram's are. Those of other
texts hold noise of an equal request: ``learns`` makes the engine give each request its own.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from guided_spec.core import DecodeBatch, FinishedText, ProposerContext
from guided_spec.masks.lookahead import Lookahead
from guided_spec.proposers.drafting import host_draft
from guided_spec.proposers.suffix_counts import (
    LONGEST,
    CountedText,
    Followers,
    Match,
    SuffixCounts,
)
from guided_spec.types import Draft

__all__ = ["KEPT", "Learned", "Suffix"]

KEPT = 1 << 16  # tokens of finished texts that are remembered, of all kinds together
LONGEST_TEXT = 1 << 12  # tokens that are learned of one of them
OWN_TOKENS = 1 << 14  # of a request's own text; beyond, the later half is counted anew
READ_AT_ONCE = 1 << 9  # of them that a step reads, so that long prompts hold up nobody
REACH = 4  # drafted tokens for each matched one
LEAST_CHANCE = 0.1  # that a drafted token and all before it are right, by their counts


class Suffix:
    """Drafts from counts, without a model; learns from finished texts.

    Only texts of one source, which have the same grammar and the same ``cache_salt``, are drafted
    from one another.
    """

    aux_hidden_layers: tuple[int, ...] = ()
    learns = True

    def __init__(self, context: ProposerContext) -> None:
        del context
        self._own: dict[int, _OwnText] = {}
        self._learned = Learned(KEPT)

    def propose(self, batch: DecodeBatch, lookahead: Lookahead) -> Draft:
        """Up to ``batch.num_draft_tokens`` tokens a request, of which the grammar chooses."""
        options: list[Iterator[list[int]]] = []
        rows = zip(batch.slots, batch.contexts, lookahead.drafted, lookahead.is_open, strict=True)
        for row, (slot, context, drafted, is_open) in enumerate(rows):
            if not is_open or batch.num_draft_tokens == 0:
                options.append(iter(()))
                continue
            own = self._own.setdefault(slot, _OwnText())
            own.read(context)
            known = [own.counts]
            learned = self._learned.of(batch.sources[row]) if batch.sources else None
            if learned is not None:
                known.append(learned)
            tail = [*context[-LONGEST:], *drafted]
            options.append(continuations(known, tail, drafted, batch.num_draft_tokens))
        return host_draft(batch, lookahead.extend_best(options))

    def learn(self, texts: Sequence[FinishedText]) -> None:
        """Remember what was written, and the few tokens before it, behind which it begins."""
        for text in texts:
            if len(text.token_ids) > text.prompt_length:
                start = max(0, text.prompt_length - LONGEST)
                self._learned.add(text.source, text.token_ids[start:])

    def release(self, slots: Sequence[int]) -> None:
        """Forget the own texts of ended requests."""
        for slot in slots:
            self._own.pop(slot, None)


class _OwnText:
    """The counts of one request's prompt and output."""

    def __init__(self) -> None:
        self._begin(0)

    def _begin(self, start: int) -> None:
        """Count from here on. start: how many tokens of the text are left out."""
        self.counts = SuffixCounts()
        self._text = CountedText()
        self._start = start

    def read(self, context: Sequence[int]) -> None:
        """Read what is new of ``context``, where it still ends as it did before."""
        tokens = self._text.tokens
        known = self._start + len(tokens)
        end = tokens[-LONGEST:]
        if [*context[known - len(end) : known]] != end:  # another text
            self._begin(0)
            known = 0
        if len(context) - self._start > OWN_TOKENS:
            known = len(context) - OWN_TOKENS // 2
            self._begin(known)
        self.counts.append(self._text, context[known : known + READ_AT_ONCE])


class Learned:
    """Finished texts by their sources, the least recently used of which goes first.

    most: tokens of all texts together.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._groups: OrderedDict[Hashable, _Group] = OrderedDict()
        self.num_tokens = 0

    def of(self, source: Hashable) -> SuffixCounts | None:
        """The counts of all texts of ``source``, which is thereby used; None without any."""
        group = self._groups.get(source)
        if group is None:
            return None
        self._groups.move_to_end(source)
        return group.counts

    def add(self, source: Hashable, token_ids: Sequence[int]) -> None:
        """Remember the first ``LONGEST_TEXT`` tokens of a text."""
        taken = token_ids[: min(LONGEST_TEXT, self._most)]
        if not taken:
            return
        self.of(source)  # others go first
        self.num_tokens += len(taken)
        while self.num_tokens > self._most:
            self._forget_one()
        group = self._groups.setdefault(source, _Group())
        text = CountedText()
        group.counts.append(text, taken)
        group.texts.append(text)
        text.runs = []  # it does not grow any more

    def _forget_one(self) -> None:
        """Forget the oldest text of the source that was not used for longest."""
        source, group = next(iter(self._groups.items()))
        text = group.texts.popleft()
        self.num_tokens -= len(text.tokens)
        if group.texts:
            group.counts.remove(text)
        else:
            del self._groups[source]


class _Group:
    """The texts of one source, the oldest first, and their counts."""

    def __init__(self) -> None:
        self.counts = SuffixCounts()
        self.texts: deque[CountedText] = deque()


def continuations(
    known: Sequence[SuffixCounts], tail: list[int], drafted: Sequence[int], most: int
) -> Iterator[list[int]]:
    """Candidates for each of up to ``most`` tokens behind ``tail``, made when they are asked for.

    drafted: where whoever asks appends the candidate that it took. The draft ends where it takes
        none.

    Of the longest matches in ``known`` the one with the largest product of its length and of the
    share of its first follower is believed. The draft is ``REACH`` times as long as that match at
    most, and ends where its tokens together become improbable: the count of a short run, or an even
    split after a long one, is thin evidence.
    """
    matches = [counts.find(tail) for counts in known]
    chance = 1.0
    for place in range(most):
        best = _best(matches)
        if best is None:
            return
        if place == 0:
            most = min(most, REACH * best.length)
        chance *= best.followers.share
        if place >= most or chance < LEAST_CHANCE:
            return
        before = len(drafted)
        yield best.followers.token_ids
        if len(drafted) == before:
            return
        tail.append(drafted[-1])
        matches = [
            counts.find(tail[-1:]) if match is None else counts.follow(match, tail)
            for counts, match in zip(known, matches, strict=True)
        ]


class _Guess(NamedTuple):
    """What a match of ``length`` tokens says comes next."""

    length: int
    followers: Followers


def _best(matches: Sequence[Match | None]) -> _Guess | None:
    """What the most believable match says, the first one of equals; None without any."""
    best, most = None, 0.0
    for match in matches:
        if match is not None:
            followers = match.followers()
            promise = match.length * followers.share
            if promise > most:
                best, most = _Guess(match.length, followers), promise
    return best
