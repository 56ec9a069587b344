"""The traces of a request's texts, in the form that it asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from guided_spec.engine.outputs import Chunk, Completion
from guided_spec.server.endpoints.replies import TraceReply
from guided_spec.server.faults import invalid_value
from guided_spec.server.service import Service
from guided_spec.trace.page import StepMarkup, summary
from guided_spec.trace.record import StepTrace, Trace

__all__ = ["SampleTraces"]


class SampleTraces:
    """Those of one request.

    form: "json" for records, "html" for rows as the trace page shows them, None for no traces.

    Raises ApiError where this server records none.
    """

    def __init__(self, service: Service, form: Literal["json", "html"] | None) -> None:
        if form is not None and not service.settings.playground:
            message = "trace: this server records none; leave it out, or start it with --playground"
            raise invalid_value(message, "trace")
        self._form = form
        vocabulary = service.llm.vocabulary
        self._vocab_size = vocabulary.vocab_size
        self._stop_token_ids = tuple(vocabulary.stop_token_ids)
        self._num_steps: Counter[int] = Counter()

    def whole(self, sample: int, completion: Completion) -> TraceReply | None:
        """That of a text; None if the request does not ask."""
        trace = completion.trace
        if self._form is None or trace is None:
            return None
        return TraceReply(steps=self._steps(sample, 0, trace.steps), **self._rest(trace))

    def piece(self, sample: int, chunk: Chunk) -> TraceReply | None:
        """What a chunk brings; with the last one everything beside the steps. None for nothing."""
        if self._form is None:
            return None
        start = self._num_steps[sample]
        self._num_steps[sample] += len(chunk.steps)
        trace = None if chunk.completion is None else chunk.completion.trace
        if not chunk.steps and trace is None:
            return None
        rest = {} if trace is None else self._rest(trace)
        return TraceReply(steps=self._steps(sample, start, chunk.steps), **rest)

    def _steps(
        self, sample: int, start: int, steps: Sequence[StepTrace]
    ) -> list[dict[str, Any]] | str:
        if self._form == "json":
            return [asdict(step) for step in steps]
        markup = StepMarkup(sample, self._vocab_size, self._stop_token_ids)
        return "".join(markup.step(at, step) for at, step in enumerate(steps, start))

    def _rest(self, trace: Trace) -> dict[str, Any]:
        if self._form == "html":
            return {"summary": summary([trace])}
        fields = asdict(replace(trace, steps=()))
        del fields["steps"]
        return fields
