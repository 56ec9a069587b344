"""Drafts of vLLM's own drafters under grammars, in the loops of both runners."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from guided_spec.integrations.vllm.backend import VllmGrammars
from guided_spec.integrations.vllm.drafts.heads import check_up_to_end
from guided_spec.integrations.vllm.drafts.tabled_requests import TabledRequests
from guided_spec.integrations.vllm.ranks import LATER, RankGroup
from guided_spec.integrations.vllm.requests import ShadowConstraint
from guided_spec.masks.lookahead import Lookahead

vllm = pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.integrations.vllm.drafters import (  # noqa: E402
    V1,
    V2,
    VOCABULARY,
    Table,
    config_of,
    encode,
    started,
    use_loops,
    use_tables,
)
from tests.integrations.vllm.parts import (  # noqa: E402
    NUM_DRAFT,
    add_request,
    first_step,
    interpreted,
    make_scheduler,
    sampling_params,
    tokenizer,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, and the Triton interpreter's
    pytest.mark.usefixtures("loops"),
    interpreted,
]
END = 0  # the bundled tokenizer's end of text
SCHEMA = {
    "type": "object",
    "properties": {"temperature": {"type": "integer"}, "sky": {"enum": ["clear", "cloudy"]}},
    "required": ["temperature", "sky"],
    "additionalProperties": False,
}
ANSWER = '{"temperature": 31, "sky": "cloudy"}'
Make = Callable[..., Any]


@pytest.fixture(params=["masks", "tables"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of the masks to the drafter: from the host, and along tables."""
    monkeypatch.delenv("GUIDED_SPEC_VLLM", raising=False)
    use_loops(monkeypatch)
    if request.param == "tables":
        use_tables(monkeypatch)


@pytest.fixture(params=["v1", "v2", "v2 with graphs"])
def make(request: pytest.FixtureRequest) -> Make:
    """A drafter of one of the loops, from a config and a table."""
    if request.param == "v1":
        return V1
    graphs = "step" if "graphs" in request.param else "none"
    return lambda config, table, **options: V2(config, table, graphs=graphs, **options)


def letter(text: str) -> int:
    (found,) = encode(text)
    return found


def free(config: Any) -> Any:
    return sampling_params(config)


def without(*missing: int) -> torch.Tensor:
    """A draft vocabulary of all tokens but these."""
    return torch.tensor([token for token in range(VOCABULARY) if token not in missing])


def accepted(draft: Sequence[int], answer: Sequence[int]) -> int:
    count = 0
    while count < min(len(draft), len(answer)) and draft[count] == answer[count]:
        count += 1
    return count


def up_to_end(draft: list[int]) -> list[int]:
    return draft[: draft.index(END) + 1] if END in draft else draft


@pytest.mark.parametrize("own_ids", [None, torch.arange(0, VOCABULARY, 2)])
def test_vllm_takes_every_draft(make: Make, own_ids: torch.Tensor | None) -> None:
    config = config_of()
    scheduler = make_scheduler(config)
    request = add_request(scheduler, "request", json=SCHEMA)
    step = first_step(scheduler, 1)
    drafter = started(make(config, Table(3, own_ids)), request=request.sampling_params)
    outputs: Any = importlib.import_module("vllm.v1.outputs")
    answer, written = [*encode(ANSWER), END], 0
    draft: list[int] = []
    while written < len(answer):
        new = answer[written : written + 1 + accepted(draft, answer[written:])]
        written += len(new)
        result = outputs.ModelRunnerOutput(["request"], {"request": 0}, sampled_token_ids=[new])
        scheduler.update_from_output(step, result)
        if new[-1] == END:
            break
        draft = drafter.step({"request": new})["request"]
        assert len(draft) == NUM_DRAFT
        draft = up_to_end(draft)
        scheduler.update_draft_token_ids(outputs.DraftTokenIds(["request"], [draft]))
        # Nothing is cut off; a token behind the end would be.
        assert request.spec_token_ids == draft
        step = scheduler.schedule()
    assert written == len(answer)


