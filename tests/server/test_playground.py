"""The playground: it stands alone, and in a browser it asks, shows and says what is wrong."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest

from guided_spec.engine.llm import LLM
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.server.app import render_playground
from tests.browser import CONTRAST, HEIGHT, NEEDS_BROWSER, SCHEMES, WIDTHS, driver
from tests.server.running import Running, running, until
from tools.pictures import show

pytest.importorskip("selenium", reason="selenium is not installed")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

__all__ = ["driver"]  # a fixture

MARKUP = "<img src=x onerror=hacked=1>&lt;"
KEY = "a-key"


class Scripts(HTMLParser):
    """The scripts of a page: what runs, and the data."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.running: list[str] = []
        self.data = ""
        self._kind: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._kind = (dict(attrs).get("type") or "text/javascript") if tag == "script" else None

    def handle_data(self, data: str) -> None:
        if self._kind == "text/javascript":
            self.running.append(data)
        elif self._kind is not None:
            self.data += data

    def handle_endtag(self, tag: str) -> None:
        del tag
        self._kind = None


def test_it_needs_nothing_else(served: Running) -> None:
    reply = httpx.get(f"{served.url}/")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"https?:|//[a-z]|@import|url\(|\bsrc=|<iframe|<object", reply.text)
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    scripts = Scripts(reply.text)
    assert len(scripts.running) == 2
    for script in scripts.running:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_the_examples_can_be_asked(llm: LLM) -> None:
    page = render_playground(20, asks_for_key=False).html
    examples = json.loads(Scripts(page).data)
    assert len(examples) == len(re.findall("<option value=.[0-9]", page)) > 2
    specs = []
    for example in examples:
        assert example["prompt"]
        schema, regex = example.get("schema"), example.get("regex")
        spec = GrammarSpec.regex(regex) if schema is None else GrammarSpec.json_schema(schema)
        specs.append(spec)
    answers = [
        llm.chat([{"role": "user", "content": e["prompt"]}], response_format=spec)
        for e, spec in zip(examples, specs, strict=True)
    ]
    assert all(answer.completion.is_complete for answer in answers)
    assert 'id="max-tokens" type="number" min="1" step="1" value="20"' in page


class Page:
    """The playground in a browser."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        self.url = url

    def open(self, width: int = 1280, scheme: str = "light") -> None:
        show(self.driver, f"{self.url}/", width, HEIGHT, scheme)

    def get(self, name: str) -> Any:
        return self.driver.find_element(By.ID, name)

    def text(self, name: str) -> str:
        return str(self.get(name).get_property("textContent"))

    def write(self, name: str, text: str) -> None:
        self.get(name).clear()
        self.get(name).send_keys(text)

    def choose(self, name: str, value: str) -> None:
        option = f"#{name} option[value='{value}']"
        self.driver.find_element(By.CSS_SELECTOR, option).click()

    def run(self) -> str:
        """Run, and wait for the end; what the page says of it."""
        self.get("run").click()
        return self.end()

    def end(self) -> str:
        until(lambda: self.text("status") not in ("Nothing has run yet.", "Writing \u2026"))
        return self.text("status")

    def chips(self) -> list[Any]:
        return list(self.driver.find_elements(By.CSS_SELECTOR, "#steps button.chip"))

    def focused(self) -> Any:
        return self.driver.switch_to.active_element

    def press(self, key: str) -> Any:
        self.focused().send_keys(key)
        return self.focused()

    def errors(self) -> list[str]:
        """What the console has; it is empty afterwards."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture
def page(driver: Any, served: Running) -> Iterator[Page]:
    made = Page(driver, served.url)
    made.open()
    yield made
    assert made.errors() == []


@NEEDS_BROWSER
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_an_example(page: Page, width: int, scheme: str) -> None:
    page.open(width, scheme)
    page.write("temperature", "0.9")
    page.write("seed", "3")
    assert re.match(r"Done: \d+ tokens in ", page.run())
    assert json.loads(page.text("answer")).keys() == {"name", "phone", "email"}
    labels = [chip.get_attribute("aria-label") for chip in page.chips()]
    kinds = {label.partition(":")[0] for label in labels}
    assert {"accepted", "accepted, forced"} <= kinds
    assert page.text("summary").count("target forwards") == 1
    asked = json.loads(page.text("request"))
    assert (asked["temperature"], asked["seed"], asked["max_tokens"]) == (0.9, 3, 256)
    widest = page.driver.execute_script("return document.documentElement.scrollWidth")
    assert widest <= width
    for box in page.driver.find_elements(By.CSS_SELECTOR, "details"):
        box.find_element(By.TAG_NAME, "summary").click() if box.is_displayed() else None
    assert page.driver.execute_script(CONTRAST) >= 4.5


