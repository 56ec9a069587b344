"""The requests of one vLLM worker that asked for a grammar, and the tokens they have committed.

The grammars that are enforced live in the scheduler's process. What is kept here follows the tokens
that this worker sampled; it draws up drafts only, and is given up where it stops to fit.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

from guided_spec.grammar.compiler import GrammarCompileQueue
from guided_spec.grammar.constraint import Constraint
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.integrations.vllm_grammars import VllmGrammars
from guided_spec.integrations.vllm_shadow import ShadowConstraints

__all__ = ["GrammarRequests"]


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

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens of the masks."""
        return self._grammars.vocabulary.vocab_size

    def add(self, name: str, sampling_params: Any, output: Iterable[int]) -> None:
        """A request begins, or goes on after it was preempted, behind its ``output`` tokens."""
        self._shadows.forget(name)
        spec = self._grammars.spec_of(sampling_params)
        self._asked[name] = _Asked(sampling_params, spec, list(output))
        if spec is not None:
            self._shadows.prepare(name, spec)

    def knows(self, name: str, sampling_params: Any) -> bool:
        """Whether this very request was added."""
        asked = self._asked.get(name)
        return asked is not None and asked.sampling_params is sampling_params

    def any_grammar(self, names: Iterable[str]) -> bool:
        """Whether one of the requests asked for a grammar."""
        asked = map(self._asked.get, names)
        return any(one is not None and one.spec is not None for one in asked)

    def commit(
        self, names: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> list[Constraint | None]:
        """Take note of [B] lists of new tokens; returns where each request's grammar stands.

        None for a free request, one without new tokens (its prompt is still read), and one whose
        grammar is not compiled yet, is complete, or does not fit its tokens.
        """
        return [self._commit(name, new) for name, new in zip(names, token_ids, strict=True)]

    def keep(self, names: Container[str]) -> None:
        """Forget every request that is not among ``names``."""
        for name in [name for name in self._asked if name not in names]:
            del self._asked[name]
            self._shadows.forget(name)

    def _commit(self, name: str, new: Sequence[int]) -> Constraint | None:
        asked = self._asked.get(name)
        if asked is None or asked.spec is None or not new:
            return None
        asked.output.extend(new)
        return self._shadows.follow(name, asked.spec, asked.output)


class _Asked(NamedTuple):
    """sampling_params: vLLM's, whose identity tells a request from a later one of its name."""

    sampling_params: Any
    spec: GrammarSpec | None
    output: list[int]