def test_nothing_is_asked_behind_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    """vLLM takes what it took, and xgrammar has nothing to warn of."""
    scheduler = make_scheduler(config_of())
    request = add_request(scheduler, "request", regex="ab?")
    first_step(scheduler, 1)
    grammar = request.structured_output_request.grammar
    check = check_up_to_end(type(grammar).validate_tokens)
    a, b, c = map(letter, "abc")
    capfd.readouterr()
    for tokens, taken in (
        ([a, END, b, c], [a, END]),
        ([a, b, END, END], [a, b, END]),
        ([a, c, END], [a]),
        ([END, a], []),
        ([], []),
    ):
        assert check(grammar, tokens) == taken
        assert not grammar.matcher.is_terminated()
    assert "Warning" not in capfd.readouterr().err


def test_a_mixed_batch_leaves_free_rows_as_they_are(make: Make) -> None:
    config, texts = config_of(), {"b": [11], "a": [letter("a")], "c": [12]}
    table = Table(5)
    drafter = started(
        make(config, table),
        b=free(config), a=sampling_params(config, regex="a[bc]{3}d+"), c=free(config),
    )  # fmt: skip
    plain = make(config, table, guided=False) if make is V1 else V2(config, table, guided=False)
    for name in texts:
        plain.add(name, free(config))
    found, expected = drafter.step(texts), plain.step(texts)
    assert (found["b"], found["c"]) == (expected["b"], expected["c"])
    assert found["a"] != expected["a"]
    assert set(tokenizer().decode(found["a"][:2])) <= set("bcd")


def test_a_free_batch_asks_for_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    config, table = config_of(), Table(7)
    drafter = started(
        make(config, table), free=free(config), bound=sampling_params(config, regex="[ab]+c")
    )
    drafter.step({"free": [11], "bound": [letter("a")]})
    drafter.remove("bound")

    def refuse(*args: Any) -> Any:
        raise AssertionError(args)

    monkeypatch.setattr(ShadowConstraint, "update", refuse)
    monkeypatch.setattr(Lookahead, "fork", refuse)
    monkeypatch.setattr(type(drafter.drafting.requests), "_record", refuse)
    plain = V2(config, table, guided=False)
    plain.add("free", free(config))
    # What the grammar forbade before is not forbidden any more, in graphs neither.
    assert drafter.step({"free": [12]}) == plain.step({"free": [12]})


def test_requests_come_and_go(make: Make) -> None:
    config = config_of()
    days = sampling_params(config, choice=["Monday", "Tuesday"])
    drafter = started(make(config, Table(9)), first=days)
    monday = drafter.step({"first": [letter("M")]})["first"]
    assert tokenizer().decode(up_to_end(monday)).startswith("onday")
    # One that goes on behind what it had written, and one whose prompt is still read.
    drafter.add("resumed", days, encode("M"))
    drafter.add("reading", days)
    drafter.step({"reading": [], "resumed": []})
    drafter.wait("resumed")
    found = drafter.step({"reading": [], "resumed": encode("on"), "first": [monday[0]]})
    assert tokenizer().decode(up_to_end(found["resumed"])).startswith("day")
    rest = tokenizer().decode(up_to_end([monday[0], *found["first"]]))
    assert rest.startswith("onday")
    # The same name again is another request.
    drafter.remove("first")
    drafter.step({"resumed": encode("day")})
    drafter.add("first", sampling_params(config, regex="x[yz]{8}"))
    drafter.step({"first": []})
    drafter.wait("first")
    assert set(tokenizer().decode(drafter.step({"first": [letter("x")]})["first"])) <= set("yz")


def test_a_text_that_left_the_grammar_is_drafted_without_it(make: Make) -> None:
    config, table = config_of(), Table(11)
    drafter = started(make(config, table), request=sampling_params(config, regex="[ab]+c"))
    plain = V2(config, table, guided=False)
    plain.add("request", free(config))
    for tokens in ([letter("z")], [letter("a")]):
        assert drafter.step({"request": tokens}) == plain.step({"request": tokens})


def test_tokens_that_the_drafter_does_not_know(make: Make) -> None:
    config = config_of()
    b, c, d = map(letter, "bcd")
    drafter = started(
        make(config, Table(13, without(b, c))),
        forced=sampling_params(config, regex="abd(b|c)d*"),
        other=sampling_params(config, regex="a[de]{9}"),
    )
    found = drafter.step({"forced": [letter("a")], "other": [letter("a")]})
    # b is the only legal token. Behind d there are two, neither of them known: the draft is over.
    assert found["forced"][:2] == [b, d]
    assert found["forced"][2] not in (b, c)
    assert set(tokenizer().decode(found["other"])) <= set("de")


