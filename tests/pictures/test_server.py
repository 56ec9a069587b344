"""Pictures through the server's interfaces; the engine is in another process."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from typer.testing import CliRunner

from guided_spec.cli.main import app
from guided_spec.engine.chats.pictures import MOST_BYTES, OpenPicture
from guided_spec.engine.process import EngineProcess
from guided_spec.types import SamplingParams
from tests.pictures.sighted import ask, picture, png, sighted
from tests.server.running import PATIENCE, Running, running

LENGTH, WORDS = 8, "What is it?"
PNG = png(picture(3))
TEXT = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{TEXT}"
OWN = {"ignore_eos": True, "temperature": 0.0, "max_tokens": LENGTH}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, one = tmp_path_factory.mktemp("model"), sighted("llava")
    one.model.save_pretrained(made)
    one.processor.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Running]:
    options: dict[str, Any] = {"max_model_len": 512, "max_batch_size": 4, "picture_tokens": 40}
    with EngineProcess(str(folder), proposer="ngram", **options) as process:
        assert process.sight.refusal is None
        assert process.sight.num_rows == 40
        with running(process) as made:  # type: ignore[arg-type]
            yield made


def wanted(*content: Any) -> str:
    token_ids = sighted("llava").expected(ask(*content), LENGTH)
    text: str = sighted("llava").processor.tokenizer.decode(token_ids, skip_special_tokens=True)
    return text


def post(served: Running, path: str, body: dict[str, Any]) -> Any:
    reply = httpx.post(f"{served.url}{path}", json=body, timeout=PATIENCE)
    assert reply.status_code == 200, reply.text
    return reply.json()


def error(served: Running, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = httpx.post(f"{served.url}{path}", json=body, timeout=PATIENCE)
    assert reply.status_code == 400, reply.text
    found: dict[str, Any] = reply.json()["error"]
    return found


def chat(*parts: Any) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": WORDS}]
    return {"messages": [{"role": "user", "content": content}], **OWN}


def responses(*parts: Any) -> dict[str, Any]:
    content = [*parts, {"type": "input_text", "text": WORDS}]
    return {"input": [{"role": "user", "content": content}], "max_output_tokens": LENGTH}


def messages(*parts: Any) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": WORDS}]
    asked = {"role": "user", "content": content}
    return {"system": "s", "messages": [asked], "max_tokens": LENGTH, "temperature": 0.0}


def image(data: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": data, **more},
    }


def test_chats_read_pictures(served: Running) -> None:
    part = {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}
    found = post(served, "/v1/chat/completions", {**chat(part), "n": 2})
    texts = [one["message"]["content"] for one in found["choices"]]
    assert texts == [wanted(picture(3), WORDS)] * 2
    without = post(served, "/v1/chat/completions", chat())
    used = [one["usage"]["prompt_tokens"] for one in (found, without)]
    assert used[0] - used[1] == 16
    assert without["choices"][0]["message"]["content"] == wanted(WORDS)
    counted = post(served, "/tokenize", {"messages": chat(part)["messages"]})
    assert counted["count"] == used[0]


def test_responses_read_pictures(served: Running) -> None:
    part = {"type": "input_image", "image_url": URL, "detail": "auto"}
    found = post(served, "/v1/responses", {**responses(part), "temperature": 0.0})
    assert found["usage"]["input_tokens"] > 16
    assert found["output"][0]["content"][0]["text"] == wanted(picture(3), WORDS)


def test_messages_read_pictures(served: Running) -> None:
    counts = [
        post(served, "/v1/messages/count_tokens", {"messages": messages(*parts)["messages"]})
        for parts in ((), (image(TEXT),))
    ]
    assert counts[1]["input_tokens"] - counts[0]["input_tokens"] == 16
    one = post(served, "/v1/messages", messages(image(TEXT)))
    changed = image(base64.b64encode(png(picture(4))).decode())
    other = post(served, "/v1/messages", messages(changed))
    assert one["content"] != other["content"]
    used = [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]
    result = {"type": "tool_result", "tool_use_id": "a", "content": [image(TEXT)]}
    asked = messages(result)
    asked["messages"].insert(0, {"role": "assistant", "content": used})
    assert post(served, "/v1/messages", asked)["usage"]["input_tokens"] > 16


FRAMES = "this interface has no videos: send its frames as pictures"
NO_VIDEOS = "this model reads pictures, no videos: its processor takes none; send its frames"
OTHERS = [
    (kind, "no model reads this here: send text or pictures")
    for kind in ("input_audio", "audio", "document", "input_file", "file")
]
BROKEN = base64.b64encode(PNG[:60]).decode()
FAULTS: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "/v1/chat/completions",
        chat({"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}),
        *("messages[0].content[0].image_url.url", "no address is fetched"),
    ),
    (
        "/v1/chat/completions",
        chat({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BROKEN}"}}),
        *("messages[0].content[0].image_url.url", "is no picture that can be read"),
    ),
    (
        "/v1/chat/completions",
        chat({"type": "image", "image": "/etc/passwd"}),
        *("messages[0].content[0].image", "must come as"),
    ),
    *(
        (path, made({"type": kind, kind: {"url": "data:"}}), f"{place}[0].content[0].type", told)
        for kind, told in (("video_url", NO_VIDEOS), ("input_video", NO_VIDEOS), *OTHERS)
        for path, made, place in (
            ("/v1/chat/completions", chat, "messages"),
            ("/v1/responses", responses, "input"),
            ("/v1/messages", messages, "messages"),
        )
        if told != NO_VIDEOS or made is not messages
    ),
    *(
        ("/v1/messages", messages({"type": kind}), "messages[0].content[0].type", FRAMES)
        for kind in ("video", "video_url", "input_video")
    ),
    (
        "/v1/chat/completions",
        chat(*[{"type": "image_url", "image_url": {"url": URL}}] * 17),
        *("messages", "at most 16 are read"),
    ),
    (
        "/v1/responses",
        responses({"type": "input_image", "image_url": "http://a/b.png"}),
        *("input[0].content[0].image_url", "no address is fetched"),
    ),
    (
        "/v1/responses",
        responses({"type": "input_image", "file_id": "f"}),
        *("input[0].content[0].file_id", "no files are kept"),
    ),
    (
        "/v1/responses",
        responses(*[{"type": "input_image", "image_url": URL}] * 17),
        *("input", "at most 16 are read"),
    ),
    (
        "/v1/messages",
        messages({"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}),
        *("messages[0].content[0].source", "no address is fetched"),
    ),
    (
        "/v1/messages",
        messages(image(BROKEN)),
        *("messages[0].content[0].source.data", "is no picture that can be read"),
    ),
    ("/v1/messages", messages(*[image(TEXT)] * 17), "messages", "at most 16 are read"),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("path", "body", "param", "reason"), FAULTS)
def test_faults_name_the_part(
    served: Running, path: str, body: dict[str, Any], param: str, reason: str
) -> None:
    found = error(served, path, body)
    assert reason in found["message"]
    assert found["message"].startswith(param)
    if path != "/v1/messages":
        assert found["param"] == param


def test_many_pictures_wait_for_their_rows(served: Running) -> None:
    """The table holds two of them, and four texts run at a time."""

    def reply(seed: int) -> str:
        text = base64.b64encode(png(picture(seed))).decode()
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}
        found = post(served, "/v1/chat/completions", chat(part))
        shown: str = found["choices"][0]["message"]["content"]
        return shown

    with ThreadPoolExecutor(5) as pool:
        found = list(pool.map(reply, range(5)))
    assert found == [wanted(picture(seed), WORDS) for seed in range(5)]


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pictures were decoded at the same time, each time one was."""
    inside, found, lock, image_of = 0, list[int](), threading.Lock(), OpenPicture.image

    def counted(self: OpenPicture) -> Image.Image:
        nonlocal inside
        with lock:
            inside += 1
            found.append(inside)
        time.sleep(0.02)
        image = image_of(self)
        with lock:
            inside -= 1
        return image

    monkeypatch.setattr(OpenPicture, "image", counted)
    return found


