from __future__ import annotations

import json
import threading
import traceback
from collections import Counter
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any

import pytest

from guided_spec.errors import GrammarCompileError, GrammarError
from guided_spec.grammar.backends.xgrammar import XGrammarBackend, XGrammarGrammar
from guided_spec.grammar.document import SpecDocument
from guided_spec.grammar.limits import GrammarLimits
from guided_spec.grammar.pipeline import GrammarCompileQueue, GrammarPipeline
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.markers import Markers
from guided_spec.grammar.text.unique_keys import MaybeUnique
from tests.grammar.hostile import Compiled
from tests.masks.walks import BYTES, accepts

WAIT = 30


class Backend:
    """Fails on "bad", and holds "slow" back until ``gate`` opens."""

    def __init__(self) -> None:
        self.vocabulary = BYTES
        self.calls: Counter[str] = Counter()
        self.gate = threading.Event()
        self.begun = threading.Event()

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        self.calls[spec.source] += 1
        if spec.source.startswith("slow"):
            self.begun.set()
            assert self.gate.wait(WAIT)
        if spec.source == "bad":
            raise GrammarCompileError("bad")
        return Compiled()


def result(future: Future[CompiledGrammar]) -> CompiledGrammar:
    return future.result(WAIT)


def test_equal_specs_share_one_compile() -> None:
    backend = Backend()
    compiling = GrammarCompileQueue(backend)
    one, other = (compiling.submit(GrammarSpec.regex("slow")) for _ in range(2))
    backend.gate.set()
    assert one is other
    assert result(one) is result(compiling.submit(GrammarSpec.regex("slow")))
    assert backend.calls == {"slow": 1}
    compiling.close()


def test_a_schema_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    source, parsed, loads = '{"type": "string"}', list[str](), json.loads

    def load(text: str) -> Any:
        parsed.append(text)
        return loads(text)

    markers = Markers(BYTES, lambda text: list(text.encode()))
    pipeline = GrammarPipeline(XGrammarBackend(BYTES), GrammarLimits(), markers=markers)
    monkeypatch.setattr(json, "loads", load)
    compiling = GrammarCompileQueue(pipeline, close_backend=pipeline.close)
    result(compiling.submit(GrammarSpec("json_schema", source)))
    assert parsed == [source]
    result(compiling.submit(GrammarSpec("json_schema", source).after("cab")))
    assert parsed == [source, source]
    compiling.close()


def test_a_slow_compile_does_not_hold_up_another() -> None:
    backend = Backend()
    compiling = GrammarCompileQueue(backend, max_workers=2)
    slow = compiling.submit(GrammarSpec.regex("slow"))
    result(compiling.submit(GrammarSpec.regex("quick")))
    assert not slow.done()
    backend.gate.set()
    result(slow)
    compiling.close()


def test_failures_are_remembered_and_their_tracebacks_do_not_grow() -> None:
    backend = Backend()
    compiling = GrammarCompileQueue(backend)
    lengths = []
    for _ in range(4):
        with pytest.raises(GrammarCompileError, match="bad") as caught:
            result(compiling.submit(GrammarSpec.regex("bad")))
        lengths.append(len(traceback.extract_tb(caught.value.__traceback__)))
    assert backend.calls == {"bad": 1}
    assert len(set(lengths[1:])) == 1
    compiling.close()


def test_the_least_recently_used_is_forgotten() -> None:
    backend = Backend()
    compiling = GrammarCompileQueue(backend, cache_size=2)
    for source in ("a", "b", "a", "c", "a", "b"):
        result(compiling.submit(GrammarSpec.regex(source)))
    assert backend.calls == {"a": 1, "b": 2, "c": 1}
    compiling.close()


def test_the_memory_has_a_limit_in_bytes() -> None:
    backend = Backend()
    compiling = GrammarCompileQueue(backend, cache_bytes=100_000)
    for source in ("a" * 40_000, "b" * 40_000, "a" * 40_000, "c" * 40_000, "a" * 40_000):
        result(compiling.submit(GrammarSpec.regex(source)))
    result(compiling.submit(GrammarSpec.regex("b" * 40_000)))
    assert {source[0]: calls for source, calls in backend.calls.items()} == {"a": 1, "b": 2, "c": 1}
    compiling.close()


