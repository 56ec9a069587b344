"""What the server has done, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from guided_spec.engine.outputs import Chunk, Completion, Load, RequestStats
from guided_spec.grammar.spec import GrammarSpec

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """Counters of one server, in a registry of their own.

    load: how busy the engine is now.
    """

    def __init__(self, load: Callable[[], Load]) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter(
            "requests", "Requests that have ended; 499: the client left", ["endpoint", "status"]
        )
        self.request_seconds = self._histogram(
            "request_seconds", "From a request's arrival to its end", _WHOLE, ["endpoint"]
        )
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to a sample's first", _FIRST
        )
        self.between_tokens = self._histogram(
            "time_between_tokens_seconds", "For each later token, its share of a step", _BETWEEN
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts")
        self.cached_tokens = self._counter("cached_tokens", "Tokens of prompts found in the cache")
        self.output_tokens = self._counter("output_tokens", "Tokens that were generated")
        self.samples = self._counter("samples", "Texts that have ended", ["finish_reason"])
        kind, position = ["kind"], ["position"]
        self.drafted = self._counter("drafted_tokens", "Tokens that were proposed", kind)
        self.accepted = self._counter("accepted_tokens", "Those that were accepted", kind)
        self.drafted_at = self._counter("drafted_at", "The same, by position in a draft", position)
        self.accepted_at = self._counter("accepted_at", "Those that were accepted", position)
        self.steps = self._counter("steps", "Forward passes, for each text that took part")
        self.starved = self._counter("starved_rows", "No legal token in the draft vocabulary")
        self.mask_seconds = self._counter("mask_seconds", "Host time for masks")
        self._gauge("slots", "Texts that can run at once", lambda: load().num_slots)
        self._gauge("running_samples", "Texts that hold a slot", lambda: load().running)
        self._gauge("blocks", "Of keys and values; stock: slots", lambda: load().num_blocks)
        self._gauge("used_blocks", "Those that texts hold", lambda: load().used_blocks)
        self._gauge("waiting_samples", "Texts that wait for a slot", lambda: load().waiting)

    def text(self) -> bytes:
        """All counters in Prometheus' text format."""
        return generate_latest(self._registry)

    def count_request(self, endpoint: str, status: int, seconds: float) -> None:
        """Count a request that has ended."""
        self.requests.labels(endpoint, str(status)).inc()
        self.request_seconds.labels(endpoint).observe(seconds)

    def count_sample(self, completion: Completion) -> None:
        """Count a text that has ended."""
        stats = completion.stats
        self.samples.labels(completion.finish_reason).inc()
        self.cached_tokens.inc(stats.cached_tokens)
        for kind, (drafted, accepted) in _by_kind(stats, completion.grammar).items():
            self.drafted.labels(kind).inc(drafted)
            self.accepted.labels(kind).inc(accepted)
        for position, drafted in enumerate(stats.drafted, 1):
            self.drafted_at.labels(str(position)).inc(drafted)
        for position, accepted in enumerate(stats.accepted, 1):
            self.accepted_at.labels(str(position)).inc(accepted)
        self.steps.inc(stats.steps)
        self.starved.inc(stats.starved)
        self.mask_seconds.inc(stats.mask_seconds)

    def _counter(self, name: str, words: str, labels: list[str] | None = None) -> Counter:
        return Counter(f"guided_spec_{name}", words, labels or [], registry=self._registry)

    def _histogram(
        self, name: str, words: str, buckets: tuple[float, ...], labels: list[str] | None = None
    ) -> Histogram:
        full = f"guided_spec_{name}"
        return Histogram(full, words, labels or [], registry=self._registry, buckets=buckets)

    def _gauge(self, name: str, words: str, read: Callable[[], float]) -> None:
        gauge = Gauge(f"guided_spec_{name}", words, registry=self._registry)
        gauge.set_function(read)


def _by_kind(stats: RequestStats, grammar: GrammarSpec | None) -> dict[str, _Drafts]:
    """A text's draft tokens by what the grammar left of the choice."""
    every = _Drafts(sum(stats.drafted), sum(stats.accepted))
    if grammar is None:
        return {"free": every}
    found = {
        "forced": _Drafts(stats.forced, stats.forced_accepted),
        "reasoning": _Drafts(stats.reasoning, stats.reasoning_accepted),
    }
    drafted, accepted = (sum(counts) for counts in zip(*found.values(), strict=True))
    return found | {"constrained": _Drafts(every.drafted - drafted, every.accepted - accepted)}


class _Drafts(NamedTuple):
    """How many tokens were drafted, and how many of them accepted."""

    drafted: int
    accepted: int


class Tally:
    """Counts one request's tokens as they come. It begins with the request's arrival.

    prompt_tokens: of each prompt once. cached_tokens: those found in the prefix cache.
    first_seconds: from the arrival to the first token; None before it.
    num_shortened: texts that were ended early to be whole within their budget.
    finish_reasons, steps, drafted_tokens, accepted_tokens: of the texts that have ended.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrived = time.perf_counter()
        self._last: dict[tuple[int, int], float] = {}
        self.prompt_tokens = self.output_tokens = self.cached_tokens = 0
        self.first_seconds: float | None = None
        self.finish_reasons: list[str] = []
        self.num_shortened = 0
        self.steps = self.drafted_tokens = self.accepted_tokens = 0

    def count_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Count the tokens of prompts."""
        self.prompt_tokens = sum(map(len, prompts))
        self._metrics.prompt_tokens.inc(self.prompt_tokens)

    def count(self, chunk: Chunk) -> None:
        """Enter a chunk of one of its samples."""
        metrics, now, new = self._metrics, time.perf_counter(), len(chunk.token_ids)
        sample = (chunk.prompt_index, chunk.sample_index)
        last = self._last.get(sample)
        if new:
            self._last[sample] = now
            self.output_tokens += new
            metrics.output_tokens.inc(new)
            if last is None:
                metrics.first_token.observe(now - self._arrived)
                self.first_seconds = self.first_seconds or now - self._arrived
            else:
                for _ in chunk.token_ids:
                    metrics.between_tokens.observe((now - last) / new)
        if chunk.completion is not None:
            metrics.count_sample(chunk.completion)
            stats = chunk.completion.stats
            self.finish_reasons.append(chunk.completion.finish_reason)
            self.num_shortened += chunk.completion.was_shortened
            self.steps += stats.steps
            self.drafted_tokens += sum(stats.drafted)
            self.accepted_tokens += sum(stats.accepted)
            if chunk.sample_index == 0:
                self.cached_tokens += stats.cached_tokens
