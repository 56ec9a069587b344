"""Mask rows that are lost between vLLM's scheduler and its worker, planted one by one.

The rows are those of the real scheduler. What a runner gets is taken from its ``sample_tokens``,
and on the older runner put where its logits are by vLLM's own function.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

vllm = pytest.importorskip("vllm", reason="vLLM is not installed")

from guided_spec.integrations.vllm import guard as vllm_guard  # noqa: E402
from guided_spec.integrations.vllm import requests as vllm_requests  # noqa: E402
from tests.integrations.vllm.parts import (  # noqa: E402
    NUM_DRAFT,
    RELEASE,
    Step,
    add_request,
    first_step,
    make_config,
    make_scheduler,
    next_step,
    tokenizer,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own
REGEXES = {"x": "a[bc]d[ef]g+", "y": "h[ij]k[lm]n+"}
WRITTEN = {"x": "a", "y": "h"}
DRAFTS = {"x": "bd", "y": "ik"}
LEGAL = {"x": ["bc", "d", "ef"], "y": ["ij", "k", "lm"]}


def ids(text: str) -> list[int]:
    found = [tokenizer().encode(one, add_special_tokens=False) for one in text]
    assert all(len(one) == 1 for one in found)
    return [one[0] for one in found]


def first_letter(token_id: Any) -> str:
    text: str = tokenizer().decode([int(token_id)])
    return text[:1]


class Runner:
    """As much of the older runner as is looked at. is_reading: its requests' prompts."""

    def __init__(self, config: Any) -> None:
        self.vllm_config = config
        self.use_async_scheduling = False
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=[])
        self.is_reading = False
        vllm_guard.guard_runner(lambda _: None)(self)

    def add(self, name: str, params: Any) -> None:
        self.requests[name] = SimpleNamespace(sampling_params=params, output_token_ids=[])

    def note(self, names: Sequence[str], sampled: Sequence[Sequence[int]]) -> None:
        """A step samples these tokens, and the runner writes them down."""
        self.input_batch.req_ids = [*names]
        mask = torch.zeros(len(names), dtype=torch.bool)
        self.discard_request_mask = SimpleNamespace(gpu=mask, np=mask.numpy())
        output = SimpleNamespace(sampled_token_ids=torch.tensor(sampled))
        vllm_requests.note_sampled_v1(lambda *_: output)(self, None, None)
        for name, tokens in zip(names, sampled, strict=True):
            self.requests[name].output_token_ids.extend(tokens)

    def guarded(self, step: Step, drafts: dict[str, list[int]], output: Any) -> Any:
        """What the runner gets in the place of ``output``, where it verifies ``drafts``."""
        names = self.input_batch.req_ids
        flat = torch.tensor([token for name in names for token in drafts[name]])
        metadata = SimpleNamespace(
            draft_token_ids=flat, num_draft_tokens=[len(drafts[name]) for name in names]
        )
        self.discard_request_mask.np[:] = self.is_reading
        self.execute_model_state = SimpleNamespace(
            scheduler_output=step.scheduled, logits=0, spec_decode_metadata=metadata
        )
        return vllm_guard.guard_masks_v1(lambda _, given: given)(self, output)


class NewRunner(Runner):
    """The same of the new runner."""

    def __init__(self, config: Any) -> None:
        self.speculator = None
        self.req_states = SimpleNamespace(
            req_id_to_index={},
            prompt_len=SimpleNamespace(np=np.full(8, 3)),
            prefill_len=SimpleNamespace(np=np.full(8, 3)),
            num_computed_prefill_tokens=np.full(8, 3),
        )
        super().__init__(config)

    def add(self, name: str, params: Any) -> None:
        self.req_states.req_id_to_index[name] = len(self.req_states.req_id_to_index)
        new = SimpleNamespace(req_id=name, sampling_params=params, prefill_token_ids=[5, 6, 7])
        scheduled = SimpleNamespace(scheduled_new_reqs=[new])
        vllm_requests.note_requests(lambda *_: None)(self, scheduled)

    def note(self, names: Sequence[str], sampled: Sequence[Sequence[int]]) -> None:
        self.input_batch.req_ids = [*names]
        counts = torch.tensor([len(tokens) for tokens in sampled])
        output = (SimpleNamespace(sampled_token_ids=torch.tensor(sampled)), counts, None)
        vllm_requests.note_sampled_v2(lambda *_: output)(self, None, self.input_batch, None)

    def guarded(self, step: Step, drafts: dict[str, list[int]], output: Any) -> Any:
        names = self.input_batch.req_ids
        lines = [[0, *drafts[name]] for name in names]
        ends = np.cumsum([0, *map(len, lines)])
        scheduled = step.scheduled.scheduled_spec_decode_tokens
        batch = SimpleNamespace(
            req_ids=names,
            num_draft_tokens_per_req=np.array([len(scheduled.get(name, ())) for name in names]),
            cu_num_logits_np=ends,
            cu_num_logits=torch.tensor(ends),
            input_ids=torch.tensor([token for line in lines for token in line]),
            logits_indices=torch.arange(ends[-1]),
            idx_mapping_np=np.array([self.req_states.req_id_to_index[name] for name in names]),
            num_scheduled_tokens=np.array([-1 if self.is_reading else len(x) for x in lines]),
        )
        self.execute_model_state = SimpleNamespace(input_batch=batch, hidden_states=0)
        return vllm_guard.guard_masks_v2(lambda _, given: given)(self, output)


