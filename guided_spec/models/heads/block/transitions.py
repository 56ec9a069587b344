"""How places of a block depend on the token before: parts that some block heads have.

``MarkovHead``, of DSpark (DeepSeek's DeepSpec, and speculators): with e = w1[previous],

    logits = logits + w2 e                                            "vanilla"
    logits = logits + w2 (sigmoid(gate_proj [hidden ; e]) * e)        "gated"

``CandidateSelector``, of DFlash 2 (z-lab; SGLang and SpecForge have the same equations): of the k
likeliest tokens t of a place,

    score(t) = logit(t) + successor[t] . (predecessor[previous] * hidden_projection(hidden))

and no other token is drafted.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from guided_spec.models.heads.draft_head import DraftVocabulary

__all__ = ["CandidateSelector", "MarkovHead", "MarkovShape", "SelectorShape"]


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
        bias: Tensor = self.markov_w2(self._latent(hidden, previous))
        return logits.float() + bias.float()

    def pairs(self, hidden: Tensor, previous: Tensor, token_ids: Tensor) -> Tensor:
        """See ``Transition``."""
        spread = hidden.unsqueeze(2).expand(-1, -1, previous.shape[2], -1)
        scored = token_ids
        if self._vocabulary is not None:
            scored = self._vocabulary.columns[token_ids].long()
        rows = self.markov_w2.weight[scored]
        return torch.einsum("rwps,rwcs->rwpc", self._latent(spread, previous).float(), rows.float())

    def _latent(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """[..., H] and int64 [...] to [..., rank]."""
        embedded: Tensor = self.markov_w1(previous)
        if self.gate_proj is None:
            return embedded
        gate = self.gate_proj(torch.cat([hidden.to(embedded.dtype), embedded], -1))
        return torch.sigmoid(gate) * embedded


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
        values, found = logits.float().topk(self._top_k)
        gains = self.pairs(hidden.unsqueeze(1), previous.view(-1, 1, 1), found.unsqueeze(1))
        kept = torch.full_like(logits, -torch.inf, dtype=torch.float32)
        return kept.scatter_(1, found, values + gains[:, 0, 0])

    def pairs(self, hidden: Tensor, previous: Tensor, token_ids: Tensor) -> Tensor:
        """See ``Transition``."""
        wanted = self.hidden_projection(hidden).unsqueeze(2) * self.predecessor_codebook[previous]
        found = self.successor_codebook[token_ids]
        return torch.einsum("rwps,rwcs->rwpc", wanted.float(), found.float())
