"""A smaller language model that drafts a whole block by one forward.

An et al., "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation",
arXiv:2504.18583, and AMD's code. Behind the text stand K - 1 times the token ``pard_token``; the
text's last token and each of these predicts the token of the place behind it. Nothing else tells
such a model from another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from guided_spec.core import DecodeBatch, DraftInFlight, Proposer, ProposerContext
from guided_spec.errors import ModelError
from guided_spec.masks.lookahead import Lookahead
from guided_spec.models.causal_lm import SlotInputs
from guided_spec.ops.host import pad_ids, to_device
from guided_spec.proposers.draft_chooser import DraftChooser
from guided_spec.proposers.draft_loop import DraftLoop
from guided_spec.proposers.draft_model import DraftCache, fit_width
from guided_spec.proposers.drafting import read_policy

__all__ = ["Pard"]


class Pard(Proposer):
    """Drafts by the policy that the context's argument names.

    Raises ConfigError when the policy is unknown, what ``DraftCache`` raises, and ModelError for a
    draft whose config.json has no ``pard_token``, or which needs the target's hidden states
    (PARD-2).
    """

    aux_hidden_layers: tuple[int, ...] = ()

    def __init__(self, context: ProposerContext) -> None:
        self._policy = read_policy(context.argument, "mask")
        self._cache = DraftCache(context)
        if self._cache.model.has_linear_state:
            kind = self._cache.model.config.model_type
            raise ModelError(
                f"proposer='pard': expected a draft of attention alone, found {kind}, whose state "
                "cannot be taken back behind a block; use draft_model"
            )
        self._token = _read_token(self._cache.model.config, self._cache.model.vocab_size)
        self._width = context.config.num_draft_tokens
        self._chooser = DraftChooser.on(context.device, None)

    def begin(
        self, batch: DecodeBatch, lookahead: Lookahead, carry: object | None = None
    ) -> DraftInFlight:
        """Up to K tokens a request."""
        del carry  # the cache is behind the text by what was accepted, and reads it now
        return self._draft(batch, lookahead).in_flight()

    @property
    def runs_as(self) -> str:
        """As the draft model."""
        return self._cache.model.runs_as

    @property
    def has_options(self) -> bool:
        """It knows its scores."""
        return True

    def release(self, slots: Sequence[int]) -> None:
        """The slots start anew with their next requests."""
        self._cache.release(slots)

    def capture(self) -> Iterator[None]:
        """Those of the model."""
        yield from self._cache.model.capture(())

    def _block(self, batch: DecodeBatch, rows: Sequence[int]) -> Tensor:
        """[R, W, V]: logits of the places behind the texts of ``rows``, by one forward.

        The masks are forgotten.
        """
        cache, slots = self._cache, [batch.slots[row] for row in rows]
        cache.read_prompts(batch, rows, self._width)
        # The last token is fed again where the text has not grown: it predicts the first place.
        starts = [
            min(cache.lengths[slot], len(batch.contexts[row]) - 1)
            for slot, row in zip(slots, rows, strict=True)
        ]
        pending = [batch.contexts[row][start:] for row, start in zip(rows, starts, strict=True)]
        masks = [self._token] * (self._width - 1)
        fed = [[*tokens, *masks] for tokens in pending]
        counts = [len(tokens) for tokens in fed]
        inputs = SlotInputs(pad_ids(fed, max(counts)), slots, starts, counts)
        logits = cache.model.forward(inputs, logits="all").logits
        assert logits is not None
        cache.model.commit([len(tokens) for tokens in pending])
        for slot, row in zip(slots, rows, strict=True):
            cache.lengths[slot] = len(batch.contexts[row])
        first = to_device([len(tokens) - 1 for tokens in pending], batch.device)
        places = first.unsqueeze(1) + torch.arange(self._width, device=first.device)
        index = places.unsqueeze(2).expand(-1, -1, logits.shape[2])
        return fit_width(logits.gather(1, index), batch.vocab_size)

    def _draft(self, batch: DecodeBatch, lookahead: Lookahead) -> DraftLoop:
        """The loop behind its run."""
        rows = self._cache.open_rows(batch, lookahead)
        loop = DraftLoop(batch, lookahead, self._policy, None, self._chooser, rows)
        if not rows:
            return loop
        starts = [len(lookahead.drafted[row]) for row in rows]
        block, steps = self._block(batch, rows), count()
        index = torch.tensor(rows).to(batch.device, non_blocking=True)

        def logits(token_ids: Tensor | None = None) -> Tensor:
            del token_ids  # what a place drafts changes no other
            step = next(steps)
            at = [min(start + step, self._width - 1) for start in starts]
            behind = torch.tensor([start + step >= self._width for start in starts])
            place = torch.tensor(at).to(batch.device, non_blocking=True)
            scores = block[torch.arange(len(rows), device=batch.device), place]
            behind = behind.to(batch.device, non_blocking=True)
            scores = scores.masked_fill(behind.unsqueeze(1), -torch.inf)
            full = scores.new_full((len(batch), scores.shape[1]), -torch.inf)
            return full.index_copy_(0, index, scores)

        loop.run(logits(), logits)
        return loop


def _read_token(config: Any, vocab_size: int) -> int:
    values = config.to_dict()
    if values.get("pard2") or values.get("spd_type") == "pard2":
        raise ModelError(
            "proposer='pard': expected a draft that reads tokens alone, found one of PARD-2, which "
            "reads the target's hidden states; pass one of PARD"
        )
    token = values.get("pard_token")
    if not isinstance(token, int) or not 0 <= token < vocab_size:
        raise ModelError(
            f"proposer='pard': expected pard_token in the draft's config.json, below {vocab_size}, "
            f"found {token!r}; pass a model that was trained for it, or use draft_model"
        )
    return token
