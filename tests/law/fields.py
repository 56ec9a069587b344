"""``Lookahead`` for hundreds of thousands of rows: forks are numbers of texts, masks a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from guided_spec.proposers.host_masks import HostMasks
from guided_spec.types import Draft
from tests.law.world import EOS, number_of, tables


class Fields:
    """Where each row's draft stands, as tensors; what the draft loop and the step ask for.

    nodes: int64 [B] the numbers of the committed texts. limits: int64 [B].
    """

    def __init__(self, nodes: Tensor, limits: Tensor) -> None:
        size = len(nodes)
        self._forks = nodes
        self._limits = limits
        self._lengths = torch.zeros(size, dtype=torch.int64)
        self._tokens = torch.full((size, int(limits.max())), -1)
        self._rows = [tables().mask_rows[nodes]]  # of every depth; all ones behind a draft's end
        self._refused = torch.full((size,), -1)
        self._is_open = limits > 0
        self._is_held = False
        self.turns: list[Any] = []  # one proposer makes the whole draft

    def tabled(self, requests: Sequence[int], ahead: int) -> None:
        """No text has a table on the device."""
        del requests, ahead

    @property
    def drafted(self) -> list[list[int]]:
        """What the draft begins with: nothing. ``WideMasks`` reads the tokens as tensors."""
        assert len(self._rows) == 1
        return [[]] * len(self._limits)

    @property
    def is_open(self) -> list[bool]:
        return [False] if self._is_held else self._is_open.tolist()

    def can_draft(self, count: int) -> bool:
        """A forward too many does no harm: the last token is not counted."""
        del count
        return any(self.is_open)

    @contextmanager
    def until(self, ends: Sequence[int]) -> Iterator[None]:
        self._is_held = not any(ends)  # one policy for all rows
        try:
            yield
        finally:
            self._is_held = False

    def next_mask(self) -> Tensor:
        return torch.where(self._is_open.unsqueeze(1), self._rows[-1], -1)

    def accept_ids(self, token_ids: Sequence[int], starved: Sequence[int] | None = None) -> None:
        del starved
        self._append(torch.tensor(token_ids))

    def extend(self, token_ids: Tensor) -> None:
        """One more token of each row, int64 [B]; -1 where there is none."""
        self._append(token_ids)

    def taken(self) -> tuple[Tensor, Tensor]:
        """The draft's ids [B, K] and lengths [B], an illegal token at its end included."""
        ids, is_bad = self._tokens, self._refused >= 0
        at = self._lengths.clamp_max(ids.shape[1] - 1).unsqueeze(1)
        bad = torch.where(is_bad, self._refused, ids.gather(1, at).squeeze(1))
        ids, lengths = ids.scatter(1, at, bad.unsqueeze(1)), self._lengths + is_bad
        width = int(lengths.max())
        return ids[:, :width].clamp_min(0), lengths

    def finish(self, num_draft: int) -> Tensor:
        free = torch.full_like(self._rows[0], -1)
        missing = num_draft + 1 - len(self._rows)
        return torch.stack([*self._rows, *[free] * missing], 1)[:, : num_draft + 1]

    def _append(self, token_ids: Tensor) -> None:
        is_drawn = self._is_open & (token_ids >= 0)
        tokens = token_ids.clamp_min(0)
        is_legal = tables().legal[self._forks].gather(1, tokens.unsqueeze(1)).squeeze(1)
        is_kept = is_drawn & is_legal
        self._refused = torch.where(is_drawn & ~is_legal, tokens, self._refused)
        depth = len(self._rows) - 1
        self._tokens[:, depth] = torch.where(is_kept, tokens, -1)
        self._lengths += is_kept
        self._forks = torch.where(is_kept, self.followed(tokens), self._forks)
        self._rows.append(torch.where(is_kept.unsqueeze(1), tables().mask_rows[self._forks], -1))
        self._is_open = is_kept & (tokens != EOS) & (self._lengths < self._limits)

    def followed(self, tokens: Tensor) -> Tensor:
        """int64 [B]: where the forks stand after ``tokens``."""
        return number_of(self._forks, tokens)


class WideMasks(HostMasks):
    """The package's masks of the host, whose draft is read as tensors instead of as lists."""

    def finish(self) -> Draft:
        fields: Any = self._lookahead
        with fields.until(self._rows.masked_ends):
            self.accept_masked()
        if not self._is_masked:
            for chosen in self.chosen:
                fields.extend(chosen.tokens)
        draft, drawn_from = Draft(*fields.taken()), self.drawn_from
        if drawn_from is None:
            return draft
        columns = None if self._vocabulary is None else self._vocabulary.columns
        certain = None if drawn_from.rescued is None else drawn_from.rescued >= 0
        whole = draft._replace(probs=drawn_from.probs, columns=columns, is_certain=certain)
        return whole.cut(draft.token_ids.shape[1])