def test_masks_raise_what_is_accepted() -> None:
    config, answer = config_of(), encode(ANSWER)
    params = sampling_params(config, json=SCHEMA)

    def total(seed: int, *, guided: bool) -> int:
        table = Table(seed, torch.arange(0, VOCABULARY, 2))
        table.prefer(answer, 1.8)
        drafter = V1(config, table, guided=guided)
        drafter.add("request", params)
        if guided:
            started(drafter, request=params)
        steps = range(len(answer) - 1)
        drafts = [drafter.step({"request": [answer[at]]})["request"] for at in steps]
        return sum(accepted(draft, answer[at + 1 :]) for at, draft in enumerate(drafts))

    counts = [(total(seed, guided=True), total(seed, guided=False)) for seed in range(3)]
    assert all(masked >= plain for masked, plain in counts)
    assert sum(masked for masked, _ in counts) > 1.3 * sum(plain for _, plain in counts)


def test_steps_that_do_not_draft_are_followed(make: Make) -> None:
    """None of the batch drafts, the drafter is not asked, or the request is not in the batch."""
    config = config_of()
    b, c, d = map(letter, "bcd")
    request = sampling_params(config, regex="a(b|c)(b|c)(b|c)d{9}")
    drafter = started(make(config, Table(15)), request=request, other=free(config))
    drafter.step({"request": [letter("a")], "other": [11]})
    for tokens in ({"request": [b], "other": [12]}, {"other": [13]}, {"request": [c]}):
        drafter.sample(tokens)
        with drafter.drafting.step([*tokens], 0):
            pass
        drafter.write(tokens)
    assert drafter.step({"request": [b], "other": [14]})["request"] == [d] * NUM_DRAFT


def test_asynchronous_scheduling_hides_tokens_from_the_older_runner() -> None:
    config = config_of()
    b, d = letter("b"), letter("d")
    drafter = started(V1(config, Table(17)), request=sampling_params(config, regex="ab{3}d{9}"))
    drafter.is_asynchronous = True
    drafter.step({"request": [letter("a")]})
    for _ in range(2):
        drafter.sample({"request": [b]})
        drafter.write({"request": [b]})
    assert drafter.step({"request": [b]})["request"] == [d] * NUM_DRAFT


def test_a_penalty_makes_the_older_runner_forget_placeholders() -> None:
    """A request with a penalty came into the batch: vLLM fills in what it has of all the others."""
    config = config_of()
    b, c, d = map(letter, "bcd")
    drafter = started(V1(config, Table(21)), request=sampling_params(config, regex="a[bc]{4}d{9}"))
    drafter.is_asynchronous = True
    drafter.step({"request": [letter("a")]})
    for token in (b, c):
        drafter.step({"request": [token]})
    output = drafter.runner.requests["request"].output_token_ids
    assert output == [-1, -1, -1]
    batch = SimpleNamespace(
        req_ids=["request"],
        prev_req_id_to_index={"request": 0},
        sampled_token_ids_cpu=torch.tensor([[c]]),
        async_copy_ready_event=SimpleNamespace(synchronize=tuple),
        sampling_metadata=SimpleNamespace(output_token_ids=[output]),
    )
    module: Any = importlib.import_module("vllm.v1.worker.gpu_input_batch")
    module.InputBatch.update_async_output_token_ids(batch)
    assert output == [c]
    drafter.step({"request": [b]})
    assert drafter.step({"request": [c]})["request"] == [d] * NUM_DRAFT


def test_a_preempted_request_goes_on_in_the_older_runner() -> None:
    """The scheduler dropped what was sampled last, and the runner gets its text from there."""
    config = config_of()
    b, c, d = map(letter, "bcd")
    drafter = started(V1(config, Table(22)), request=sampling_params(config, regex="a[bc]{3}d{9}"))
    drafter.is_asynchronous = True
    drafter.step({"request": [letter("a")]})
    drafter.step({"request": [b, c]})
    drafter.step({"request": [c]})
    drafter.runner.requests["request"].output_token_ids = [letter("a"), b, c]
    drafter.step({"request": []})  # its text is read again, in chunks
    assert drafter.step({"request": [b]})["request"] == [d] * NUM_DRAFT


