"""The records and protocols of a step: its batch, and what proposers and targets have to be."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from guided_spec.config import EngineConfig
from guided_spec.errors import ConfigError
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead, Pause
from guided_spec.masks.rows import MaskRows
from guided_spec.models.hidden_states import HiddenStates
from guided_spec.models.stock.routed import RoutedRows
from guided_spec.ops.host import Download, to_device
from guided_spec.ops.sampling.adjust import Adjustments
from guided_spec.ops.sampling.logprobs import LogprobsPlan
from guided_spec.ops.sampling.noise import DraftNoise, NoiseKeys, Stream, exponential_noise
from guided_spec.ops.sampling.verify import draw_noise
from guided_spec.ops.sampling.warp import Sampling, VerifyRows
from guided_spec.types import Accepted, Draft, DraftPolicy, Noise, Verifier


class PromptPiece(NamedTuple):
    """Prompt tokens for ``slot``, which come after the ``start`` that it holds already.

    tokens: of the whole text, for who reads hidden states; () where nobody does.
    """

    slot: int
    start: int
    token_ids: list[int]
    tokens: Sequence[int] = ()


class TargetOutput(NamedTuple):
    """One verify forward.

    logits: [B, K + 1, V]: row i follows the last committed token and i draft tokens.
    hidden_states: [B, K + 1, len(aux_hidden_layers) * H], in the order of the layers; None when the
        proposer asked for none.
    counts: [B] how many of the K + 1 tokens each row was read for; None for all.
    prompts: the hidden states of prompts that it read besides; None for none.
    num_before: [B] tokens of prompts that each row was read for besides; () for none.
    routed: the experts of its tokens, for the target's ``commit``; None where nobody asks.
    """

    logits: Tensor
    hidden_states: Tensor | None = None
    counts: Sequence[int] | None = None
    prompts: HiddenStates | None = None
    num_before: Sequence[int] = ()
    routed: RoutedRows | None = None


@dataclass(slots=True)
class DecodeBatch:
    """The requests that decode together in one step.

    slots: [B] each request's KV slot, the key under which a proposer may keep state; ascending.
    contexts: [B] prompt and output tokens so far. The last one is not in the KV cache yet.
    prompt_lengths: [B] how many of them are the prompt.
    constraints: [B] None for a free request.
    limits: [B] draft tokens that still fit the request, at most.
    sampling: the requests' parameters, on ``device``.
    mask_rows: host memory for the masks.
    num_draft_tokens: K for proposers that could draft without end.
    states: the target's hidden states that became known since the last step, of all positions
        but the last token's: of these requests but for those of ``prompts``, and for a proposer
        that ``reads_prompts`` of other slots, whose prompts are not read to their ends.
    policies: [B] the draft policy each request asks for, None where it leaves that to the proposer.
    verifier: which of ``guided_spec.step.VERIFIERS`` decides.
    adjustments: the biases, bans and penalties of all requests; None where no request has any.
    logprobs: which requests want log-probabilities, and which ones; None when none does.
    prefills: [B] equal where a prompt was read once for several; () where each has its own.
    sources: [B] equal where one text may be drafted from the other: their ``GuidedText.source``; ()
        where it is unknown; such texts share nothing.
    traced: the requests, by their rows, of which ``Step.probs`` is wanted.
    prompts: which the forward that verifies reads besides, of other slots, and of those of the
        batch that have only begun: of these nothing is known before; () where the engine hands
        none.
    """

    slots: tuple[int, ...]
    contexts: tuple[Sequence[int], ...]
    prompt_lengths: tuple[int, ...]
    constraints: tuple[Constraint | None, ...]
    limits: tuple[int, ...]
    sampling: Sampling
    mask_rows: MaskRows
    num_draft_tokens: int
    vocab_size: int
    device: torch.device
    states: HiddenStates = field(default_factory=HiddenStates)
    policies: tuple[DraftPolicy | None, ...] = ()
    verifier: Verifier = "rejection"
    adjustments: Adjustments | None = None
    logprobs: LogprobsPlan | None = None
    prefills: tuple[Hashable, ...] = ()
    sources: tuple[Hashable, ...] = ()
    traced: Sequence[int] = ()
    prompts: Sequence[PromptPiece] = ()

    def __len__(self) -> int:
        return len(self.slots)

    def positions(self) -> Tensor:
        """int64 [B]: the absolute position of the next token of each request."""
        return to_device([len(context) for context in self.contexts], self.device)

    def draft_keys(self, positions: Tensor) -> DraftNoise:
        """Which noise to sample the draft tokens at ``positions`` int64 [B] with.

        Coupled drafts share the target's noise; for the rejection sampler the two are independent,
        or its residual would not be. Drafts then have noise of their step alone, whose first
        position is in the high word: tokens drawn again must not be what was refused before.
        """
        stream = Stream.of_drafts(self.verifier)
        if stream is Stream.DRAFT:
            positions = positions + (self.positions() << 32)
        return DraftNoise(self.sampling.seeds, positions, stream, self.vocab_size)

    def draft_noise(self, positions: Tensor) -> Tensor:
        """[B, V] exponential(1): the noise of ``draft_keys``."""
        return exponential_noise(*self.draft_keys(positions))

    def verify_rows(self, noise: Noise | None = None) -> VerifyRows:
        """How the batch decides, with ``noise`` or the keys of its own."""
        seeds = self.sampling.seeds
        # Greedy rows read no noise; so nothing has to be uploaded for them.
        first = seeds if self.sampling.all_greedy else self.positions()
        keys = NoiseKeys(seeds, first)
        return VerifyRows(self.sampling, noise or keys, self.verifier, self.adjustments)

    def verify_noise(self, num_draft: int) -> Noise:
        """The noise of one step with a draft of ``num_draft`` tokens."""
        return draw_noise(self.verify_rows(), num_draft, self.vocab_size)


class DraftInFlight(Protocol):
    """A draft whose tokens the device knows, and the host perhaps not yet."""

    @property
    def draft(self) -> Draft:
        """Its ``token_ids`` are final; until ``finish``, ``num_tokens`` [B] is the most that a row
        may hold, and ``probs`` is None."""
        ...

    @property
    def most(self) -> tuple[int, ...]:
        """[B], known to the host: no row of the draft is longer, finished or not. The draft is as
        wide as the largest, or wider."""
        ...

    @property
    def is_advanced(self) -> bool:
        """Whether the host knows the tokens already, and the grammars have accepted them."""
        ...

    @property
    def serve_mailbox(self) -> Callable[[], None] | None:
        """Serves the device while it waits for the host in the draft; None: it does not wait.

        To be called before waiting for the device before ``finish``: the device goes on after a
        while without it, with a poor draft. It may be called again.
        """
        ...

    def finish(self) -> Draft:
        """Wait for the tokens and accept them; the draft with the same ``token_ids``.

        To be called once, before ``Lookahead.finish``, when the target's forward is launched.
        """
        ...

    def carry(self, accepted: Accepted, output: TargetOutput, packed: Download) -> object | None:
        """Launch the state for the next step's ``begin``; nothing waits for the device.

        output: of the verify forward. packed: int64 [B, K + 2] being copied to the host,
        ``num_accepted`` and the ``token_ids`` of ``accepted``. Returns None where there is none.
        """
        ...


LaunchCarry = Callable[[Accepted, TargetOutput, Download], object | None]
"""Launches and returns the state for the next step; see ``DraftInFlight.carry``."""


class FinishedDraft(NamedTuple):
    """A draft that the host knows already.

    launch_carry: launches the state for the next step; None: there is none.
    """

    draft: Draft
    most: tuple[int, ...]
    launch_carry: LaunchCarry | None = None

    @property
    def is_advanced(self) -> bool:
        """True: the host knows the tokens."""
        return True

    @property
    def serve_mailbox(self) -> None:
        """None: the device waits for nothing."""

    def finish(self) -> Draft:
        """The draft as it is."""
        return self.draft

    def carry(self, accepted: Accepted, output: TargetOutput, packed: Download) -> object | None:
        """State for the next step's draft, from ``launch_carry``; None where there is none."""
        return None if self.launch_carry is None else self.launch_carry(accepted, output, packed)


