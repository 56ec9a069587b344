"""What one case gave, its JSON, and the first value in which two records differ.

Tokens, drafts, mask hashes, texts, finish reasons and counters are compared with ``==``.
Log-probabilities are float32, written with the digits that tell any two of them apart. They are
compared exactly where the record was made with the same torch on the same kind of CPU, which its
``Fingerprint`` says. Other versions of torch and other vector instructions sum in another order, so
there they may differ by ``TOLERANCE``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

RECORDS = Path(__file__).resolve().parent / "records"
TOLERANCE = 1e-4
MISSING = "nothing"


class Fingerprint(NamedTuple):
    """What decides how floating-point numbers are summed."""

    torch: str
    cpu: str

    @classmethod
    def of_this_run(cls) -> Fingerprint:
        """The torch and the CPU of this process."""
        return cls(torch.__version__, torch.backends.cpu.get_cpu_capability())


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step of one request.

    by: who drafted, with the number of tokens in a row: "forced:2 ngram:3".
    draft: the draft tokens. accepted: those of them that were accepted.
    masks: a hash of the tokens that the grammar allows at each draft position, and at the one
        after the draft if all of it was accepted; "-" where the grammar was not asked. None for
        free text.
    drawn: the target's own token after the accepted ones; None where the text ended before it.
    kept: accepted and drawn tokens that the text has.
    """

    by: str
    draft: list[int]
    masks: str | None
    accepted: list[int]
    drawn: int | None
    kept: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """One sample of one prompt.

    request: which one. steps: in order. error: the name of its class.
    logprobs: of the tokens; None where the request did not ask.
    stats: the counters of ``RequestStats`` that are not 0, but for clocks and the seed.
    """

    request: str
    steps: list[StepRecord]
    token_ids: list[int]
    text: str
    finish_reason: str
    error: str | None
    stats: dict[str, Any]
    logprobs: list[float] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseRecord:
    """One case: its requests in the order in which they were asked for."""

    fingerprint: Fingerprint
    requests: list[RequestRecord]

    def to_json(self) -> str:
        """The record's JSON text: one line a step, and one for each other value."""
        requests = ",\n".join(map(_request_json, self.requests))
        fingerprint = _dump(self.fingerprint._asdict())
        return f'{{"fingerprint": {fingerprint},\n"requests": [\n{requests}\n]}}\n'

    @classmethod
    def from_json(cls, text: str) -> CaseRecord:
        """The record that ``to_json`` wrote."""
        found = json.loads(text)
        requests = []
        for fields_of_one in found["requests"]:
            steps = [StepRecord(**step) for step in fields_of_one.pop("steps")]
            requests.append(RequestRecord(steps=steps, **fields_of_one))
        return cls(fingerprint=Fingerprint(**found["fingerprint"]), requests=requests)


def path_of(name: str) -> Path:
    """Where the record of a case is kept."""
    return RECORDS / f"{name}.json"


def _request_json(request: RequestRecord) -> str:
    values = asdict(request)
    steps = ",\n".join(_dump(step) for step in values.pop("steps"))
    lines = [f"{_dump(key)}: {_dump(value)}" for key, value in values.items()]
    lines.insert(1, f'"steps": [\n{steps}\n]' if steps else '"steps": []')
    return "{" + ",\n".join(lines) + "}"


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


class Difference(NamedTuple):
    """The first value in which a run is not as recorded."""

    where: str
    recorded: object
    found: object

    def __str__(self) -> str:
        return f"{self.where}: {self.recorded!r} was recorded, {self.found!r} was found"


def first_difference(recorded: CaseRecord, found: CaseRecord) -> Difference | None:
    """None where the two are alike. Causes come before effects: steps before texts."""
    is_exact = recorded.fingerprint == found.fingerprint
    for one, other in zip_longest(recorded.requests, found.requests):
        if one is None or other is None or one.request != other.request:
            names = [MISSING if r is None else r.request for r in (one, other)]
            return Difference("requests", *names)
        for difference in _differences(one, other, is_exact=is_exact):
            return difference
    return None


def _differences(
    one: RequestRecord, other: RequestRecord, *, is_exact: bool
) -> Iterator[Difference]:
    for at, (step, again) in enumerate(zip_longest(one.steps, other.steps)):
        where = f"{one.request}, step {at}"
        if step is None or again is None:
            yield Difference(where, step or MISSING, again or MISSING)
            return
        yield from _unequal(where, _values(step), _values(again))
    values, again_values = _values(one), _values(other)
    logprobs = values.pop("logprobs"), again_values.pop("logprobs")
    counters = values.pop("stats"), again_values.pop("stats")
    del values["steps"], again_values["steps"]
    yield from _unequal(one.request, values, again_values)
    names = sorted({*counters[0], *counters[1]})  # those that are 0 are left out
    filled = [{name: counted.get(name, 0) for name in names} for counted in counters]
    yield from _unequal(f"{one.request}, stats", *filled)
    yield from _unlike(f"{one.request}, logprobs", *logprobs, is_exact=is_exact)


def _values(record: StepRecord | RequestRecord) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in fields(record)}


def _unequal(where: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    for name, value in one.items():
        again = other[name]
        if name == "masks" and value and again:
            value, again = value.split(), again.split()
        if value == again:
            continue
        if isinstance(value, list) and isinstance(again, list):
            at, value, again = _first_unequal(value, again)
            name = f"{name}[{at}]"
        yield Difference(f"{where}, {name}", value, again)


def _first_unequal(one: Sequence[object], other: Sequence[object]) -> tuple[int, object, object]:
    pairs = enumerate(zip_longest(one, other, fillvalue=MISSING))
    return next((at, a, b) for at, (a, b) in pairs if a != b)


def _unlike(
    where: str, one: list[float] | None, other: list[float] | None, *, is_exact: bool
) -> Iterator[Difference]:
    """Of log-probabilities, in step with tokens that are alike."""
    if one is None or other is None:
        if one is not other:
            yield Difference(where, one, other)
        return
    for at, (value, again) in enumerate(zip(one, other, strict=True)):
        is_alike = np.float32(value) == np.float32(again)
        if not is_alike and (is_exact or not abs(value - again) <= TOLERANCE):
            yield Difference(f"{where}[{at}]", value, again)
