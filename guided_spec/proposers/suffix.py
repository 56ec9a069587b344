"""Suffix decoding: what came most often after the text's last tokens before.

Oliaro et al., "SuffixDecoding: extreme speculative decoding for emerging AI applications" (2024,
arXiv:2411.04975): two suffix trees, of the request's own text and of finished texts of its kind.
The draft takes the more frequent branch after the longest match, and is no longer than the match
and its counts deserve.

The trees are cut at a depth. A run that stands in the texts once has no nodes below it: where it
stands says what follows. So a new token costs as many look-ups as the longest run before it that
has stood there already, and nothing is built anew.

Counts of the own text are verified tokens of the same request, as an n-gram's are. Those of other
texts hold noise of an equal request: ``learns`` makes the engine give each request its own.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from heapq import nlargest
from typing import NamedTuple

from guided_spec.core import DecodeBatch, FinishedText, ProposerContext
from guided_spec.masks.lookahead import Lookahead
from guided_spec.proposers.drafting import host_draft
from guided_spec.types import Draft

LONGEST = 8  # tokens of a run whose followers are counted
CANDIDATES = 4  # followers that are named, for a grammar to choose from
_NOTHING: list[int] = []
KEPT = 1 << 16  # tokens of finished texts that are remembered, of all kinds together
LONGEST_TEXT = 1 << 12  # tokens that are learned of one of them
OWN_TOKENS = 1 << 14  # of a request's own text; beyond, the later half is counted again
READ_AT_ONCE = 1 << 9  # of them that a step reads, so that long prompts delay no other
REACH = 4  # drafted tokens for each matched one
LEAST_CHANCE = 0.1  # that a drafted token and all before it are right, by their counts


class CountedText:
    """A text that is counted, and may grow.

    runs: the nodes of its last 1, 2, ... tokens, as far as they occurred in the texts before.
    """

    __slots__ = ("runs", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.runs: list[_Node] = []


class _Node:
    """A run of tokens. count: how often it occurs in the texts.

    followers: the runs that are one token longer, by that token; None of a run that stood in the
    texts once when it was last seen. It then goes on at ``text[at]``, if anywhere.
    ranked: what ``rank`` found; None where that is out of date.
    """

    __slots__ = ("at", "count", "followers", "ranked", "text")

    def __init__(self, text: list[int], at: int) -> None:
        self.count = 1
        self.followers: dict[int, _Node] | None = None
        self.ranked: Followers | None = None
        self.text = text
        self.at = at

    def open(self) -> None:
        """Give the only occurrence so far its node below this one."""
        self.followers = {}
        if self.at < len(self.text):
            self.followers[self.text[self.at]] = _Node(self.text, self.at + 1)
        self.text = _NOTHING  # else the node would keep a text that is removed

    def rank(self) -> Followers:
        """The followers, of which there are some, by their counts."""
        found = self.ranked
        if found is None:
            assert self.followers
            found = self.ranked = _rank(self.followers)
        return found


class Followers(NamedTuple):
    """What followed a run.

    token_ids: the most frequent tokens, the most frequent first, the smallest id among equals.
    share: how much of all that followed the first of them is.
    """

    token_ids: list[int]
    share: float


class Match(NamedTuple):
    """A run that occurs in the texts and continues there; length: its tokens.

    at: where its only occurrence goes on in ``node.text``; -1 where ``node.followers`` says that.
    """

    length: int
    node: _Node
    at: int = -1

    def followers(self) -> Followers:
        """The most frequent tokens after the run, and the share of the first of them."""
        node = self.node
        if self.at >= 0:
            return Followers([node.text[self.at]], 1.0)
        return node.rank()


def _rank(followers: dict[int, _Node]) -> Followers:
    if len(followers) == 1:
        return Followers([*followers], 1.0)
    counts = [(follower.count, -token) for token, follower in followers.items()]
    best = nlargest(CANDIDATES, counts)
    total = sum(count for count, _ in counts)
    return Followers([-token for _, token in best], best[0][0] / total)


class SuffixCounts:
    """Counts of all runs of up to ``longest`` + 1 tokens of texts that come and go.

    The last text may grow until another one begins.
    """

    def __init__(self, longest: int = LONGEST) -> None:
        self._longest = longest
        self._root = _Node(_NOTHING, 0)
        self._root.followers = {}

    def append(self, text: CountedText, token_ids: Sequence[int]) -> None:
        """Append to a text; one that is empty begins here."""
        tokens, root, longest = text.tokens, self._root, self._longest
        for token in token_ids:
            tokens.append(token)
            end = len(tokens)
            runs: list[_Node] = []
            for node in (root, *text.runs):
                followers = node.followers
                assert followers is not None  # it was opened at the second occurrence
                node.ranked = None
                follower = followers.get(token)
                if follower is None:
                    followers[token] = _Node(tokens, end)
                    continue
                follower.count += 1
                if len(runs) < longest:
                    if follower.followers is None:
                        follower.open()
                    runs.append(follower)
                else:
                    follower.text = _NOTHING  # nothing is read below it
            text.runs = runs

    def remove(self, text: CountedText) -> None:
        """Take a whole text out; it must not be used again."""
        tokens = text.tokens
        for start in range(len(tokens)):
            node = self._root
            for token in tokens[start : start + self._longest + 1]:
                followers = node.followers
                assert followers is not None  # else the run stood there once, and is gone
                node.ranked = None
                node = followers[token]
                node.count -= 1
                if node.count == 0:
                    del followers[token]
                    break

    def find(self, tail: list[int]) -> Match | None:
        """The longest end of ``tail``, of ``longest`` tokens at most, that goes on in the texts.

        If a run goes on, so do its own ends: their lengths are searched by halves.
        """
        found, size = None, len(tail)
        least, most = 0, min(self._longest, size)
        while least < most:
            length = (least + most + 1) // 2
            match = self._match(tail[size - length :])
            if match is None:
                most = length - 1
            else:
                least, found = length, match
        return found

    def extend(self, match: Match, tail: list[int]) -> Match | None:
        """``find``, where ``match`` was the match before the last token of ``tail``."""
        length, node, at = match
        token = tail[-1]
        if at >= 0:
            if node.text[at] == token and at + 1 < len(node.text):
                return Match(length + 1, node, at + 1)
        elif length < self._longest and node.followers is not None:
            follower = node.followers.get(token)
            found = None if follower is None else _match(follower, length + 1)
            if found is not None:
                return found
        return self.find(tail[-length:])

    def _match(self, run: list[int]) -> Match | None:
        node = self._root
        for depth, token in enumerate(run):
            if node.followers is None:
                at, left = node.at, len(run) - depth
                goes_on = at + left < len(node.text)
                if goes_on and node.text[at : at + left] == run[depth:]:
                    return Match(len(run), node, at + left)
                return None
            follower = node.followers.get(token)
            if follower is None:
                return None
            node = follower
        return _match(node, len(run))


def _match(node: _Node, length: int) -> Match | None:
    if node.followers is None:
        return Match(length, node, node.at) if node.at < len(node.text) else None
    return Match(length, node) if node.followers else None


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
        """Remember what was written, and the few tokens before it."""
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
        # In the order of use. No LRUCache: a source is forgotten text by text, not as a whole.
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
    """Candidates for each of up to ``most`` tokens after ``tail``, made when they are asked for.

    drafted: to which the caller appends the candidate that it took. The draft ends where it takes
        none.

    Of the longest matches in ``known`` the one with the largest product of its length and of the
    share of its first follower is believed. The draft is ``REACH`` times as long as that match at
    most, and ends where its tokens together become improbable: the count of a short run, or an even
    split after a long one, is thin evidence.
    """
    matches = [counts.find(tail) for counts in known]
    chance = 1.0
    for depth in range(most):
        best = _best(matches)
        if best is None:
            return
        if depth == 0:
            most = min(most, REACH * best.length)
        chance *= best.followers.share
        if depth >= most or chance < LEAST_CHANCE:
            return
        before = len(drafted)
        yield best.followers.token_ids
        if len(drafted) == before:
            return
        tail.append(drafted[-1])
        matches = [
            counts.find(tail[-1:]) if match is None else counts.extend(match, tail)
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
