"""Answers written anew: valid ones, whole ones, and nothing else."""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from guided_spec.engine.llm import LLM
from guided_spec.errors import ConfigError, RequestError
from guided_spec.evaluate.measurement import is_valid
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.training.data import corpus
from guided_spec.training.data.corpus import Regenerated, regenerate
from guided_spec.training.data.endpoint import Endpoint
from guided_spec.training.data.records import read_example, read_grammar
from guided_spec.types import SamplingParams
from tests.server.running import running
from tests.tiny_llm import make_llm, tiny_tokenizer

PARAMS = SamplingParams(max_tokens=64)
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """A random model, whose free texts do not end, with a chat template."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = TEMPLATE
    with make_llm("llama", tokenizer=tokenizer, max_batch_size=2) as llm:
        yield llm


def test_held_out_documents(records: list[dict[str, Any]], tmp_path: Path) -> None:
    chosen = [record for record in records if record["schema"] is not None][:3]
    path = write(tmp_path / "in.jsonl", chosen)
    output = tmp_path / "new" / "out.jsonl"
    with LLM(max_model_len=512) as llm:
        params = SamplingParams(max_tokens=200)
        assert regenerate([path], output, llm, params) == Regenerated(3, 0, 0)
    for before, after in zip(chosen, read(output), strict=True):
        jsonschema.validate(json.loads(after["response"]), before["schema"])
        assert "answer" not in after
        kept = {"kind", "prompt", "schema", "regex"}
        assert {name: after[name] for name in kept} == {name: before[name] for name in kept}


def test_every_shape_keeps_the_rest(llm: LLM, tmp_path: Path) -> None:
    user, old = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "no"}
    human, gpt = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "no"}
    records: list[dict[str, Any]] = [
        {"prompt": "A", "answer": {"gold": 1}, "regex": "[0-9]{3}", "id": 1},
        {"messages": [user, old, user], "choice": ["yes", "no"], "prompt": "Hi"},
        {"messages": [user, {**old, "name": "Bob"}], "regex": "[a-c]{2}", "answer": "kept"},
        {"conversations": [human, gpt], "schema": {"type": "boolean"}},
        {"conversations": [human], "regex": "x{2}", "response": "old"},
        {"prompt": [user], "regex": "xy"},
    ]
    path = write(tmp_path / "in.jsonl", records)
    result = regenerate([path], tmp_path / "out.jsonl", llm, PARAMS)
    assert result == Regenerated(written=6, failed=0, cut=0)
    found = read(tmp_path / "out.jsonl")
    for before, after in zip(records, found, strict=True):
        answer = read_example(after).response
        text = answer["content"] if isinstance(answer, Mapping) else str(answer)
        assert is_valid(text, read_grammar(before))
        assert read_example(after).grammar == read_grammar(before)
    assert found[0] == {**_without(records[0], "answer"), "response": found[0]["response"]}
    assert found[1]["messages"][:3] == records[1]["messages"]
    assert found[1]["prompt"] == "Hi"
    assert found[2]["messages"][0] == user
    assert {*found[2]["messages"][1]} == {"role", "content"}
    assert found[2]["answer"] == "kept"
    assert found[3]["conversations"][0] == human
    assert found[3]["conversations"][1]["value"] in ("true", "false")
    assert found[4] == {"conversations": [human, {"from": "gpt", "value": "xx"}], "regex": "x{2}"}
    assert found[5]["prompt"] == [user, {"role": "assistant", "content": "xy"}]


def test_what_fails_and_what_is_cut(
    llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records: list[dict[str, Any]] = [
        {"prompt": "a", "regex": "("},
        {"prompt": "b", "regex": "[a-z]{100}"},
        {"prompt": "c", "regex": "[a-z]{3}"},
        {"prompt": "d" * 500, "regex": "[a-z]{3}"},
    ]
    path = write(tmp_path / "in.jsonl", records)
    with caplog.at_level(logging.WARNING):
        params = SamplingParams(max_tokens=20, complete=False)
        result = regenerate([path], tmp_path / "out.jsonl", llm, params)
    assert result == Regenerated(written=1, failed=2, cut=1)
    assert [record["prompt"] for record in read(tmp_path / "out.jsonl")] == ["c"]
    (warning,) = caplog.messages
    assert "in.jsonl:1" in warning
    assert "regex" in warning


def test_calls_follow_one_another(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grammar of the parameters is for those without their own, and seeds count on."""
    monkeypatch.setattr(corpus, "CALL_RECORDS", 32)
    path = write(tmp_path / "in.jsonl", [{"prompt": "a"}] * 30 + [{"prompt": "a", "regex": "b"}])
    params = SamplingParams(
        max_tokens=8, temperature=1.0, seed=5, grammar=GrammarSpec.regex("[a-z]{4}")
    )
    output = tmp_path / "out.jsonl"
    for limit, expected in ((33, 62), (None, 62)):
        result = regenerate([path, path], output, llm, params, limit=limit)
        count = min(limit or expected, expected)
        assert result == Regenerated(count, 0, 0)
    texts = [record["response"] for record in read(output)]
    assert texts[30] == texts[61] == "b"
    assert all(len(text) == 4 for at, text in enumerate(texts) if at not in (30, 61))
    assert len({*texts}) > 30
    (alone,) = llm.generate(
        "a", SamplingParams(max_tokens=8, temperature=1.0, seed=5 + 33, grammar=params.grammar)
    )
    assert alone.text == texts[33]


