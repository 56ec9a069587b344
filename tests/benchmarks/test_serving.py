"""Requests by a pattern, at our server and at what stands for vLLM's."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.gpu.peers import VllmEnvironment
from benchmarks.serving.__main__ import app, summary
from benchmarks.serving.requests import DATASETS, Asked, Request, make_requests, read_datasets
from benchmarks.serving.servers import Subject, served
from benchmarks.serving.traffic import Answer, Pattern, Traffic, arrivals, drive
from guided_spec.bundled import bundled_asset
from guided_spec.errors import ConfigError, GuidedSpecError
from guided_spec.evaluate.measurement import TASKS
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from tests.benchmarks.vllm_stand_in import write_stand_in
from tests.tiny_llm import TOKENIZER_SIZE, tiny_tokenizer

CHOICE = GrammarSpec.choice(["Positive", "Negative"])
OFFLINE = sorted({*DATASETS} - {"xgrammar_bench"})
PERSON = {
    **dict.fromkeys(("name", "city", "occupation", "company", "email", "biography"), "a"),
    "age": 3,
}
RIGHT = {
    "json": json.dumps([PERSON]),
    "grammar": "SELECT name FROM orders WHERE email = 70",
    "regex": "a@b.com\n",
    "choice": "Negative",
}


def asked(prompt: Any) -> Request:
    return Request(prompt, CHOICE, CHOICE)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of what stands for vLLM's server."""
    site = tmp_path_factory.mktemp("site")
    write_stand_in(site)
    where = VllmEnvironment(site=str(site))
    with served("vllm", Subject(model=bundled_asset("target"), vllm=where)) as (url, _):
        yield url


def test_requests_come_by_their_rate() -> None:
    for burstiness in (0.5, 1.0, 4.0):
        pattern = Pattern(rate=20.0, burstiness=burstiness)
        times = list(islice(arrivals(pattern), 4000))
        gaps = [b - a for a, b in pairwise(times)]
        assert times[0] == 0.0
        assert fmean(gaps) == pytest.approx(1 / 20, rel=0.1)
        assert pstdev(gaps) / fmean(gaps) == pytest.approx(burstiness**-0.5, rel=0.1)
        assert list(islice(arrivals(pattern), 9)) == times[:9]
    assert list(islice(arrivals(Pattern()), 3)) == [0.0] * 3


@pytest.mark.parametrize("dataset", OFFLINE)
def test_data_sets_can_be_asked_and_judged(dataset: str) -> None:
    requests = make_requests(dataset, 9, 1.0, seed=0)
    backend = XGrammarBackend(Vocabulary.from_tokenizer(tiny_tokenizer(), TOKENIZER_SIZE, [0]))
    assert len(requests) == 9
    for request in requests:
        if request.grammar is None:
            assert dataset in ("chat", "tasks")
            continue
        assert request.is_correct("{") is False
        backend.compile(request.grammar)
    if dataset in RIGHT:
        assert requests[0].is_correct(RIGHT[dataset])
    sources = {request.grammar.source for request in requests if request.grammar is not None}
    if "unique" in dataset:
        again = make_requests(dataset, 9, 1.0, seed=0)
        sources |= {request.grammar.source for request in again if request.grammar is not None}
        assert len(sources) == 18
    elif dataset in RIGHT:
        assert len(sources) == 1


def test_all_tasks_take_turns() -> None:
    six = make_requests("tasks", 6, 1.0, seed=0)
    assert [request.prompt for request in six] == [
        make_requests(task, 1, 1.0, seed=0)[0].prompt for task in TASKS
    ]


def test_a_data_set_has_settings_of_its_own() -> None:
    default = Asked("", 1.0, 1.0, 64, 0.7)
    text = "regex,documents:share=0.5:part=0.3,regex:tokens=9:temperature=0"
    assert read_datasets(text, default) == {
        "regex": Asked("regex", 1.0, 1.0, 64, 0.7),
        "documents:share=0.5:part=0.3": Asked("documents", 0.3, 0.5, 64, 0.7),
        "regex:tokens=9:temperature=0": Asked("regex", 1.0, 1.0, 9, 0.0),
    }
    for wrong in ("regex:tokens", "regex:tokens=x", "regex:length=3"):
        with pytest.raises(ConfigError, match="NAME:KEY=NUMBER"):
            read_datasets(wrong, default)


