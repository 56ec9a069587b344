"""Small grammars that workers prepare are those that this process would have compiled."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from guided_spec.errors import GrammarCompileError, UnsupportedSchemaError
from guided_spec.grammar import preparation
from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.completion import deferred_endings
from guided_spec.grammar.completion.completion import EndingsCache
from guided_spec.grammar.completion.deferred_endings import DeferredEndings
from guided_spec.grammar.completion.endings import UnreadableGrammarError
from guided_spec.grammar.completion.rule_endings import RuleEndings
from guided_spec.grammar.completion.rules import RuleSource, source_of
from guided_spec.grammar.limits import GrammarLimits
from guided_spec.grammar.pipeline import GrammarCompileQueue, GrammarPipeline
from guided_spec.grammar.preparation import Preparation
from guided_spec.grammar.protocol import CompiledGrammar, legal_row
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.ops.mask_words import ids_of
from tests.masks.walks import BYTES, EOS
from tests.processes import ROOT

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="workers need POSIX"),
    pytest.mark.slow,
]

Found = TypeVar("Found")
WAIT = 60
LIMITS = GrammarLimits(compile_seconds=WAIT)
ADDRESS = {
    "type": "object",
    "properties": {
        "street": {"type": "string", "maxLength": 40},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "more": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    },
    "required": ["street"],
}
SPECS = (
    GrammarSpec.json_schema(ADDRESS),
    GrammarSpec.json_schema(ADDRESS, key_order="any"),
    GrammarSpec.json_schema(ADDRESS, additional_properties="schema"),
    GrammarSpec.json_schema({"type": "string", "maxLength": 200}),  # goes to llguidance
    GrammarSpec.json_object(),
    GrammarSpec.regex("(ab|c){2,9}"),
    GrammarSpec.regex("[a-c]{2,90}"),
    GrammarSpec.ebnf('root ::= "(" root ")" | "x"'),
    GrammarSpec.choice(["yes", "no", "not yet"]),
    GrammarSpec.json_schema({"type": "integer", "not": {"const": 3}}, unsupported="rewrite"),
)


def numbered(number: int) -> GrammarSpec:
    return GrammarSpec.json_schema(
        {
            "type": "object",
            "properties": {f"n{number}": {"type": "string"}},
            "required": [f"n{number}"],
            "additionalProperties": False,
        }
    )


def idle(pipeline: GrammarPipeline) -> list[subprocess.Popen[bytes]]:
    """The workers that wait for work."""
    return [worker.process for worker in pipeline._workers._idle]


def wait_for(found: Callable[[], Found]) -> Found:
    for _ in range(WAIT * 20):
        if result := found():
            return result
        time.sleep(0.05)
    raise AssertionError("waited in vain")


def forbid(*_: object) -> Any:
    raise AssertionError("this process has done a worker's work")


@pytest.fixture(name="pipeline", scope="module")
def _pipeline() -> Iterator[GrammarPipeline]:
    """With a worker that is idle."""
    make = BackendChoice("auto", BYTES)
    with closing(
        GrammarPipeline(make, LIMITS, endings=EndingsCache(BYTES), make=_make, name="auto")
    ) as pipeline:
        pipeline.warm_up()
        wait_for(lambda: idle(pipeline))
        yield pipeline


def _make(vocabulary: Any) -> BackendChoice:
    return BackendChoice("auto", vocabulary)


def rows_of_walk(compiled: CompiledGrammar, seed: int) -> list[bytes]:
    """The rows along a text that is drawn."""
    dice, text, rows = random.Random(seed), compiled.new_matcher(), list[bytes]()
    while len(rows) < 40:
        row = legal_row(text, BYTES.vocab_size)
        rows.append(row.tobytes())
        token_id = dice.choice(ids_of(row))
        assert text.accept_token(token_id)
        if token_id == EOS:
            break
    return rows


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.kind}:{spec.source[:30]}")
def test_what_a_worker_prepares_is_what_this_process_compiles(
    spec: GrammarSpec, pipeline: GrammarPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = EndingsCache(BYTES)
    expected = BackendChoice("auto", BYTES).compile(spec)
    with monkeypatch.context() as patched:
        patched.setattr(pipeline._backend, "compile_document", forbid)
        patched.setattr(Preparation, "read", forbid)
        found = pipeline.compile(spec)
    assert type(found) is type(expected)
    for seed in range(4):
        assert rows_of_walk(found, seed) == rows_of_walk(expected, seed)
    assert pipeline._endings is not None
    ours, theirs = own.of(expected), pipeline._endings.of(found)
    assert isinstance(ours, RuleEndings) == isinstance(theirs, DeferredEndings)
    least = ours.cost(ours.start)
    assert least == theirs.cost(theirs.start)
    for budget in (least, least + 1, least + 3, least + 8, 40):
        if budget >= least:
            bound = [
                endings.bound(grammar, budget, is_required=True)
                for endings, grammar in ((own, expected), (pipeline._endings, found))
            ]
            for seed in range(4):
                assert rows_of_walk(bound[0], seed) == rows_of_walk(bound[1], seed)


def test_rules_stay_packed_far_from_the_end(
    pipeline: GrammarPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, endings = pipeline.compile(numbered(77)), pipeline._endings
    assert endings is not None
    size = endings.size_of(found)
    monkeypatch.setattr(deferred_endings, "pickle", None)
    rows_of_walk(endings.bound(found, 100_000, is_required=True), 0)
    assert endings.size_of(found) == size
    monkeypatch.undo()
    near = endings.of(found).cost(endings.of(found).start)
    rows_of_walk(endings.bound(found, near, is_required=True), 0)
    assert endings.size_of(found) > size


def test_errors_and_warnings_are_those_of_this_process(pipeline: GrammarPipeline) -> None:
    broken = GrammarSpec.json_schema({"type": "object", "properties": {"a": {"not": {}}}})
    for spec, kind in (
        (replace(broken, source='{"type": "strnig"}'), GrammarCompileError),
        (GrammarSpec.json_schema({"not": {"pattern": "(?m)a"}}), UnsupportedSchemaError),
        (GrammarSpec.regex("(?=a)b"), GrammarCompileError),
        (GrammarSpec.regex("a("), GrammarCompileError),
    ):
        messages = set[str]()
        for compiler in (BackendChoice("auto", BYTES), pipeline):
            with pytest.raises(kind) as caught:
                compiler.compile(spec)
            messages.add(f"{type(caught.value)} {caught.value}")
        assert len(messages) == 1
    assert idle(pipeline)  # an error ends no worker
    loose = GrammarSpec.json_schema({"not": {"pattern": "(?m)b"}}, unsupported="warn")
    for compiler in (BackendChoice("auto", BYTES), pipeline):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            compiler.compile(loose)
        assert "not" in str(told[-1].message)


def test_what_takes_many_steps_is_left_to_the_threads_for_large_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = replace(LIMITS, steps=300)
    backend = XGrammarBackend(BYTES, compile_threads=1)
    with closing(GrammarPipeline(backend, limits, endings=EndingsCache(BYTES))) as pipeline:
        pipeline.warm_up()
        wait_for(lambda: idle(pipeline))
        queue = GrammarCompileQueue(pipeline)
        put_back, kept = list[object](), queue._put_back

        def put(entry: Any, document: Any) -> None:
            put_back.append(entry)
            kept(entry, document)

        monkeypatch.setattr(queue, "_put_back", put)
        compiled = queue.submit(GrammarSpec.json_schema(ADDRESS)).result(WAIT)
        assert len(put_back) == 1
        assert rows_of_walk(compiled, 1)
        queue.close()


def test_nobody_waits_for_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first grammars there is none; where all are busy, this process compiles."""
    monkeypatch.setattr(preparation, "FEW", 2)
    backend = XGrammarBackend(BYTES, compile_threads=1)
    with closing(GrammarPipeline(backend, LIMITS, endings=EndingsCache(BYTES))) as pipeline:
        pipeline.compile(numbered(0))
        assert not pipeline._workers.pids
        pipeline.compile(numbered(1))
        (process,) = wait_for(lambda: idle(pipeline))
        with monkeypatch.context() as patched:
            patched.setattr(pipeline._workers, "_idle", [])
            pipeline.compile(numbered(2))
        process.kill()
        process.wait()
        for number in range(3, 6):
            pipeline.compile(numbered(number))
        (other,) = wait_for(lambda: idle(pipeline))
        assert other.pid != process.pid