@runtime_checkable
class Proposer(Protocol):
    """Drafts tokens for the target to verify. The contract is in docs/add_a_proposer.md.

    A class that has it for a base writes ``begin`` and ``release``, and of the rest what it does.
    """

    aux_hidden_layers: tuple[int, ...]
    """Hidden states it wants from the target: index i is the input of layer i, n the output of the
    last of n layers, -1 that output after the final norm. () for none."""

    @abstractmethod
    def begin(
        self, batch: DecodeBatch, lookahead: Lookahead, carry: object | None = None
    ) -> DraftInFlight:
        """Draft up to ``batch.num_draft_tokens`` tokens a request, on ``batch.device``.

        Continues after ``lookahead.drafted`` and reports every token it drafts to the lookahead,
        by ``accept`` or ``extend``, now or in ``finish``; the draft holds its own tokens only.

        carry: state that the last step's draft returned; None where there is none. Texts may have
        continued with other tokens, ended, or changed their slots since.
        """
        ...

    @abstractmethod
    def release(self, slots: Sequence[int]) -> None:
        """Forget what is kept for these slots: their requests have ended."""
        ...

    def capture(self) -> Iterator[None]:
        """Capture CUDA graphs before the first step, one at each ``next``."""
        return iter(())

    @property
    def learns(self) -> bool:
        """Whether it drafts from what other requests wrote; a chain does where a member does.

        Requests with equal seeds then get noise of their own each: a draft must not depend on the
        noise that verifies it, which had a part in what an equal request wrote.
        """
        return False

    def learn(self, texts: Sequence[FinishedText]) -> None:
        """Texts that have ended well, before their slots are released; only where it ``learns``."""
        del texts

    def may_draft(self, num_draft_tokens: int) -> bool:
        """Whether it may draft anything where a batch has that K.

        Where it does not, the target's next forward is launched before this step's tokens are read.
        """
        return num_draft_tokens > 0

    @property
    def reads_prompts(self) -> bool:
        """Whether it reads the states of prompts that are not read to their ends; a later
        batch's ``states`` then lack those positions."""
        return False

    @property
    def runs_as(self) -> str:
        """What computes its drafts, in words, where a model does; "" where none does."""
        return ""

    @property
    def has_own_vocabulary(self) -> bool | None:
        """Whether it draws from fewer tokens than the target's, see ``Draft.columns``; None: both
        may be. The sampler's kernels are compiled for it beforehand.
        """
        return None

    @property
    def ends_chains(self) -> bool:
        """Whether a chain drafts nothing after its drafts in the same step.

        So the device may make them while the host goes on; otherwise a chain waits for them. This
        must not depend on the batch: a request's draft would depend on the other requests in it.
        """
        return False

    def interrupts(self, batch: DecodeBatch, lookahead: Lookahead) -> Pause | None:
        """Called on the first of a chain: where the others stop, so that it drafts again.

        Asked after each token of theirs. None lets them draft as far as they like.
        """
        del batch, lookahead
        return None


