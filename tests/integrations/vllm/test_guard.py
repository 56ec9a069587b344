"""Mask rows that are lost between vLLM's scheduler and its worker, planted one by one.

The rows are those of the real scheduler. What a runner gets is taken from its ``sample_tokens``,
and put where its logits are by vLLM's own function.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

vllm = pytest.importorskip("vllm", reason="vLLM is not installed")

from guided_spec.integrations.vllm import guard as vllm_guard  # noqa: E402
from guided_spec.integrations.vllm import requests as vllm_requests  # noqa: E402
from tests.integrations.vllm.guarded import (  # noqa: E402
    HISTORIES,
    LEGAL,
    Make,
    NewRunner,
    Runner,
    World,
    first_letter,
    ids,
)
from tests.integrations.vllm.parts import RELEASE, Step, make_config, wait_for_grammar  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


@pytest.fixture(params=[Runner, NewRunner])
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


def counted() -> dict[str, float]:
    client: Any = importlib.import_module("prometheus_client")
    name = f"{vllm_guard.COUNTER}_total"
    found = {
        reason: client.REGISTRY.get_sample_value(name, {"reason": reason, "rank": "0"}) or 0.0
        for reason in ("missing", "stale")
    }
    return {reason: value for reason, value in found.items() if value}


@pytest.fixture(autouse=True)
def uncounted() -> None:
    vllm_guard._counter().clear()


def test_right_rows_are_left_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody waits for the device."""
    world = World(make)
    monkeypatch.setattr(vllm_requests.GrammarRequests, "stand", None)
    assert world.check() is world.output
    assert {name: world.legal(world.output, name) for name in LEGAL} == LEGAL
    assert counted() == {}


def unname(world: World) -> None:
    """The scheduler does not name a request."""
    rows = world.rows(world.output, "y").copy()
    world.output.grammar_bitmask = rows
    world.output.structured_output_request_ids = ["y"]
    if world.output.__dict__.get("num_acceptable_drafts"):
        world.output.num_acceptable_drafts = [2]


def unname_all(world: World) -> None:
    world.output = None


def open_first(world: World) -> None:
    """A row forbids nothing."""
    world.rows(world.output, "x")[0] = -1


def open_behind_a_draft(world: World) -> None:
    """The scheduler took the draft for a refused one, which it is not."""
    world.rows(world.output, "x")[1:] = -1


def swap(world: World) -> None:
    """Each request has the rows of the other."""
    x, y = world.rows(world.output, "x"), world.rows(world.output, "y")
    x[:], y[:] = y.copy(), x.copy()


