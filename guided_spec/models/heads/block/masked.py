"""P-EAGLE over slots: masks behind the last verified position, all by one forward.

The equations, as speculators trains and vLLM runs it, are in ``guided_spec.models.heads.eagle3``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from guided_spec.errors import ModelError
from guided_spec.models.heads.eagle3 import MASK, Eagle3Head
from guided_spec.models.heads.slot_head import SlotHead, SlotRoom

__all__ = ["MaskedReader"]


class MaskedReader:
    """A ``BlockReader``. width: tokens of a draft at most.

    Raises ModelError for an EAGLE-3 head that has nothing to put at the places behind a text.
    """

    transition = None

    def __init__(
        self,
        head: Eagle3Head,
        room: SlotRoom,
        width: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        if head.mask_hidden is None:
            raise ModelError(f"proposer='p_eagle': expected a head with a {MASK}, found none")
        self.head, self.width, self.size = head, width, head.hidden_size
        self._slots = SlotHead(head, room, device=device, dtype=dtype)
        self.max_length = self._slots.max_length
        self.length, self.release = self._slots.length, self._slots.release
        self.adopt, self.read = self._slots.adopt, self._slots.read
        self.copy_slot = self._slots.copy_slot

    def logits(self, outputs: Tensor) -> Tensor:
        """See ``BlockReader``."""
        return self.head.logits(outputs)

    def draft(self, slots: Sequence[int], last: Tensor, width: int) -> Tensor:
        """See ``BlockReader``; the last token has been read already."""
        head = self.head
        assert head.mask_hidden is not None
        assert head.layout.mask_token_id is not None
        masks = last.new_full((len(slots), width - 1), head.layout.mask_token_id)
        hidden = head.features(head.mask_hidden).expand(*masks.shape, -1)
        return self._slots.masked(slots, masks, hidden)
