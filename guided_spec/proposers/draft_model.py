"""A smaller language model of the same vocabulary drafts for the target.

``Pard``: An et al., "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model
Adaptation", arXiv:2504.18583, and AMD's code. The text is followed by K - 1 times the token
``pard_token``; the text's last token and each of these predicts the token after it. Nothing else
distinguishes such a model from another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from guided_spec.core import DecodeBatch, DraftInFlight, Proposer, ProposerContext
from guided_spec.errors import ConfigError, ModelError, VocabularyMismatchError
from guided_spec.masks.lookahead import Lookahead
from guided_spec.models.causal_lm import CausalLM, largest_context, make_causal_lm
from guided_spec.models.loading import load_model
from guided_spec.models.pictures.vision import split_vision
from guided_spec.models.stock.slots import SlotInputs
from guided_spec.models.tokenizer import load_tokenizer
from guided_spec.ops.host import pad_ids, to_device
from guided_spec.proposers.choice_graphs import ChoiceGraphs
from guided_spec.proposers.draft_session import DraftRows
from guided_spec.proposers.drafting import read_policy, shared_prompts
from guided_spec.proposers.host_masks import HostMasks


class DraftCache:
    """A smaller language model over slots, and how much of each text it has read.

    Where the target keeps texts in blocks, so does it, by the same tables: it never runs out of
    them where the target does not. What others have read of a prompt it reads again.

    Raises ConfigError when no draft model is named, ModelError when the model cannot be loaded, and
    VocabularyMismatchError when its tokens are not the target's.
    """

    def __init__(self, context: ProposerContext) -> None:
        if context.draft is None:
            fix = "name a smaller model with the target's tokenizer, or choose the proposer ngram"
            raise ConfigError("draft", None, fix)
        model = split_vision(_load(context), 1).language
        limit = largest_context(model.config.get_text_config(decoder=True))
        length = min(limit or context.max_model_len, context.max_model_len)
        self.model = make_causal_lm(
            model,
            num_slots=context.num_slots,
            max_length=length,
            kernels=context.config.kernels,
            shared_blocks=context.blocks,
            window=context.window,
        )
        _check_width(self.model.vocab_size, context)
        self.chunk = context.config.prefill_tokens
        self._longest = context.config.num_draft_tokens
        self.lengths = [0] * context.num_slots  # committed tokens in the cache, a slot

    def release(self, slots: Sequence[int]) -> None:
        """The slots' caches start empty with their next requests."""
        for slot in slots:
            self.lengths[slot] = 0
        self.model.release(slots)

    def open_rows(self, batch: DecodeBatch, lookahead: Lookahead) -> list[int]:
        """The requests whose drafts are open and whose slots can hold the longest draft more.

        The longest one, whatever the other members of a chain leave of it in this turn.
        """
        longest = max(batch.num_draft_tokens, self._longest)
        longest_text = self.model.max_length - longest if batch.num_draft_tokens > 0 else -1
        lengths = map(len, lookahead.drafted)
        pairs = zip(lookahead.is_open, batch.contexts, lengths, strict=True)
        return [
            row
            for row, (is_open, context, drafted) in enumerate(pairs)
            if is_open and len(context) + drafted <= longest_text
        ]

    def read_prompts(self, batch: DecodeBatch, rows: Sequence[int], rest: int) -> None:
        """Read the texts of ``rows`` but for ``rest`` tokens at most, in chunks.

        The prompt of new requests is read once for those that share one; they continue after it.
        """
        self._share_prompts(batch, rows)
        for row in rows:
            context = batch.contexts[row]
            self._read_up_to(len(context) - rest, batch.slots[row], context)

    def _share_prompts(self, batch: DecodeBatch, rows: Sequence[int]) -> None:
        for group in shared_prompts(batch):
            length = batch.prompt_lengths[group[0]] - 1
            new = [row for row in group if row in rows and not self.lengths[batch.slots[row]]]
            # Keys and values stay where they are; a linear state has moved on with its text.
            can_stay = not self.model.has_linear_state
            known = [row for row in group if can_stay and self.lengths[batch.slots[row]] >= length]
            if length == 0 or not new or len(new) + len(known) < 2:
                continue
            source, *_ = [*known, *new]
            slot = batch.slots[source]
            self._read_up_to(length, slot, batch.contexts[source])
            others = [batch.slots[row] for row in new if row != source]
            self.model.copy_slot(slot, others, length)
            for other in others:
                self.lengths[other] = length

    def _read_up_to(self, end: int, slot: int, context: Sequence[int]) -> None:
        """Feed committed tokens (a new prompt) in chunks, until ``end`` of them are there."""
        while self.lengths[slot] < end:
            start = self.lengths[slot]
            count = min(self.chunk, end - start)
            tokens = torch.tensor([list(context[start : start + count])])
            self.model.forward(SlotInputs(tokens, [slot], [start], [count]), logits="none")
            self.model.commit([count], [count])
            self.lengths[slot] += count


