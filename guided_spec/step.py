"""The guided speculative step: the whole algorithm on one screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from guided_spec.core import (
    DecodeBatch,
    DraftInFlight,
    Proposer,
    TargetModel,
    TargetOutput,
)
from guided_spec.errors import (
    GrammarDeadEndError,
    GrammarStateError,
    GuidedSpecError,
    NoTokenLeftError,
)
from guided_spec.masks.lookahead import Lookahead
from guided_spec.ops.host import Download, named_range
from guided_spec.ops.sampling.logprobs import (
    Logprobs,
    Scores,
    StepProbs,
    gather_logprobs,
    gather_step_probs,
)
from guided_spec.ops.sampling.verify import VERIFIERS, verify
from guided_spec.ops.side_stream import SideStream
from guided_spec.types import Accepted, Draft, Noise, TokenLogprobs

__all__ = ["VERIFIERS", "Committed", "Step", "commit", "speculative_step"]


class Step(NamedTuple):
    """One step's outcome: what was accepted, of which draft, under which masks.

    num_drafted: int64 [B], ``draft.num_tokens`` being copied to the host.
    packed: for ``commit``: ``accepted`` being copied to the host.
    output: of the verify forward, with the hidden states of the accepted tokens.
    flight: the draft as the proposer made it, for ``launch_carry``.
    logprobs: of the accepted tokens; None when no request of the batch asks.
    probs: of drafted and accepted tokens, for ``batch.traced``; None when that is empty.
    """

    accepted: Accepted
    draft: Draft
    lookahead: Lookahead
    num_drafted: Download
    packed: Download
    output: TargetOutput
    flight: DraftInFlight
    logprobs: Logprobs | None = None
    probs: StepProbs | None = None

    def launch_carry(self, side: SideStream | None = None) -> object | None:
        """Launch the proposer's state for the next step of these requests, see ``Proposer.begin``.

        Once, before ``commit`` waits for the device. side: as of ``speculative_step``.
        """
        committed = (self.accepted, self.output, self.packed)
        if side is None:
            return self.flight.carry(*committed)
        side.after_download(self.packed)
        side.borrow(self.accepted.token_ids, self.accepted.num_accepted)
        prompts = self.output.prompts
        side.borrow(self.output.hidden_states, *(prompts.tensors if prompts else ()))
        with side.use():
            return self.flight.carry(*committed)

    def token_logprobs(self, committed: Sequence[Committed]) -> list[list[TokenLogprobs]]:
        """Of the tokens that each request gained; none where nobody asks."""
        if self.logprobs is None:
            return [[] for _ in committed]
        return self.logprobs.records([row.token_ids for row in committed])


class Committed(NamedTuple):
    """What one request gained: its new tokens, or why it cannot go on after them."""

    token_ids: list[int]
    num_accepted: int
    error: GuidedSpecError | None = None


def speculative_step(
    target: TargetModel,
    proposer: Proposer,
    batch: DecodeBatch,
    noise: Noise | None = None,
    *,
    carry: object | None = None,
    side: SideStream | None = None,
) -> Step:
    """Draft, verify in one forward, and keep what the batch's verifier accepts.

    noise: None draws what the batch's seeds give for a draft of this length.
    carry: what ``launch_carry`` of the last step returned; None is always right, and may be slower.
    side: where the draft is made, overlapped with the work of the current stream, for a target
        whose ``verify`` only launches a CUDA graph: all mask rows are filled after the launch, and
        no thread competes with it. None: the forward may keep the host busy, too.

    Originals of the batch's constraints are not touched: ``commit`` moves them.
    """
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    launches_at_once, side = side is not None, side or SideStream.none()
    with named_range("draft"), side.use():
        flight = proposer.begin(batch, lookahead, carry)
        # Another thread would hold the interpreter while the forward is to be launched. That pays
        # where the launch takes long; else ``finish`` fills the rows when it is done.
        if flight.is_advanced and not launches_at_once:
            lookahead.start()
    side.join()
    with named_range("verify"):
        output = target.verify(batch, flight)
    # From here on the host works while the forward runs.
    with side.use():
        draft = flight.finish()
    side.join()
    num_drafted = Download(draft.num_tokens)  # now: later it would wait for the proposer too
    bitmask = lookahead.finish(draft.token_ids.shape[1])
    with named_range("sample"):
        accepted = verify(output.logits, bitmask, draft, batch.verify_rows(noise))
    scores = Scores(output.logits, bitmask, draft.token_ids, batch.sampling, batch.adjustments)
    logprobs = probs = None
    if batch.logprobs is not None:
        logprobs = gather_logprobs(scores, accepted.token_ids, batch.logprobs)
    if batch.traced:
        probs = gather_step_probs(scores, draft, accepted.token_ids, batch.traced)
    known = (accepted, draft, lookahead, num_drafted, pack(accepted), output, flight)
    return Step(*known, logprobs, probs)


def pack(accepted: Accepted) -> Download:
    """int64 [B, K + 2] being copied to the host: ``num_accepted``, then the ``token_ids``."""
    return Download(torch.cat([accepted.num_accepted.unsqueeze(1), accepted.token_ids], 1))


def commit(
    batch: DecodeBatch, accepted: Accepted, packed: Download | None = None
) -> list[Committed]:
    """Move the matchers over the accepted tokens; one download.

    Those of texts that go on read them later, while the device works: the fork when the next step
    needs a row, the original at the next commit.

    packed: of the step; None packs ``accepted`` now.

    Returns one record a request. A request whose grammar is at a dead end or refuses a token, or
    whose bans leave no token, gets the error; the others are not affected.
    """
    packed = pack(accepted) if packed is None else packed
    for constraint in batch.constraints:
        if constraint is not None:
            constraint.catch_up()
    return [
        _commit_row(batch, request, row[0], row[1 : row[0] + 2])
        for request, row in enumerate(packed.wait().tolist())
    ]


def _commit_row(
    batch: DecodeBatch, request: int, num_accepted: int, token_ids: list[int]
) -> Committed:
    """token_ids: those that were accepted, and the one that was drawn, -1 for none."""
    constraint = batch.constraints[request]
    is_at_an_end = token_ids[-1] < 0
    if is_at_an_end:
        token_ids.pop()
    if constraint is not None:
        try:
            # The capacity was counted with one token less: a text that fills it ends.
            goes_on = constraint.has_row or len(token_ids) <= batch.limits[request]
            token_ids = (constraint.commit_ahead if goes_on else constraint.commit)(token_ids)
        except GrammarStateError as error:
            return Committed([], num_accepted, error)
    if is_at_an_end and not (constraint is not None and constraint.is_terminated):
        return Committed(token_ids, num_accepted, _no_token(batch, request, num_accepted))
    return Committed(token_ids, num_accepted)


def _no_token(batch: DecodeBatch, request: int, num_accepted: int) -> GuidedSpecError:
    """Why no token had a probability after the accepted ones."""
    length = len(batch.contexts[request]) - batch.prompt_lengths[request] + num_accepted
    where = f"at output position {length}"
    bans = [] if batch.adjustments is None else batch.adjustments.bans_after(request, length)
    is_free = batch.constraints[request] is None
    if bans:
        allowed = "" if is_free else " that the grammar allows"
        names = " and ".join(bans)
        return NoTokenLeftError(f"no token is left {where}: {names} forbid all{allowed}")
    if is_free:
        return NoTokenLeftError(f"no token is left {where}: the target's logits are -inf or NaN")
    return GrammarDeadEndError(f"no token is legal {where}")
