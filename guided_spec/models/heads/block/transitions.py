"""How a position of a block depends on the tokens before, of the heads that have a part for it.

``MarkovHead``, of DSpark (DeepSeek's DeepSpec, and speculators): with e = w1[previous],

    logits = logits + w2 e                                            "vanilla"
    logits = logits + w2 (sigmoid(gate_proj [hidden ; e]) * e)        "gated"

``RecurrentMarkovHead``, its kind "rnn", has a state s, which is 0 before the block:

    gate, candidate, output = joint_proj [s ; e ; hidden]
    s = sigmoid(gate) * s + (1 - sigmoid(gate)) * tanh(candidate)
    logits = logits + w2 tanh(output)

``PrefixHead``, of Domino (Huang et al., arXiv:2605.29707; SGLang has the same equations): s is 0
before the last token of the text, and with its embedding and those of the tokens drafted so far

    s = prefix_gru(embedding, s)
    logits = logits + embed_proj [hidden ; s]

but for the first ``num_plain`` positions, whose logits stay.

``CandidateSelector``, of DFlash 2 (z-lab; SGLang and SpecForge have the same equations): of the k
likeliest tokens t of a position,

    score(t) = logit(t) + successor[t] . (predecessor[previous] * hidden_projection(hidden))

and no other token is drafted.

DSpark's ``ConfidenceHead`` says how likely a token is to stay, from [hidden ; e]. It is trained and
kept; drafts have the length that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from guided_spec.models.heads.draft_head import DraftVocabulary

GROUP = 32  # tokens, of which the likeliest is read first


class BlockPosition(NamedTuple):
    """A position of each of R blocks. All ids are the target's.

    hidden: [R, H], its output. previous: int64 [R], the token before it. state: [R, M], what
    ``Transition.advance`` made of it. depth: int64 [R], positions of its block before it. plan:
    float32 [R, L], of a ``BlockPlanner``; None without one.
    """

    hidden: Tensor
    previous: Tensor
    state: Tensor
    depth: Tensor
    plan: Tensor | None = None


class Transition(Protocol):
    """How the token of a position depends on those before it in the block.

    state_size: M, numbers that a position takes from the one before; 0: it depends on the token
    before alone.
    """

    state_size: int

    def advance(self, state: Tensor, hidden: Tensor, previous: Tensor) -> Tensor:
        """The state [R, M] of a position from that of the one before, zeros for a block's first.

        hidden, previous: as of ``BlockPosition``.
        """
        ...

    def step(self, logits: Tensor, position: BlockPosition) -> Tensor:
        """Logits [R, D] of a position by itself to float32 [R, D] at ``position``."""
        ...


class BlockPlanner(Protocol):
    """Looks at all positions of a block before the first one is drafted."""

    def plan_size(self, width: int) -> int:
        """L: numbers that the plan of ``width`` positions has."""
        ...

    def anchors(self, states: Tensor) -> Tensor:
        """What is kept of the target's states [R, X] at the last verified positions: [R, H]."""
        ...

    def plan(self, logits: Tensor, outputs: Tensor, anchors: Tensor) -> Tensor:
        """Float32 [R, L], of logits [R, W, D] and outputs [R, W, H] of all positions."""
        ...


class MarkovShape(NamedTuple):
    """rank: of the two matrices. kind: whose equation, see the module's docstring."""

    rank: int
    kind: Literal["vanilla", "gated", "rnn"]


class PrefixShape(NamedTuple):
    """state_size: of the GRU. rank: of the correction. num_plain: first positions without one."""

    state_size: int
    rank: int
    num_plain: int


class SelectorShape(NamedTuple):
    """rank: of the codebooks. top_k: candidates of a position."""

    rank: int
    top_k: int


class MarkovHead(nn.Module):
    """A ``Transition`` of the kinds without a state.

    vocabulary: what is scored; None: the target's ``vocab_size`` tokens.
    """

    state_size = 0

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

    def advance(self, state: Tensor, hidden: Tensor, previous: Tensor) -> Tensor:
        """Nothing; see ``Transition``."""
        del hidden, previous
        return state

    def step(self, logits: Tensor, position: BlockPosition) -> Tensor:
        """Logits [R, D] to float32 [R, D]; see ``Transition``."""
        return logits.float() + self.bias(position.hidden, self.markov_w1(position.previous))

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