class DraftModel(Proposer):
    """Drafts with any smaller causal LM, batched, with a KV cache of its own.

    The cache's lengths count committed tokens only: every step first feeds what was committed since
    the last one, and so overwrites what the last draft stored. The context's argument is the draft
    policy.

    Raises ConfigError when the policy is unknown, and what ``DraftCache`` raises.
    """

    aux_hidden_layers: tuple[int, ...] = ()

    def __init__(self, context: ProposerContext) -> None:
        self._policy = read_policy(context.argument, "mask")
        self._context, self._cache = context, DraftCache(context)
        self._model = self._cache.model
        self._choices = ChoiceGraphs.on(context, None)

    def begin(
        self, batch: DecodeBatch, lookahead: Lookahead, carry: object | None = None
    ) -> DraftInFlight:
        """Up to K tokens a request: masked, and sampled where the request's temperature says so."""
        del carry  # the cache lacks what was accepted, and reads it now
        open_rows = self._cache.open_rows(batch, lookahead)
        rows = DraftRows.from_batch(batch, lookahead, self._policy, open_rows)
        masks = HostMasks(rows, None, self._choices)
        if open_rows:
            self._draft(masks, batch, lookahead, open_rows)
        return masks.in_flight()

    def capture(self) -> Iterator[None]:
        """Capture the graphs of the draft model, one at each ``next``."""
        self._choices.capture(self._context, self._model.dtype)
        yield from self._model.capture(())

    @property
    def ends_chains(self) -> bool:
        """Where the proposer's own policy lets the host see the draft once it is made."""
        return self._policy == "validate"

    @property
    def runs_as(self) -> str:
        """How the draft model computes, in words."""
        return self._model.runs_as

    def release(self, slots: Sequence[int]) -> None:
        """The slots start empty with their next requests."""
        self._cache.release(slots)

    def _draft(
        self, masks: HostMasks, batch: DecodeBatch, lookahead: Lookahead, rows: Sequence[int]
    ) -> None:
        """Draft for ``rows``."""
        drafted = [list(lookahead.drafted[row]) for row in rows]
        self._cache.read_prompts(batch, rows, self._cache.chunk)
        feeder, lengths = _Feeder(self._model, batch, rows), self._cache.lengths
        pending = [batch.contexts[row][lengths[batch.slots[row]] :] for row in rows]
        starts = [lengths[slot] for slot in feeder.slots]
        for row in rows:
            lengths[batch.slots[row]] = len(batch.contexts[row])
        if self._model.has_linear_state:
            # Such a state cannot be cut back: it is kept as it is after the committed tokens.
            feeder.feed(pending, starts)
            saved = self._model.save_states(feeder.slots)
            feeder.feed(drafted, feeder.ends)
            masks.draft(feeder.logits, feeder.next)
            self._model.load_states(feeder.slots, saved)
            return
        feeder.feed([[*p, *d] for p, d in zip(pending, drafted, strict=True)], starts)
        masks.draft(feeder.logits, feeder.next)


class Pard(DraftModel):
    """A draft model that drafts a whole block by one forward.

    Raises what ``DraftModel`` raises, and ModelError for a draft whose config.json has no
    ``pard_token``, or which needs the target's hidden states (PARD-2).
    """

    def __init__(self, context: ProposerContext) -> None:
        super().__init__(context)
        if self._model.has_linear_state:
            kind = self._model.config.model_type
            raise ModelError(
                f"proposer='pard': expected a draft of attention alone, found {kind}, whose state "
                "cannot be taken back after a block; use draft_model"
            )
        self._token = _read_token(self._model.config, self._model.vocab_size)
        self._width = context.config.num_draft_tokens

    def _block(self, batch: DecodeBatch, rows: Sequence[int]) -> Tensor:
        """[R, W, V]: logits of the positions after the texts of ``rows``, by one forward.

        What the masks store is forgotten.
        """
        cache, slots = self._cache, [batch.slots[row] for row in rows]
        cache.read_prompts(batch, rows, self._width)
        # The last token is fed again where the text has not grown: it predicts the first one.
        starts = [
            min(cache.lengths[slot], len(batch.contexts[row]) - 1)
            for slot, row in zip(slots, rows, strict=True)
        ]
        pending = [batch.contexts[row][start:] for row, start in zip(rows, starts, strict=True)]
        masks = [self._token] * (self._width - 1)
        fed = [[*tokens, *masks] for tokens in pending]
        counts = [len(tokens) for tokens in fed]
        inputs = SlotInputs(pad_ids(fed, max(counts)), slots, starts, counts)
        logits = self._model.forward(inputs, logits="all").logits
        assert logits is not None
        counts = [len(tokens) for tokens in pending]
        self._model.commit(counts, counts)
        for slot, row in zip(slots, rows, strict=True):
            cache.lengths[slot] = len(batch.contexts[row])
        first = to_device([len(tokens) - 1 for tokens in pending], batch.device)
        positions = first.unsqueeze(1) + torch.arange(self._width, device=first.device)
        index = positions.unsqueeze(2).expand(-1, -1, logits.shape[2])
        return _fit_width(logits.gather(1, index), batch.vocab_size)

    def _draft(
        self, masks: HostMasks, batch: DecodeBatch, lookahead: Lookahead, rows: Sequence[int]
    ) -> None:
        starts = [len(lookahead.drafted[row]) for row in rows]
        block, steps = self._block(batch, rows), count()
        index = to_device(rows, batch.device)

        def logits(token_ids: Tensor | None = None) -> Tensor:
            del token_ids  # what a position drafts changes no other
            step = next(steps)
            at = [min(start + step, self._width - 1) for start in starts]
            outside = [start + step >= self._width for start in starts]
            column, is_outside = to_device([at, outside], batch.device)
            scores = block[torch.arange(len(rows), device=batch.device), column]
            scores = scores.masked_fill(is_outside.bool().unsqueeze(1), -torch.inf)
            full = scores.new_full((len(batch), scores.shape[1]), -torch.inf)
            return full.index_copy_(0, index, scores)

        masks.draft(logits(), logits)


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


