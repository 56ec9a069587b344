"""The loop that drafts with a model, for every proposer that has one, under two policies.

- ``mask``: at each depth the grammar's mask goes to the device, and what was drawn under it comes
  back. Every draft token is legal; each depth waits for the host once. Where all these grammars
  have tables on the device, the masks come from there, and the host checks the draft afterwards.
- ``validate``: the model drafts freely. The host checks the draft afterwards, in one download; the
  first illegal token stays in it, and the verifier refuses it exactly.

Under each, the drafter's logits are adjusted like the target's (``ops.sampling.adjust``).

Which one a request gets changes how much is accepted, never the distribution of the text: a draft
sampled under a mask is verified with its masked probabilities, and one sampled freely with those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from guided_spec.core import DecodeBatch, DraftInFlight, FinishedDraft, LaunchCarry, TargetOutput
from guided_spec.masks.lookahead import Lookahead
from guided_spec.masks.rows import TableAdvance, TabledTexts
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.ops.host import Download, pad_ids, to_device
from guided_spec.ops.sampling.adjust import Adjustments
from guided_spec.ops.sampling.noise import DraftNoise
from guided_spec.proposers.draft_chooser import Chosen, DraftChooser
from guided_spec.proposers.drafting import draft_ends, host_draft, used_policies
from guided_spec.proposers.masked_drafter import (
    DraftBuffers,
    DraftPrefix,
    MaskedDraft,
    MaskedDrafter,
    MaskedTurn,
)
from guided_spec.types import Accepted, Draft, DraftPolicy

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
    loop = DraftLoop(batch, lookahead, policy, vocabulary)
    loop.run(first_logits, forward)
    return loop.finish()


class _PendingDraft(NamedTuple):
    """A loop's draft that is still being copied to the host; see ``DraftInFlight``."""

    draft: Draft
    most: tuple[int, ...]
    loop: DraftLoop
    later: Download | None
    launch_carry: LaunchCarry | None

    @property
    def is_advanced(self) -> bool:
        return False

    @property
    def serve_mailbox(self) -> Callable[[], None] | None:
        return self.loop.serve_mailbox

    def finish(self) -> Draft:
        return self.loop.finish_as(self.draft, self.later)

    def carry(self, accepted: Accepted, output: TargetOutput, packed: Download) -> object | None:
        return None if self.launch_carry is None else self.launch_carry(accepted, output, packed)


class _Masked(NamedTuple):
    """A draft of K tokens under masks for B requests; see ``MaskedTurn``."""

    buffers: DraftBuffers
    prefix: DraftPrefix | None
    depths: int
    batch: int

    def own(self, drawn: Tensor) -> Tensor:
        """[B, K, ...]: a copy of what is in the buffers that each request drew itself."""
        own = drawn[: self.depths, : self.batch]
        own = own if self.prefix is None else self.prefix.after(own)
        return own.transpose(0, 1).clone(memory_format=torch.contiguous_format)