def test_a_server_writes_what_its_model_writes(llm: LLM, tmp_path: Path) -> None:
    """Under each kind of grammar, greedily; what it refuses or cuts is counted."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    records: list[dict[str, Any]] = [
        {"prompt": "a", "schema": schema},
        {"prompt": "b", "regex": "[a-z]{3}"},
        {"messages": [{"role": "user", "content": "c"}], "choice": ["yes", "no"]},
        {"prompt": "d", "ebnf": 'root ::= "x" | "y"'},
        {"prompt": "e", "regex": "[a-z"},
        {"prompt": "f", "regex": "[a-z]{100}"},
    ]
    path = write(tmp_path / "in.jsonl", records)
    params = SamplingParams(max_tokens=40, temperature=0.0)
    outputs = [tmp_path / "here.jsonl", tmp_path / "there.jsonl"]
    here = regenerate([path], outputs[0], llm, params)
    with running(llm) as served, Endpoint(f"{served.url}/v1/", llm.tokenizer) as endpoint:
        there = regenerate([path], outputs[1], endpoint, params)
        with pytest.raises(ConfigError, match="only asked for max_tokens, temperature"):
            regenerate([path], tmp_path / "x.jsonl", endpoint, SamplingParams(top_p=0.5))
        with pytest.raises(RequestError, match="answers with 400"):
            endpoint.generate([[1]], [SamplingParams(grammar=GrammarSpec.regex("[a-z"))])
        with pytest.raises(ConfigError, match="answers with status 404"):
            Endpoint(served.url, llm.tokenizer)
    assert read(outputs[0]) == read(outputs[1])
    assert len(read(outputs[1])) >= 4
    assert there.failed >= 1
    assert sum(here) == sum(there) == len(records)
    with pytest.raises(ConfigError, match="regenerate_url=.*does not answer"):
        Endpoint(f"{served.url}/v1", llm.tokenizer)


def test_asking_a_server_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"url='http.*httpx.*'guided-spec\[train\]'"):
        Endpoint("http://127.0.0.1:1/v1", llm.tokenizer, option="url")


def test_errors(llm: LLM, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [{"prompt": "a", "regex": "b"}, {"text": "a"}])
    output = tmp_path / "out.jsonl"
    with pytest.raises(ConfigError, match="in.jsonl:2': has no prompt"):
        regenerate([path], output, llm, PARAMS)
    assert not output.exists()
    with pytest.raises(ConfigError, match="one of the inputs"):
        regenerate([path], tmp_path / "x" / ".." / "in.jsonl", llm, PARAMS)
    for params in (SamplingParams(n=2), SamplingParams(echo=True)):
        with pytest.raises(ConfigError, match="n=1"):
            regenerate([path], output, llm, params)
    write(path, [{"messages": [], "regex": "b"}])
    with pytest.raises(ConfigError, match="in.jsonl:1': messages"):
        regenerate([path], output, llm, PARAMS)


def _without(record: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != name}
