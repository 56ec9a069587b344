"""Pictures that a model reads in both directions: where they are in the texts of slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.models.pictures.embedding import PictureEmbedding
from guided_spec.ops.attention.slot_attention import Ahead, Span


class SlotSpans:
    """The spans of the texts in slots whose tokens all see each other, as of pictures in Gemma 3.

    A span must be read by one forward: a token of it depends on all the others.

    windowed_only: as of ``Ahead``.
    """

    def __init__(self, *, windowed_only: bool) -> None:
        self._windowed_only = windowed_only
        self._of_slot: dict[int, Sequence[range]] = {}

    @classmethod
    def of(cls, model: PreTrainedModel) -> SlotSpans | None:
        """For a model that reads pictures so; None for others."""
        table: Any = model.get_input_embeddings()
        if not isinstance(table, PictureEmbedding) or table.sees_ahead == "never":
            return None
        return cls(windowed_only=table.sees_ahead == "windowed")

    def put(self, slot: int, spans: Sequence[range]) -> None:
        """A text begins in the slot. spans: of its positions, in their order."""
        self._of_slot[slot] = spans

    def fed(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        width: int | None = None,
    ) -> Ahead:
        """What sees ahead in rows of one line. slots, starts, counts: [R], see ``SlotInputs``.

        width: of padded rows; None: they have their own tokens alone.
        """
        found, first = list[Span](), 0
        for slot, start, count in zip(slots, starts, counts, strict=True):
            for span in self._of_slot.get(slot, ()):
                if span.start < start + count and start < span.stop:
                    is_whole = start <= span.start and span.stop <= start + count
                    assert is_whole, "a picture that is read in both directions is in one piece"
                    found.append(Span(slot, first + span.start - start, span))
            first += count if width is None else width
        return Ahead(tuple(found), self._windowed_only)


def last_seen(positions: Tensor, ahead: Ahead) -> Tensor:
    """int64 [B, T]: the last position that each token sees.

    positions: [B, T], of rows of T tokens each in the line of ``ahead``.
    """
    found = positions.clone()
    for span in ahead.spans:
        row, step = divmod(span.first, positions.shape[1])
        found[row, step : step + len(span.positions)] = span.positions.stop - 1
    return found