@NEEDS_BROWSER
def test_by_keyboard_alone(page: Page) -> None:
    names: list[str] = []
    while not names or names[-1] != "run":
        names.append(page.press(Keys.TAB).get_attribute("id"))
        assert len(names) < 20, names
    fields = ["example", "prompt", "kind", "source", "temperature", "max-tokens", "seed", "run"]
    assert names == fields
    page.press(Keys.ENTER)
    assert page.end().startswith("Done")
    page.get("run").send_keys(Keys.TAB)  # to the request, and to the first row
    first = page.press(Keys.TAB)
    chips = page.chips()
    assert first == chips[0]
    second = page.press(Keys.ARROW_RIGHT)
    assert second == chips[1]
    tip = page.get(second.get_attribute("aria-describedby"))
    assert tip.is_displayed()
    assert re.search(r"allowed tokens\n[\d,]+ of 4,096", tip.text)
    page.press(Keys.ESCAPE)
    assert not tip.is_displayed()
    rows = page.driver.find_elements(By.CSS_SELECTOR, "#steps .chips")
    stops = page.driver.find_elements(By.CSS_SELECTOR, '#steps button[tabindex="0"]')
    assert len(stops) == len(rows) > 1
    page.get("prompt").send_keys(Keys.CONTROL + Keys.ENTER)
    assert page.end().startswith("Done")


@NEEDS_BROWSER
def test_other_grammars(page: Page) -> None:
    page.choose("example", "3")
    assert page.get("kind").get_property("value") == "regex"
    pattern = page.get("source").get_property("value")
    page.run()
    assert re.fullmatch(pattern, page.text("answer"))
    page.choose("kind", "schema")
    page.choose("kind", "regex")
    assert page.get("source").get_property("value") == pattern, "each kind keeps its own"
    page.choose("kind", "free")
    assert not page.get("source").is_displayed()
    page.write("max-tokens", "3")
    assert page.run().startswith("Stopped at the token limit")
    assert "of 4,096" not in page.text("steps"), "free text has no allowed tokens"


@NEEDS_BROWSER
def test_what_a_model_writes_is_text(page: Page) -> None:
    page.choose("kind", "regex")
    page.write("source", re.escape(MARKUP).replace(r"\ ", " "))
    page.run()
    assert page.text("answer") == MARKUP
    kept = "#steps :is(.accepted, .replacement, .bonus):not(.dropped)"
    chips = page.driver.find_elements(By.CSS_SELECTOR, kept)
    written = "".join(chip.get_property("textContent") for chip in chips)
    assert written == MARKUP.replace(" ", "\u00b7") + "end"
    assert page.driver.execute_script("return typeof hacked") == "undefined"


@NEEDS_BROWSER
@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("schema", '{"type": ', "Invalid JSON: "),
        ("schema", "  ", "Enter a JSON schema, or choose free text."),
        ("regex", "", "Enter a regular expression, or choose free text."),
    ],
)
def test_what_cannot_be_sent(
    page: Page, served: Running, kind: str, source: str, reason: str
) -> None:
    name = "guided_spec_requests_total{/v1/chat/completions,200}"
    before = served.metrics().get(name, 0)
    page.choose("kind", kind)
    page.write("source", source)
    page.get("run").click()
    assert page.text("source-error").startswith(reason)
    assert page.get("source").get_attribute("aria-invalid") == "true"
    assert page.focused() == page.get("source")
    assert page.text("status") == "Nothing has run yet."
    assert served.metrics().get(name, 0) == before


@NEEDS_BROWSER
def test_what_the_server_refuses(page: Page) -> None:
    page.write("source", '{"not": {"type": "string", "pattern": "("}}')
    assert page.run() == "Failed."
    assert "/not" in page.text("error")
    assert [one for one in page.errors() if "status of 400" not in one] == []


@NEEDS_BROWSER
@pytest.mark.parametrize(
    "stop",
    [
        lambda page: page.get("stop").click(),
        lambda page: page.get("prompt").send_keys(Keys.ESCAPE),
    ],
    ids=["click", "key"],
)
def test_stop(page: Page, served: Running, stop: Callable[[Page], None]) -> None:
    page.choose("kind", "regex")
    page.write("source", "([a-z] ){300,2000}")
    page.write("max-tokens", "900")
    page.get("run").click()
    until(lambda: bool(page.text("answer")))
    assert not page.get("run").is_enabled()
    stop(page)
    assert page.end() == "Stopped."
    assert page.get("run").is_enabled()
    until(served.is_idle)


@NEEDS_BROWSER
def test_a_key(driver: Any, llm: LLM) -> None:
    """The page can be had without one, and asks for it; nothing is answered without."""
    with running(llm, api_keys=(KEY,)) as closed:
        page = Page(driver, closed.url)
        page.open()
        page.get("run").click()
        assert page.text("status") == "Nothing has run yet.", "the browser asks for the key"
        page.write("key", "another")
        assert page.run() == "Failed."
        assert "Authorization: Bearer KEY" in page.text("error")
        assert [one for one in page.errors() if "status of 401" not in one] == []
        page.write("key", KEY)
        page.get("run").click()
        until(lambda: page.text("status").startswith("Done"))
        assert KEY not in page.driver.page_source
        assert page.errors() == []
