"""What the server has done, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from guided_spec.engine.outputs import Chunk, RequestStats
from guided_spec.engine.worker import Load

__all__ = ["Metrics", "Tally"]

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
        self.drafted = self._counter("drafted_tokens", "Tokens that were proposed")
        self.accepted = self._counter("accepted_tokens", "Those of them that were accepted")
        self.forced = self._counter("forced_tokens", "Accepted, and the grammar left no choice")
        self.steps = self._counter("steps", "Forward passes, for each text that took part")
        self.starved = self._counter("starved_rows", "No legal token in the draft vocabulary")
        self.mask_seconds = self._counter("mask_seconds", "Host time for masks")
        self._gauge("slots", "Texts that can run at once", lambda: load().num_slots)
        self._gauge("running_samples", "Texts that hold a slot", lambda: load().running)
        self._gauge("waiting_samples", "Texts that wait for a slot", lambda: load().waiting)

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self._registry)

    def count_request(self, endpoint: str, status: int, seconds: float) -> None:
        """A request has ended."""
        self.requests.labels(endpoint, str(status)).inc()
        self.request_seconds.labels(endpoint).observe(seconds)

    def count_sample(self, finish_reason: str, stats: RequestStats) -> None:
        """A text has ended."""
        self.samples.labels(finish_reason).inc()
        self.cached_tokens.inc(stats.cached_tokens)
        self.drafted.inc(sum(stats.drafted))
        self.accepted.inc(sum(stats.accepted))
        self.forced.inc(stats.forced_accepted)
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


class Tally:
    """Counts one request's tokens as they come. It begins with the request's arrival."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrived = time.perf_counter()
        self._last: dict[tuple[int, int], float] = {}
        self.cached_tokens = 0  # of prompts, found in the prefix cache

    @property
    def seconds(self) -> float:
        """Since the arrival."""
        return time.perf_counter() - self._arrived

    def count(self, chunk: Chunk) -> None:
        """Enter a chunk of one of its samples."""
        metrics, now, new = self._metrics, time.perf_counter(), len(chunk.token_ids)
        place = (chunk.prompt_index, chunk.sample_index)
        last = self._last.get(place)
        if new:
            self._last[place] = now
            metrics.output_tokens.inc(new)
            if last is None:
                metrics.first_token.observe(now - self._arrived)
            else:
                for _ in chunk.token_ids:
                    metrics.between_tokens.observe((now - last) / new)
        if chunk.completion is not None:
            metrics.count_sample(chunk.completion.finish_reason, chunk.completion.stats)
            if chunk.sample_index == 0:
                self.cached_tokens += chunk.completion.stats.cached_tokens