Make = Callable[[Any], Runner]


class World:
    """Two requests behind their first token, and the step that verifies two drafts of each."""

    def __init__(
        self,
        make: Make,
        drafts: dict[str, str] = DRAFTS,
        regex: str | None = None,
        stops: Sequence[int] = (),
    ) -> None:
        config = make_config()
        scheduler = make_scheduler(config)
        self.runner = make(config)
        for name, own in REGEXES.items():
            request = add_request(scheduler, name, stops, regex=regex or own)
            self.runner.add(name, request.sampling_params)
        step = first_step(scheduler, len(REGEXES))
        sampled = {name: ids("a" if regex else text) for name, text in WRITTEN.items()}
        self.runner.note([*REGEXES], [*sampled.values()])
        self.drafts = {name: ids(text) for name, text in drafts.items()}
        self.step = next_step(scheduler, step, sampled, {**self.drafts})
        self.output = copy.deepcopy(self.step.grammar)

    def size(self, name: str) -> int:
        if RELEASE >= (0, 33):
            return NUM_DRAFT + 1
        return len(self.step.scheduled.scheduled_spec_decode_tokens.get(name, ())) + 1

    def rows(self, output: Any, name: str) -> Any:
        names = output.structured_output_request_ids
        start = sum(map(self.size, names[: names.index(name)]))
        return output.grammar_bitmask[start : start + self.size(name)]

    def check(self) -> Any:
        return self.runner.guarded(self.step, self.drafts, self.output)

    def legal(self, output: Any, name: str) -> list[str]:
        """The letters that tokens may begin with by each of a request's rows."""
        bits = np.unpackbits(self.rows(output, name).view(np.uint8), axis=-1, bitorder="little")
        rows = bits[: len(self.drafts[name]) + 1]
        return ["".join(sorted({*map(first_letter, np.flatnonzero(row))})) for row in rows]


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


def test_rows_of_another_place_are_stale_where_that_costs_no_wait(make: Make) -> None:
    world = World(make)
    x, y = world.rows(world.output, "x"), world.rows(world.output, "y")
    x[:], y[:] = y.copy(), x.copy()
    guard = vllm_guard.guard_of(world.runner)
    assert guard is not None
    if make is Runner:  # it knows its texts, and the grammars are compiled beside the first steps
        for shadow in guard.requests._shadows._shadows.values():
            shadow._future.result(60)
    else:
        assert world.check() is world.output  # the texts are on the device
        guard.requests.stand(["x", "y"])  # as drafting under grammars does before
    found = world.check()
    assert {name: world.legal(found, name) for name in LEGAL} == LEGAL
    assert counted() == {"stale": 6}


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


@pytest.mark.parametrize("is_guarded", [False, True])
def test_the_target_writes_what_its_grammar_allows(*, is_guarded: bool) -> None:
    """vLLM's own function puts the rows where the logits of a target are that likes one token."""
    world = World(Runner)
    open_behind_a_draft(world)
    output = world.check() if is_guarded else world.output
    logits = torch.zeros(6, 4096)
    (liked,) = ids("z")
    logits[:, liked] = 5.0
    batch = SimpleNamespace(req_ids=world.runner.input_batch.req_ids)
    utils: Any = importlib.import_module("vllm.v1.structured_output.utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "PIN_MEMORY", False, raising=False)
        utils.apply_grammar_bitmask(world.step.scheduled, output, batch, logits)
    written = [first_letter(token_id) for token_id in logits.argmax(-1)]
    rows = [letters for name in batch.req_ids for letters in LEGAL[name]]
    illegal = [at for at, letters in enumerate(rows) if written[at] not in letters]
    assert illegal == ([] if is_guarded else [1, 2])


def test_where_the_guard_cannot_follow_it_is_off(caplog: pytest.LogCaptureFixture) -> None:
    config = make_config()
    config.kv_transfer_config = SimpleNamespace()
    assert vllm_guard.guard_of(Runner(config)) is None
    assert "guard is off: with a KV connector" in caplog.text


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
