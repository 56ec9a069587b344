"""Block heads in both forms, told the same, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.models.heads.block.reader import (
    ContextReader,
    MaskedReader,
    PackedContextReader,
    PackedMaskedReader,
)
from guided_spec.models.heads.block.runner import BlockRunner
from guided_spec.models.heads.loading import load_head
from guided_spec.models.heads.slot_head import SlotLimits
from guided_spec.models.packed.blocks import BLOCK, Blocks
from guided_spec.models.packed.graph_pool import CaptureWindow
from guided_spec.models.packed.heads import PackedBlock, PackedEagle3
from guided_spec.models.packed.slot_head import PackedSlotHead
from tests.models.heads.block_checkpoints import DIALECTS, write_block, write_p_eagle

SLOTS, LENGTH, WIDTH = 6, 3 * BLOCK, 6
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
# kind, dialect, and fields of config.json: all that are served
FORMS: list[tuple[str, str, dict[str, Any]]] = [
    *((kind, dialect, {}) for kind in ("dflash", "dspark") for dialect in DIALECTS[kind]),
    ("dflash", "zlab", KINDS),
    ("dflash", "zlab", {**KINDS, "use_sliding_window": True}),
    ("dflash", "zlab", {"is_causal": True}),
    ("dflash", "zlab", {"input_embedding_scale": 3.0, "final_logit_softcapping": 2.0}),
    ("dflash", "speculators", {"draft_vocab_size": 40}),
    ("dspark", "deepseek", {"markov_head_type": "gated"}),
    ("dspark", "deepseek", {"markov_head_type": "rnn"}),
    ("domino", "zlab", {}),
    ("lilicorr", "zlab", {}),
    ("p_eagle", "speculators", {}),
    ("p_eagle", "specforge", {"draft_vocab_size": 40}),
]


def _load(kind: str, folder: Path, target: PreTrainedModel) -> Any:
    return load_head(kind, folder, target)


class BlockPair:
    """stock, packed: the same random head over slots of memory that holds no numbers. window: in
    which the packed one captures.

    form: of ``FORMS``. blocks: the tables of the packed one; None: of its own.
    """

    def __init__(
        self,
        folder: Path,
        target: PreTrainedModel,
        form: tuple[str, str, dict[str, Any]],
        blocks: Blocks | None = None,
    ) -> None:
        kind, dialect, changes = form
        if kind == "p_eagle":
            write_p_eagle(folder, target, layout=dialect, **changes)
        else:
            write_block(folder, target, kind, dialect, **changes)
        self.head = _load(kind, folder, target)
        self.columns = len(self.head.aux_hidden_layers) * target.config.hidden_size
        self.device, limits = target.device, SlotLimits(SLOTS, LENGTH, piece=9)
        where: Any = {"device": target.device, "dtype": target.dtype}
        self.window = CaptureWindow()
        reader: Any
        ahead: Any
        if kind == "p_eagle":
            served = PackedEagle3.of(self.head, LENGTH)
            assert served is not None
            slots = PackedSlotHead(served, limits, blocks=blocks, window=self.window, **where)
            ahead, memory = PackedMaskedReader(self.head, slots, WIDTH), slots.slots.memory
            reader = MaskedReader(self.head, limits, WIDTH, **where)
        else:
            form_of = PackedBlock.of(self.head, LENGTH)
            assert form_of is not None
            own: Any = {"blocks": blocks, "window": self.window}
            ahead = PackedContextReader(form_of, limits, **own, **where)
            memory = ahead.slots.memory
            reader = ContextReader(self.head, limits, **where)
        with torch.inference_mode():
            for buffer in (buffer for layer in memory for buffer in layer):
                buffer.fill_(torch.nan)
        self.reader = ahead
        self.stock = BlockRunner(reader, SLOTS, WIDTH, **where)
        self.packed = BlockRunner(ahead, SLOTS, WIDTH, **where)
        self.source = torch.Generator().manual_seed(0)

    def tokens(self, count: int) -> list[int]:
        size = 64
        return torch.randint(size, (count,), generator=self.source).tolist()

    def states(self, *shape: int) -> Tensor:
        return torch.randn(*shape, self.columns, generator=self.source).to(self.device)

    def read(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Both read as many tokens of each slot."""
        tokens = [self.tokens(count) for count in counts]
        states = [self.states(count) for count in counts]
        for runner in (self.stock, self.packed):
            runner.read(slots, tokens, states)

    def check(self, slots: Sequence[int], *, exact: float = 1e-5) -> None:
        """The scores along a draft are alike, and what they were made from."""
        limits: Any = {"rtol": exact, "atol": exact * float(self.stock.logits(slots).abs().max())}
        for _ in range(WIDTH):
            one, other = (runner.logits(slots) for runner in (self.stock, self.packed))
            torch.testing.assert_close(other, one, **limits)
            drafted = torch.tensor(self.tokens(len(slots))).to(self.device)
            for runner in (self.stock, self.packed):
                runner.append(slots, drafted)
        assert self.packed.logits(slots).isneginf().all()
        expected, found = (runner._outputs[slots] for runner in (self.stock, self.packed))
        torch.testing.assert_close(found, expected, **limits)
        for runner in (self.stock, self.packed):
            runner.rewind(slots)
