"""Pictures on pages: thumbnails of a trace, and those that a playground's request takes along."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from guided_spec.cli.main import app
from guided_spec.server.app import render_playground
from guided_spec.trace.page import render_page
from tests.browser import NEEDS_BROWSER, driver
from tests.pictures.sighted import ask, picture, png, sighted
from tests.server.running import Running, running, until
from tests.server.test_playground import Page
from tests.trace.traces import make_trace

__all__ = ["driver"]  # a fixture
WORDS = "What is it?"
# Drops a file on the page, or pastes one: with the text that stands beside it, if any.
GIVE = """
const [kind, text, data] = arguments, given = new DataTransfer();
const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
given.items.add(new File([bytes], "given.png", { type: "image/png" }));
if (text) given.setData("text/plain", text);
const event = kind === "drop" ? new DragEvent("drop", { dataTransfer: given, bubbles: true })
  : new ClipboardEvent("paste", { clipboardData: given, bubbles: true });
document.getElementById("prompt").dispatchEvent(event);
"""


def thumbnails(page: str) -> list[Image.Image]:
    sources = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', page)
    return [Image.open(io.BytesIO(base64.b64decode(one))) for one in sources]


def test_a_trace_shows_small_pictures_of_its_prompt() -> None:
    given = [picture(1, (400, 100)), picture(2, (8, 16))]
    before = [one.tobytes() for one in given]
    page = render_page([make_trace([])], prompt=WORDS, pictures=given)
    assert [one.size for one in thumbnails(page)] == [(160, 40), (8, 16)]
    assert 'alt="Picture 1, 400 x 100"' in page
    assert [one.tobytes() for one in given] == before
    assert thumbnails(render_page([make_trace([])], prompt=WORDS)) == []
    assert len(thumbnails(render_page([make_trace([])], pictures=given))) == 2


def test_the_command_traces_pictures(tmp_path: Path) -> None:
    made = sighted("llava")
    made.model.save_pretrained(tmp_path / "model")
    made.processor.save_pretrained(tmp_path / "model")
    image, page = tmp_path / "a.png", tmp_path / "trace.html"
    image.write_bytes(png(picture(3, (320, 16))))
    own = ["trace", WORDS, "--model", str(tmp_path / "model"), "--max-tokens", "8"]
    options = ["--image", str(image), "--max-model-len", "512", "-o", str(page)]
    found = CliRunner().invoke(app, [*own, *options])
    assert found.exit_code == 0, found.output
    assert [one.size for one in thumbnails(page.read_text())] == [(160, 8)]


def test_only_a_model_that_reads_pictures_is_asked_about_some() -> None:
    assert 'id="picture"' not in render_playground(9, asks_for_key=False).html
    assert 'id="picture"' in render_playground(9, asks_for_key=False, reads_pictures=True).html


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    options: dict[str, Any] = {"max_model_len": 512, "max_batch_size": 4}
    with sighted("llava").llm(**options) as llm, running(llm) as made:
        yield made


@pytest.fixture
def page(driver: Any, served: Running) -> Iterator[Page]:
    made = Page(driver, served.url)
    made.open()
    made.choose("kind", "free")
    made.write("prompt", WORDS)
    made.write("max-tokens", "8")
    yield made
    assert made.errors() == []


def shown(page: Page) -> list[str]:
    images = page.driver.find_elements("css selector", "#pictures img")
    return [image.get_attribute("alt") for image in images]


@NEEDS_BROWSER
def test_pictures_go_with_the_request(page: Page, tmp_path: Path) -> None:
    files = [tmp_path / "first.png", tmp_path / "second.png"]
    for seed, file in enumerate(files, 3):
        file.write_bytes(png(picture(seed)))
    page.get("picture").send_keys("\n".join(map(str, files)))
    until(lambda: shown(page) == ["first.png", "second.png"])
    assert not page.run().startswith("Failed"), page.text("error")
    expected = sighted("llava").expected(ask(picture(3), picture(4), WORDS), 8)
    text = sighted("llava").processor.tokenizer.decode(expected, skip_special_tokens=True)
    assert page.text("answer") == text
    content = json.loads(page.text("request"))["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "image_url", "text"]
    assert re.search(r"^data:image/png;base64,.{18}\.\.\. \(\d+ c", content[0]["image_url"]["url"])
    page.driver.find_element("css selector", "#pictures button").click()
    assert shown(page) == ["second.png"]
    page.choose("example", "1")
    assert shown(page) == []


@NEEDS_BROWSER
def test_pictures_are_dropped_and_pasted(page: Page) -> None:
    data = base64.b64encode(png(picture(3))).decode()
    page.driver.execute_script(GIVE, "drop", "", data)
    until(lambda: len(shown(page)) == 1)
    page.driver.execute_script(GIVE, "paste", "", data)
    until(lambda: len(shown(page)) == 2)
    page.driver.execute_script(GIVE, "paste", "words beside it", data)
    page.driver.execute_script(GIVE, "drop", "", data)
    until(lambda: len(shown(page)) > 2)
    assert len(shown(page)) == 3, "what is pasted as text is no picture"
