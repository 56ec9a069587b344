"""Endings by rules that another process has read, which are unpacked once a text needs them."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.completion.endings import Endings
from guided_spec.grammar.completion.rule_endings import ParseStates, RuleEndings
from guided_spec.grammar.completion.spelling import Spelling
from guided_spec.grammar.text.row_filter import Probe


class HandedRules(NamedTuple):
    """What one process tells another one of the rules that it has read.

    cost: tokens of the shortest text, and the stop token. rest: the most tokens that may be missing
    after the first token. is_lasting: and after any further one. named: tokens that are read as
    marks. rules: a pickled ``RuleTexts``.
    """

    cost: int
    rest: int
    is_lasting: bool
    named: frozenset[int]
    rules: bytes

    @classmethod
    def pack(cls, endings: RuleEndings, named: frozenset[int]) -> HandedRules:
        """endings: whose spelling has the tokens that are ``named``."""
        start, longest, rules = endings.start, endings.by_tokens, pickle.dumps(endings.shortest)
        return cls(endings.cost(start), longest.of(start), longest.is_lasting, named, rules)


@final
class _Start:
    """The state of the empty text, before the rules are unpacked."""


_START: Final = _Start()


class DeferredEndings(Endings):
    """``RuleEndings`` whose rules are unpacked when a text needs them.

    Most texts never come so near to the end of their budget. To unpack the rules of many new
    grammars would hold up the texts that decode meanwhile.
    """

    is_exact = True

    def __init__(self, handed: HandedRules, spelling: Spelling) -> None:
        self.vocab_size = spelling.vocab_size
        self._handed, self._spelling = handed, spelling
        self._unpacked: RuleEndings | None = None
        self._lock = threading.Lock()

    @property
    def _inner(self) -> RuleEndings:
        with self._lock:  # states of two unpackings would not know each other
            if self._unpacked is None:
                states = ParseStates(pickle.loads(self._handed.rules))
                self._unpacked = RuleEndings(states, self._spelling)
            return self._unpacked

    def _own(self, state: Any) -> Any:
        return self._inner.start if state is _START else state

    @property
    def is_filling_up(self) -> bool:
        """Whether further texts should get endings of their own."""
        return self._unpacked is not None and self._unpacked.is_filling_up

    @property
    def memory_size_bytes(self) -> int:
        """Of the packed rules, and of the states and tables once there are some."""
        unpacked = 0 if self._unpacked is None else self._unpacked.memory_size_bytes
        return len(self._handed.rules) + unpacked

    @property
    def start(self) -> Any:
        """The state of the empty text."""
        return _START

    def cost(self, state: Any) -> int:
        """Tokens within which the text can be ended: at least 1."""
        return self._handed.cost if state is _START else self._inner.cost(state)

    def stride(self, state: Any, remaining: int) -> int:
        """How many tokens can be taken before the state has to be known again."""
        if state is not _START:
            return self._inner.stride(state, remaining)
        return max(1, remaining - self._handed.rest - 1) if self._handed.is_lasting else 1

    def after(self, state: Any, token_ids: Sequence[int], probe: Probe) -> Any:
        """The state after some tokens; None where the rules do not allow them."""
        return self._inner.after(self._own(state), token_ids, probe)

    def is_free(self, state: Any, remaining: int) -> bool:
        """Whether every token leads to a state that costs less than ``remaining``."""
        if state is _START and remaining > self._handed.rest + 1:
            return True
        return self._inner.is_free(self._own(state), remaining)

    def row(
        self, state: Any, remaining: int, probe: Probe, legal: NDArray[np.int32] | None = None
    ) -> NDArray[np.int32]:
        """int32 [W]: the tokens that lead to a state that costs less than ``remaining``."""
        return self._inner.row(self._own(state), remaining, probe, legal)

    def admits(self, state: Any, token_id: int, remaining: int, probe: Probe) -> bool:
        """Whether ``row`` has the bit of a token that the grammar allows."""
        return self._inner.admits(self._own(state), token_id, remaining, probe)