class DraftLoop:
    """What is drafted in one step, and how each request keeps to its grammar.

    ``run``, ``take`` or ``take_masked`` once, then ``finish`` or ``in_flight`` once. The arguments
    are those of ``draft_autoregressively``.
    rows: the requests that draft, if they are open; None: all.
    chooser: kept by the drafter from step to step, made with the target ids of ``vocabulary``; None
        launches every choice by itself.
    """

    def __init__(
        self,
        batch: DecodeBatch,
        lookahead: Lookahead,
        policy: DraftPolicy,
        vocabulary: DraftVocabulary | None,
        chooser: DraftChooser | None = None,
        rows: Sequence[int] | None = None,
    ) -> None:
        self._target_ids = None if vocabulary is None else vocabulary.target_ids
        self._chooser = chooser or DraftChooser(self._target_ids)
        self._batch, self._lookahead, self._vocabulary = batch, lookahead, vocabulary
        self._starts = [len(drafted) for drafted in lookahead.drafted]
        self._ends = draft_ends(batch, lookahead, range(len(batch)) if rows is None else rows)
        # A request that needs no mask is advanced once all is drawn, whatever others need.
        pairs = zip(used_policies(batch, policy), batch.constraints, strict=True)
        self._is_later = [used != "mask" or constraint is None for used, constraint in pairs]
        # Of those whose forks advance as they draft: the others' turn comes later.
        self._waiting_ends = [
            start if later else end
            for start, end, later in zip(self._starts, self._ends, self._is_later, strict=True)
        ]
        self._most = [
            end - start if later else 0
            for start, end, later in zip(self._starts, self._ends, self._is_later, strict=True)
        ]
        self._sampling = batch.sampling
        self._chosen: list[Chosen] = []
        self._drawn: Download | None = None
        self._running: MaskedDraft | None = None
        self._masked: _Masked | None = None
        self._adjustments = DraftAdjustments(batch, lookahead.drafted, vocabulary)
        self._tabled: TableAdvance | None = None
        self._is_waiting = not all(self._is_later)  # for the host, at each token

    def tables(self) -> TabledTexts | None:
        """The texts that draft under masks and have tables on the device; None for none."""
        ends = zip(self._starts, self._ends, strict=True)
        rows = [request for request, (start, end) in enumerate(ends) if end > start]
        if any(self._starts[row] for row in rows):
            return None
        masked = [row for row in rows if not self._is_later[row]]
        return self._lookahead.tabled(masked, self._batch.num_draft_tokens)

    def run(self, first_logits: Tensor, forward: Callable[[Tensor], Tensor]) -> None:
        """Draw token after token; the last may still be being copied to the host."""
        self._leave_tables()
        logits = first_logits
        noise = None if self._sampling.all_greedy else self._keys(self._starts)
        with self._lookahead.until(self._waiting_ends):
            for depth in range(self._batch.num_draft_tokens):
                if self._is_waiting:
                    self._accept_drawn()
                if not self._goes_on(depth):
                    break
                self._draw(logits, depth, noise)
                if depth + 1 == self._batch.num_draft_tokens or not self._may_go_on(depth + 1):
                    break
                logits = forward(self._chosen[-1].readable)

    def take(self, best: Tensor) -> None:
        """Every request's best tokens, int64 [B, K] target ids."""
        self._chosen += [Chosen(ids.expand(3, -1), None, None) for ids in best.unbind(1)]

    def take_masked(
        self,
        drafter: MaskedDrafter,
        slots: Sequence[int],
        prefix: DraftPrefix | None,
        texts: TabledTexts | None,
    ) -> None:
        """Tokens under masks, drawn while the host advances the forks; see ``drafts_masked``.

        prefix: what the drafts hold already; None where those that continue hold nothing.
        texts: whose masks the device takes from tables; None where there are none.
        """
        noise = None if self._sampling.all_greedy else self._keys([0] * len(self._batch))
        turn = MaskedTurn(self._lookahead, self._ends, prefix, texts)
        self._running = drafter.begin(slots, self._batch, turn, self._sampling, noise)
        self._masked = _Masked(
            self._running.buffers, prefix, self._batch.num_draft_tokens, len(slots)
        )
        # All requests are advanced as they draft: the host sees every token anyway.
        self._waiting_ends, self._most = self._ends, [0] * len(slots)
        # The device works on while the next launches are made: on the forward of a block, or on the
        # one after the first token.
        if self._running.needs_host and not drafter.scores_at_once:
            self._running.accept_drawn(1)

    def finish(self) -> Draft:
        """The draft, once the host has accepted its tokens."""
        rows = self._advance(self._download())
        return self._with_probs(host_draft(self._batch, rows))

    def in_flight(self, launch_carry: LaunchCarry | None = None) -> DraftInFlight:
        """The draft as the target may read it at once. launch_carry: see ``FinishedDraft``."""
        if self._masked is None and not self._chosen:
            return FinishedDraft(self.finish(), (0,) * len(self._batch), launch_carry)
        ids = self._ids()
        pairs = zip(self._starts, self._ends, strict=True)
        most = tuple(min(end - start, ids.shape[1]) for start, end in pairs)
        lengths = to_device(most, ids.device)
        return _PendingDraft(Draft(ids, lengths), most, self, self._download(), launch_carry)

    @property
    def serve_mailbox(self) -> Callable[[], None] | None:
        """Fills masks while the device waits, see ``DraftInFlight``; None where it does not."""
        running = self._running
        return running.accept_drawn if running is not None and running.needs_host else None

    def finish_as(self, draft: Draft, later: Download | None) -> Draft:
        """``draft`` with the lengths that the grammars leave it. later: what the host sees."""
        lengths = to_device([len(row) for row in self._advance(later)], draft.token_ids.device)
        return self._with_probs(Draft(draft.token_ids, lengths))

    def _leave_tables(self) -> None:
        """The device takes what rows it can from tables.

        Not in chains, whose turns end by what is drafted. The device does not wait for the host
        where all come from there.
        """
        texts = None if self._lookahead.turns else self.tables()
        if texts is None:
            return
        batch = self._batch
        self._tabled = self._chooser.begin_advance(texts, batch.num_draft_tokens, batch.device)
        self._lookahead.leave(texts, self._tabled.sources[:, : len(batch)])
        self._is_waiting = not texts.is_alone

    def _goes_on(self, depth: int) -> bool:
        """Whether any request may draft another token."""
        return (self._is_waiting and self._lookahead.can_draft(1)) or depth < self._longest

    def _may_go_on(self, depth: int) -> bool:
        """``_goes_on`` as far as it is known before ``_accept_drawn``."""
        return (self._is_waiting and self._lookahead.can_draft(2)) or depth < self._longest

    @property
    def _longest(self) -> int:
        """The most tokens of drafts that the host does not wait for."""
        if self._is_waiting:
            return max(self._most)
        return max(end - start for start, end in zip(self._starts, self._ends, strict=True))

    def _draw(self, logits: Tensor, depth: int, noise: DraftNoise | None) -> None:
        """One token for each request from logits [B, D]; call ``_accept_drawn`` next."""
        logits = self._adjustments.apply(logits)
        mask = None if all(self._is_later) else self._lookahead.next_mask()
        chosen = self._chooser.choose(depth, logits, mask, self._sampling, noise, self._tabled)
        self._chosen.append(chosen)
        self._adjustments.append(chosen.tokens)
        if self._is_waiting:
            self._drawn = Download(chosen.report[:2])

    def _accept_drawn(self) -> None:
        """Advance the masked requests by what was drawn; waits until that is on the host."""
        if self._running is not None:
            self._running.accept_drawn()
            self._running = None
        if self._drawn is not None:
            tokens, starved = self._drawn.wait().tolist()
            self._lookahead.accept_ids(tokens, starved)
            self._drawn = None

    def _download(self) -> Download | None:
        """What the host has to see of the tokens that it accepts later, int64 [K, 2, B]."""
        if not self._chosen or not self._longest:
            return None
        return Download(torch.stack([chosen.report[:2] for chosen in self._chosen]))

    def _advance(self, later: Download | None) -> list[list[int]]:
        """Accept what the host has not seen yet; returns every request's own tokens."""
        self._lookahead.keep_sources()
        reports = None if later is None else later.wait()
        with self._lookahead.until(self._waiting_ends):
            self._accept_drawn()
            if reports is not None and self._tabled is not None and not self._is_waiting:
                self._lookahead.accept_drawn(*reports.transpose(0, 1).tolist())
        if reports is not None and any(self._most):
            drawn = zip(reports[:, 0].T.tolist(), self._most, strict=True)
            self._lookahead.extend([row[:most] for row, most in drawn])
        drafted, refused = self._lookahead.drafted, self._lookahead.refused
        rows = []
        for request, start in enumerate(self._starts):
            row = drafted[request][start:]
            found = refused[request] if self._ends[request] > start else None
            # Dropping an illegal token that was sampled would bias the text: the verifier has to
            # refuse it.
            rows.append(row if found is None else [*row, found])
        return rows

    def _keys(self, starts: Sequence[int]) -> DraftNoise:
        """Which noise the token is drawn with that follows ``starts`` [B] draft tokens."""
        pairs = zip(self._batch.contexts, starts, strict=True)
        positions = [len(context) + start for context, start in pairs]
        return self._batch.draft_keys(to_device(positions, self._batch.device))

    def _ids(self) -> Tensor:
        """int64 [B, K]: what was drawn, 0 where there is none; K may be less."""
        if self._masked is not None:
            return self._masked.own(self._masked.buffers.ids)
        return torch.stack([chosen.readable for chosen in self._chosen], 1)

    def _with_probs(self, draft: Draft) -> Draft:
        """The draft and what its tokens were drawn from; as it is where all are certain."""
        if self._sampling.all_greedy or not self._is_drawn:
            return draft
        columns = is_certain = None
        if self._vocabulary is not None:
            columns = self._vocabulary.columns
            is_certain = self._stack(lambda drawn: drawn.rescued) >= 0
        probs = self._stack(lambda drawn: drawn.probs)
        whole = draft._replace(probs=probs, columns=columns, is_certain=is_certain)
        return whole.cut(draft.token_ids.shape[1])

    @property
    def _is_drawn(self) -> bool:
        """Whether tokens were sampled; else all are certain."""
        return self._masked is not None or any(chosen.probs is not None for chosen in self._chosen)

    def _stack(self, part: Callable[[Chosen | DraftBuffers], Tensor | None]) -> Tensor:
        """[B, K, ...]: one part of all that was drawn."""
        sources = self._chosen if self._masked is None else [self._masked.buffers]
        found = [kept for kept in map(part, sources) if kept is not None]
        return torch.stack(found, 1) if self._masked is None else self._masked.own(found[0])