FAULTS: dict[Callable[[World], None], dict[str, int]] = {
    unname: {"missing": 3},
    unname_all: {"missing": 6},
    open_first: {"missing": 1},
    open_behind_a_draft: {"missing": 2},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lost_row_is_filled_anew(
    make: Make, fault: Callable[[World], None], caplog: pytest.LogCaptureFixture
) -> None:
    world = World(make)
    fault(world)
    before = copy.deepcopy(world.output)
    found = world.check()
    if before is not None:  # what the scheduler may have in its hands is not changed
        assert world.output.structured_output_request_ids == before.structured_output_request_ids
        assert np.array_equal(world.output.grammar_bitmask, before.grammar_bitmask)
    assert {name: world.legal(found, name) for name in LEGAL} == LEGAL
    assert found.__dict__.get("num_acceptable_drafts", [2, 2]) == [2, 2]
    world.runner.note(["x", "y"], [ids("c"), ids("j")])
    world.output = found
    world.runner.guarded(Step(SimpleNamespace(scheduled_spec_decode_tokens={}), None),
                         {"x": [], "y": []}, None)  # fmt: skip
    assert counted() == FAULTS[fault]
    assert "filled anew" in caplog.text


def test_rows_behind_a_refused_draft_stay_open(make: Make) -> None:
    """They are never reached, whatever the scheduler knows of it."""
    world = World(make)
    world.drafts["x"] = ids("bz")
    world.rows(world.output, "x")[2] = -1
    assert world.check() is world.output


def test_rows_of_another_place_are_stale(make: Make) -> None:
    world = World(make)
    swap(world)
    guard = vllm_guard.guard_of(world.runner)
    assert guard is not None
    for name in LEGAL:
        wait_for_grammar(guard.requests, name)
    found = world.check()
    assert {name: world.legal(found, name) for name in LEGAL} == LEGAL
    assert counted() == {"stale": 6}


@pytest.mark.parametrize("features", ["guard", "endings,guard"])
def test_a_budget_forbids_more_than_the_grammar(
    make: Make, monkeypatch: pytest.MonkeyPatch, features: str
) -> None:
    """Its rows are left alone where budgets are on, but for one that forbids everything."""
    monkeypatch.setenv("GUIDED_SPEC_VLLM", features)
    world = World(make)
    guard = vllm_guard.guard_of(world.runner)
    assert guard is not None
    for name in LEGAL:
        wait_for_grammar(guard.requests, name)
    (token_id,) = ids("c")
    world.rows(world.output, "x")[0, token_id // 32] &= ~np.int32(1 << token_id % 32)
    found = world.check()
    kept = {"guard": LEGAL, "endings,guard": {**LEGAL, "x": ["b", "d", "ef"]}}[features]
    assert {name: world.legal(found, name) for name in LEGAL} == kept
    assert counted() == ({} if found is world.output else {"stale": 1})
    world.rows(world.output, "x")[0] = 0
    assert world.legal(world.check(), "x") == LEGAL["x"]


def test_requests_that_have_ended_or_are_read_need_no_rows(make: Make) -> None:
    world = World(make)
    unname(world)
    assert world.check() is not world.output  # it may go on
    world.runner.note(["y"], [ids("j")])
    world.runner.is_reading = True
    world.runner.requests.pop("x", None)
    scheduled = Step(SimpleNamespace(scheduled_spec_decode_tokens={}), None)
    assert world.runner.guarded(scheduled, {"y": []}, None) is None
    assert counted() == {}  # it did not


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("fault", [*FAULTS, swap])
def test_the_target_writes_what_its_grammar_allows(
    make: Make, fault: Callable[[World], None], history: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the guard, whatever came before; and without it, it does not."""
    world = World(make, history=history)
    fault(world)
    world.know()
    assert illegal(world, world.output, monkeypatch)
    assert not illegal(world, world.check(), monkeypatch)


def illegal(world: World, output: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a target that likes one token writes against its grammars, under these rows."""
    logits = torch.zeros(6, 4096)
    (liked,) = ids("z")
    logits[:, liked] = 5.0
    batch = SimpleNamespace(req_ids=world.runner.input_batch.req_ids)
    utils: Any = importlib.import_module("vllm.v1.structured_output.utils")
    monkeypatch.setattr(utils, "PIN_MEMORY", False, raising=False)
    if output is not None:  # else a runner has nothing to apply
        utils.apply_grammar_bitmask(world.step.scheduled, output, batch, logits)
    written = [first_letter(token_id) for token_id in logits.argmax(-1)]
    rows = [letters for name in batch.req_ids for letters in LEGAL[name]]
    return [one for one, letters in zip(written, rows, strict=True) if one not in letters]


def test_where_the_guard_cannot_follow_it_is_off(caplog: pytest.LogCaptureFixture) -> None:
    config = make_config()
    config.kv_transfer_config = SimpleNamespace()
    assert vllm_guard.guard_of(Runner(config)) is None
    assert "guard is off: with a KV connector" in caplog.text


def test_a_runner_that_loads_its_model_in_another_way_is_guarded_at_its_first_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As vLLM's for CPUs does."""
    runner = SimpleNamespace(vllm_config=make_config(), execute_model_state=None)
    step = vllm_guard.guard_masks_v1(lambda _, given: given)
    caplog.set_level("INFO", "vllm.guided_spec")
    assert step(runner, None) is step(runner, None) is None
    assert vllm_guard.guard_of(runner) is not None
    assert caplog.text.count("the masks of the target are guarded") == 1


@pytest.mark.skipif(RELEASE < (0, 28), reason="older releases end with the tokenizer's stop token")
def test_a_request_ends_with_stop_tokens_of_its_own(make: Make) -> None:
    world = World(make, {"x": "", "y": ""}, regex="ab*", stops=ids("!"))
    guard = vllm_guard.guard_of(world.runner)
    assert guard is not None
    assert None not in guard.requests.stand(["x", "y"])
    assert world.check() is world.output
    assert world.legal(world.output, "x") == ["!b"]
    world.runner.note(["x", "y"], [ids("!"), ids("b")])
    ended, running = guard.requests.stand(["x", "y"])
    assert ended is None
    assert running is not None