@pytest.mark.parametrize("escaped", [False, True])
def test_small_bodies_of_large_pictures_take_turns(
    decoding: list[int],
    escaped: bool,  # noqa: FBT001
) -> None:
    """A client of small bodies must not fill the memory, nor keep the threads from others."""
    sent = json.dumps(chat({"type": "image_url", "image_url": {"url": URL}}))
    if escaped:
        sent = sent.replace('"image_url"', '"\\u0069mage_url"')
    with sighted("llava").llm() as llm, running(llm) as served, ThreadPoolExecutor(4) as pool:

        def reply(_: int) -> str:
            headers = {"content-type": "application/json"}
            address = f"{served.url}/v1/chat/completions"
            found = httpx.post(address, content=sent, headers=headers, timeout=PATIENCE)
            shown: str = found.json()["choices"][0]["message"]["content"]
            return shown

        assert set(pool.map(reply, range(4))) == {wanted(picture(3), WORDS)}
    assert decoding == [1] * 4


def test_threads_of_one_llm_take_turns(decoding: list[int]) -> None:
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    with sighted("llava").llm() as llm, ThreadPoolExecutor(4) as pool:

        def reply(seed: int) -> str:
            return llm.chat(ask(picture(seed), WORDS), params=params).text

        assert list(pool.map(reply, range(4))) == [wanted(picture(at), WORDS) for at in range(4)]
    assert decoding == [1] * 4


def test_the_largest_file_fits_into_a_body() -> None:
    """With the server's own settings: what a picture may have is not what its request may not."""
    file = png(Image.new("RGB", (2642, 2642)), "BMP")
    assert 0.99 < len(file) / MOST_BYTES <= 1
    url = f"data:image/bmp;base64,{base64.b64encode(file).decode()}"
    with sighted("llava").llm() as llm, running(llm) as served:
        part = {"type": "image_url", "image_url": {"url": url}}
        found = post(served, "/v1/chat/completions", chat(part))
    text = wanted(Image.new("RGB", (2642, 2642)), WORDS)
    assert found["choices"][0]["message"]["content"] == text


def test_the_command_takes_images(folder: Path, tmp_path: Path) -> None:
    files = []
    for seed in (3, 4):
        files.append(tmp_path / f"{seed}.png")
        picture(seed).save(files[-1])
    images = [word for one in files for word in ("--image", str(one))]
    own = ["generate", WORDS, "--model", str(folder), "--max-tokens", "8", "--max-model-len", "512"]
    found = CliRunner().invoke(app, [*own, *images, "--json"])
    assert found.exit_code == 0, found.output
    token_ids = sighted("llava").expected(ask(picture(3), picture(4), WORDS), LENGTH)
    assert f'"token_ids": {token_ids}' in found.stdout or str(token_ids)[1:-1] in found.stdout
    bad = CliRunner().invoke(app, [*own, "--image", str(tmp_path / "none.png")])
    assert bad.exit_code == 1
    assert "cannot be read" in bad.output


def test_pictures_of_pil_stay_as_they_are() -> None:
    given = Image.new("RGBA", (16, 16), (255, 0, 0, 0))
    before = given.tobytes()
    with sighted("llava").llm() as llm:
        llm.chat(ask(given, WORDS))
    assert (given.mode, given.tobytes()) == ("RGBA", before)