def test_the_size_of_a_compiled_grammar_counts() -> None:
    counting = Counter[str]()

    class Counting(XGrammarBackend):
        def compile_document(self, document: SpecDocument) -> MaybeUnique[XGrammarGrammar]:
            counting[document.spec.source] += 1
            return super().compile_document(document)

    compiling = GrammarCompileQueue(Counting(BYTES, compile_threads=1), cache_bytes=7_000_000)
    # Each takes about 5 MB, with its style.
    schemas = [json.dumps({"enum": [f"{letter}{i}" * 20 for i in range(200)]}) for letter in "ab"]
    for schema in [*schemas, schemas[0], schemas[0]]:
        result(compiling.submit(GrammarSpec("json_schema", schema, any_whitespace=True)))
    assert sorted(counting.values()) == [1, 2]
    compiling.close()


@pytest.mark.parametrize("known", [10, 400])
def test_no_call_weighs_more_for_a_full_cache(known: int) -> None:
    """Neither does one that is new: each weighs itself, when asked for and when compiled."""
    backend, weighed = Backend(), 0

    def weigh(grammar: CompiledGrammar) -> int:
        nonlocal weighed
        del grammar
        weighed += 1
        return 0

    compiling = GrammarCompileQueue(backend, size_of_more=weigh)
    for length in range(known):
        result(compiling.submit(GrammarSpec.regex("a" + "b" * length)))
    weighed = 0
    for source in ("ab", "new", "ab", "bad", "newer"):
        with suppress(GrammarCompileError):
            result(compiling.submit(GrammarSpec.regex(source)))
    assert 0 < weighed <= 3 * 5
    compiling.close()


def test_grammars_that_grow_with_their_use_are_weighed_again() -> None:
    backend, weight = Backend(), 0
    compiling = GrammarCompileQueue(backend, cache_bytes=1_000_000, size_of_more=lambda _: weight)
    specs = [GrammarSpec.regex("a" * length) for length in range(1, 101)]
    for spec in specs:
        result(compiling.submit(spec))
    weight = 50_000  # all have grown while they were used; twenty of them are too much
    for _ in range(200):
        result(compiling.submit(specs[-1]))
    assert backend.calls[specs[-1].source] == 1
    weight = 0
    result(compiling.submit(specs[0]))
    assert backend.calls["a"] == 2
    compiling.close()


def test_large_grammars_wait_among_themselves() -> None:
    backend = Backend()
    compiling = GrammarCompileQueue(backend, max_workers=1)
    slow = compiling.submit(GrammarSpec.regex("slow" + "." * 300))
    assert backend.begun.wait(WAIT)
    next_one = compiling.submit(GrammarSpec.regex("." * 300))
    result(compiling.submit(GrammarSpec.regex("quick")))
    assert not slow.done()
    assert not next_one.done()
    backend.gate.set()
    result(next_one)
    compiling.close()


def test_unfinished_ones_are_never_forgotten() -> None:
    backend = Backend()
    compiling = GrammarCompileQueue(backend, max_workers=1, cache_size=1)
    futures = [compiling.submit(GrammarSpec.regex(f"slow{i}")) for i in range(3)]
    backend.gate.set()
    for future in futures:
        result(future)
    assert set(backend.calls.values()) == {1}
    compiling.close()


def test_a_cancelled_one_is_compiled_for_the_next_who_asks() -> None:
    backend = Backend()
    compiling = GrammarCompileQueue(backend, max_workers=1)
    compiling.submit(GrammarSpec.regex("slow"))
    assert backend.begun.wait(WAIT)
    assert compiling.submit(GrammarSpec.regex("a")).cancel()
    again = compiling.submit(GrammarSpec.regex("a"))
    backend.gate.set()
    result(again)
    assert backend.calls["a"] == 1
    compiling.close()


def test_close_cancels_what_has_not_begun() -> None:
    backend = Backend()
    compiling = GrammarCompileQueue(backend, max_workers=1)
    slow = compiling.submit(GrammarSpec.regex("slow"))
    assert backend.begun.wait(WAIT)
    waiting = compiling.submit(GrammarSpec.regex("a"))
    compiling.close()
    compiling.close()
    backend.gate.set()
    result(slow)
    with pytest.raises(CancelledError):
        result(waiting)
    with pytest.raises(GrammarError, match="closed"):
        compiling.submit(GrammarSpec.regex("b"))


def test_with_xgrammar() -> None:
    compiling = GrammarCompileQueue(XGrammarBackend(BYTES), max_workers=2)
    futures = [compiling.submit(GrammarSpec.regex(f"[a-z]{{{i}}}")) for i in range(1, 9)]
    for length, future in enumerate(futures, 1):
        assert accepts(result(future), "x" * length)
    compiling.close()