class FinishedText(NamedTuple):
    """A text that is complete, or as long as it may be.

    source: see ``DecodeBatch.sources``. token_ids: prompt and output. prompt_length: how many are
    the prompt.
    """

    source: Hashable
    token_ids: Sequence[int]
    prompt_length: int


@runtime_checkable
class SimpleProposer(Protocol):
    """A proposer that has nothing to overlap: ``from_propose`` makes it a ``Proposer``."""

    aux_hidden_layers: tuple[int, ...]

    def propose(self, batch: DecodeBatch, lookahead: Lookahead) -> Draft:
        """The draft, accepted by the grammars or not; see ``Proposer.begin``."""
        ...

    def release(self, slots: Sequence[int]) -> None:
        """Forget the state of these slots; see ``Proposer``."""
        ...


@runtime_checkable
class Learns(Protocol):
    """What a ``SimpleProposer`` may have besides; see ``Proposer``."""

    @property
    def learns(self) -> bool: ...
    def learn(self, texts: Sequence[FinishedText]) -> None: ...


class _FromPropose(Proposer):
    def __init__(self, proposer: SimpleProposer) -> None:
        self.aux_hidden_layers = proposer.aux_hidden_layers
        self._proposer = proposer
        self._learner = proposer if isinstance(proposer, Learns) and proposer.learns else None

    def begin(
        self, batch: DecodeBatch, lookahead: Lookahead, carry: object | None = None
    ) -> DraftInFlight:
        del carry
        before = lookahead.lengths
        proposed = self._proposer.propose(batch, lookahead)
        if not isinstance(proposed, Draft):
            name = type(self._proposer).__name__
            fix = "propose must return a Draft; no_draft(batch) is one without tokens"
            raise ConfigError(f"{name}.propose(...)", proposed, fix)
        draft = lookahead.advance(proposed, before)
        lengths, width = zip(before, lookahead.lengths, strict=True), draft.token_ids.shape[1]
        return FinishedDraft(draft, tuple(min(end - start, width) for start, end in lengths))

    @property
    def learns(self) -> bool:
        return self._learner is not None

    def learn(self, texts: Sequence[FinishedText]) -> None:
        if self._learner is not None:
            self._learner.learn(texts)

    def release(self, slots: Sequence[int]) -> None:
        self._proposer.release(slots)