def test_chats_from_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    messages = [{"role": "user", "content": "hi"}]
    rows = datasets.Dataset.from_list([{"prompt": messages, "schema": '{"type": "null"}'}] * 2)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: rows if split else name)
    one, *others = make_requests("xgrammar_bench", 3, 1.0, seed=0)
    assert one.prompt == messages
    assert one.is_correct("null")
    assert others == [one, one]


def test_a_share_has_a_grammar(tmp_path: Path) -> None:
    requests = make_requests("choice", 40, 0.3, seed=1)
    assert sum(request.grammar is not None for request in requests) == 12
    assert {request.is_correct("x") for request in requests} == {False, None}
    assert make_requests("choice", 40, 0.3, seed=1) == requests
    (tmp_path / "own.jsonl").write_text('{"prompt": "a", "regex": "a+"}\n')
    assert make_requests(str(tmp_path / "own.jsonl"), 2, 1.0, seed=0)[1].is_correct("aa")


def test_answers_are_timed_and_judged(vllm: str) -> None:
    requests = [
        asked("a"),
        asked([{"role": "user", "content": "a chat"}]),
        Request("free", None, None),
        asked("wrong"),
        asked("refused"),
        asked("broken"),
        asked("cut off"),
    ]
    traffic = asyncio.run(drive(vllm, requests, Pattern(rate=500.0)))
    text, chat, free, wrong, *faults = traffic.answers
    assert [text.text, chat.text, free.text] == ["Positive", "Positive", "free"]
    assert [one.is_correct for one in (text, chat, free, wrong)] == [True, True, None, False]
    for one in (text, chat):
        assert one.tokens == 4
        assert 0.01 < one.first < one.first + sum(one.gaps) < one.seconds < traffic.seconds
        assert one.per_token == pytest.approx((one.seconds - one.first) / 3)
    for fault, reason in zip(
        faults, ("400: no such schema", "out of memory", "usage"), strict=True
    ):
        assert reason in str(fault.fault)
    found = summary(traffic)
    assert (found["requests"], found["failed"], found["tokens"]) == (4, 3, 16)
    assert found["correct"] == pytest.approx(200 / 3)
    assert found["tokens_per_second"] == pytest.approx(16 / traffic.seconds)
    assert found["ttft_ms"]["p50"] <= found["ttft_ms"]["p99"] < found["e2el_ms"]["p99"]


def test_figures_of_nothing() -> None:
    found = summary(Traffic([Answer(fault="x")], 1.0))
    assert (found["requests"], found["failed"], found["correct"], found["itl_ms"]) == (
        *(0, 1),
        *(None, None),
    )
    assert Answer(tokens=1, seconds=1.0).per_token is None


def test_no_more_than_may_run(vllm: str) -> None:
    """With a time limit they come again and again, and never more than allowed."""
    count = Request("count", None, None)  # answered by how many run
    traffic = asyncio.run(drive(vllm, [count], Pattern(seconds=0.3, max_concurrency=2)))
    assert len(traffic.answers) > 4
    assert {answer.text for answer in traffic.answers} <= {"1", "2"}
    assert traffic.answers[-1].fault is None
    traffic = asyncio.run(drive(vllm, [count] * 12, Pattern()))
    assert max(int(answer.text) for answer in traffic.answers) > 2


@pytest.mark.parametrize(
    "wrong",
    [{"rate": 0.0}, {"burstiness": -1.0}, {"seconds": 1.0}, {"rate": math.nan}],
)
def test_other_patterns_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Pattern(**wrong)


