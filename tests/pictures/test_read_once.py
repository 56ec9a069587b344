"""A file is decoded once, and one whose header is whole and whose pixels are not is refused."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image, PngImagePlugin
from typer.testing import CliRunner

from guided_spec.cli.main import app
from guided_spec.engine.llm import LLM
from guided_spec.errors import ConfigError
from guided_spec.models.pictures.picture import PicturePrompt
from guided_spec.types import SamplingParams
from tests.pictures.sighted import ask, picture, png, sighted
from tests.pictures.test_server import OWN, chat, folder, image, messages, responses, served
from tests.server.running import PATIENCE, Running

CUT = png(picture(3, (64, 64)))[:900]
CUT_TEXT = base64.b64encode(CUT).decode()
CUT_URL = f"data:image/png;base64,{CUT_TEXT}"
PART = {"type": "image_url", "image_url": {"url": CUT_URL}}
PLACE = "messages[0].content[1].image_url.url"
REASON = "='900 bytes': is no picture that can be read"
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)

__all__ = ["folder", "served"]  # fixtures


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Files of PNG of which pixels were decoded."""
    found: list[Any] = []
    kind: Any = PngImagePlugin.PngImageFile
    prepare = kind.load_prepare

    def noted(self: Any) -> None:
        found.append(self)
        prepare(self)

    monkeypatch.setattr(kind, "load_prepare", noted)
    return found


def test_a_file_is_decoded_once(decoded: list[Any], tmp_path: Path) -> None:
    """Reading a message looks at the header alone."""
    file = tmp_path / "one.png"
    file.write_bytes(png(picture(3)))
    with sighted("llava").llm() as llm:
        llm.chat(ask(file, "What is it?"), params=GREEDY)
        assert len(decoded) == 1
        llm.generate([ask(file, "What is it?")], GREEDY)
        assert len(decoded) == 2


def asked() -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "see"}, PART]}, *ask("and?")]


def streamed(llm: LLM) -> None:
    list(llm.stream_chat(asked()))


def awaited(llm: LLM) -> None:
    asyncio.run(llm.achat(asked()))


def awaited_stream(llm: LLM) -> None:
    async def read() -> None:
        async for _ in llm.astream_chat(asked()):
            pass

    asyncio.run(read())


CALLS: list[Callable[[LLM], Any]] = [
    *(streamed, awaited, awaited_stream),
    lambda llm: llm.chat(asked()),
    lambda llm: llm.encode(asked()),
    lambda llm: llm.generate([asked()]),
    lambda llm: llm.choose(asked(), ["a", "b"]),
]


@pytest.mark.every_case
@pytest.mark.parametrize("call", CALLS)
def test_each_call_names_the_part(call: Callable[[LLM], Any]) -> None:
    with sighted("llava").llm() as llm, pytest.raises(ConfigError) as caught:
        call(llm)
    assert str(caught.value).startswith(PLACE + REASON)


def test_others_of_a_batch_are_served() -> None:
    one, whole = sighted("llava"), ask(picture(4), "and?")
    with one.llm() as llm:
        found = llm.generate([whole, asked(), whole], GREEDY, on_error="return")
    assert [output.error is None for output in found] == [True, False, True]
    assert str(found[1].error).startswith(PLACE + REASON)
    for output in (found[0], found[2]):
        assert output.completions[0].token_ids == one.expected(whole, 8)


IN_RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [image(CUT_TEXT)]}
CHAT = {"messages": asked(), **OWN}
RESPONSE = responses(
    {"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": CUT_URL}
)
MESSAGE, AFTER = messages(image(CUT_TEXT)), messages(IN_RESULT)
AFTER["messages"].insert(0, {"role": "user", "content": "look"})
AFTER["messages"].insert(
    1,
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}],
    },
)
COUNT = {"messages": AFTER["messages"], "system": "s"}
DEEP = "messages[2].content[0].content[0].source.data"
ASKED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", CHAT, PLACE),
    ("/v1/chat/completions", {**CHAT, "stream": True}, PLACE),
    ("/tokenize", {"messages": CHAT["messages"]}, PLACE),
    ("/v1/responses", RESPONSE, "input[0].content[1].image_url"),
    ("/v1/responses", {**RESPONSE, "stream": True}, "input[0].content[1].image_url"),
    ("/v1/messages", MESSAGE, "messages[0].content[0].source.data"),
    ("/v1/messages", AFTER, DEEP),
    ("/v1/messages", {**AFTER, "stream": True}, DEEP),
    ("/v1/messages/count_tokens", COUNT, DEEP),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("path", "body", "place"), ASKED)
def test_each_endpoint_names_the_part(
    served: Running, path: str, body: dict[str, Any], place: str
) -> None:
    reply = httpx.post(f"{served.url}{path}", json=body, timeout=PATIENCE)
    assert reply.status_code == 400, reply.text
    found = reply.json()["error"]
    assert found["message"].startswith(place + REASON)
    assert found["param"] == place


def test_the_commands_name_the_part(folder: Path, tmp_path: Path) -> None:
    """A batch goes on with its other lines."""
    cut = tmp_path / "cut.png"
    cut.write_bytes(CUT)
    own = ["generate", "--model", str(folder), "--max-model-len", "512"]
    found = CliRunner().invoke(app, [*own, "see", "--max-tokens", "8", "--image", str(cut)])
    assert found.exit_code == 1
    assert "of 900 bytes, is no picture that can be read" in " ".join(found.output.split())
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        for name, body in (("a", chat()), ("b", CHAT), ("c", chat()))
    ]
    sent, written = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    sent.write_text("".join(json.dumps(line) + "\n" for line in lines))
    batch = CliRunner().invoke(app, [*own, "--input", str(sent), "--output", str(written)])
    assert written.exists(), batch.output
    replies = {one["custom_id"]: one for one in map(json.loads, written.read_text().splitlines())}
    codes = [(replies[name]["response"] or {}).get("status_code") for name in "abc"]
    assert codes == [200, 400, 200]
    assert PLACE + REASON in json.dumps(replies["b"])


def test_pictures_are_told_apart_by_their_pixels() -> None:
    """Those of other sides, too, whose bytes are the same."""
    plain = Image.new("RGB", (16, 32))
    other = plain.copy()
    other.putpixel((15, 31), (0, 0, 1))
    shown = [plain, plain.copy(), plain.rotate(90, expand=True), other]
    with sighted("qwen2_vl").llm() as llm:
        prompts = [llm.prepare_chat(ask(one, "What?")).prompt for one in shown]
    read = [one.pictures[0] for one in prompts if isinstance(one, PicturePrompt)]
    assert read[0] == read[1]
    assert len({*read}) == 3
