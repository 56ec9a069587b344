"""How a position of a block depends on the token before, of the heads that have a part for it.

``MarkovHead``, of DSpark (DeepSeek's DeepSpec, and speculators): with e = w1[previous],

    logits = logits + w2 e                                            "vanilla"
    logits = logits + w2 (sigmoid(gate_proj [hidden ; e]) * e)        "gated"

``CandidateSelector``, of DFlash 2 (z-lab; SGLang and SpecForge have the same equations): of the k
likeliest tokens t of a position,

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

GROUP = 32  # tokens, of which the likeliest is read first


class Transition(Protocol):
    """How the token of a position depends on the one before it; all ids are the target's."""

    def step(self, logits: Tensor, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits [R, D] of a position by itself to float32 [R, D] after ``previous``, int64 [R].

        hidden: [R, H], of the position.
        """
        ...


class MarkovShape(NamedTuple):
    """rank: of the two matrices. kind: whose equation, see the module's docstring."""

    rank: int
    kind: Literal["vanilla", "gated"]


class SelectorShape(NamedTuple):
    """rank: of the codebooks. top_k: candidates of a position."""

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
        scored = vocab_size if vocabulary is None else len(vocabulary)
        self.markov_w1 = nn.Embedding(vocab_size, shape.rank)
        self.markov_w2 = nn.Linear(shape.rank, scored, bias=False)
        self.gate_proj: nn.Linear | None = None
        if shape.kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + shape.rank, shape.rank)

    def step(self, logits: Tensor, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits [R, D] to float32 [R, D] after ``previous``; see ``Transition``."""
        return logits.float() + self.bias(hidden, self.markov_w1(previous))

    def bias(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """What is added to the logits [..., D] after tokens of w1 ``embedded`` [..., rank]."""
        bias: Tensor = self.markov_w2(self._latent(hidden, embedded))
        return bias

    def _latent(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """[..., H] and [..., rank] to [..., rank]."""
        if self.gate_proj is None:
            return embedded
        gate = self.gate_proj(torch.cat([hidden.to(embedded.dtype), embedded], -1))
        return torch.sigmoid(gate) * embedded


class ConfidenceHead(nn.Module):
    """How likely the verifier is to keep what a position drafts, as a logit.

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
        """Logits [R, D] to float32 [R, D] after ``previous``: -inf for all but ``top_k`` tokens."""
        values, found = likeliest(logits.float(), self._top_k)
        wanted = self.hidden_projection(hidden) * self.predecessor_codebook[previous]
        successors = self.successor_codebook[found]
        gains = torch.einsum("rs,rcs->rc", wanted.float(), successors.float())
        kept = torch.full_like(logits, -torch.inf, dtype=torch.float32)
        return kept.scatter_(1, found, values + gains)


class Likeliest(NamedTuple):
    """values: the highest logits [..., C], the best first. found: int64, their indices."""

    values: Tensor
    found: Tensor


def likeliest(logits: Tensor, count: int) -> Likeliest:
    """``topk`` of logits [..., D] that reads a large vocabulary once.

    The ``count`` highest logits stand in the ``count`` groups with the highest peaks; so what is
    sorted are the peaks of the groups, and then the tokens of so many of them.
    """
    size = logits.shape[-1]
    if size <= 2 * GROUP * count:
        return Likeliest(*logits.topk(count))
    whole = size // GROUP * GROUP
    peaks = logits[..., :whole].unflatten(-1, (-1, GROUP)).amax(-1)
    if whole < size:
        peaks = torch.cat([peaks, logits[..., whole:].amax(-1, keepdim=True)], -1)
    groups = peaks.topk(count, sorted=False).indices
    offsets = torch.arange(GROUP, device=logits.device)
    tokens = (groups.unsqueeze(-1) * GROUP + offsets).flatten(-2)
    held = logits.gather(-1, tokens.clamp_max(size - 1)).masked_fill(tokens >= size, -torch.inf)
    values, at = held.topk(count)
    return Likeliest(values, tokens.gather(-1, at))
