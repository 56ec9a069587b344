"""vLLM's drafters of whole blocks: P-EAGLE, DFlash and DSpark.

P-EAGLE and DFlash draw all tokens of a block from the logits of one forward, DSpark one after
another from the hidden states of one. vLLM draws the block first, freely, in the new runner inside
of a CUDA graph. Where a request has a grammar it is drawn again after that, from left to right,
from the same hidden states and with the same noise: the tokens of free requests do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

_BASE, _FLASH, _SPARK = "SpecDecodeBaseProposer", "DFlashSpeculator", "DSparkSpeculator"
# What a drafter has to have from these, the first that it is of: a DSpark is a DFlash too.
_DRAWN_BY = {
    _BASE: ("propose", "_sample_draft_tokens"),
    _SPARK: ("_generate_draft", "_sample_sequential", "_sample_logits"),
    _FLASH: ("_generate_draft",),
}


class BlockDrafting(Protocol):
    """What draws a block under masks, see ``heads.Drafting``."""

    @property
    def is_running(self) -> bool: ...

    def step(self, names: Sequence[str], num_draft: int) -> AbstractContextManager[None]: ...

    def positions(self, hidden_states: Tensor) -> Iterator[Tensor]: ...

    def masked(self, logits: Tensor) -> Tensor: ...


def draws_blocks(drafter: Any) -> bool:
    """Whether it is one of the drafters that ``guide_blocks`` knows.

    Not one that draws paths of candidates (DFlash2, LiLiCorr, XPress), nor a DSpark with a draft
    vocabulary of its own, whose logits cannot be masked.
    """
    for name, drawn_by in _DRAWN_BY.items():
        owner = _owner(drafter, name)
        if owner is not None:
            return _is_block(drafter) and all(_is_of(drafter, owner, one) for one in drawn_by)
    return False


def _is_block(drafter: Any) -> bool:
    if _owner(drafter, _BASE) is not None:
        return bool(getattr(drafter, "parallel_drafting", False))
    own_tokens = getattr(drafter.model, "draft_id_to_target_id", None)
    return _owner(drafter, _SPARK) is None or own_tokens is None


def guide_blocks(drafter: Any, drafting: BlockDrafting) -> None:
    """The blocks of a drafter that ``draws_blocks`` are legal from now on."""
    if _owner(drafter, _BASE) is not None:
        _guide_proposer(drafter, drafting)
    elif _owner(drafter, _SPARK) is not None:
        _redraw_after(drafter, drafting, _guide_spark(drafter, drafting))
    else:
        _redraw_after(drafter, drafting, _guide_flash(drafter, drafting))


def _owner(drafter: Any, name: str) -> Any:
    return next((cls for cls in type(drafter).__mro__ if cls.__name__ == name), None)


def _is_of(drafter: Any, owner: Any, name: str) -> bool:
    found = getattr(owner, name, None)
    return found is not None and getattr(type(drafter), name) is found


def _guide_proposer(proposer: Any, drafting: BlockDrafting) -> None:
    """The older runner: what is drawn is in no graph, so that it is drawn under masks at once."""
    draw = proposer._sample_draft_tokens

    def draw_legal(hidden_states: Tensor, metadata: Any) -> Any:
        if not drafting.is_running:
            return draw(hidden_states, metadata)
        drawn, probs = list[Tensor](), list[Tensor]()
        for hidden in drafting.positions(hidden_states):
            token_ids, own_probs = draw(hidden, metadata)
            proposer.input_ids[: len(token_ids)] = token_ids  # where the next mask looks
            drawn.append(token_ids)
            if own_probs is not None:
                probs.append(own_probs)
        block = torch.stack(drawn, 1).flatten()
        return block, torch.stack(probs, 1).flatten(0, 1) if probs else None

    proposer._sample_draft_tokens = draw_legal


Redraw = Callable[[int], None]


def _redraw_after(speculator: Any, drafting: BlockDrafting, redraw: Redraw) -> None:
    """Call ``redraw`` after each block of the new runner."""
    propose = speculator.propose

    def propose_legal(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        draft = propose(input_batch, *args, **kwargs)
        num_draft = kwargs.get("num_speculative_tokens")
        num_draft = speculator.num_speculative_steps if num_draft is None else num_draft
        with drafting.step(input_batch.req_ids, num_draft):
            if drafting.is_running:
                redraw(len(input_batch.req_ids))
        return draft

    speculator.propose = propose_legal


def _guide_flash(speculator: Any, drafting: BlockDrafting) -> Redraw:
    draw, width = speculator.sample_draft, speculator.num_speculative_steps
    rows = speculator.max_num_reqs * width
    kept = [_Kept(rows) for _ in range(4)]
    fixed: list[Any] = []

    def sample_draft(  # noqa: PLR0913, PLR0917 - vLLM's
        hidden: Tensor,
        positions: Tensor,
        requests: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        steps: Tensor,
        logits: Tensor | None,
        **others: Any,
    ) -> Any:
        for one, tensor in zip(kept, (hidden, positions, requests, steps), strict=True):
            one.keep(tensor)
        fixed[:] = [temperature, seeds, logits, others]
        return draw(hidden, positions, requests, temperature, seeds, steps, logits, **others)

    def redraw(count: int) -> None:
        hidden, *by_token = (one.rows(count * width) for one in kept)
        positions, requests, steps = (one.view(count, width).T.contiguous() for one in by_token)
        temperature, seeds, logits, others = fixed
        for at, one in enumerate(drafting.positions(hidden)):
            speculator.draft_tokens[:count, at] = draw(
                one, positions[at], requests[at], temperature, seeds, steps[at], logits, **others
            )

    speculator.sample_draft = sample_draft
    return redraw


def _guide_spark(speculator: Any, drafting: BlockDrafting) -> Redraw:
    draw_all, draw_one = speculator._sample_sequential, speculator._sample_logits
    kept = _Kept(speculator.max_num_reqs * speculator.num_query_per_req)
    kernels = getattr(speculator.model, "sample_sequential", None)  # of some models, without logits

    def sample_sequential(num_reqs: int, hidden: Tensor) -> None:
        kept.keep(hidden)
        draw_all(num_reqs, hidden)

    def sample_logits(logits: Tensor, *others: Any) -> Any:
        return draw_one(drafting.masked(logits), *others)

    speculator._sample_sequential = sample_sequential
    speculator._sample_logits = sample_logits
    if kernels is not None:
        speculator.model.sample_sequential = lambda *given: (
            not drafting.is_running and kernels(*given)
        )
    return lambda count: draw_all(count, kept.rows(count * speculator.num_query_per_req))


class _Kept:
    """The first rows of a tensor at one address, which a CUDA graph writes to as well.

    It is first kept before graphs are captured, when vLLM measures what memory a step needs.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._rows: Tensor | None = None

    def keep(self, tensor: Tensor) -> None:
        if self._rows is None:
            # A normal tensor: vLLM writes inside and outside of its inference mode.
            with torch.inference_mode(mode=False):
                shape = (self._size, *tensor.shape[1:])
                self._rows = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
        count = min(self._size, len(tensor))
        self._rows[:count].copy_(tensor[:count])

    def rows(self, count: int) -> Tensor:
        assert self._rows is not None
        return self._rows[:count]
