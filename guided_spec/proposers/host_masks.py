"""Masks that the host fills and uploads, token by token, for any drafter that scores tokens.

Each token under a mask waits for the host once. Where all these grammars have tables on the device,
the masks come from there, and the host checks the draft afterwards. Logits are adjusted like the
target's (``ops.sampling.adjust``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from guided_spec.core import DecodeBatch, DraftInFlight, LaunchCarry
from guided_spec.masks.lookahead import Lookahead
from guided_spec.masks.rows import TableAdvance
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.ops.host import Download, pad_ids, to_device
from guided_spec.ops.sampling.adjust import Adjustments
from guided_spec.ops.sampling.noise import DraftNoise
from guided_spec.proposers.choice_graphs import ChoiceGraphs, Chosen
from guided_spec.proposers.draft_session import (
    DraftRows,
    DraftSession,
    DrawnFrom,
    DrawnTokens,
    no_draft_in_flight,
)
from guided_spec.types import Draft, DraftPolicy

NO_TOKEN = -1


class DraftAdjustments:
    """Biases, bans and penalties after each request's draft so far. Costs nothing without any.

    drafted: [B] tokens that the requests' drafts hold already.
    vocabulary: what the drafter's logits score; None: the target's own V tokens.
    """

    def __init__(
        self,
        batch: DecodeBatch,
        drafted: Sequence[Sequence[int]],
        vocabulary: DraftVocabulary | None,
    ) -> None:
        self._adjustments = batch.adjustments
        self._vocabulary = vocabulary
        if self._adjustments is None:
            return
        lengths = [len(row) for row in drafted]
        tokens = pad_ids(drafted, max(lengths) + batch.num_draft_tokens, NO_TOKEN)
        self._tokens = tokens.to(batch.device, non_blocking=True)
        self._lengths = to_device(lengths, batch.device)

    def apply(self, logits: Tensor) -> Tensor:
        """Logits [B, D] of the next token to such logits, in float32 where anything is adjusted."""
        if self._adjustments is None:
            return logits
        if self._vocabulary is None:
            return self._apply(self._adjustments, logits)
        # In target ids there and back: the rules name target tokens.
        target_ids = self._vocabulary.target_ids
        full = logits.new_full((len(logits), self._vocabulary.target_size), float("-inf"))
        full = full.index_copy(1, target_ids, logits)
        return self._apply(self._adjustments, full)[:, target_ids]

    def append(self, token_ids: Tensor) -> None:
        """One more drafted token for each request, int64 [B] target ids; -1 for none."""
        if self._adjustments is None:
            return
        self._tokens.scatter_(1, self._lengths.unsqueeze(1), token_ids.unsqueeze(1))
        self._lengths = self._lengths + 1

    def _apply(self, adjustments: Adjustments, logits: Tensor) -> Tensor:
        return adjustments.apply(logits.unsqueeze(1), self._tokens, self._lengths).squeeze(1)


def draft_autoregressively(
    first_logits: Tensor,
    forward: Callable[[Tensor], Tensor],
    batch: DecodeBatch,
    lookahead: Lookahead,
    policy: DraftPolicy = "mask",
    vocabulary: DraftVocabulary | None = None,
) -> Draft:
    """Draft up to K tokens a request with any model that maps a token to logits.

    first_logits: [B, D] after each request's context and its draft so far; a request whose row is
        -inf throughout drafts nothing.
    forward: int64 [B] target ids just drafted -> [B, D] logits after them. Launched before the host
        looks at these tokens: it may turn out that nobody wants its logits. Not called for the
        last.
    policy: of the requests that do not ask for one.
    vocabulary: what the logits score; None: the target's own V tokens.

    Greedy requests draft the largest logit, others sample from the warped draft distribution.
    Where no legal token is in the draft vocabulary, the only legal token is drafted if there is
    just one, and the request's draft ends otherwise.
    """
    masks = HostMasks(DraftRows.from_batch(batch, lookahead, policy), vocabulary)
    masks.draft(first_logits, forward)
    return masks.in_flight().finish()


class HostMasks:
    """Draws a draft token by token; a ``MaskSource``.

    vocabulary: what the logits score; None: the target's own V tokens. choices: kept by the drafter
    from step to step, made with the target ids of ``vocabulary``; None launches every choice by
    itself.

    ``draft`` once, then ``in_flight`` once.
    """

    serve_mailbox = None

    def __init__(
        self,
        rows: DraftRows,
        vocabulary: DraftVocabulary | None,
        choices: ChoiceGraphs | None = None,
    ) -> None:
        target_ids = None if vocabulary is None else vocabulary.target_ids
        self._choices = choices or ChoiceGraphs(target_ids)
        self._rows, self._vocabulary = rows, vocabulary
        self._batch, self._lookahead = rows.batch, rows.lookahead
        self.chosen: list[Chosen] = []
        self._last: Download | None = None  # what was drawn and is not accepted yet
        self._report: Download | None = None
        self._adjustments = DraftAdjustments(rows.batch, self._lookahead.drafted, vocabulary)
        self._tabled: TableAdvance | None = None
        self._is_masked = self._waits = bool(rows.masked)  # waits: for the host, at each token

    def draft(self, first_logits: Tensor, forward: Callable[[Tensor], Tensor]) -> None:
        """Draw token after token, with the arguments of ``draft_autoregressively``.

        The last may still be being copied to the host.
        """
        self._take_tables()
        rows, count, logits = self._rows, self._batch.num_draft_tokens, first_logits
        noise = rows.noise(rows.starts)
        with self._lookahead.until(rows.masked_ends):
            for depth in range(count):
                if self._waits:
                    self._accept_last()
                if not self._goes_on(depth, 1):
                    break
                self._draw(logits, depth, noise)
                if depth + 1 == count or not self._goes_on(depth + 1, 2):
                    break
                logits = forward(self.chosen[-1].readable)

    def in_flight(self, launch_carry: LaunchCarry | None = None) -> DraftInFlight:
        """The draft as the target may read it at once. launch_carry: see ``FinishedDraft``."""
        if not self.chosen:
            return no_draft_in_flight(self._batch, launch_carry)
        return DraftSession(self._rows, self, self._vocabulary, launch_carry)

    @property
    def ids(self) -> Tensor:
        """What was drawn, int64 [B, K], 0 where there is none; K may be less."""
        return torch.stack([chosen.readable for chosen in self.chosen], 1)

    @property
    def drawn_from(self) -> DrawnFrom | None:
        """What the tokens were drawn from; None where every request is greedy."""
        probs = [chosen.probs for chosen in self.chosen if chosen.probs is not None]
        if not probs:
            return None
        rescued = [chosen.rescued for chosen in self.chosen if chosen.rescued is not None]
        return DrawnFrom(torch.stack(probs, 1), torch.stack(rescued, 1) if rescued else None)

    def begin_report(self) -> None:
        """Begin to copy what was drawn, if it is not all accepted as it comes."""
        if self._longest:
            self._report = Download(torch.stack([chosen.report[:2] for chosen in self.chosen]))

    def accept_masked(self) -> None:
        """Accept the last token under the host's masks."""
        if self._waits:
            self._accept_last()

    def report(self) -> DrawnTokens:
        """Wait for all that was drawn."""
        assert self._report is not None
        token_ids, starved = self._report.wait().transpose(0, 1).tolist()
        return DrawnTokens(token_ids, starved, self._rows.starts)

    def _take_tables(self) -> None:
        """The device takes what rows it can from tables.

        Not in chains, whose turns end by what is drafted. The device does not wait for the host
        where all come from there.
        """
        lookahead, batch = self._lookahead, self._batch
        texts = None if lookahead.turns else self._rows.tables()
        if texts is None:
            return
        self._tabled = self._choices.begin_advance(texts, batch.num_draft_tokens, batch.device)
        lookahead.leave(texts, self._tabled.sources[:, : len(batch)])
        self._waits = not texts.is_alone

    def _goes_on(self, depth: int, count: int) -> bool:
        """Whether any request may draft the token at ``depth``.

        count: tokens that masked requests draft for that; 2 before the last one is accepted.
        """
        return (self._waits and self._lookahead.can_draft(count)) or depth < self._longest

    @property
    def _longest(self) -> int:
        """The most tokens of drafts that the host does not wait for."""
        rows = self._rows
        starts = rows.masked_ends if self._waits else rows.starts
        return max((end - start for start, end in zip(starts, rows.ends, strict=True)), default=0)

    def _draw(self, logits: Tensor, depth: int, noise: DraftNoise | None) -> None:
        """One token for each request from logits [B, D]; call ``_accept_last`` next."""
        logits = self._adjustments.apply(logits)
        mask = self._lookahead.next_mask() if self._is_masked else None
        sampling = self._batch.sampling
        chosen = self._choices.choose(depth, logits, mask, sampling, noise, self._tabled)
        self.chosen.append(chosen)
        self._adjustments.append(chosen.tokens)
        if self._waits:
            self._last = Download(chosen.report[:2])

    def _accept_last(self) -> None:
        """Advance the masked requests by what was drawn; waits until that is on the host."""
        if self._last is not None:
            tokens, starved = self._last.wait().tolist()
            self._lookahead.accept_ids(tokens, starved)
            self._last = None
