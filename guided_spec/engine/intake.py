"""Admission: requests whose grammars are compiled get slots while the KV cache has capacity."""

from __future__ import annotations

from concurrent.futures import Future, wait

from guided_spec.engine.request import Request, State
from guided_spec.engine.scheduler import Scheduler
from guided_spec.errors import GrammarError, GuidedSpecError
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.models.causal_lm import CausalLM

BOUND_AT_ONCE = 8  # texts that get their grammars while a step runs: more would hold it up
PATIENCE = 0.05  # seconds until somebody may have cancelled


class Intake:
    """Admits requests to an engine's scheduler.

    model: whose KV cache must have capacity. longest_draft: draft tokens of a text at most.
    is_parallel: whether several processes run it, which must admit the same requests at the
    same step.
    """

    def __init__(
        self, scheduler: Scheduler, model: CausalLM, longest_draft: int, *, is_parallel: bool
    ) -> None:
        self._scheduler, self._model = scheduler, model
        self._longest_draft, self._is_parallel = longest_draft, is_parallel

    def admit(self) -> None:
        """Give slots to those that may begin."""
        if self._is_parallel:
            # Whose grammar is done first must not decide what is batched in which process.
            wait(self._grammars())
        for request in self._scheduler.ready():
            if not self._model.has_blocks(len(request.text.tokens) + self._longest_draft):
                break  # else it would read its prompt, and go back to the queue
            if self._bind(request):
                self._scheduler.admit(request)
                request.num_cached, request.is_begun = 0, False
                request.stats.start()

    def bind_next(self) -> None:
        """Bind those that come next to their grammars, while the device works."""
        for request in [] if self._is_parallel else self._scheduler.coming(BOUND_AT_ONCE):
            self._bind(request)

    def wait(self) -> None:
        """Wait for a grammar, for a while."""
        wait(self._grammars(), timeout=PATIENCE, return_when="FIRST_COMPLETED")

    def _bind(self, request: Request) -> bool:
        """Give it its compiled grammar; False where that cannot be, with which it ends."""
        try:
            request.take_grammar()
        except GuidedSpecError as error:
            self._scheduler.end(request, error)
        except Exception as error:  # as of a backend's matcher; it concerns this request alone
            self._scheduler.end(request, GrammarError(f"the grammar cannot be used: {error!r}"))
        return request.state is not State.FINISHED

    def _grammars(self) -> list[Future[CompiledGrammar]]:
        jobs = [request.job for request in self._scheduler]
        return [job.grammar for job in jobs if job.grammar is not None]
