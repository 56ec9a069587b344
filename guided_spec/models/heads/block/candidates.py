"""What one forward of a block says: the likeliest tokens of each place, and how they follow.

Some heads have a part that says how a place depends on the token before. ``MarkovHead``, of DSpark
(DeepSeek's DeepSpec, and speculators): with e = w1[previous],

    logits = logits + w2 e                                            "vanilla"
    logits = logits + w2 (sigmoid(gate_proj [hidden ; e]) * e)        "gated"

``CandidateSelector``, of DFlash 2 (z-lab; SGLang and SpecForge have the same equations): of the k
likeliest tokens t of a place,

    score(t) = logit(t) + successor[t] . (predecessor[previous] * hidden_projection(hidden))

and no other token is drafted.

DSpark's ``ConfidenceHead`` says how likely a token is to stay, from [hidden ; e]. It is trained and
kept; drafts have the length that is asked for.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from guided_spec.models.heads.draft_head import DraftVocabulary

__all__ = [
    "Block",
    "CandidateSelector",
    "Candidates",
    "ConfidenceHead",
    "MarkovHead",
    "MarkovShape",
    "SelectorShape",
    "Transition",
    "choose_candidates",
]


class Block(NamedTuple):
    """The W places behind R texts, as one forward has them.

    logits: [R, W, D], of each place by itself. hidden: [R, W, H], what they were made from. last:
    int64 [R], target ids of the texts' last tokens. candidates: what ``choose_candidates`` makes of
    the logits, where that was found with them; None: it was not.
    """

    logits: Tensor
    hidden: Tensor
    last: Tensor
    candidates: Candidates | None = None

    def first(self, count: int) -> Block:
        """The first ``count`` places."""
        found = self.candidates
        cut = None if found is None else found.first(count)
        return Block(self.logits[:, :count], self.hidden[:, :count], self.last, cut)

    def with_logits(self, logits: Tensor) -> Block:
        """The block under other logits [R, W, D], whose candidates nobody knows."""
        return self._replace(logits=logits, candidates=None)


class Transition(Protocol):
    """How the token of a place depends on the one before it; all ids are the target's."""

    def step(self, logits: Tensor, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits [R, D] of a place by itself to float32 [R, D] behind ``previous``, int64 [R].

        hidden: [R, H], of the place.
        """
        ...

    def pairs(self, hidden: Tensor, previous: Tensor, token_ids: Tensor) -> Tensor:
        """float32 [R, W, P, C]: what ``token_ids`` int64 [R, W, C] gain behind ``previous``.

        hidden: [R, W, H]. previous: int64 [R, W, P], of the places before.
        """
        ...


class Candidates(NamedTuple):
    """The C likeliest tokens of each place, the best first.

    token_ids: int64 [R, W, C], target ids. scores: float32 [R, W, C], logits of each place by
    itself; -inf: not to be drafted. gains: float32 [R, W, C, C], [r, w, p, c] is what
    candidate c of place w gains behind candidate p of the place before; at place 0 every p is the
    text's last token. None where places do not depend on one another.
    """

    token_ids: Tensor
    scores: Tensor
    gains: Tensor | None

    def first(self, count: int) -> Candidates:
        """Those of the first ``count`` places."""
        gains = None if self.gains is None else self.gains[:, :count]
        return Candidates(self.token_ids[:, :count], self.scores[:, :count], gains)

    def of_rows(self, count: int) -> Candidates:
        """Those of the first ``count`` texts."""
        gains = None if self.gains is None else self.gains[:count]
        return Candidates(self.token_ids[:count], self.scores[:count], gains)


def choose_candidates(
    block: Block,
    count: int,
    vocabulary: DraftVocabulary | None = None,
    transition: Transition | None = None,
) -> Candidates:
    """The candidates of a block; C is ``count``, or D where there are fewer.

    vocabulary: what the logits score; None: the target's own tokens. With a ``transition``, the
    candidates of a place are the likeliest ones behind the best candidate of the place before.
    """
    count = min(count, block.logits.shape[-1])
    known = block.candidates
    if known is not None and known.token_ids.shape[2] == count:
        return known
    if transition is None:
        scores, found = _likeliest(block.logits, count)
        return Candidates(_to_target(found, vocabulary), scores.float(), None)
    logits = block.logits.float()
    chosen, kept, previous = list[Tensor](), list[Tensor](), block.last
    for place in range(logits.shape[1]):
        alone = logits[:, place]
        behind = transition.step(alone, block.hidden[:, place], previous)
        best, found = _likeliest(behind, count)
        # What the transition rules out stays out, whatever comes before it.
        kept.append(alone.gather(1, found).masked_fill(best.isneginf(), -torch.inf))
        chosen.append(_to_target(found, vocabulary))
        previous = chosen[-1][:, 0]
    token_ids = torch.stack(chosen, 1)
    before = block.last[:, None, None].expand(-1, 1, count)
    gains = transition.pairs(block.hidden, torch.cat([before, token_ids[:, :-1]], 1), token_ids)
    return Candidates(token_ids, torch.stack(kept, 1), gains)


GROUP = 32  # tokens, of which the likeliest is looked at first


class _Likeliest(NamedTuple):
    """values: the highest logits [..., C], the best first. found: int64, where they stand."""

    values: Tensor
    found: Tensor


def _likeliest(logits: Tensor, count: int) -> _Likeliest:
    """``topk`` of logits [..., D] that reads a large vocabulary once.

    The ``count`` highest logits stand in the ``count`` groups with the highest peaks; so what is
    sorted are the peaks of the groups, and then the tokens of so many of them.
    """
    size = logits.shape[-1]
    if size <= 2 * GROUP * count:
        return _Likeliest(*logits.topk(count))
    whole = size // GROUP * GROUP
    peaks = logits[..., :whole].unflatten(-1, (-1, GROUP)).amax(-1)
    if whole < size:
        peaks = torch.cat([peaks, logits[..., whole:].amax(-1, keepdim=True)], -1)
    groups = peaks.topk(count, sorted=False).indices
    places = torch.arange(GROUP, device=logits.device)
    tokens = (groups.unsqueeze(-1) * GROUP + places).flatten(-2)
    held = logits.gather(-1, tokens.clamp_max(size - 1)).masked_fill(tokens >= size, -torch.inf)
    values, at = held.topk(count)
    return _Likeliest(values, tokens.gather(-1, at))


def _to_target(draft_ids: Tensor, vocabulary: DraftVocabulary | None) -> Tensor:
    return draft_ids if vocabulary is None else vocabulary.to_target(draft_ids)


class MarkovShape(NamedTuple):
    """rank: of the two matrices. kind: whose equation, see the module's docstring."""

    rank: int
    kind: Literal["vanilla", "gated"]


class SelectorShape(NamedTuple):
    """rank: of the codebooks. top_k: candidates of a place."""

    rank: int
    top_k: int


class MarkovHead(nn.Module):
    """A ``Transition``. vocabulary: what is scored; None: the target's ``vocab_size`` tokens."""

    def __init__(
        self,
        shape: MarkovShape,
        hidden_size: int,
        vocab_size: int,
        vocabulary: DraftVocabulary | None,
    ) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        scored = vocab_size if vocabulary is None else len(vocabulary)
        self.markov_w1 = nn.Embedding(vocab_size, shape.rank)
        self.markov_w2 = nn.Linear(shape.rank, scored, bias=False)
        self.gate_proj: nn.Linear | None = None
        if shape.kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + shape.rank, shape.rank)

    def step(self, logits: Tensor, hidden: Tensor, previous: Tensor) -> Tensor:
        """See ``Transition``."""
        return logits.float() + self.bias(hidden, self.markov_w1(previous)).float()

    def bias(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """What is added to the logits [..., D] behind tokens of w1 ``embedded`` [..., rank]."""
        bias: Tensor = self.markov_w2(self._latent(hidden, embedded))
        return bias

    def pairs(self, hidden: Tensor, previous: Tensor, token_ids: Tensor) -> Tensor:
        """See ``Transition``."""
        spread = hidden.unsqueeze(2).expand(-1, -1, previous.shape[2], -1)
        scored = token_ids
        if self._vocabulary is not None:
            scored = self._vocabulary.columns[token_ids].long()
        rows = self.markov_w2.weight[scored]
        latent = self._latent(spread, self.markov_w1(previous))
        return torch.einsum("rwps,rwcs->rwpc", latent.float(), rows.float())

    def _latent(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """[..., H] and [..., rank] to [..., rank]."""
        if self.gate_proj is None:
            return embedded
        gate = self.gate_proj(torch.cat([hidden.to(embedded.dtype), embedded], -1))
        return torch.sigmoid(gate) * embedded


class ConfidenceHead(nn.Module):
    """How likely the verifier is to keep what a place drafts, as a logit.

    width: H, or H + rank where it reads the token before by the Markov head's w1.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, joined: Tensor) -> Tensor:
        """[..., H + rank], outputs and embedded tokens before them, to [...]."""
        found: Tensor = self.proj(joined[..., : self.proj.in_features])
        return found.squeeze(-1)


class CandidateSelector(nn.Module):
    """A ``Transition`` over all of the target's ``vocab_size`` tokens."""

    def __init__(self, shape: SelectorShape, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self._top_k = min(shape.top_k, vocab_size)
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, shape.rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, shape.rank))
        self.hidden_projection = nn.Linear(hidden_size, shape.rank, bias=False)

    def step(self, logits: Tensor, hidden: Tensor, previous: Tensor) -> Tensor:
        """See ``Transition``; -inf for all but ``top_k`` tokens."""
        values, found = _likeliest(logits.float(), self._top_k)
        gains = self.pairs(hidden.unsqueeze(1), previous.view(-1, 1, 1), found.unsqueeze(1))
        kept = torch.full_like(logits, -torch.inf, dtype=torch.float32)
        return kept.scatter_(1, found, values + gains[:, 0, 0])

    def pairs(self, hidden: Tensor, previous: Tensor, token_ids: Tensor) -> Tensor:
        """See ``Transition``."""
        wanted = self.hidden_projection(hidden).unsqueeze(2) * self.predecessor_codebook[previous]
        found = self.successor_codebook[token_ids]
        return torch.einsum("rwps,rwcs->rwpc", wanted.float(), found.float())
