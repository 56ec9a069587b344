"""One request's place in its grammar under LMDeploy, across drafting, verification and commit."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guided_spec.errors import GrammarCompileError, GrammarDeadEndError, GuidedSpecError
from guided_spec.grammar.constraint import Constraint
from guided_spec.grammar.lookahead import Lookahead
from guided_spec.grammar.mask_rows import MaskRows, row_allows
from guided_spec.grammar.protocol import CompiledGrammar

__all__ = ["DraftPlace", "Place"]

_CPU = torch.device("cpu")


class Place:
    """What stands where LMDeploy expects a matcher.

    compiled: the grammar, being compiled. num_draft: K, the length of every draft.

    Drafting walks a fork and fills the rows on its way; verification asks for the same rows and
    fills the last one only; ``commit`` alone moves the original. LMDeploy puts other requests into
    the batch between the two, so each request has rows of its own.
    """

    def __init__(
        self, compiled: Future[CompiledGrammar], vocab_size: int, num_draft: int = 0
    ) -> None:
        self.compiled = compiled
        self._vocab_size = vocab_size
        self._num_draft = max(num_draft, 1)  # a row is looked at only where a token may follow
        self._rows: MaskRows | None = None
        self._constraint: Constraint | None = None
        self._ahead: Lookahead | None = None
        self._told = 0
        self.row = 0  # in the batch that asked last
        self.has_ended = False

    @property
    def constraint(self) -> Constraint:
        """The grammar and the committed text; waits for the compile.

        Raises what the compile raised: GrammarCompileError and its kinds.
        """
        if self._constraint is None:
            try:
                self._constraint = Constraint(self.compiled.result())
            except GuidedSpecError:
                raise
            except Exception as error:
                raise GrammarCompileError(f"the grammar could not be compiled: {error}") from error
        return self._constraint

    @property
    def is_broken(self) -> bool:
        """Whether the grammar did not compile. Such a request ends at its first commit."""
        try:
            _ = self.constraint
        except GuidedSpecError:
            return True
        return False

    def is_terminated(self) -> bool:
        """Whether nothing is masked any more: the text is complete, or the request has failed."""
        return self.has_ended

    def fork(self) -> DraftPlace:
        """Begin a draft behind the committed text; LMDeploy calls it before it drafts."""
        if not self.is_broken:
            self._begin()
        return DraftPlace(self)

    def next_row(self) -> NDArray[np.int32] | None:
        """int32 [W] on the host: what may follow the committed text. None: nothing is masked.

        Read only, and only up to the next call of any method. Forgets the draft: LMDeploy drops
        the drafts of a request that it puts off and computes again.
        """
        if self.has_ended or self.is_broken:
            return None
        return self._begin().peek(0)

    def draft_row(self) -> NDArray[np.int32] | None:
        """``next_row`` behind the draft so far; also None where the draft has ended."""
        return None if self._ahead is None else self._ahead.peek(0)

    def draft(self, token_id: int) -> int:
        """Append one drafted token; returns the one that stands in the draft.

        An illegal token becomes the only legal one where there is just one: a drafter that scores a
        part of the vocabulary may not know it. Otherwise it stays, the draft is cut there, and the
        verifier refuses it.
        """
        if self._ahead is None:
            return token_id
        row = self._ahead.peek(0)
        if row is not None and not row_allows(row, token_id):
            token_id = _only_token(row, token_id)
        self._ahead.extend([[token_id]])
        self._told += 1
        return token_id

    def begin(self) -> Lookahead:
        """Start a draft behind the committed text, for a proposer; ``end_draft`` follows."""
        return self._begin()

    def end_draft(self, token_ids: Sequence[int]) -> None:
        """Walk what stands in the draft behind the tokens that the lookahead has been told."""
        assert self._ahead is not None
        self._ahead.extend([list(token_ids[len(self._ahead.drafted[0]) :])])
        self._told = len(token_ids)

    def missing(self, num_draft: int) -> bool:
        """Whether ``verify_rows`` has to be told the draft's tokens."""
        return not self.has_ended and not self.is_broken and self._told != num_draft

    def verify_rows(self, num_draft: int, token_ids: Sequence[int] | None) -> Tensor | None:
        """int32 [K + 1, W] on the host: the masks of every target row; None where there is none.

        token_ids: the K draft tokens; None where ``draft`` was told all of them.
        """
        if self.has_ended or self.is_broken:
            return None
        if token_ids is not None and self._told != num_draft:
            self._begin(num_draft).extend([list(token_ids)])
            self._told = num_draft
        assert self._ahead is not None
        rows = self._ahead.finish(num_draft)
        return None if rows is None else rows[0]

    def commit(self, token_ids: Sequence[int]) -> list[int]:
        """Move the original over accepted tokens; returns those up to the end of the text.

        Raises GrammarDeadEndError where no token could follow, GrammarStateError where the grammar
        refuses one, and what the compile raised. The place is then out of use: ``has_ended``.
        """
        if self.has_ended:
            return []
        self._told = 0
        self._ahead = None
        try:
            taken = self.constraint.commit(token_ids)
        except GuidedSpecError as error:
            self.has_ended = True
            if self._is_dead_end(token_ids):
                raise GrammarDeadEndError("no token of the vocabulary is legal here") from error
            raise
        self.has_ended = self.constraint.is_terminated
        return taken

    def _begin(self, num_draft: int = 0) -> Lookahead:
        if self._rows is None or self._rows.depths <= max(num_draft, self._num_draft):
            self._num_draft = max(num_draft, self._num_draft)
            with torch.inference_mode(mode=False):  # other threads fill them, outside that mode
                self._rows = MaskRows(1, self._num_draft + 1, self._vocab_size, _CPU)
        self._told = 0
        self._ahead = Lookahead.fork([self.constraint], self._rows, [self._num_draft])
        return self._ahead

    def _is_dead_end(self, token_ids: Sequence[int]) -> bool:
        """Whether the committed text, with what is legal of these tokens, cannot go on."""
        if self._constraint is None or self._rows is None:
            return False
        ahead = Lookahead.fork([self._constraint], self._rows, [len(token_ids)])
        ahead.extend([list(token_ids)])
        depth = len(ahead.drafted[0])
        ahead.finish(depth)
        return not self._rows.words(0, depth).any()


class DraftPlace:
    """A place while its draft is being made: what LMDeploy takes for a forked matcher."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def next_row(self) -> NDArray[np.int32] | None:
        """int32 [W] on the host: what may follow the draft so far. None: nothing is masked."""
        return self._place.draft_row()

    def draft(self, token_id: int) -> int:
        """See ``Place.draft``."""
        return self._place.draft(token_id)


def _only_token(row: NDArray[np.int32], otherwise: int) -> int:
    """The one legal token of a row; ``otherwise`` where there is another number of them."""
    words = row.view(np.uint32)
    if np.bitwise_count(words).sum() != 1:
        return otherwise
    word = int(np.flatnonzero(words)[0])
    return word * 32 + int(words[word]).bit_length() - 1
