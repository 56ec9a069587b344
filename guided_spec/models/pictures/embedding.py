"""The embedding table of a model that reads pictures: the vocabulary's rows, then pictures'."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

SeesAhead = Literal["never", "always", "windowed"]  # layers that have a window alone


class PictureEmbedding(nn.Embedding):
    """Looks tokens up as ``nn.Embedding`` does; ids from ``num_tokens`` on are rows of pictures.

    placeholder: the token that stands for them where a prompt is written down.
    deep: [num_rows, D, H], what the first D layers add to what they give for a row; None where no
        layer does.
    scale: what tokens are multiplied by, and pictures are not, as in Gemma; None for nothing.
    sees_ahead: in which layers a picture's rows see each other in both directions.
    """

    def __init__(
        self, weight: Tensor, num_tokens: int, placeholder: int, scale: Tensor | None = None
    ) -> None:
        super().__init__(weight.shape[0], weight.shape[1], _weight=weight, _freeze=True)
        self.num_tokens, self.placeholder = num_tokens, placeholder
        self.deep: Tensor | None = None
        self.scale = scale
        self.sees_ahead: SeesAhead = "never"

    @classmethod
    def widening(cls, stock: nn.Embedding, num_rows: int, placeholder: int) -> PictureEmbedding:
        """A table with ``num_rows`` rows more, of whose beginning the stock weight becomes a view.

        Nothing is stored twice, and the stock modules compute what they did.
        """
        own = stock.weight.data
        weight = own.new_zeros(len(own) + num_rows, own.shape[1])
        weight[: len(own)] = own
        weight[len(own) :] = own[placeholder]
        stock.weight.data = weight[: len(own)]
        scale = dict(stock.named_buffers()).get("embed_scale")
        return cls(weight, len(own), placeholder, scale)

    def forward(self, input: Tensor) -> Tensor:
        """int64 [...] to [..., H]."""
        found = super().forward(input)
        if self.scale is None:
            return found
        factor = self.scale.to(found.dtype).where(input < self.num_tokens, 1)
        return found * factor.unsqueeze(-1)

    def of_tokens(self) -> nn.Embedding:
        """A table of the vocabulary alone, of its own memory."""
        own = self.weight[: self.num_tokens].detach().clone()
        return nn.Embedding(self.num_tokens, self.embedding_dim, _weight=own)

    def deepen(self, num_layers: int) -> None:
        """Let rows hold what so many layers add."""
        if num_layers:
            self.deep = self.weight.new_zeros(self.num_rows, num_layers, self.embedding_dim)

    def deep_arguments(self, token_ids: Tensor) -> dict[str, Any]:
        """What a decoder of transformers is told of the rows among int64 [B, T]."""
        if self.deep is None:
            return {}
        seen = token_ids >= self.num_tokens
        found = self.deep[token_ids[seen] - self.num_tokens]
        return {"visual_pos_masks": seen, "deepstack_visual_embeds": list(found.unbind(1))}

    @property
    def num_rows(self) -> int:
        """Rows of pictures."""
        return self.num_embeddings - self.num_tokens

    @torch.inference_mode()
    def write(self, rows: list[int], features: Tensor) -> None:
        """Make these rows of pictures ``features`` [len(rows), 1 + D, H]."""
        index = torch.tensor(rows, device=self.weight.device)
        self.weight[self.num_tokens + index] = features[:, 0].to(self.weight)
        if self.deep is not None:
            self.deep[index] = features[:, 1:].to(self.deep)


class WithoutPictures(nn.Module):
    """Another table of the same tokens, in which every picture's row is that of ``padding``."""

    def __init__(self, table: nn.Module, pictures: PictureEmbedding, padding: int) -> None:
        super().__init__()
        self._table, self._num_tokens, self._padding = table, pictures.num_tokens, padding

    def forward(self, token_ids: Tensor) -> Any:
        """int64 [...] to what the table gives."""
        return self._table(token_ids.where(token_ids < self._num_tokens, self._padding))


def deep_changes(embedding: nn.Module, token_ids: Tensor) -> list[Tensor]:
    """[D] of [N, H]: what the first D layers add for tokens int64 [N], zeros for those of text.

    Never waits for the device.
    """
    if not isinstance(embedding, PictureEmbedding) or embedding.deep is None:
        return []
    rows = token_ids - embedding.num_tokens
    found = embedding.deep[rows.clamp_min(0)].where((rows >= 0)[:, None, None], 0)
    return list(found.unbind(1))


def token_rows(embedding: nn.Module) -> Any:
    """The weight [V, H] of an embedding, without rows of pictures; None where it has none."""
    weight = getattr(embedding, "weight", None)
    if isinstance(embedding, PictureEmbedding):
        return weight[: embedding.num_tokens] if isinstance(weight, Tensor) else weight
    return weight


def seeing(own: nn.Embedding, target: PreTrainedModel) -> nn.Embedding:
    """A drafter's own table as it can be given the target's ids: every picture's row is that of the
    placeholder. Where the target reads no pictures, the table itself."""
    theirs: Any = target.get_input_embeddings()
    if not isinstance(theirs, PictureEmbedding):
        return own
    return PictureEmbedding.widening(own, theirs.num_rows, theirs.placeholder)