class RecurrentMarkovHead(nn.Module):
    """A ``Transition`` of the kind "rnn". Its state holds s, and tanh(output).

    vocabulary: as of ``MarkovHead``.
    """

    def __init__(
        self,
        shape: MarkovShape,
        hidden_size: int,
        vocab_size: int,
        vocabulary: DraftVocabulary | None,
    ) -> None:
        super().__init__()
        scored = vocab_size if vocabulary is None else len(vocabulary)
        self.state_size = 2 * shape.rank
        self.markov_w1 = nn.Embedding(vocab_size, shape.rank)
        self.markov_w2 = nn.Linear(shape.rank, scored, bias=False)
        self.joint_proj = nn.Linear(2 * shape.rank + hidden_size, 3 * shape.rank)

    def advance(self, state: Tensor, hidden: Tensor, previous: Tensor) -> Tensor:
        """[R, 2 * rank]: s, and tanh(output); see ``Transition``."""
        embedded = self.markov_w1(previous)
        before, _ = state.to(embedded.dtype).chunk(2, -1)
        joined = torch.cat([before, embedded, hidden.to(embedded.dtype)], -1)
        gate, candidate, output = self.joint_proj(joined).chunk(3, -1)
        found = torch.lerp(candidate.tanh(), before, gate.sigmoid())
        return torch.cat([found, output.tanh()], -1)

    def step(self, logits: Tensor, position: BlockPosition) -> Tensor:
        """Logits [R, D] to float32 [R, D]; see ``Transition``."""
        _, output = position.state.chunk(2, -1)
        bias: Tensor = self.markov_w2(output.to(self.markov_w2.weight.dtype))
        return logits.float() + bias


class PrefixHead(nn.Module):
    """A ``Transition`` over all of the target's ``vocab_size`` tokens, whose state is a GRU's.

    embed: token ids int64 [R] to [R, H].
    """

    def __init__(
        self,
        shape: PrefixShape,
        hidden_size: int,
        vocab_size: int,
        embed: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.state_size = shape.state_size
        self._num_plain, self._embed = shape.num_plain, embed
        self.prefix_gru = nn.GRUCell(hidden_size, shape.state_size, bias=False)
        width = hidden_size + shape.state_size
        self.embed_proj = nn.Sequential(
            nn.Linear(width, shape.rank, bias=False),
            nn.SiLU(),
            nn.Linear(shape.rank, vocab_size, bias=False),
        )

    def advance(self, state: Tensor, hidden: Tensor, previous: Tensor) -> Tensor:
        """[R, M]: the GRU's state after ``previous``; see ``Transition``."""
        del hidden
        kind = self.prefix_gru.weight_hh.dtype
        found: Tensor = self.prefix_gru(self._embed(previous).to(kind), state.to(kind))
        return found

    def step(self, logits: Tensor, position: BlockPosition) -> Tensor:
        """Logits [R, D] to float32 [R, D]; see ``Transition``."""
        kind = self.prefix_gru.weight_hh.dtype
        joined = torch.cat([position.hidden.to(kind), position.state.to(kind)], -1)
        correction: Tensor = self.embed_proj(joined)
        is_corrected = (position.depth >= self._num_plain).unsqueeze(1)
        return logits.float() + correction.where(is_corrected, 0)


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

    state_size = 0

    def __init__(self, shape: SelectorShape, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self._top_k = min(shape.top_k, vocab_size)
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, shape.rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, shape.rank))
        self.hidden_projection = nn.Linear(hidden_size, shape.rank, bias=False)

    def advance(self, state: Tensor, hidden: Tensor, previous: Tensor) -> Tensor:
        """Nothing; see ``Transition``."""
        del hidden, previous
        return state

    def step(self, logits: Tensor, position: BlockPosition) -> Tensor:
        """Logits [R, D] to float32 [R, D] at ``position``: -inf for all but ``top_k`` tokens."""
        values, found = likeliest(logits.float(), self._top_k)
        predecessors = self.predecessor_codebook[position.previous]
        wanted = self.hidden_projection(position.hidden) * predecessors
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
