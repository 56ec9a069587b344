"""The plugin without vLLM: what is asked for, what is refused, and the wrappers on their own."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from guided_spec.errors import ConfigError
from guided_spec.integrations.patches import OneOf, Patch
from guided_spec.integrations.vllm import plugin as vllm
from guided_spec.integrations.vllm.drafts import heads as drafts
from guided_spec.integrations.vllm.exact import (
    keep_refused_draft,
    keep_refused_in_step,
    mark_refused,
)
from guided_spec.integrations.vllm.plugin import install

ENGINE = "a_made_up_engine"


SOURCE = """
class Base:
    declared: int

class Owner(Base):
    def __init__(self):
        self.made = 1

    def double(self, value):
        return 2 * value

def half(value):
    return value // 2
"""


def one_more(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any) -> Any:
        return original(*args) + 1

    return wrapped


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A module in the place of vLLM, with one that imports from it."""
    (tmp_path / f"{ENGINE}.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "its_importer.py").write_text(f"from {ENGINE} import half", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(vllm, "installed_root", lambda: tmp_path)
    monkeypatch.setattr(vllm, "installed_version", lambda: "1.2.3")
    importlib.import_module("its_importer")
    yield sys.modules[ENGINE]
    del sys.modules[ENGINE], sys.modules["its_importer"]


HALF = Patch(ENGINE, "half", "value", one_more, importers=("its_importer", "none"))
DOUBLE = Patch(ENGINE, "Owner.double", "self ...", one_more)


def test_functions_are_wrapped_once(engine: Any) -> None:
    for _ in range(2):
        install("it", [HALF, DOUBLE])
    assert engine.Owner().double(4) == 9
    assert sys.modules["its_importer"].half(4) == 3  # imported by name before that
    assert engine.half is sys.modules["its_importer"].half


def twice(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any) -> Any:
        return 2 * original(*args)

    return wrapped


def test_two_features_may_wrap_one_function(engine: Any) -> None:
    for _ in range(2):
        install("it", [DOUBLE])
        install("another", [DOUBLE._replace(wrap=twice)])
    assert engine.Owner().double(4) == 18


OWNER = Patch(ENGINE, "Owner", attributes="declared made double !gone")


@pytest.mark.parametrize(
    ("patch", "lack"),
    [
        (DOUBLE._replace(parameters="self"), "Owner.double takes other parameters"),
        (DOUBLE._replace(parameters="self other ..."), "Owner.double takes other parameters"),
        (DOUBLE._replace(path="Owner.triple"), "there is no a_made_up_engine.Owner.triple"),
        (DOUBLE._replace(module="not_there"), "there is no not_there.Owner.double"),
        (OWNER._replace(attributes="made gone"), "Owner has no gone"),
        (OWNER._replace(attributes="!made"), "Owner has made"),
        (
            OneOf(((OWNER._replace(path="A"),), (OWNER._replace(path="B"),))),
            r"engine.A and there is no .*\.B",
        ),
    ],
)
def test_what_a_release_lacks_is_said_before_anything_is_wrapped(
    engine: Any, patch: Patch | OneOf, lack: str
) -> None:
    install("it", [OWNER])
    with pytest.raises(ConfigError, match=lack):
        install("it", [HALF, patch])
    assert engine.half(4) == 2


def test_the_first_way_that_fits_is_taken(engine: Any) -> None:
    other = DOUBLE._replace(wrap=twice)
    install("it", [OneOf(((OWNER._replace(attributes="gone"), DOUBLE), (OWNER, other), (DOUBLE,)))])
    assert engine.Owner().double(4) == 16


def test_a_function_that_something_else_has_changed_is_refused(engine: Any) -> None:
    engine.Owner.double = print
    with pytest.raises(ConfigError, match="another plugin"):
        install("it", [HALF, DOUBLE])
    assert engine.half(4) == 2


def made_up(monkeypatch: pytest.MonkeyPatch, name: str, **parts: list[Patch]) -> None:
    """The feature ``name`` is of these parts, and asked for."""
    module: Any = ModuleType(vllm.FEATURES[name])
    module.PATCHES, module.PARTS = [HALF], parts
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv(vllm.VARIABLE, name)
    monkeypatch.setenv(vllm.RAY_VARIABLE, "")


GONE = [OWNER._replace(attributes="gone")]


def test_a_part_that_does_not_fit_is_off_and_warned_of(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    warned: list[str] = []
    monkeypatch.setattr(vllm, "log", said.append)
    monkeypatch.setattr(vllm, "warn", warned.append)
    made_up(monkeypatch, "drafts", other=GONE)
    vllm.register()
    assert engine.half(4) == 2
    made_up(monkeypatch, "drafts", one=[HALF], other=GONE)
    vllm.register()
    assert engine.half(4) == 3
    off = "vLLM 1.2.3 does not fit it: a_made_up_engine.Owner has no gone"
    assert warned == [f"drafts (other) is off, {off}"] * 2
    assert said == ["nothing on for vLLM 1.2.3", "drafts (one) on for vLLM 1.2.3"]


@pytest.mark.parametrize("name", vllm.PROMISES)
def test_without_what_texts_depend_on_nothing_starts(
    engine: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    made_up(monkeypatch, name, it=GONE)
    made_up(monkeypatch, "drafts", one=[HALF])
    monkeypatch.setenv(vllm.VARIABLE, f"drafts,{name}")
    with pytest.raises(ConfigError, match=rf"'{name}': vLLM 1\.2\.3 .*Owner has no gone; install"):
        vllm.register()
    assert engine.half(4) == 2


def test_the_plugin_is_silent_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "", " , "):
        if value is None:
            monkeypatch.delenv(vllm.VARIABLE, raising=False)
        else:
            monkeypatch.setenv(vllm.VARIABLE, value)
        vllm.register()
    for value, message in (
        ("schemas,exat", "exact,forced,graphs,guard,schemas"),
        ("drafts:topk_walk", "drafts,endings,exact,forced"),
    ):
        monkeypatch.setenv(vllm.VARIABLE, value)
        with pytest.raises(ConfigError, match=message):
            vllm.register()


def test_the_first_refused_token_keeps_its_id() -> None:
    seen: list[Any] = []
    wrapped = keep_refused_draft(lambda *args: seen.append(args))
    wrapped("batch", ["a", "b"], [0, 3])
    wrapped("batch", ["a"], None)
    assert seen == [("batch", ["a", "b"], [1, 4]), ("batch", ["a"], None)]


class Request:
    use_structured_output = True
    is_prefill_chunk = False
    spec_token_ids: list[int]

    def is_finished(self) -> bool:
        return False


class Scheduler:
    """As much of vLLM's as the wrappers touch; tokens from 100 on are illegal."""

    def __init__(self, *names: str) -> None:
        self.requests = {name: Request() for name in names}
        config = SimpleNamespace(draft_sample_method="probabilistic")
        self.vllm_config = SimpleNamespace(speculative_config=config)

    def update_draft_token_ids(self, drafts: Any) -> None:
        for name, token_ids in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            if name in self.requests:
                legal = [token < 100 for token in token_ids]
                end = legal.index(False) if False in legal else len(legal)
                self.requests[name].spec_token_ids = token_ids[:end]

    def get_grammar_bitmask(self, output: Any) -> Any:
        return output.scheduled_spec_decode_tokens


def update(scheduler: Scheduler, **drafts: list[int]) -> None:
    record = SimpleNamespace(req_ids=list(drafts), draft_token_ids=list(drafts.values()))
    keep_refused_in_step(Scheduler.update_draft_token_ids)(scheduler, record)


def seen_by_grammar(scheduler: Scheduler, **scheduled: list[int]) -> dict[str, list[int]]:
    output = SimpleNamespace(scheduled_spec_decode_tokens=scheduled)
    found: dict[str, list[int]] = mark_refused(Scheduler.get_grammar_bitmask)(scheduler, output)
    assert output.scheduled_spec_decode_tokens is scheduled
    return found


def test_a_refused_token_is_verified_but_not_walked() -> None:
    scheduler = Scheduler("a", "b", "c")
    scheduler.requests["c"].is_prefill_chunk = True
    update(scheduler, a=[1, 2, 103, 4], b=[1, 2], c=[101], gone=[101])
    drafts = {name: request.spec_token_ids for name, request in scheduler.requests.items()}
    assert drafts == {"a": [1, 2, 103], "b": [1, 2], "c": []}
    assert seen_by_grammar(scheduler, **drafts) == {"a": [1, 2, -1], "b": [1, 2], "c": []}
    # The scheduler may trim a draft, or not schedule the request at all.
    assert seen_by_grammar(scheduler, a=[1, 2]) == {"a": [1, 2]}
    assert seen_by_grammar(scheduler, b=[5]) == {"b": [5]}
    # A mark stays until the request is drafted for again, or ends.
    update(scheduler, b=[104])
    assert seen_by_grammar(scheduler, a=[1, 2, 103], b=[104]) == {"a": [1, 2, -1], "b": [-1]}
    update(scheduler, a=[7, 8, 9])
    assert seen_by_grammar(scheduler, a=[7, 8, 9]) == {"a": [7, 8, 9]}
    del scheduler.requests["b"]
    update(scheduler)
    assert seen_by_grammar(scheduler, b=[104]) == {"b": [104]}


def test_drafts_that_are_not_drawn_are_left_alone() -> None:
    scheduler = Scheduler("a")
    for config in (SimpleNamespace(draft_sample_method="greedy"), None):
        scheduler.vllm_config.speculative_config = config
        update(scheduler, a=[1, 103])
        assert scheduler.requests["a"].spec_token_ids == [1]


def test_processes_on_ray_get_the_variable(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    del engine
    made_up(monkeypatch, "drafts", drafts=[])
    monkeypatch.setattr(vllm, "log", len)
    for before, after in (("", "GUIDED_SPEC_VLLM"), ("A, B", "A,B,GUIDED_SPEC_VLLM")):
        monkeypatch.setenv(vllm.RAY_VARIABLE, before)
        monkeypatch.delenv(vllm.VARIABLE, raising=False)
        vllm.register()
        assert os.environ[vllm.RAY_VARIABLE] == before  # nothing was asked for
        monkeypatch.setenv(vllm.VARIABLE, "drafts")
        vllm.register()
        vllm.register()
        assert os.environ[vllm.RAY_VARIABLE] == after


def test_workers_on_ray_start_with_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    begin = vllm.start_with_variable(lambda _, config: seen.append(config.parallel_config))
    monkeypatch.setenv(vllm.VARIABLE, "drafts")
    for given, rest in (
        (None, {}),
        ({"pip": ["it"]}, {}),
        ({"env_vars": {"A": "1", vllm.VARIABLE: "counts"}}, {"A": "1"}),
    ):
        config = SimpleNamespace(parallel_config=SimpleNamespace(ray_runtime_env=given))
        begin("executor", config)
        variables = {**rest, vllm.VARIABLE: "drafts"}
        assert seen.pop().ray_runtime_env == {**(given or {}), "env_vars": variables}


def test_a_drafter_that_loads_no_model_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """N-grams and their like: ``drafts`` was asked for, and nobody has looked at them before."""

    class NgramProposer:
        pass

    warned: list[str] = []
    monkeypatch.setattr(drafts, "warn", warned.append)
    runner = SimpleNamespace(drafter=NgramProposer())
    propose = drafts.draft_legal(lambda _runner, _output, sampled: sampled)
    assert [propose(runner, None, [[1]]) for _ in range(2)] == [[[1]], [[1]]]
    why = "it has a way of its own to draft"
    assert warned == [f"NgramProposer drafts as without this package: {why}"]
