"""The requests of one vLLM worker that asked for a grammar, and the tokens they have committed.

The grammars that are enforced live in the scheduler's process. What is kept here follows the tokens
that this worker sampled, in steps that draft and in those that do not; it draws up drafts only, and
is given up where it stops to fit.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guided_spec.grammar.compiler import GrammarCompileQueue
from guided_spec.grammar.constraint import Constraint
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.integrations.vllm_grammars import VllmGrammars
from guided_spec.integrations.vllm_shadow import ShadowConstraints

__all__ = ["GrammarRequests"]

MOST_NOTED = 64  # steps without a draft whose tokens may stay on the device


class GrammarRequests:
    """Running requests by vLLM's names for them.

    config: vLLM's VllmConfig. With tensor parallelism a grammar is waited for where it is first
        needed: every rank must draft the same tokens, and so have it from the same step on.

    Raises ModelError for a tokenizer that cannot be read.
    """

    def __init__(self, config: Any) -> None:
        self._grammars = VllmGrammars(config)
        queue = GrammarCompileQueue(self._grammars, max_workers=1)
        is_split = config.parallel_config.tensor_parallel_size > 1
        self._shadows = ShadowConstraints(queue, waits=is_split)
        self._asked: dict[str, _Asked] = {}
        self._noted: list[_Noted] = []

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens of the masks."""
        return self._grammars.vocabulary.vocab_size

    def add(self, name: str, sampling_params: Any, output: Iterable[int]) -> None:
        """A request begins, or goes on after it was preempted, behind its ``output`` tokens."""
        self._forget(name)
        spec = self._grammars.spec_of(sampling_params)
        self._asked[name] = _Asked(sampling_params, spec, list(output))
        if spec is not None:
            self._shadows.prepare(name, spec)

    def restate(self, name: str, output: Sequence[int]) -> None:
        """The output of a request that was added, as vLLM knows it; what was missed is made up for.

        Only what is new is read, where the output still ends as it did.
        """
        self._drop_noted(name)
        known = self._asked[name].output
        if len(known) > len(output) or (known and known[-1] != output[len(known) - 1]):
            self._shadows.forget(name)
            known.clear()
        known.extend(output[len(known) :])

    def knows(self, name: str, sampling_params: Any) -> bool:
        """Whether this very request was added."""
        asked = self._asked.get(name)
        return asked is not None and asked.sampling_params is sampling_params

    def any_grammar(self, names: Iterable[str]) -> bool:
        """Whether one of the requests asked for a grammar."""
        asked = map(self._asked.get, names)
        return any(one is not None and one.spec is not None for one in asked)

    def note(self, names: Sequence[str], token_ids: Tensor, num_tokens: Tensor) -> None:
        """Take note of what a step sampled: tokens [B, <= K + 1] on the device, and how many each.

        Nothing waits for the device, except now and then while nothing is drafted. Tokens outside
        of the vocabulary are none.
        """
        if self.any_grammar(names):
            counts = num_tokens.view(-1, 1).to(token_ids.dtype)
            packed = torch.cat([counts, token_ids], 1)  # a copy: vLLM may use its memory again
            if len(self._noted) == MOST_NOTED:
                self._record()
            self._noted.append(_Noted([*names], packed))

    def commit(self, names: Sequence[str]) -> list[Constraint | None]:
        """[B] where each request's grammar stands behind all that was noted; waits for it.

        None for a free request, one without tokens in the last step that was noted (its prompt is
        still read), and one whose grammar is not compiled yet, is complete, or does not fit its
        tokens.
        """
        written = self._record()
        return [self._follow(name) if name in written else None for name in names]

    def keep(self, names: Container[str]) -> None:
        """Forget every request that is not among ``names``."""
        for name in [name for name in self._asked if name not in names]:
            del self._asked[name]
            self._forget(name)

    def _record(self) -> set[str]:
        """Append what was noted; returns the requests that got tokens in the last step."""
        noted, self._noted = self._noted, []
        written = set[str]()
        for names, packed in noted:
            written.clear()
            for name, (count, *token_ids) in zip(names, packed.tolist(), strict=True):
                new = [
                    token for token in token_ids[: max(0, count)] if 0 <= token < self.vocab_size
                ]
                if name in self._asked and new:
                    self._asked[name].output.extend(new)
                    written.add(name)
        return written

    def _follow(self, name: str) -> Constraint | None:
        asked = self._asked[name]
        return None if asked.spec is None else self._shadows.follow(name, asked.spec, asked.output)

    def _forget(self, name: str) -> None:
        self._shadows.forget(name)
        self._drop_noted(name)

    def _drop_noted(self, name: str) -> None:
        for noted in self._noted:
            noted.names[:] = [None if other == name else other for other in noted.names]


class _Noted(NamedTuple):
    """What a step sampled, int [B, 1 + width]: how many tokens, and these.

    names: None for a request whose tokens are known in another way.
    """

    names: list[str | None]
    packed: Tensor


class _Asked(NamedTuple):
    """sampling_params: vLLM's, whose identity tells a request from a later one of its name."""

    sampling_params: Any
    spec: GrammarSpec | None
    output: list[int]