def test_tokens_that_the_older_runner_takes_back() -> None:
    config = config_of()
    drafter = started(V1(config, Table(19)), request=sampling_params(config, regex="a[bc]{3}d*"))
    drafter.step({"request": [letter("a")]})
    drafter.step({"request": encode("b")})
    del drafter.runner.requests["request"].output_token_ids[1:]
    found = drafter.step({"request": [letter("c")]})["request"]
    assert set(tokenizer().decode(found[:2])) <= set("bc")
    assert found[2:] == [letter("d")] * 2 or END in found


@pytest.mark.parametrize("loops", ["tables"], indirect=True)
def test_along_tables_nothing_waits(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the host has seen a grammar's table, it is asked about no token of its texts."""
    config, answer = config_of(), [*encode(ANSWER), END]
    params = sampling_params(config, json=SCHEMA)
    drafter = started(make(config, Table(31)), first=params)
    drafter.step({"first": answer[:1]})

    def refuse(*args: Any) -> Any:
        raise AssertionError(args)

    monkeypatch.setattr(type(drafter.drafting.requests), "commit", refuse)
    drafter.add("second", params)  # of a grammar that is known
    drafter.is_asynchronous = True  # of the older runner
    written, at = {"first": 1, "second": 0}, 0
    while written:
        at += 1
        new = {}
        for name in [*written]:
            start, written[name] = written[name], written[name] + 1 + at % 2
            new[name] = answer[start : written[name]]
        drafts = drafter.step(new)
        for name, tokens in new.items():
            if tokens[-1:] == [END] or written[name] >= len(answer):
                drafter.remove(name)
                del written[name]
                continue
            text = [*answer[: written[name]], *up_to_end(drafts[name])]
            left = text[: text.index(END)] if END in text else text
            assert is_beginning(params, left), tokenizer().decode(left)


@pytest.mark.parametrize("loops", ["tables"], indirect=True)
def test_ranks_ask_their_group_whether_a_request_walks(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()

    def agree(group: RankGroup, marks: Sequence[int]) -> list[int]:
        assert group._group == "the ranks' group"
        asked.extend(marks)
        return [LATER] * len(marks)

    state = importlib.import_module("vllm.distributed.parallel_state")
    monkeypatch.setattr(state, "_TP", SimpleNamespace(cpu_group="the ranks' group"))
    monkeypatch.setattr(RankGroup, "agree", agree)
    config = config_of()
    config.parallel_config.tensor_parallel_size = 2
    b, d = letter("b"), letter("d")
    drafter = started(make(config, Table(35)), first=sampling_params(config, regex="ab{3}d{9}"))
    assert drafter.step({"first": [letter("a")]})["first"] == [b, b, b, d][:NUM_DRAFT]
    assert max(asked) > LATER
    assert drafter.drafting.requests.any_on_host(["first"])


@pytest.mark.slow
@pytest.mark.parametrize("loops", ["masks"], indirect=True)
def test_a_grammar_that_comes_again_gets_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUIDED_SPEC_VLLM", "tables")  # made by a process of its own
    config = config_of()
    b, d = letter("b"), letter("d")
    params = sampling_params(config, regex="ab{3}d{9}")
    drafter = started(V2(config, Table(33)), first=params)
    drafter.step({"first": [letter("a")]})
    table = drafter.drafting.requests._asked["first"].shadow._future.result()
    deadline = time.monotonic() + 60
    while table.table is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert table.table is not None, table.reason
    found = drafter.step({"first": [b]})["first"]
    assert found == [b, b, d, d][:NUM_DRAFT]
    assert not drafter.drafting.requests.any_on_host(["first"])


def is_beginning(params: Any, token_ids: Sequence[int]) -> bool:
    """Whether tokens begin a text of the request's grammar."""
    compiled = VllmGrammars(config_of())
    spec = compiled.spec_of(params)
    assert spec is not None
    return all(map(compiled.compile(spec).new_matcher().accept_token, token_ids))


def test_kernels_of_tables_are_compiled_where_a_drafter_is_loaded(
    monkeypatch: pytest.MonkeyPatch, make: Make, request: pytest.FixtureRequest
) -> None:
    """Not at the first text that has one."""
    asked = list[TabledRequests]()
    monkeypatch.setattr(TabledRequests, "compile_ahead", lambda own: asked.append(own))
    make(config_of(), Table(36))
    assert len(asked) == ("tables" in request.node.callspec.params.values())
