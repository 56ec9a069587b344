"""A draft head over KV slots: it reads verified tokens, then drafts token by token.

Keys and values of verified tokens are always computed from the *target's* hidden states. What a
draft stores after them is computed from the head's own output and overwritten by the next read:
"training-time test" of EAGLE-3 (arXiv:2503.01840) trains for that, and MTP heads are served so.

With several modules (DeepSeek-V3's report, arXiv:2412.19437, section 2.2) module j predicts one
token further: at position i it pairs the output of module j - 1 at i with token i + j + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from guided_spec.models.attention import MaskBuilder, shape_free_kernels
from guided_spec.models.heads.draft_head import DraftHead
from guided_spec.models.heads.mtp import MtpHead, QwenMtpHead
from guided_spec.models.packed.packed_lm import Rows
from guided_spec.models.pictures.axes import SlotAxes
from guided_spec.models.stock.kv_cache import SlotCache, StepPlan
from guided_spec.ops.host import pad_ids, to_device


class SlotLimits(NamedTuple):
    """How much a head over slots holds.

    num_slots: texts at a time. max_length: tokens of a text.
    piece: tokens of one reading forward at most, over all its rows.
    width: about how many tokens of a text are read at a time; only kernels are tuned by it.
    """

    num_slots: int
    max_length: int
    piece: int = 1024
    width: int = 1


class HeadRunner(Protocol):
    """A head over KV slots: ``SlotHead``, and its packed form; see the methods there."""

    @property
    def max_length(self) -> int: ...
    def length(self, slot: int) -> int: ...
    def depth(self, slot: int) -> int: ...
    def release(self, slots: Sequence[int]) -> None: ...
    def adopt(self, slot: int) -> None: ...
    def mark(self, slots: Sequence[int]) -> None: ...
    def rewind(self, slots: Sequence[int]) -> None: ...
    def read(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], states: Sequence[Tensor]
    ) -> None: ...
    def copy_slot(self, source: int, destinations: Sequence[int]) -> None: ...
    def append(self, slots: Sequence[int], token_ids: Tensor) -> None: ...
    def logits(self, slots: Sequence[int]) -> Tensor: ...


class SlotHead:
    """A head, its KV cache, and the length of each slot.

    limits: how much it can hold. device, dtype: of the head. axes: the positions of the
        texts, by which a head of the target's own layers is rotated where they have several.

    Runs one token through every module, into no slot, which allocates the slots' memory. Raises
    ModelError when the head's layers cannot run over slots.
    """

    @torch.inference_mode()
    def __init__(
        self,
        head: DraftHead,
        limits: SlotLimits,
        *,
        device: torch.device,
        dtype: torch.dtype,
        axes: SlotAxes | None = None,
    ) -> None:
        self.head = head
        has_axes = isinstance(head, MtpHead | QwenMtpHead) and head.counts_axes
        self._axes = axes if has_axes else None
        num_slots, max_length, self._piece, _ = limits
        self.max_length = max_length
        self._device, self._dtype = device, dtype
        self._run: Any = head
        self._cache = SlotCache(head.config, num_slots=num_slots, max_length=max_length)
        self._masks = MaskBuilder(head.config, self._cache.layer_types, self._cache.windows)
        self._lengths = [0] * num_slots  # verified positions read
        self._depths = [0] * num_slots  # draft tokens after them
        depth, width = head.num_modules, head.hidden_size
        # Each module's output at the last position it has read.
        self._last = torch.zeros(depth, num_slots, width, device=device, dtype=dtype)
        self._hidden = torch.zeros(num_slots, width, device=device, dtype=dtype)
        # The draft so far, as modules after the first need it: tokens, and the outputs for them.
        self._tokens = torch.zeros(num_slots, depth, device=device, dtype=torch.int64)
        self._trail = torch.zeros(num_slots, depth, width, device=device, dtype=dtype)
        self._marked = (self._hidden.clone(), self._trail.clone())
        self._marks = [0] * num_slots
        self._indexed: tuple[tuple[int, ...], Tensor] | None = None  # the last slots, on the device
        for module in range(depth):
            self._forward(self._tokens[:1, :1], self._trail[:1, :1], module, Rows([0], [0], [0]))

    def length(self, slot: int) -> int:
        """Verified positions that were read into the slot; 0: nothing to draft from."""
        return self._lengths[slot]

    def depth(self, slot: int) -> int:
        """Draft tokens after the verified ones."""
        return self._depths[slot]

    def release(self, slots: Sequence[int]) -> None:
        """Empty the slots."""
        for slot in slots:
            self._lengths[slot] = self._depths[slot] = self._marks[slot] = 0

    def adopt(self, slot: int) -> None:
        """Nothing: no slot holds what was read into another."""

    @torch.inference_mode()
    def mark(self, slots: Sequence[int]) -> None:
        """Save the positions of the slots' drafts for ``rewind``; ``read`` does so too."""
        index = self._index(slots)
        for kept, state in zip(self._marked, (self._hidden, self._trail), strict=True):
            kept[index] = state[index]
        for slot in slots:
            self._marks[slot] = self._depths[slot]

    @torch.inference_mode()
    def rewind(self, slots: Sequence[int]) -> None:
        """Take the slots' drafts back to their marks."""
        slots = [slot for slot in slots if self._depths[slot] != self._marks[slot]]
        if not slots:
            return
        index = self._index(slots)
        for kept, state in zip(self._marked, (self._hidden, self._trail), strict=True):
            state[index] = kept[index]
        for slot in slots:
            self._depths[slot] = self._marks[slot]

    @torch.inference_mode()
    def read(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], states: Sequence[Tensor]
    ) -> None:
        """Read verified tokens; a draft made before is forgotten.

        tokens: [R] lists, n >= 1 each: the tokens *after* the positions. states: [R] hidden states
        of the target at the positions, [n, len(aux_hidden_layers) * H_target].
        """
        for slot in slots:
            self._depths[slot] = 0
        left = [(slot, row, state) for slot, row, state in zip(slots, tokens, states, strict=True)]
        while left:
            width = max(1, self._piece // len(left))
            for group in self._groups_of_equal_skip([slot for slot, _, _ in left]):
                rows = [left[i] for i in group]
                self._read_piece(
                    [slot for slot, _, _ in rows],
                    [row[:width] for _, row, _ in rows],
                    [state[:width] for _, _, state in rows],
                )
            left = [(s, row[width:], state[width:]) for s, row, state in left if len(row) > width]
        self.mark(slots)

    @torch.inference_mode()
    def copy_slot(self, source: int, destinations: Sequence[int]) -> None:
        """Make ``destinations`` hold what was read into ``source``, without a draft."""
        length = self._lengths[source]
        self._cache.copy_slot(source, destinations, length)
        index = self._index(destinations)
        self._last[:, index] = self._last[:, source].unsqueeze(1).clone()
        self._hidden[index] = self._hidden[source].clone()
        for slot in destinations:
            self._lengths[slot], self._depths[slot] = length, 0
        self.mark(destinations)

    @torch.inference_mode()
    def append(self, slots: Sequence[int], token_ids: Tensor) -> None:
        """Append one draft token, int64 [R] on the head's device, to each slot's draft."""
        modules = self.head.num_modules
        # Which module runs, and how many of its positions are before the text's start.
        keys = [self._next_module(slot) for slot in slots]
        for module, skip in sorted(set(keys)):
            rows = [row for row, key in enumerate(keys) if key == (module, skip)]
            chosen = [slots[row] for row in rows]
            tokens = token_ids
            if len(rows) < len(slots):
                tokens = token_ids[to_device(rows, self._device)]
            if module < modules:
                self._append_by_module(module, skip, chosen, tokens)
            else:
                self._append_recycled(chosen, tokens)
            for slot in chosen:
                self._depths[slot] += 1

    @torch.inference_mode()
    def logits(self, slots: Sequence[int]) -> Tensor:
        """[R, D]: the scores of the token that follows each slot's draft."""
        return self.head.logits(self._hidden[self._index(slots)])

    @torch.inference_mode()
    def masked(self, slots: Sequence[int], token_ids: Tensor, hidden: Tensor) -> Tensor:
        """The outputs [R, T + 1, H] at each slot's last verified position and the T after it.

        token_ids: int64 [R, T]; hidden: [R, T, H], what is fed at these positions; T may be 0.
        What they store is overwritten by the next read; there is no draft.
        """
        first = self._hidden[self._index(slots)].unsqueeze(1)
        count = token_ids.shape[1]
        if count == 0:
            return first
        starts = [self._lengths[slot] for slot in slots]
        rows = Rows([*slots], starts, [count] * len(slots))
        return torch.cat([first, self._forward(token_ids, hidden, 0, rows)], 1)

    def _next_module(self, slot: int) -> tuple[int, int]:
        module = self._depths[slot] + 1
        if module >= self.head.num_modules:
            return self.head.num_modules, 0
        return module, max(0, module - self._lengths[slot])

    def _groups_of_equal_skip(self, slots: list[int]) -> list[list[int]]:
        """Row numbers in groups whose modules skip equally many tokens at a text's start."""
        keys = [min(self._lengths[slot], self.head.num_modules - 1) for slot in slots]
        return [[i for i, k in enumerate(keys) if k == key] for key in sorted(set(keys))]

    def _read_piece(
        self, slots: list[int], tokens: list[Sequence[int]], states: list[Tensor]
    ) -> None:
        index, counts = self._index(slots), [len(row) for row in tokens]
        starts, width = [self._lengths[slot] for slot in slots], max(counts)
        ids = pad_ids(tokens, width)
        ids = ids.to(self._device, non_blocking=True)
        padded = pad_sequence(list(states), batch_first=True)  # [R, width, X]
        hidden = self.head.features(padded.to(self._device, self._dtype))
        last: list[Tensor] = []
        for module in range(self.head.num_modules):
            skip = max(0, module - starts[0])  # the same for all: see _groups_of_equal_skip
            if module > 0:
                # The output of the module before, one position later than where this one reads.
                before = self._last[module - 1, index].unsqueeze(1)
                hidden = hidden[:, :-1] if skip else torch.cat([before, hidden[:, :-1]], 1)
            if width <= skip:
                break  # the text is still too short for this module
            fed = [max(0, count - skip) for count in counts]
            positions = [max(0, start - module) for start in starts]
            hidden = self._forward(ids[:, skip:], hidden, module, Rows(slots, positions, fed))
            last.append(_at(hidden, fed))
        self._last[: len(last), index] = torch.stack(last)
        self._hidden[index] = last[0]
        for slot, count in zip(slots, counts, strict=True):
            self._lengths[slot] += count

    def _append_recycled(self, slots: list[int], token_ids: Tensor) -> None:
        """One token through the last module, fed with its own output."""
        index, last = self._index(slots), self.head.num_modules - 1
        # It has been fed up to the last verified position by then, whatever number it has.
        starts = [self._lengths[slot] + self._depths[slot] - last for slot in slots]
        hidden = self._hidden[index].unsqueeze(1)
        rows = Rows(slots, starts, [1] * len(slots))
        self._hidden[index] = self._forward(token_ids.unsqueeze(1), hidden, last, rows)[:, 0]

    def _append_by_module(
        self, module: int, skip: int, slots: list[int], token_ids: Tensor
    ) -> None:
        """The next module over the whole draft, ``module`` tokens, up to the last position read.

        skip: tokens at the front that would belong to positions before the text's start.
        """
        index = self._index(slots)
        self._tokens[index, module - 1] = token_ids
        before = self._last[module - 1, index].unsqueeze(1)
        hidden = torch.cat([before, self._trail[index, : module - 1]], 1)[:, skip:]
        starts = [max(0, self._lengths[slot] - module) for slot in slots]
        rows = Rows(slots, starts, [module - skip] * len(slots))
        hidden = self._forward(self._tokens[index, skip:module], hidden, module, rows)
        self._trail[index, skip:module] = hidden
        self._hidden[index] = hidden[:, -1]

    def _forward(self, token_ids: Tensor, hidden: Tensor, module: int, rows: Rows) -> Tensor:
        plan = StepPlan(
            rows.slots,
            rows.starts,
            rows.counts,
            num_tokens=token_ids.shape[1],
            max_length=self.max_length,
        )
        self._cache.begin(plan)
        positions = plan.positions(self._device)
        axes = self._axes
        with shape_free_kernels():
            output: Tensor = self._run(
                token_ids,
                hidden,
                module=module,
                position_ids=positions if axes is None else axes.at(rows.slots, positions),
                attention_mask=self._masks.build(positions, plan.view, self._dtype),
                cache=self._cache,
            )
        return output

    def _index(self, slots: Sequence[int]) -> Tensor:
        key = tuple(slots)
        if self._indexed is None or self._indexed[0] != key:
            self._indexed = (key, to_device(key, self._device))
        return self._indexed[1]


def _at(hidden: Tensor, counts: Sequence[int]) -> Tensor:
    """[R, H]: of hidden [R, T, H] each row's last real token."""
    last = torch.tensor([max(count, 1) - 1 for count in counts])
    index = last.to(hidden.device, non_blocking=True).view(-1, 1, 1)
    return hidden.gather(1, index.expand(-1, 1, hidden.shape[2])).squeeze(1)
