"""The texts of one call of generate, whose tokens are looked at back and forth, in rows that move.

transformers tells a logits processor nothing but token ids. So a text is known by its content: by
its prompt, and by the tokens behind it that were looked at before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from guided_spec.errors import GrammarDeadEndError
from guided_spec.grammar.constraint import Fork
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.ops.bitmask import num_mask_words

__all__ = ["Generation", "TrackedText", "common_length"]

KEPT_ROWS = 64  # of a text; more than drafts are long


class TrackedText:
    """One text, and the mask rows along it.

    compiled: its grammar, None for free text. vocab_size: V of the grammar's vocabulary.
    given: the tokens behind the prompt that were last looked at, legal or not, and what is known to
        follow them.
    """

    def __init__(self, compiled: CompiledGrammar | None, vocab_size: int) -> None:
        self.given: list[int] = []
        self.compiled = compiled
        self._vocab_size = vocab_size
        self._fork = Fork(compiled.new_matcher(), compiled.excluded) if compiled else None
        self._rows: dict[int, Tensor] = {}  # by the number of tokens before

    def copy(self) -> TrackedText:
        """An independent copy at the same place."""
        copied = TrackedText(self.compiled, self._vocab_size)
        copied.given = self.given.copy()
        copied._rows = self._rows.copy()
        if self._fork is not None and copied._fork is not None:
            copied._fork.matcher = self._fork.matcher.fork()
            copied._fork.token_ids = self._fork.token_ids.copy()
        return copied

    def row(self, token_ids: list[int]) -> Tensor | None:
        """int32 [W] on the CPU: what may follow these tokens, with the grammar; not to be changed.

        None behind the end of the text, and behind a token that the grammar refuses: one of a draft
        that is about to be rejected, or padding. None for free text.

        Raises GrammarDeadEndError where no token is legal.
        """
        if common_length(self.given, token_ids) < len(token_ids):
            self.given = token_ids
        if self._fork is None:
            return None
        agreed = common_length(self._fork.token_ids, token_ids)
        if agreed == len(token_ids) and agreed in self._rows:
            return self._rows[agreed]  # drafted before, verified now
        self._fork.rollback_to(agreed)
        self._rows = {depth: row for depth, row in self._rows.items() if depth <= agreed}
        if not all(self._accept(self._fork, token) for token in token_ids[agreed:]):
            return None
        return None if self._fork.matcher.is_terminated() else self._fill(self._fork)

    def _accept(self, fork: Fork, token_id: int) -> bool:
        is_known = 0 <= token_id < self._vocab_size
        return is_known and not fork.matcher.is_terminated() and fork.accept(token_id)

    def _fill(self, fork: Fork) -> Tensor:
        depth = len(fork.token_ids)
        bitmask = torch.zeros(1, num_mask_words(self._vocab_size), dtype=torch.int32)
        fork.matcher.fill_next_token_bitmask(bitmask, 0)
        if not bitmask.any():
            raise GrammarDeadEndError(f"no token is legal at output position {depth}")
        self._rows[depth] = bitmask[0]
        self._rows.pop(depth - KEPT_ROWS, None)
        return bitmask[0]


class Generation:
    """The texts of one call of generate, as they were at the last look.

    prompts: [R] of one width, as the first call saw them.
    grammars: [R] None for free texts. vocab_size: V of their vocabulary.
    """

    def __init__(
        self,
        prompts: Sequence[list[int]],
        grammars: Sequence[CompiledGrammar | None],
        vocab_size: int,
    ) -> None:
        self._width = len(prompts[0])
        self._prompts = prompts
        self._texts = [TrackedText(grammar, vocab_size) for grammar in grammars]

    def holds(self, rows: Sequence[list[int]]) -> bool:
        """Whether these rows [R] go on here: all their tokens but the last were looked at before.

        So it is in every kind of decoding: nothing is drawn behind a token that was not looked at.
        """
        if len(rows) != len(self._texts):
            return False
        return all(
            row[: self._width] == prompt and self._nearest(at, row).is_known
            for at, (row, prompt) in enumerate(zip(rows, self._prompts, strict=True))
        )

    def follow(self, rows: Sequence[list[int]]) -> list[Tensor | None]:
        """Look at rows [R] that ``holds`` admits; returns what ``TrackedText.row`` gives for each.

        Beams change places: a row takes over the text that it goes on from.
        """
        sources = [self._nearest(at, row).place for at, row in enumerate(rows)]
        self._texts = [
            self._texts[source] if source == at else self._texts[source].copy()
            for at, source in enumerate(sources)
        ]
        pairs = zip(self._texts, rows, strict=True)
        return [text.row(row[self._width :]) for text, row in pairs]

    def _nearest(self, at: int, row: list[int]) -> _Nearest:
        """Which text of the same prompt and grammar the row goes on from: its own if it can."""
        tokens = row[self._width :]
        place, longest = at, common_length(self._texts[at].given, tokens)
        if longest >= len(tokens) - 1:
            return _Nearest(at, is_known=True)
        for other, text in enumerate(self._texts):
            is_kin = self._prompts[other] == self._prompts[at]
            if is_kin and text.compiled is self._texts[at].compiled:
                length = common_length(text.given, tokens)
                if length > longest:
                    place, longest = other, length
        return _Nearest(place, is_known=longest >= len(tokens) - 1)


class _Nearest(NamedTuple):
    """place: of the text. is_known: whether it holds all of the row's tokens but the last."""

    place: int
    is_known: bool


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two lists have in common at their beginnings."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(at for at in range(shorter) if one[at] != other[at])