def test_two_workers_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    backend = XGrammarBackend(BYTES, compile_threads=1)
    with closing(
        GrammarPipeline(backend, LIMITS, endings=EndingsCache(BYTES), num_workers=2)
    ) as pipeline:
        pipeline.warm_up()
        wait_for(lambda: len(idle(pipeline)) == 2)
        pipeline.warm_up()
        for thread in threading.enumerate():
            if thread.name == "grammar-preparation":
                thread.join(WAIT)
        assert len(pipeline._workers.pids) == 2


def test_rules_that_take_many_steps_are_read_by_a_worker(pipeline: GrammarPipeline) -> None:
    here = EndingsCache(BYTES).read_here
    reading = Preparation(pipeline._workers, LIMITS, here)
    source = source_of(XGrammarBackend(BYTES, compile_threads=1).compile(numbered(0)))
    found = reading.read(source, steps=0)
    assert found.first.tolist() == here(source).first.tolist()
    with pytest.raises(UnreadableGrammarError, match="do not close"):
        pipeline._workers.read(RuleSource("root ::= ((", is_regex=False), LIMITS)


def test_a_worker_that_takes_too_long_fails_its_request_alone() -> None:
    endings, limits = EndingsCache(BYTES), GrammarLimits(compile_seconds=1e-6)
    backend = XGrammarBackend(BYTES, compile_threads=1)
    with closing(GrammarPipeline(backend, limits, endings=endings)) as pipeline:
        pipeline._workers.start_one()
        with pytest.raises(GrammarCompileError, match="compile_seconds"):
            pipeline.compile(numbered(0))
        assert not pipeline._workers.pids
        assert isinstance(endings.of(pipeline.compile(numbered(1))), RuleEndings)


