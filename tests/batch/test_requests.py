"""Batch lines get what the server answers to the same bodies, and nothing that it refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow
import pytest
from pyarrow import parquet

from guided_spec.batch.inputs import Line, reader_of
from guided_spec.batch.requests import RequestForm
from guided_spec.batch.run import Batch
from guided_spec.engine.llm import LLM
from guided_spec.engine.rows.progress import ProgressBar
from guided_spec.server.app import build_app

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASK = [{"role": "user", "content": "Please call Maria Lopez at +49 170 5551234."}]
CONTACT = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "phone": {"type": "string"}},
    "required": ["name", "phone"],
}
FORM = {"type": "json_schema", "json_schema": {"name": "contact", "schema": CONTACT}}
TOOL = {"type": "function", "function": {"name": "call", "parameters": CONTACT}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": ASK, "response_format": FORM, "model": "bundled"}),
    (CHAT, {"messages": ASK, "response_format": FORM, "max_tokens": 28}),
    (CHAT, {"messages": ASK, "tools": [TOOL], "tool_choice": "required", "max_tokens": 90}),
    (CHAT, {"messages": ASK, "n": 2, "seed": 3, "temperature": 1, "max_tokens": 5}),
    (TEXT, {"prompt": ["A", "B"], "guided_regex": "[0-9]{3}", "logprobs": 1}),
    (RESPONSES, {"input": "Hello", "max_output_tokens": 6}),
    (CHAT, {"messages": ASK, "max_new_tokens": 5}),
    (CHAT, {"messages": ASK, "response_format": {**FORM, "strict": True}}),
    (CHAT, {"messages": ASK, "response_format": FORM, "max_tokens": 2}),
    (CHAT, {"messages": ASK, "model": "gpt-5"}),
    (CHAT, {"messages": []}),
    (TEXT, {"prompt": "x" * 99_999}),
    (TEXT, {"prompt": "A", "temperature": -1}),
    (TEXT, {"prompt": "A", "guided_json": {"type": "strnig"}}),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=512, max_batch_size=4) as made:
        yield made


def answers(llm: LLM | None, folder: Path, lines: list[Any]) -> list[dict[str, Any]]:
    """What a batch writes, in the order of the lines. llm: None where none may be needed."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (
        Batch(source, output, RequestForm("bundled", ("bundled",))) as batch,
        ProgressBar(None, is_shown=False) as bar,
    ):
        assert batch.needs_model is (llm is not None)
        batch.run(llm, bar) if llm is not None else batch.refuse_faults()
        assert (bar.speed.num_tokens > 0) is (llm is not None)
    found = [json.loads(line) for line in output.read_text().splitlines()]
    order = [line["custom_id"] for line in lines if isinstance(line, dict) and "custom_id" in line]
    return sorted(found, key=lambda answer: order.index(answer["custom_id"])) if order else found


def comparable(value: Any) -> Any:
    """Without ids and times, which differ; what the cache held is not compared either."""
    if isinstance(value, list):
        return [comparable(each) for each in value]
    if not isinstance(value, dict):
        return value
    out = ("id", "call_id", "created", "created_at", "cached_tokens")
    return {name: comparable(each) for name, each in value.items() if name not in out}


def test_answers_are_the_server_s(llm: LLM, tmp_path: Path) -> None:
    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=build_app(llm))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [await client.post(url, json=body, timeout=60) for url, body in BODIES]

    lines = [
        {"custom_id": f"line {at}", "method": "POST", "url": url, "body": body}
        for at, (url, body) in enumerate(BODIES)
    ]
    expected = asyncio.run(ask())
    found = answers(llm, tmp_path, lines)
    assert [line["custom_id"] for line in found] == [line["custom_id"] for line in lines]
    for answer, reply in zip(found, expected, strict=True):
        assert answer["error"] is None
        assert answer["response"]["status_code"] == reply.status_code
        assert comparable(answer["response"]["body"]) == comparable(reply.json())
    assert {reply.status_code for reply in expected} == {200, 400, 404}


def test_faults_of_lines_need_no_model(tmp_path: Path) -> None:
    whole = {"method": "POST", "url": TEXT, "body": {"prompt": "A"}}
    lines: list[Any] = [
        [1],
        {**whole, "custom_id": ""},
        {**whole, "custom_id": 5},
        {**whole, "custom_id": "a", "priority": 1},
        {**whole, "custom_id": "b", "method": "GET"},
        {**whole, "custom_id": "c", "url": "/v1/embeddings"},
        {**whole, "custom_id": "d", "body": "A"},
        {**whole, "custom_id": "e", "body": {"prompt": "A", "stream": True}},
        {**whole, "custom_id": "f", "body": {"prompt": "A", "model": "gpt-5"}},
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    form, messages = RequestForm("bundled", ("bundled",)), []
    for at, line in enumerate(lines):
        refusal: Any = form.read(at, Line(at, line)).refusal
        body = (refusal["response"] or {"body": refusal})["body"]
        messages.append(body["error"]["message"])
    assert messages == [
        "the line is no object but [1]: write {custom_id, method, url, body}",
        "custom_id='': must be a non-empty str, and another on each line",
        "custom_id=5: must be a non-empty str, and another on each line",
        "'priority' is no field of a line: it has custom_id, method, url, body",
        "method='GET': must be POST",
        "url='/v1/embeddings': must be one of /v1/chat/completions, /v1/completions, /v1/responses",
        "body='A': must be an object, the request itself",
        "stream: answers of a batch are whole; leave it out",
        "the model 'gpt-5' is not served here; there is bundled",
    ]
    assert len(answers(None, tmp_path, lines[3:])) == 6


class Broken:
    """An LLM with a fault of ours in it."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.num_asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def encode(self, prompt: Any) -> list[int]:
        """Fails once."""
        self.num_asked += 1
        if self.num_asked == 1:
            raise ZeroDivisionError
        return self._llm.encode(prompt)


def test_a_fault_of_ours_costs_one_line(llm: LLM, tmp_path: Path) -> None:
    lines = [
        {"custom_id": name, "url": TEXT, "body": {"prompt": "A", "max_tokens": 2}} for name in "abc"
    ]
    broken: Any = Broken(llm)
    found = answers(broken, tmp_path, lines)
    codes = sorted(answer["response"]["status_code"] for answer in found)
    assert codes == [200, 200, 500]


def test_requests_in_parquet(tmp_path: Path) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi", "name": None}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    path, form = tmp_path / "requests.parquet", RequestForm("m", ("m",))
    parquet.write_table(pyarrow.Table.from_pylist([line]), path)
    (read,) = reader_of(path)(path, form.columns)
    question = form.read(1, read)
    assert (question.custom_id, question.refusal) == ("a", None)
    assert question.content.messages[0]["content"] == "hi"
