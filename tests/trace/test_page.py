"""The page stands alone, escapes whatever a model may write, and shows every token once."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.errors import ConfigError
from guided_spec.trace.page import SIGNS, render_page
from guided_spec.trace.record import Trace
from tests.trace.traces import make_step, make_token, make_trace

HOSTILE = (
    "</script><script>hacked=1</script>",
    "<b>",
    "&lt;",
    '" onfocus="hacked=1',
    "$title",
    "'",
)
VOID = {"meta", "link", "wbr"}


class Element(NamedTuple):
    """tag, attributes, and all text inside, filled while it is read."""

    tag: str
    attributes: dict[str, str | None]
    text: list[str]


class Reader(HTMLParser):
    """Every element of a page; asserts that tags are closed in their order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs), [])
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text.append(data)

    def all(self, tag: str, kind: str = "") -> list[Element]:
        """Those of a tag and class."""
        found = [element for element in self.elements if element.tag == tag]
        return [e for e in found if kind in (e.attributes.get("class") or "").split() or not kind]


def written(element: Element) -> str:
    """A chip's text, without the signs for white space."""
    text = "".join(element.text)
    for char, sign in SIGNS.items():
        text = text.replace(sign, char)
    return text


def hostile_trace() -> Trace:
    steps = []
    for text in HOSTILE:
        accepted = make_token(text, "accepted", source=text, place=text, allowed=3)
        refused = make_token(text, "rejected", draft_prob=0.5, target_prob=0.25)
        drawn = make_token(text, "replacement", target_prob=1.0)
        steps.append(make_step([accepted, refused], drawn, 2))
    return make_trace(steps, proposer=HOSTILE[0], text="".join(HOSTILE))


@pytest.fixture(scope="module")
def page() -> str:
    return render_page([hostile_trace(), make_trace([])], title=HOSTILE[0], prompt=HOSTILE[1])


def test_it_needs_nothing_else(page: str) -> None:
    assert not re.search(r"https?:|//[a-z]|@import|url\(|\bsrc=|<iframe|<object", page)
    (link,) = Reader(page).all("link")
    assert link.attributes == {"rel": "icon", "href": "data:,"}


def test_what_a_model_writes_is_text(page: str) -> None:
    reader = Reader(page)
    (script,) = reader.all("script")
    assert "hacked" not in "".join(script.text)
    assert all(
        name in {"type", "class", "style", "id", "role"} or name.startswith("aria-")
        for e in reader.all("button")
        for name in e.attributes
    )
    for kind in ("accepted", "rejected", "replacement"):
        assert [written(e) for e in reader.all("button", kind)] == [*HOSTILE]
    assert "".join(reader.all("title")[0].text) == HOSTILE[0]
    assert any("".join(e.text) == "".join(HOSTILE) for e in reader.all("pre"))


@given(st.lists(st.text(min_size=1), min_size=1, max_size=3), st.text())
def test_of_any_text(texts: list[str], prompt: str) -> None:
    tokens = [make_token(text, "accepted", place=text) for text in texts]
    page = render_page([make_trace([make_step(tokens, None, len(tokens))])], prompt=prompt)
    # A parser of HTML reads a carriage return as the end of a line, and drops NUL and its like.
    shown = [re.sub(r"[\s\x00-\x1f]", "", written(e)) for e in Reader(page).all("button")]
    assert shown == [re.sub(r"[\s\x00-\x1f]", "", unsigned(text)) for text in texts]


def unsigned(text: str) -> str:
    return "".join(next((c for c, sign in SIGNS.items() if sign == char), char) for char in text)


def test_names_lead_to_elements(page: str) -> None:
    reader = Reader(page)
    ids = [e.attributes["id"] for e in reader.elements if "id" in e.attributes]
    assert len(ids) == len(set(ids))
    named = [
        e.attributes[name]
        for e in reader.elements
        for name in ("aria-describedby", "aria-labelledby")
        if name in e.attributes
    ]
    assert len(named) == 3 * len(HOSTILE) + 5
    assert set(named) <= set(ids)
    assert all(e.attributes["aria-label"] for e in reader.all("button"))


def test_the_order_of_a_step() -> None:
    """What was drawn stands where it belongs: behind the token that it replaces."""
    drafted = [
        make_token("a", "accepted", source="forced"),
        make_token("b", "rejected"),
        make_token("c", "unused"),
    ]
    step = make_step(drafted, make_token("", "replacement", id=0), 2)
    whole = make_step([make_token("d", "accepted")], make_token("", "bonus", id=9), 1)
    buttons = Reader(render_page([make_trace([step, whole])])).all("button")
    assert [written(button) for button in buttons] == ["a", "b", "end", "c", "d", "#9"]
    kinds = [(button.attributes["class"] or "").split()[1:] for button in buttons]
    assert kinds == [
        ["accepted", "forced"],
        ["rejected"],
        ["replacement"],
        ["unused"],
        ["accepted"],
        ["bonus", "dropped"],
    ]


def test_details_and_figures() -> None:
    token = make_token(
        "a b",
        "accepted",
        draft_prob=0.125,
        target_prob=0.5,
        processed_prob=0.00001,
        allowed=1234,
        place="",
    )
    steps = [make_step([token], None, 1, at=0.25), make_step([token], None, 1)]
    reader = Reader(render_page([make_trace(steps, vocab_size=5000)]))
    names = ["".join(e.text) for e in reader.all("dt")]
    values = ["".join(e.text) for e in reader.all("dd")]
    found = dict(zip(names, values, strict=True))
    assert found["draft probability"] == "12.50 %"
    assert found["target probability"] == "50.00 %"
    assert found["with temperature, filters"] == "1.0e-03 %"
    assert found["allowed tokens"] == "1,234 of 5,000"
    assert found["place in the JSON"] == "the whole text"
    assert found["token"] == "'a b', id 7"
    cells = ["".join(e.text) for e in reader.all("td")]
    assert "2 of 2 (100%)" in cells
    assert "500.0 ms" in cells
    heights = [re.sub(r".*height:", "", e.attributes["style"] or "") for e in reader.all("i")]
    shares, growth, times = ["100.0%"], ["100.0%"] * 2, ["100.0%"] * 2
    assert heights == [*shares, "0.0%", *growth, "0.0%", *times, "0.0%"]  # the last ones fill up
    images = [e for e in reader.all("div") if e.attributes.get("role") == "img"]
    assert len(images) == 3
    assert all(e.attributes["aria-label"] for e in images)
    down = [[*e.text] for e in reader.all("span", "ends")]
    across = [[*e.text] for e in reader.all("div", "ends")]
    assert down == [["100 %", "0"], ["1", "0"], ["250 ms", "0"]]
    assert across == [
        ["1", "position in the draft", "1"],
        ["0 ms", "time", "500 ms"],
        ["1", "step", "2"],
    ]


@pytest.mark.parametrize("count", [0, 3])
def test_one_or_two_of_them(count: int) -> None:
    with pytest.raises(ConfigError, match="pass one trace, or 2 to compare"):
        render_page([make_trace([])] * count)