class _Feeder:
    """Feeds the drafting rows of one step to the model and spreads the logits over the batch.

    logits: [B, V] after the last token of each row; -inf for requests that do not draft.
    ends: tokens in each drafting row's slot.
    """

    def __init__(self, model: CausalLM, batch: DecodeBatch, rows: Sequence[int]) -> None:
        self.slots = [batch.slots[row] for row in rows]
        self.ends = [0] * len(rows)
        self.logits = torch.full(
            (len(batch), batch.vocab_size), float("-inf"), dtype=model.dtype, device=batch.device
        )
        self._model = model
        self._rows = to_device(rows, batch.device)

    def feed(self, tokens: Sequence[Sequence[int]], starts: Sequence[int]) -> None:
        """Feed each row its tokens, after ``starts`` of them; rows without any are left alone."""
        counts = [len(row) for row in tokens]
        self.ends = [start + count for start, count in zip(starts, counts, strict=True)]
        if any(counts):
            self._forward(pad_ids(tokens, max(counts)), starts, counts)

    def next(self, token_ids: Tensor) -> Tensor:
        """[B, V] logits after one more token a row, int64 [B]."""
        starts = self.ends
        self.ends = [end + 1 for end in starts]
        self._forward(token_ids[self._rows].unsqueeze(1), starts, [1] * len(starts))
        return self.logits

    def _forward(self, tokens: Tensor, starts: Sequence[int], counts: Sequence[int]) -> None:
        inputs = SlotInputs(tokens, self.slots, starts, counts)
        logits = self._model.forward(inputs, logits="last").logits
        assert logits is not None
        self._model.commit(counts, counts)
        logits = _fit_width(logits[:, 0], self.logits.shape[1])
        fed = [row for row, count in enumerate(counts) if count > 0]
        if len(fed) == len(self.logits):
            self.logits = logits
            return
        kept = to_device(fed, logits.device)
        self.logits = self.logits.index_copy(0, self._rows[kept], logits[kept])


def _fit_width(logits: Tensor, vocab_size: int) -> Tensor:
    """Models of one tokenizer pad their logits differently: padding ids are never drafted."""
    if logits.shape[-1] >= vocab_size:
        return logits[..., :vocab_size]
    return torch.nn.functional.pad(logits, (0, vocab_size - logits.shape[-1]), value=float("-inf"))


def _load(context: ProposerContext) -> Any:
    if not isinstance(context.draft, str | Path):
        return context.draft
    if context.tokenizer is not None:
        _check_tokens(load_tokenizer(context.draft, argument="draft"), context)
    return load_model(
        context.draft, dtype=context.dtype, device=str(context.device), argument="draft"
    )


def _check_tokens(tokenizer: Any, context: ProposerContext) -> None:
    ours, theirs = context.tokenizer.get_vocab(), tokenizer.get_vocab()
    if ours != theirs:
        token = next(iter(sorted(ours.items() ^ theirs.items(), key=lambda item: item[1])))[0]
        raise VocabularyMismatchError(
            f"draft={context.draft!r}: its tokenizer differs from the target's, first at token "
            f"{token!r} ({theirs.get(token)} instead of {ours.get(token)}); "
            "use a draft model of the same family, or the proposer ngram"
        )


def _check_width(vocab_size: int, context: ProposerContext) -> None:
    used = context.vocabulary.vocab_size
    if context.tokenizer is not None:
        used = min(used, len(context.tokenizer))
    if vocab_size < used:
        raise VocabularyMismatchError(
            f"draft={context.draft!r}: it knows {vocab_size} tokens, the target {used}; "
            "use a draft model of the same family, or the proposer ngram"
        )
