"""Many requests in flight at one LLM: submitted, cancelled now and then, and judged as they end."""

from __future__ import annotations

import queue
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from guided_spec.bench.soak_judge import find_wrong
from guided_spec.bench.soak_requests import Case, CaseSource
from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Chunk, Completion
from guided_spec.engine.request import Request
from guided_spec.errors import RequestCancelledError

__all__ = ["SoakRun", "Tally"]

PATIENCE = 120.0  # seconds without any chunk: a request does not end
_CANCEL = 0.2  # chance of each that is to be cancelled, whenever another one ends


@dataclass(slots=True)
class Tally:
    """What became of the requests so far.

    requests: submitted. ends: completions by (kind of case, how it ended). tokens: generated.
    wrong: what was not as it has to be.
    """

    requests: int = 0
    tokens: int = 0
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, case: Case, completion: Completion, wrong: str | None) -> None:
        """Count one completion."""
        self.tokens += len(completion.token_ids)
        end = str(completion.finish_reason)
        if isinstance(completion.error, RequestCancelledError):
            end = "cancelled"
        self.ends[case.kind, end] += 1
        if wrong is not None:
            self.wrong.append(f"{case.kind}: {wrong}; {case.prompt!r:.60} {case.params}")


class _Flight(NamedTuple):
    """A case on its way. requests: None for those that failed at once. missing: its completions."""

    case: Case
    requests: list[Request | None]
    missing: list[int]


class SoakRun:
    """Keeps a number of requests in flight; every end is judged.

    in_flight: requests at once. seed: of the cancellations.
    """

    def __init__(self, llm: LLM, cases: CaseSource, *, in_flight: int = 48, seed: int = 0) -> None:
        self._llm = llm
        self._cases = cases
        self._in_flight = in_flight
        self._dice = random.Random(seed)
        self._flights: dict[int, _Flight] = {}
        self._chunks: queue.SimpleQueue[tuple[int, Chunk]] = queue.SimpleQueue()
        self.tally = Tally()

    def run(self, num_requests: int) -> None:
        """So many more requests, each to its end; some of them stream."""
        last = self.tally.requests + num_requests
        while self.tally.requests < last or self._flights:
            while self.tally.requests < last and len(self._flights) < self._in_flight:
                self._submit()
            if not self._take():
                self.tally.wrong.append(f"{len(self._flights)} requests do not end")
                self._flights.clear()
                return

    def _submit(self) -> None:
        number = self.tally.requests
        self.tally.requests += 1
        case = self._cases.draw()
        missing = list(range(case.params.n))
        requests = self._llm._submit(
            [case.prompt],
            case.params,
            lambda chunk: self._chunks.put((number, chunk)),
            is_streamed=self._dice.random() < 0.2,
        )
        self._flights[number] = _Flight(case, requests, missing)

    def _take(self) -> bool:
        """One chunk; False where none comes any more."""
        try:
            number, chunk = self._chunks.get(timeout=PATIENCE)
        except queue.Empty:
            return False
        if chunk.completion is None:
            return True
        flight = self._flights.get(number)
        if flight is None or chunk.sample_index not in flight.missing:
            self.tally.wrong.append(f"request {number} ended twice")
            return True
        flight.missing.remove(chunk.sample_index)
        wrong = find_wrong(flight.case, chunk.completion, self._llm.vocabulary)
        self.tally.add(flight.case, chunk.completion, wrong)
        if not flight.missing:
            del self._flights[number]
        self._cancel_some()
        return True

    def _cancel_some(self) -> None:
        for flight in self._flights.values():
            if flight.case.is_cancelled and self._dice.random() < _CANCEL:
                for request in flight.requests:
                    if request is not None:
                        request.is_cancelled = True
