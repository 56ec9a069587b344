"""The plugin without vLLM: what is asked for, what is refused, and the wrappers on their own."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from guided_spec.errors import ConfigError
from guided_spec.integrations.vllm import plugin as vllm
from guided_spec.integrations.vllm import plugin as vllm_patches
from guided_spec.integrations.vllm.exact import (
    keep_refused_draft,
    keep_refused_in_step,
    mark_refused,
)
from guided_spec.integrations.vllm.plugin import Patch, install

ENGINE = "a_made_up_engine"


class Owner:
    def double(self, value: int) -> int:
        return 2 * value


def one_more(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any) -> Any:
        return original(*args) + 1

    return wrapped


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module in the place of vLLM, in a version that is supported."""
    module: Any = ModuleType(ENGINE)
    module.half = lambda value: value // 2
    module.Owner = Owner
    importer = ModuleType("its_importer")
    importer.__dict__["half"] = module.half
    monkeypatch.setitem(sys.modules, ENGINE, module)
    monkeypatch.setitem(sys.modules, "its_importer", importer)
    monkeypatch.setattr(Owner, "double", Owner.double)
    use_version(monkeypatch, "0.33.0+cu130")
    return importer


def use_version(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def found(name: str) -> str:
        if version is None:
            raise PackageNotFoundError(name)
        return version

    monkeypatch.setattr(vllm_patches, "version", found)


HALF = Patch(ENGINE, "half", {"0.33.0": ("value",)}, one_more, importers=("its_importer", "none"))
DOUBLE = Patch(ENGINE, "Owner.double", {"0.33.0": ("self", "value")}, one_more)


def test_functions_are_wrapped_once(engine: ModuleType) -> None:
    for _ in range(2):
        install("it", [HALF, DOUBLE])
    assert Owner().double(4) == 9
    assert engine.half(4) == 3  # imported by name before that
    assert sys.modules[ENGINE].half is engine.half


def twice(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any) -> Any:
        return 2 * original(*args)

    return wrapped


@pytest.mark.usefixtures("engine")
def test_two_features_may_wrap_one_function() -> None:
    for _ in range(2):
        install("it", [DOUBLE])
        install("another", [DOUBLE._replace(wrap=twice)])
    assert Owner().double(4) == 18


@pytest.mark.usefixtures("engine")
def test_a_version_without_the_function_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    use_version(monkeypatch, "0.25.1")
    install("it", [HALF, DOUBLE])
    assert Owner().double(4) == 8


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("version", ["0.26.0", "0.33.1", None])
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    use_version(monkeypatch, version)
    with pytest.raises(ConfigError, match=r"0\.25\.1 and 0\.33\.0"):
        install("it", [DOUBLE])
    assert Owner().double(4) == 8


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        (DOUBLE._replace(parameters={"0.33.0": ("self",)}), "another plugin"),
        (DOUBLE._replace(path="Owner.triple"), "another build"),
        (DOUBLE._replace(module="a_module_that_is_not_there"), "another build"),
    ],
)
def test_changed_functions_are_refused_before_any_is_wrapped(patch: Patch, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        install("it", [HALF, patch])
    assert sys.modules[ENGINE].half(4) == 2


def test_the_plugin_is_silent_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    use_version(monkeypatch, "1.0.0")
    for value in (None, "", " , "):
        if value is None:
            monkeypatch.delenv(vllm.VARIABLE, raising=False)
        else:
            monkeypatch.setenv(vllm.VARIABLE, value)
        vllm.register()
    for value, message in (
        ("exact", r"0\.33\.0"),
        ("schemas,exat", "exact,schemas"),
        ("drafts:topk_walk", "drafts,exact,schemas"),
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


def test_processes_on_ray_get_the_variable(
    engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    del engine
    module: Any = ModuleType("guided_spec.integrations.vllm.drafts")
    module.PATCHES = ()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(vllm_patches, "log", len)
    for before, after in (("", "GUIDED_SPEC_VLLM"), ("A, B", "A,B,GUIDED_SPEC_VLLM")):
        monkeypatch.setenv(vllm.RAY_VARIABLE, before)
        monkeypatch.delenv(vllm.VARIABLE, raising=False)
        vllm.register()
        assert os.environ[vllm.RAY_VARIABLE] == before  # nothing was asked for
        monkeypatch.setenv(vllm.VARIABLE, "drafts")
        vllm.register()
        vllm.register()
        assert os.environ[vllm.RAY_VARIABLE] == after