@pytest.mark.parametrize(("name", "share"), [("absent", 1.0), ("json", 1.5)])
def test_other_requests_are_refused(name: str, share: float) -> None:
    with pytest.raises(ConfigError, match="must be"):
        make_requests(name, 1, share, seed=0)


def test_servers_that_do_not_come(vllm: str, tmp_path: Path) -> None:
    write_stand_in(tmp_path)
    subject = Subject(
        model=bundled_asset("target"), vllm=VllmEnvironment(site=str(tmp_path), logs=tmp_path)
    )
    with (
        pytest.raises(GuidedSpecError, match="no such thing as ngram"),
        served("vllm:ngram", subject),
    ):
        pass
    assert "ngram" in (tmp_path / "serve_vllm_ngram.log").read_text()
    for name, fix in (("vllm:medusa", "methods are none, ngram"), ("vllm:eagle3", "--draft")):
        with pytest.raises(ConfigError, match=fix), served(name, subject):
            pass
    with served(vllm, subject) as (url, _):  # one that runs already
        assert url == vllm
    with pytest.raises(GuidedSpecError, match="first request: .*no such schema"):
        asyncio.run(drive(vllm, [asked("refused")], Pattern()))


def test_who_is_told_to_leave_stops_its_server(tmp_path: Path) -> None:
    """``timeout`` does so, and the server would keep a GPU's memory."""
    write_stand_in(tmp_path)
    subject = Subject(
        model=bundled_asset("target"), vllm=VllmEnvironment(site=str(tmp_path), logs=tmp_path)
    )
    before, pids = signal.getsignal(signal.SIGTERM), list[int | None]()

    def leave() -> None:
        with served("vllm", subject) as (_, pid):
            pids.append(pid)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    with pytest.raises(SystemExit, match=f"{128 + signal.SIGTERM}"):
        leave()
    assert signal.getsignal(signal.SIGTERM) == before
    (pid,) = pids
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
def test_the_command(vllm: str, tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    arguments = ["--servers", f"default,{vllm}", "--datasets", "choice,documents"]
    arguments += ["--num-prompts", "3", "--max-concurrency", "3", "--output-len", "80"]
    result = CliRunner().invoke(app, [*arguments, "--output", str(output)])
    assert result.exit_code == 0, result.output
    ours, documents, theirs, _ = json.loads(output.read_text())
    assert [ours["server"], theirs["server"]] == ["default", vllm]
    for found in (ours, documents, theirs):
        assert (found["requests"], found["failed"]) == (3, 0)
    assert [found["correct"] for found in (ours, documents, theirs)] == [100.0] * 3
    assert documents["tokens"] > 60
    assert {found["device_busy"] for found in (ours, theirs)} == {None}  # no GPU
    assert "first token" in result.output


@pytest.mark.parametrize(
    "wrong", [["--max-concurrency", "1,x"], ["--num-prompts", "0"], ["--num-prompts", "1,2"]]
)
def test_sizes_that_are_none(wrong: list[str]) -> None:
    result = CliRunner().invoke(app, ["--datasets", "regex", *wrong])
    assert result.exit_code == 1
    assert f"{wrong[0].removeprefix('--')}='{wrong[1]}': must be" in result.output


def test_each_size_is_sent_its_own(vllm: str, tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    arguments = ["--servers", vllm, "--datasets", "choice,choice:part=0.5:share=0"]
    arguments += ["--max-concurrency", "1,2", "--num-prompts", "2,3", "--output", str(output)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(output.read_text())
    assert [(one["clients"], one["requests"]) for one in found] == [(1, 2), (1, 1), (2, 3), (2, 2)]
    assert [one["correct"] for one in found] == [100.0, None, 100.0, None]


def test_clients_go_on_for_some_time(vllm: str, tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    arguments = ["--servers", vllm, "--datasets", "choice", "--num-prompts", "1"]
    arguments += ["--max-concurrency", "1", "--seconds", "0.3", "--output", str(output)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (found,) = json.loads(output.read_text())
    assert (found["failed"], found["correct"]) == (0, 100.0)
    assert found["requests"] > 1  # the only prompt again
