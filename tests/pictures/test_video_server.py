"""Videos through the server's interfaces."""

from __future__ import annotations

import base64
import json
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from guided_spec.engine.chats.videos import OpenVideo
from guided_spec.engine.process import EngineProcess
from tests.pictures.filmed import expected, film, filmed, show
from tests.pictures.sighted import picture, png
from tests.pictures.test_server import LENGTH, OWN, WORDS, chat, error, post, responses
from tests.server.running import PATIENCE, Running, running

FAMILY = "qwen2_5_vl"
CAT = film(1)


def data(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


FRAMES = [data(png(one)) for one in CAT.frames]
IN_ONE = "data:video/jpeg;base64," + ",".join(one.partition(",")[2] for one in FRAMES)
STILL = {"type": "image_url", "image_url": {"url": data(png(picture(3)))}}


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with filmed(FAMILY).llm("ngram", picture_tokens=40) as llm, running(llm) as made:
        yield made


def wanted(*content: Any) -> str:
    token_ids = expected(FAMILY, show(*content, WORDS), LENGTH)
    text: str = filmed(FAMILY).processor.tokenizer.decode(token_ids, skip_special_tokens=True)
    return text


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("part", "fps"),
    [
        ({"type": "video", "video": FRAMES}, 2.0),
        ({"type": "video", "video": FRAMES, "fps": 0.5}, 0.5),
        ({"type": "video_url", "video_url": {"url": IN_ONE}}, 2.0),
        ({"type": "video_url", "video_url": {"url": IN_ONE}, "fps": 8}, 8.0),
    ],
)
def test_chats_read_videos(served: Running, part: dict[str, Any], fps: float) -> None:
    found = post(served, "/v1/chat/completions", {**chat(part, STILL), "n": 2})
    texts = [one["message"]["content"] for one in found["choices"]]
    assert texts == [wanted(CAT._replace(fps=fps), picture(3))] * 2
    counted = post(served, "/tokenize", {"messages": chat(part, STILL)["messages"]})
    assert counted["count"] == found["usage"]["prompt_tokens"]


def test_responses_read_videos(served: Running) -> None:
    part = {"type": "input_video", "video_url": IN_ONE}
    found = post(served, "/v1/responses", {**responses(part), "temperature": 0.0})
    assert found["output"][0]["content"][0]["text"] == wanted(CAT)


def test_other_messages_have_videos_too(served: Running) -> None:
    """Results of tools, as pictures are."""
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    part = {"type": "video", "video": FRAMES}
    asked = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [part]},
    ]
    found = post(served, "/v1/chat/completions", {"messages": asked, **OWN})
    assert found["usage"]["prompt_tokens"] > 2 * 4


@pytest.mark.slow
def test_an_engine_in_another_process_reads_videos(tmp_path: Path) -> None:
    one = filmed(FAMILY)
    one.model.save_pretrained(tmp_path)
    one.processor.tokenizer.save_pretrained(tmp_path)
    options: dict[str, Any] = {"max_model_len": 512, "picture_tokens": 40}
    part, other = {"type": "video", "video": FRAMES}, film(2)
    moved = {"type": "video", "video": [data(png(frame)) for frame in other.frames], "fps": 5}
    with (
        EngineProcess(str(tmp_path), proposer="ngram", processor=one.processor, **options) as made,
        running(made) as served,  # type: ignore[arg-type]
    ):
        for parts, films in (
            ((part, STILL), (CAT, picture(3))),
            ((moved, part), (other._replace(fps=5), CAT)),  # the first one's rows go, and come back
            ((part, part, STILL), (CAT, CAT, picture(3))),
        ):
            found = post(served, "/v1/chat/completions", {**chat(*parts), "n": 2})
            texts = [choice["message"]["content"] for choice in found["choices"]]
            assert texts == [wanted(*films)] * 2
            refused = error(served, "/v1/chat/completions", chat({**part, "fps": True}))
            assert refused["param"] == "messages[0].content[0].fps"


FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "video", "video": []}, ".video", "must hold at least one frame"),
    ({"type": "video", "video": ["/etc/passwd"]}, ".video[0]", "must be an address"),
    ({"type": "video", "video": "/etc/passwd"}, ".video", "must be an address"),
    ({"type": "video", "video": ["http://a/b.png"]}, ".video[0]", "no address is fetched"),
    ({"type": "video", "video": FRAMES, "fps": 0}, ".fps", "frames per second"),
    ({"type": "video", "video": FRAMES, "fps": "2"}, ".fps", "frames per second"),
    ({"type": "video", "video": FRAMES, "fps": math.nan}, ".fps", "frames per second"),
    (
        {"type": "video", "video": [*FRAMES, data(png(picture(1, (8, 16))))]},
        ".video[4]",
        "send frames of one size",
    ),
    (
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
        ".video_url.url",
        "no file of video is decoded",
    ),
    ({"type": "input_audio", "input_audio": {}}, ".type", "no model reads this here"),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("part", "place", "reason"), FAULTS)
def test_faults_name_the_part(
    served: Running, part: dict[str, Any], place: str, reason: str
) -> None:
    found = httpx.post(
        f"{served.url}/v1/chat/completions",
        content=json.dumps(chat(part)),
        headers={"content-type": "application/json"},
        timeout=PATIENCE,
    )
    assert found.status_code == 400, found.text
    if not (isinstance(part.get("fps"), float)):  # there is no such number in JSON
        assert found.json()["error"]["param"] == f"messages[0].content[0]{place}"
        assert reason in found.json()["error"]["message"]


def test_videos_are_counted_with_pictures(served: Running) -> None:
    parts = [{"type": "video", "video": FRAMES[:1]}] * 16
    found = error(served, "/v1/chat/completions", chat(STILL, *parts))
    assert "at most 16 are read" in found["message"]


def test_videos_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of small bodies must not fill the memory."""
    inside, found, lock, read = 0, list[int](), threading.Lock(), OpenVideo.read

    def counted(self: OpenVideo) -> Any:
        nonlocal inside
        with lock:
            inside += 1
            found.append(inside)
        frames = read(self)
        with lock:
            inside -= 1
        return frames

    monkeypatch.setattr(OpenVideo, "read", counted)
    part = {"type": "video", "video": FRAMES}
    with filmed(FAMILY).llm() as llm, running(llm) as served, ThreadPoolExecutor(4) as pool:

        def reply(_: int) -> str:
            choice = post(served, "/v1/chat/completions", chat(part))["choices"][0]
            return str(choice["message"]["content"])

        texts = list(pool.map(reply, range(4)))
    assert texts == [wanted(CAT)] * 4
    assert found == [1] * 4
