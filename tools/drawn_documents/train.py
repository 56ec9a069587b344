"""Training: next tokens of the answer, and the characters that each picture token shows."""

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Idefics3ForConditionalGeneration

from tools.bundled_models.train import (
    cosine,
    make_optimizer,
    to_device,
    use_causal_attention,
)
from tools.drawn_documents.corpus import HEAD, PICTURE, Batch
from tools.drawn_documents.page import CHARACTERS, SLOTS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainConfig:
    """One run: it ends after `steps` steps or `seconds` seconds, whichever comes first."""

    steps: int
    seconds: float = math.inf
    learning_rate: float = 1.5e-3
    warmup: int = 300
    weight_decay: float = 0.05
    compiled: bool = False
    log_every: int = 100


class Reader(nn.Module):
    """The model with a head that names the characters of a picture token, dropped afterwards.

    Without that head a vision tower that begins at nothing learns to read late: an answer says
    what is on a page, but not where.
    """

    def __init__(self, model: Idefics3ForConditionalGeneration) -> None:
        super().__init__()
        self.model = model
        width = model.model.text_model.config.hidden_size
        self.names = nn.Linear(width, SLOTS * (len(CHARACTERS) + 1))
        use_causal_attention(model.model.text_model)

    def forward(
        self, pages: Tensor, characters: Tensor, ids: Tensor, answered: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The two losses; arguments are those of a ``Batch``."""
        core = self.model.model
        features = self._features(pages)
        named = self.names(features).view(-1, len(CHARACTERS) + 1).float()
        naming = functional.cross_entropy(named, characters.long().flatten())
        words = core.text_model.embed_tokens(ids)
        mixed = torch.cat(
            (words[:, :HEAD], features.to(words.dtype), words[:, HEAD + PICTURE :]), dim=1
        )
        hidden = core.text_model(inputs_embeds=mixed, use_cache=False).last_hidden_state
        # Nothing is asked of the picture's own tokens.
        first = HEAD + PICTURE
        logits = self.model.lm_head(hidden[:, first:-1]).float()
        losses = functional.cross_entropy(
            logits.flatten(0, 1), ids[:, first + 1 :].flatten().long(), reduction="none"
        )
        weights = answered[:, first + 1 :].flatten().float()
        return (losses * weights).sum() / weights.sum(), naming

    def _features(self, pages: Tensor) -> Tensor:
        """What the stock model computes of whole pages, without its look at masks."""
        vision, core = self.model.model.vision_model, self.model.model
        pixels = (pages[:, None].float() / 127.5 - 1).expand(-1, 3, -1, -1)
        patches = vision.embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
        hidden = patches + vision.embeddings.position_embedding.weight
        hidden = vision.encoder(inputs_embeds=hidden, attention_mask=None).last_hidden_state
        return core.connector(vision.post_layernorm(hidden))  # type: ignore[no-any-return]


def train(reader: Reader, data: Iterator[Batch], config: TrainConfig, device: str) -> int:
    """Train in place until the steps, the time or the data end; return the steps."""
    if config.compiled:
        core = reader.model.model
        # Layer by layer: those of one kind are compiled once.
        for layer in (*core.vision_model.encoder.layers, *core.text_model.layers):
            layer.compile()
    optimizer = make_optimizer(reader, config.learning_rate, config.weight_decay)
    start, step = time.monotonic(), 0
    recent = torch.zeros(2, device=device)
    waited, since = 0.0, start
    for step, batch in enumerate(data, 1):
        waited += time.monotonic() - since
        progress = max(step / max(1, config.steps), (time.monotonic() - start) / config.seconds)
        rate = min(1.0, step / max(1, config.warmup)) * cosine(progress)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * rate
        arrays = (batch.pages, batch.characters, batch.ids, batch.answered)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            answer, naming = reader(*to_device(arrays, torch.device(device)))
        (answer + naming).backward()
        torch.nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        both = torch.stack((answer.detach(), naming.detach()))
        recent = both if step == 1 else 0.95 * recent + 0.05 * both
        if step % config.log_every == 0 or step == 1:
            spent = time.monotonic() - start
            found = [f"{x:.4f}" for x in recent.tolist()]
            logger.info(
                "step %d answer %s characters %s at %.0f s, %.0f s of them waited for pages",
                *(step, *found, spent, waited),
            )
        if progress >= 1:
            break
        since = time.monotonic()
    return step