def test_the_end_of_a_program_is_no_warning() -> None:
    """Its workers are ended while they start."""
    program = """
import time
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.completion.completion import EndingsCache
from guided_spec.grammar.limits import GrammarLimits
from guided_spec.grammar.pipeline import GrammarPipeline
from tests.masks.walks import BYTES
backend, endings = XGrammarBackend(BYTES, compile_threads=1), EndingsCache(BYTES)
pipeline = GrammarPipeline(backend, GrammarLimits(), endings=endings)
pipeline.warm_up()
while not pipeline._workers.pids:
    time.sleep(0.01)
"""
    # Not a fork of a process that has imported everything: such a one ends without finalizers.
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_worker_may_not_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, is_closed: bool
) -> None:
    monkeypatch.setattr(preparation, "FEW", 1)
    endings, backend = EndingsCache(BYTES), XGrammarBackend(BYTES, compile_threads=1)
    make = None if is_closed else os._exit
    with closing(GrammarPipeline(backend, LIMITS, endings=endings, make=make)) as pipeline:
        assert isinstance(endings.of(pipeline.compile(numbered(0))), RuleEndings)
        if is_closed:
            pipeline.close()
        for thread in threading.enumerate():
            if thread.name == "grammar-preparation":
                thread.join(WAIT)
        assert not pipeline._workers.pids
        assert ("does not start" in caplog.text) == (not is_closed)
        assert isinstance(endings.of(pipeline.compile(numbered(1))), RuleEndings)