def from_propose(proposer: Proposer | SimpleProposer) -> Proposer:
    """The whole contract for one that has ``propose`` alone; a ``Proposer`` comes back as it is.

    Raises ConfigError for anything else.
    """
    if isinstance(proposer, Proposer):
        return proposer
    if isinstance(proposer, SimpleProposer):
        return _FromPropose(proposer)
    fix = "needs aux_hidden_layers, release and propose; with begin, also Proposer as its base"
    raise ConfigError("proposer", type(proposer).__name__, fix)


class TargetModel(Protocol):
    """The model whose distribution the output has."""

    def verify(self, batch: DecodeBatch, flight: DraftInFlight) -> TargetOutput:
        """One forward over each request's last token and draft; may return before it is done.

        flight: holds the ``draft`` to verify; do not call its ``finish``. Rows need not be read
        beyond its ``most``; outputs beyond a row's end are never used.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProposerContext:
    """The one argument of every proposer's constructor.

    vocabulary: the target's tokens.
    encode: text to the tokenizer's own token ids, no special tokens added.
    tokenizer: the target's tokenizer, None when the engine runs without one.
    target: the target as a transformers model; None when the target is not one.
    config: the engine's settings.
    num_slots, max_model_len: how many requests run at once, and how long each may become.
    device, dtype: where and in what the target computes.
    argument: the text after the colon of the proposer's name, "" without one.
    draft: the draft model or head the user named: a folder, a hub id, a model, or None.
    blocks: the block tables of the target's keys and values, for proposers that keep their own by
        them, a ``guided_spec.models.packed.blocks.Blocks``; None where it has none.
    axes: a ``guided_spec.models.pictures.axes.SlotAxes`` of the target's texts, or None.
    window: in which CUDA graphs may be captured, a
        ``guided_spec.models.packed.graph_pool.CaptureWindow``; None never closes.
    """

    vocabulary: Vocabulary
    encode: Callable[[str], list[int]]
    tokenizer: Any
    target: Any
    config: EngineConfig
    num_slots: int
    max_model_len: int
    device: torch.device
    dtype: torch.dtype
    argument: str = ""
    draft: Any = None
    blocks: Any = None
    axes: Any = None
    window: Any = None
