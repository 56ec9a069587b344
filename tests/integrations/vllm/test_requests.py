"""What a worker of vLLM knows of its requests' tokens, whether it drafts or not."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.integrations.vllm import requests as vllm_requests
from guided_spec.integrations.vllm.requests import GrammarRequests
from guided_spec.ops.host import Download
from tests.tiers import examples
from tests.toys import VOCAB_SIZE, VOCABULARY

LETTERS = SimpleNamespace(
    grammar=GrammarSpec.regex("[abc]{2,}"),  # any of the tokens 0, 1 and 2
    max_tokens=None,
)
PARAMS = {"a": LETTERS, "b": LETTERS, "free": None}
NAMES = [*PARAMS]


class Grammars:
    """Stands for vLLM's: a request's parameters name its grammar."""

    vocabulary = VOCABULARY

    def __init__(self, config: Any) -> None:
        del config
        self._backend = XGrammarBackend(VOCABULARY)

    def spec_of(self, params: Any) -> GrammarSpec | None:
        return None if params is None else params.grammar

    def stops_of(self, params: Any) -> frozenset[int]:
        del params
        return frozenset()

    def span_of(self, params: Any, prompt: Any) -> None:
        del params, prompt

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        return self._backend.compile(spec)


@pytest.fixture(scope="module")
def config() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_requests, "VllmGrammars", Grammars)
        # Several ranks wait for their grammars: nothing here depends on time.
        parallel = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1)
        yield SimpleNamespace(parallel_config=parallel)


def note(requests: GrammarRequests, sampled: dict[str, list[int]]) -> None:
    """As a runner notes it, with memory that it uses again."""
    width = max(1, *map(len, sampled.values()))
    rows = [[*tokens, *[-1] * (width - len(tokens))] for tokens in sampled.values()]
    memory = torch.tensor(rows, dtype=torch.int32).view(len(rows), width)
    counts = torch.tensor([len(tokens) for tokens in sampled.values()])
    requests.note([*sampled], memory, counts)
    memory.fill_(7)


def committed(requests: GrammarRequests, name: str) -> list[int] | None:
    (constraint,) = requests.commit([name])
    return None if constraint is None else constraint.committed


def test_steps_without_a_draft_are_made_up_for(config: Any) -> None:
    requests = GrammarRequests(config)
    requests.add("a", LETTERS, [0])
    requests.add("free", None, [])
    for new in ([1], [], [2, VOCAB_SIZE, 0], [1]):
        note(requests, {"free": [5], "a": new})
    assert committed(requests, "a") == [0, 1, 2, 0, 1]
    assert requests.commit(["a", "free"]) == [None, None]  # nothing was sampled since
    note(requests, {"a": [2]})
    requests.add("b", LETTERS, [])
    note(requests, {"free": [5], "b": [0]})
    assert requests.commit(["a"]) == [None]  # it was not in the last step
    note(requests, {"a": [2]})
    assert committed(requests, "a") == [0, 1, 2, 0, 1, 2, 2]


def test_a_step_is_read_at_the_second_one_behind_it(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the device is: so ranks read the same in each step. vLLM's scheduler has had the
    tokens by then, so that nothing is waited for."""
    read = list[int]()

    class Numbered(Download):
        begun = 0

        def __init__(self, tensor: torch.Tensor) -> None:
            super().__init__(tensor)
            Numbered.begun += 1
            self._number = Numbered.begun

        def wait(self) -> torch.Tensor:
            read.append(self._number)
            return super().wait()

    monkeypatch.setattr(vllm_requests, "Download", Numbered)
    requests = GrammarRequests(config)
    requests.add("a", LETTERS, [])
    requests.add("b", LETTERS, [])
    for at in range(50):
        note(requests, {"a": [at % 3]})
        assert len(read) == max(0, at - 1)
    note(requests, {"b": [0]})
    constraint = requests.at_hand("a")  # what was sampled for others is not waited for
    assert constraint is not None
    assert constraint.committed == [at % 3 for at in range(50)]
    assert len(read) == 50
    assert committed(requests, "b") == [0]
    assert read == [*range(1, 52)]


def test_tokens_that_vllm_takes_back_are_forgotten(config: Any) -> None:
    requests = GrammarRequests(config)
    requests.add("a", LETTERS, [])
    note(requests, {"a": [0, 9, 1]})
    assert requests.commit(["a"]) == [None]  # 9 is no letter: it has lost its place
    requests.restate("a", [0, 1])
    note(requests, {"a": [2]})
    assert committed(requests, "a") == [0, 1, 2]
    note(requests, {"a": [1]})
    requests.restate("a", [0, 1, 2, 0, 0])  # what was noted is among it, or is not so
    note(requests, {"a": [2]})
    assert committed(requests, "a") == [0, 1, 2, 0, 0, 2]


def test_what_is_behind_the_last_token_is_not_judged(
    config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that was on its way when the request ended had no mask for it."""
    requests = GrammarRequests(config)
    requests.add("a", SimpleNamespace(grammar=LETTERS.grammar, max_tokens=3), [])
    note(requests, {"a": [0, 1, 2]})
    assert committed(requests, "a") == [0, 1, 2]
    note(requests, {"a": [9]})
    assert requests.commit(["a"]) == requests.stand(["a"]) == [None]
    assert not caplog.records
    requests.restate("a", [0, 1])  # vLLM has taken it back
    note(requests, {"a": [2]})
    assert committed(requests, "a") == [0, 1, 2]


STEP = st.tuples(
    st.sampled_from(["draft", "rest", "preempt", "restate", "end"]),
    st.lists(st.lists(st.integers(0, 2), max_size=3), min_size=3, max_size=3),
    st.sets(st.sampled_from(NAMES), min_size=1),
)


@settings(max_examples=examples(60))
@given(st.lists(STEP, max_size=12))
def test_however_it_is_scheduled_a_grammar_stands_behind_its_text(
    config: Any, steps: list[tuple[str, list[list[int]], set[str]]]
) -> None:
    requests, texts = GrammarRequests(config), {name: list[int]() for name in NAMES}
    for name in NAMES:
        requests.add(name, PARAMS[name], [])
    for what, new, batch in steps:
        names = sorted(batch)
        sampled = {name: new[NAMES.index(name)] for name in names}
        for name in names if what in ("preempt", "restate", "end") else ():
            texts[name] = [] if what == "end" else texts[name][:-1]
            if what == "restate":
                requests.restate(name, texts[name])
            else:
                requests.add(name, PARAMS[name], texts[name])
        note(requests, sampled)
        for name in names:
            texts[name] += sampled[name]
        if what == "draft":
            found = [one and one.committed for one in requests.commit(names)]
            assert found == [
                texts[name] if PARAMS[name] and sampled[name] else None for name in names
            ]
