"""A learned draft head drafts for the target: EAGLE, EAGLE-3, MTP and blocks, all by one class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guided_spec.core import (
    DecodeBatch,
    DraftInFlight,
    PromptPiece,
    Proposer,
    ProposerContext,
    TargetOutput,
)
from guided_spec.errors import ConfigError, ModelError
from guided_spec.masks.lookahead import Lookahead
from guided_spec.models.heads.block.model import BlockHead
from guided_spec.models.heads.block.reader import (
    BlockReader,
    ContextReader,
    MaskedReader,
    PackedContextReader,
    PackedMaskedReader,
)
from guided_spec.models.heads.block.runner import BlockRunner
from guided_spec.models.heads.draft_head import DraftHead
from guided_spec.models.heads.eagle import Eagle3Head
from guided_spec.models.heads.loading import load_head
from guided_spec.models.heads.slot_head import HeadRunner, SlotHead, SlotLimits
from guided_spec.models.hidden_states import HiddenStates, Unread
from guided_spec.models.packed.heads import PackedBlock, PackedEagle3, PackedMtp
from guided_spec.models.packed.slot_head import AheadRunner, PackedSlotHead, ReadAhead
from guided_spec.models.packed_form import is_packed_on
from guided_spec.ops.host import Download, pad_ids, to_device
from guided_spec.ops.mailbox import can_run, can_share
from guided_spec.proposers.choice_graphs import ChoiceGraphs
from guided_spec.proposers.device_masks import DeviceMasks, DraftPrefix
from guided_spec.proposers.draft_graphs import DraftGraphs
from guided_spec.proposers.draft_session import DraftRows, DraftSession, no_draft_in_flight
from guided_spec.proposers.drafting import read_policy, shared_prompts
from guided_spec.proposers.host_masks import HostMasks
from guided_spec.types import Accepted, DraftPolicy

DEFAULT_POLICY: DraftPolicy = "mask"


class _ReadAhead(NamedTuple):
    """What was read of the accepted tokens before the host knew them.

    rows: by slot, the row of ``packed`` and the length of the text before it. packed: see
    ``DraftInFlight.carry``.
    """

    rows: dict[int, tuple[int, int]]
    packed: Download


class LearnedHead(Proposer):
    """Drafts with a head that is fed with the target's hidden states.

    A step that drafts first reads the tokens verified since the last one, with the target's hidden
    states, and so overwrites what the last draft stored; then it drafts from its own output.

    head: on the device and in the dtype of ``context``. The context's argument is the draft policy.
    run: makes what runs the head over its slots.
    Raises ConfigError for an unknown policy, ModelError when the head cannot run over slots.
    """

    def __init__(
        self, context: ProposerContext, head: DraftHead | BlockHead, run: Run | None = None
    ) -> None:
        self.aux_hidden_layers = head.aux_hidden_layers
        self._context, self._longest = context, context.config.num_draft_tokens
        config, length = context.config, context.max_model_len
        width = config.num_draft_tokens + 1
        limits = SlotLimits(context.num_slots, length, config.prefill_tokens, width)
        self._head, self._ahead = (run or _over_slots)(head, limits, context)
        self._vocabulary = head.vocabulary
        target_ids = None if head.vocabulary is None else head.vocabulary.target_ids
        sources = None if self._ahead is None else self._ahead.sources
        self._choices = ChoiceGraphs.on(context, target_ids, sources)
        self._graphs: DraftGraphs | None = None
        forward = None if self._ahead is None else self._ahead.draft_forward(self._longest)
        if forward is not None and can_run(context.device):
            self._graphs = DraftGraphs(forward, target_ids, context)
        self._can_wait = can_share(context.device)  # for the host, while a draft is made
        self._policy = read_policy(context.argument, DEFAULT_POLICY)

    def begin(
        self, batch: DecodeBatch, lookahead: Lookahead, carry: object | None = None
    ) -> DraftInFlight:
        """Up to K tokens a request, from its second step on if its prompt is a single token."""
        self._commit_read_ahead(batch, carry)
        self._read(batch)
        launch_carry = partial(self.read_ahead, batch)
        if batch.num_draft_tokens == 0:
            return no_draft_in_flight(batch, launch_carry)
        open_rows = self._open_rows(batch, lookahead)
        if self._graphs is not None:
            most = tuple(min(limit, batch.num_draft_tokens) for limit in batch.limits)
            batch = replace(batch, limits=most)
        rows = DraftRows.from_batch(batch, lookahead, self._policy, open_rows)
        launched = self._launch(rows, open_rows) if open_rows else None
        if launched is not None:
            return DraftSession(rows, launched, self._vocabulary, launch_carry)
        masks = HostMasks(rows, self._vocabulary, self._choices)
        if open_rows:
            self._draft(masks, rows, open_rows)
        return masks.in_flight(launch_carry)

    def read_ahead(
        self, batch: DecodeBatch, accepted: Accepted, output: TargetOutput, packed: Download
    ) -> object | None:
        """The head reads the accepted tokens while the host commits them; for ``begin``.

        Before them it reads what the forward has read of prompts: no step has to wait for that.
        """
        head, lengths = self._ahead, [len(context) for context in batch.contexts]
        if head is None or output.hidden_states is None:
            return None
        if output.prompts:
            self._read_prompts(batch.prompts, output.prompts)
        pairs = enumerate(zip(batch.slots, lengths, strict=True))
        rows = [row for row, (slot, length) in pairs if 1 < length == head.length(slot) + 1]
        counts = output.counts or [accepted.token_ids.shape[1]] * len(batch)
        slots, counts = [batch.slots[row] for row in rows], [counts[row] for row in rows]
        if not rows or not head.can_read_ahead(slots, counts):
            return None
        fresh = (accepted.token_ids, output.hidden_states, accepted.num_accepted)
        if len(rows) < len(batch):  # the head has more to read of the others than was read here
            index = to_device(rows, batch.device)
            token_ids, states, num_accepted = fresh
            fresh = token_ids[index], states[index], num_accepted[index]
        head.read_ahead(ReadAhead(slots, *fresh, counts))
        known = {slot: (row, lengths[row]) for slot, row in zip(slots, rows, strict=True)}
        return _ReadAhead(known, packed)

    def capture(self) -> Iterator[None]:
        """Capture the graphs of the head and of whole drafts, one at each ``next``."""
        if not self._longest:
            return
        self._choices.capture(self._context, self._context.dtype)
        if self._ahead is not None:
            yield from self._ahead.capture()
        if self._graphs is not None:
            yield from self._graphs.capture()

    @property
    def ends_chains(self) -> bool:
        """True under ``validate``, and where a graph drafts under masks while the host goes on."""
        return self._policy == "validate" or (self._graphs is not None and self._can_wait)

    @property
    def reads_prompts(self) -> bool:
        """So that no step waits for thousands of tokens at once."""
        return True

    @property
    def runs_as(self) -> str:
        """Packed forwards where the head reads ahead, else stock modules."""
        return "stock modules" if self._ahead is None else "packed forwards"

    @property
    def has_own_vocabulary(self) -> bool:
        """Whether the head has a vocabulary of its own."""
        return self._vocabulary is not None

    def release(self, slots: Sequence[int]) -> None:
        """The slots start empty with their next requests."""
        self._head.release(slots)

    def _open_rows(self, batch: DecodeBatch, lookahead: Lookahead) -> list[int]:
        pairs = enumerate(zip(lookahead.is_open, lookahead.drafted, strict=True))
        return [
            row
            for row, (is_open, drafted) in pairs
            if is_open and self._may_draft(batch, len(drafted), row)
        ]

    def _draft(self, masks: HostMasks, rows: DraftRows, open_rows: Sequence[int]) -> None:
        """Draft token by token for ``open_rows``."""
        batch, drafted = rows.batch, rows.lookahead.drafted
        slots = [batch.slots[row] for row in open_rows]
        self._append_drafted(slots, [drafted[row] for row in open_rows], batch.device)
        index = None  # nothing has to be picked or spread
        if len(open_rows) < len(batch):
            index = to_device(open_rows, batch.device)

        def logits() -> Tensor:
            scores = self._head.logits(slots)
            if index is None:
                return scores
            full = scores.new_full((len(batch), scores.shape[1]), float("-inf"))
            return full.index_copy_(0, index, scores)

        def forward(token_ids: Tensor) -> Tensor:
            self._head.append(slots, token_ids if index is None else token_ids[index])
            return logits()

        masks.draft(logits(), forward)

    def _launch(self, rows: DraftRows, open_rows: Sequence[int]) -> DeviceMasks | None:
        """Draft by one graph, if it can be; others than ``open_rows`` draft too, unused."""
        batch, lookahead, slots = rows.batch, rows.lookahead, rows.batch.slots
        if self._graphs is None or batch.adjustments is not None:
            return None
        if lookahead.turns and not self.ends_chains:  # they end one after another
            return None
        texts = rows.tables()
        if rows.masked and not (self._can_wait or (texts is not None and texts.is_alone)):
            return None
        self._head.rewind(slots)
        if any(self._head.depth(slot) for slot in slots):
            return None  # another draft of this step has followed it
        prefix = None
        if any(rows.starts[row] for row in open_rows):
            drafted, is_open = lookahead.drafted, set(open_rows)
            held = [drafted[row] if row in is_open else () for row in range(len(batch))]
            prefix = DraftPrefix.from_rows(held, batch.num_draft_tokens, batch.device)
        return self._graphs.launch(rows, slots, prefix, texts)

    def _may_draft(self, batch: DecodeBatch, drafted: int, row: int) -> bool:
        """Whether the slot has been read, and can hold the longest draft after its text.

        drafted: tokens that the draft holds already.

        Where it drafts by a graph, that holds K tokens of the draft, whichever member they are
        from: a longer one costs all requests a step of the head. Later tokens come in the next
        step, from the target's own hidden states.
        """
        slot = batch.slots[row]
        longest = max(batch.num_draft_tokens, self._longest)
        if self._graphs is not None and drafted >= batch.num_draft_tokens:
            return False
        length, known = len(batch.contexts[row]), self._head.length(slot)
        fits = length + drafted + longest <= self._head.max_length
        return fits and batch.num_draft_tokens > 0 and 0 < known == length - 1

    def _commit_read_ahead(self, batch: DecodeBatch, carry: object | None) -> None:
        """What was read ahead counts where it is what became of the text."""
        head = self._ahead
        if not isinstance(carry, _ReadAhead) or head is None:
            return
        rows = carry.packed.wait().tolist()
        for slot, context in zip(batch.slots, batch.contexts, strict=True):
            at, length = carry.rows.get(slot, (0, 0))
            # A slot that was released since is at 0, whatever its new text is.
            if length > 0 and head.length(slot) + 1 == length:
                num_accepted, *token_ids = rows[at]
                if list(context[length:]) == token_ids[: num_accepted + 1]:
                    head.commit(slot, num_accepted + 1)

    def _read(self, batch: DecodeBatch) -> None:
        """Read what is known and not read yet, of prompts that have only begun too."""
        if not batch.states and batch.num_draft_tokens == 0:
            return
        head = self._head
        coming = {prompt.slot for prompt in batch.prompts}  # read by this step's own forward
        wanted: dict[int, int | None] = dict.fromkeys(batch.states)
        for slot, context in zip(batch.slots, batch.contexts, strict=True):
            if slot not in coming:
                wanted[slot] = len(context) - 1
        unread = self._pull(batch.states, wanted)
        rests: dict[int, Unread] = {}
        shared = [self._share(batch, rows, unread, rests) for rows in shared_prompts(batch)]
        self._read_unread(unread)
        for first, *others in filter(None, shared):
            head.copy_slot(first, others)
        self._read_unread({slot: rest for slot, rest in rests.items() if rest.token_ids})
        for slot, length in wanted.items() if batch.num_draft_tokens > 0 else ():
            if length not in (None, head.length(slot)):
                raise ModelError(
                    f"slot {slot}: the draft head needs the target's hidden states of {length} "
                    f"tokens, and has those of {head.length(slot)}; push the others to batch.states"
                )

    def _share(
        self,
        batch: DecodeBatch,
        rows: Sequence[int],
        unread: dict[int, Unread],
        rests: dict[int, Unread],
    ) -> list[int]:
        """The slot that holds the prompt of ``rows`` once ``unread`` is read, then those that copy
        it.

        Empty where no slot takes it. Moves to ``rests`` what is read after it.
        """
        head, length = self._head, batch.prompt_lengths[rows[0]] - 1
        slots = [batch.slots[row] for row in rows]
        new = [slot for slot in slots if slot in unread and head.length(slot) == 0 < length]
        holders = [slot for slot in slots if slot not in unread and head.length(slot) == length]
        if len(holders[:1]) + len(new) < 2:
            return []
        for slot in new:
            prompt, rests[slot] = unread.pop(slot).split(length)
        if not holders:
            unread[new[0]] = prompt
        return [*holders[:1], *new]

    def _read_prompts(self, prompts: Sequence[PromptPiece], states: HiddenStates) -> None:
        """Read ``states`` of the prompts. Where they do not go on with what the head has read, they
        are read later, from all that is kept."""
        self._read_unread(self._pull(states, dict.fromkeys(prompt.slot for prompt in prompts)))

    def _pull(self, states: HiddenStates, wanted: Mapping[int, int | None]) -> dict[int, Unread]:
        """What the head has not read, by slot. wanted: up to which length; None: all that is known.

        Slots that were read ahead, or earlier in this step, have nothing.
        """
        unread = dict[int, Unread]()
        for slot, length in wanted.items():
            self._head.adopt(slot)
            start = self._head.length(slot)
            found = None if start == length else states.pull(slot, start)
            if found is not None:
                unread[slot] = found
        return unread

    def _read_unread(self, unread: Mapping[int, Unread]) -> None:
        slots = sorted(unread)
        if slots:
            tokens = [unread[slot].token_ids for slot in slots]
            self._head.read(slots, tokens, [unread[slot].states for slot in slots])

    def _append_drafted(
        self, slots: Sequence[int], drafted: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        """Append the tokens that the drafts already hold, from where the last call began."""
        self._head.rewind(slots)
        missing = [
            list(tokens[self._head.depth(slot) :])
            for slot, tokens in zip(slots, drafted, strict=True)
        ]
        longest = max(map(len, missing))
        if longest == 0:
            return
        tokens = pad_ids(missing, longest).to(device, non_blocking=True)
        for depth in range(longest):
            rows = [row for row, one in enumerate(missing) if len(one) > depth]
            column = tokens[to_device(rows, device), depth]
            self._head.append([slots[row] for row in rows], column)
        self._head.mark(slots)


class _Runner(NamedTuple):
    """What runs the head over its slots; ``ahead``: the same, where it is an ``AheadRunner``."""

    head: HeadRunner
    ahead: AheadRunner | None = None


Run = Callable[[Any, SlotLimits, ProposerContext], _Runner]


def _over_slots(head: Any, limits: SlotLimits, context: ProposerContext) -> _Runner:
    return _Runner(SlotHead(head, limits, **_where(context), axes=context.axes))


def _packed(
    form: type[PackedEagle3 | PackedMtp], head: Any, limits: SlotLimits, context: ProposerContext
) -> _Runner:
    """A runner by CUDA graphs, if there are kernels for this kind of head."""
    served = form.of(head, limits.max_length) if _are_packed(context) else None
    if served is None:
        return _over_slots(head, limits, context)
    packed = PackedSlotHead(served, limits, **_for_graphs(context))
    return _Runner(packed, packed)


def _over_blocks(head: BlockHead, limits: SlotLimits, context: ProposerContext) -> _Runner:
    served = PackedBlock.of(head, limits.max_length) if _are_packed(context) else None
    if served is not None:
        packed = PackedContextReader(served, limits, **_for_graphs(context))
        return _over_reader(packed, limits, context)
    reader = ContextReader(head, limits, blocks=context.blocks, **_where(context))
    return _over_reader(reader, limits, context)


def _over_masks(head: Eagle3Head, limits: SlotLimits, context: ProposerContext) -> _Runner:
    served = PackedEagle3.of(head, limits.max_length) if _are_packed(context) else None
    width = context.config.num_draft_tokens
    if served is not None:
        slots = PackedSlotHead(served, limits, **_for_graphs(context))
        return _over_reader(PackedMaskedReader(head, slots, width), limits, context)
    return _over_reader(MaskedReader(head, limits, width, **_where(context)), limits, context)


def _over_reader(reader: BlockReader, limits: SlotLimits, context: ProposerContext) -> _Runner:
    width = context.config.num_draft_tokens
    runner = BlockRunner(reader, limits.num_slots, width, **_where(context))
    return _Runner(runner, None if reader.ahead is None else runner)


def _are_packed(context: ProposerContext) -> bool:
    return is_packed_on(context.device, context.config.kernels)


def _where(context: ProposerContext) -> dict[str, Any]:
    return {"device": context.device, "dtype": context.dtype}


def _for_graphs(context: ProposerContext) -> dict[str, Any]:
    return {**_where(context), "blocks": context.blocks, "window": context.window}


def _build(method: str, run: Run, context: ProposerContext) -> LearnedHead:
    """With the head that ``load_head`` reads for a method."""
    if context.target is None:
        fix = f"{method} needs a transformers model as target; use another proposer"
        raise ConfigError("proposer", method, fix)
    if context.draft is not None and not isinstance(context.draft, str | Path):
        fix = f"{method} takes the folder or hub id of its checkpoint"
        raise ConfigError("draft", type(context.draft).__name__, fix)
    return LearnedHead(context, load_head(method, context.draft, context.target), run)


# EAGLE and EAGLE-2 weights (arXiv:2401.15077, arXiv:2406.16858), drafting a chain.
eagle = partial(_build, "eagle", _over_slots)
# EAGLE-3 (arXiv:2503.01840) from SafeAILab, SpecForge or speculators.
eagle3 = partial(_build, "eagle3", partial(_packed, PackedEagle3))
# The MTP layers in a DeepSeek-V3, R1 or V3.2 checkpoint (arXiv:2412.19437).
deepseek_mtp = partial(_build, "deepseek_mtp", partial(_packed, PackedMtp))
# Those in a GLM-4.5 or GLM-4.5-Air checkpoint, and in a Qwen3-Next or Qwen3.5 one.
glm4_moe_mtp = partial(_build, "glm4_moe_mtp", _over_slots)
qwen3_5_mtp = partial(_build, "qwen3_5_mtp", partial(_packed, PackedMtp))
# MTP layers of the target's own kind in a folder of their own, for any target.
mtp = partial(_build, "mtp", partial(_packed, PackedMtp))
# DFlash from z-lab, DeepSeek or speculators: one forward of the head drafts a block.
dflash = partial(_build, "dflash", _over_blocks)
# DFlash 2 from z-lab or speculators: a block whose candidates are scored by their predecessors.
dflash2 = partial(_build, "dflash2", _over_blocks)
# Domino (arXiv:2605.29707): a block corrected by a GRU over its tokens.
domino = partial(_build, "domino", _over_blocks)
# LiLiCorr (arXiv:2608.20530): a block whose candidates score each other.
lilicorr = partial(_build, "lilicorr", _over_blocks)
# DSpark from DeepSeek or speculators: a block with a Markov head.
dspark = partial(_build, "dspark", _over_blocks)
# P-EAGLE from speculators or in EAGLE-3's layout: masks after the text, at once.
p_eagle = partial(_build, "p_eagle", _over_masks)
