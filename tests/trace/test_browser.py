"""The page in a browser: without errors, within its width, readable, by pointer and keyboard."""

from __future__ import annotations

from typing import Any

import pytest

from guided_spec.trace.page import render_page
from tests.browser import CONTRAST, HEIGHT, NEEDS_BROWSER, SCHEMES, WIDTHS, driver
from tests.trace.test_page import HOSTILE, hostile_trace
from tests.trace.traces import make_step, make_token, make_trace
from tools.pictures import show

pytest.importorskip("selenium", reason="selenium is not installed")
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

pytestmark = NEEDS_BROWSER

__all__ = ["driver"]  # a fixture

BOX = "return arguments[0].getBoundingClientRect().toJSON()"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    words = [make_token(f"word{at}", "accepted", target_prob=0.5) for at in range(30)]
    kinds = [
        make_token("forced", "accepted", source="forced", place="/a/very/long/place" * 9),
        make_token("x" * 300, "rejected", draft_prob=0.5, target_prob=0.1, allowed=12),
        make_token(" \n\t", "unused"),
        make_token("last", "unused", source="forced"),
    ]
    drawn = make_token(" ", "replacement", id=9, target_prob=1.0, allowed=12)
    dropped = make_step([make_token("kept", "accepted"), make_token("not", "accepted")], drawn, 1)
    bonus = make_step(words, make_token("", "bonus", id=0), 31)
    other = make_trace([make_step(kinds, drawn, 2), bonus, dropped], proposer="chain:" + "a+b" * 30)
    path = tmp_path_factory.mktemp("page") / "trace.html"
    path.write_text(render_page([other, hostile_trace()], prompt=HOSTILE[0]), encoding="utf-8")
    return path.as_uri()


def chips(driver: Any) -> list[Any]:
    return list(driver.find_elements(By.CSS_SELECTOR, "button.chip"))


def focused(driver: Any) -> Any:
    return driver.switch_to.active_element


def tip_of(driver: Any, chip: Any) -> Any:
    return driver.find_element(By.ID, chip.get_attribute("aria-describedby"))


def press(driver: Any, key: str) -> Any:
    focused(driver).send_keys(key)
    return focused(driver)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_is_shown_without_errors(driver: Any, page: str, width: int, scheme: str) -> None:
    show(driver, page, width, HEIGHT, scheme)
    chips(driver)[0].send_keys(Keys.ARROW_RIGHT)
    assert driver.get_log("browser") == []
    assert driver.execute_script("return typeof hacked") == "undefined"
    widest = driver.execute_script("return document.documentElement.scrollWidth")
    assert widest <= width
    assert driver.execute_script(CONTRAST) >= 4.5


def test_the_two_schemes_differ(driver: Any, page: str) -> None:
    colours = []
    for scheme in SCHEMES:
        show(driver, page, 1280, HEIGHT, scheme)
        body = driver.find_element(By.TAG_NAME, "body")
        colours.append(body.value_of_css_property("background-color"))
    assert colours[0] != colours[1]


def test_two_runs_stand_side_by_side_where_there_is_room(driver: Any, page: str) -> None:
    tops = []
    for width in WIDTHS:
        show(driver, page, width, HEIGHT)
        tops.append([run.rect["y"] for run in driver.find_elements(By.CSS_SELECTOR, ".run")])
    narrow, wide = tops
    assert narrow[0] < narrow[1]
    assert wide[0] == wide[1]


def test_every_chip_is_reached_by_keyboard(driver: Any, page: str) -> None:
    show(driver, page, 1280, HEIGHT)
    everything = chips(driver)
    for _ in range(12):  # past what can be folded out
        if press(driver, Keys.TAB) == everything[0]:
            break
    reached = [focused(driver)]
    while reached[-1] != (after := press(driver, Keys.ARROW_RIGHT)):
        reached.append(after)
    assert reached == everything
    steps = len(driver.find_elements(By.CSS_SELECTOR, ".step"))
    stops = driver.find_elements(By.CSS_SELECTOR, 'button.chip[tabindex="0"]')
    assert len(stops) == steps


def test_keys_between_rows(driver: Any, page: str) -> None:
    show(driver, page, 1280, HEIGHT)
    rows = [
        row.find_elements(By.CSS_SELECTOR, "button")
        for row in driver.find_elements(By.CSS_SELECTOR, ".chips")
    ]
    rows[1][20].send_keys(Keys.ARROW_UP)
    assert focused(driver) == rows[0][-1]
    assert press(driver, Keys.HOME) == rows[0][0]
    assert press(driver, Keys.ARROW_DOWN) == rows[1][0]
    assert press(driver, Keys.END) == rows[1][-1]
    assert press(driver, Keys.TAB) == rows[2][0]
    shift_tab = ActionChains(driver).key_down(Keys.SHIFT).send_keys(Keys.TAB).key_up(Keys.SHIFT)
    shift_tab.perform()
    assert focused(driver) == rows[1][-1], "a row keeps its place"


@pytest.mark.parametrize("width", WIDTHS)
def test_details_on_focus_and_on_hover(driver: Any, page: str, width: int) -> None:
    show(driver, page, width, HEIGHT)
    first, second = chips(driver)[:2]
    assert not tip_of(driver, second).is_displayed()
    first.send_keys(Keys.ARROW_RIGHT)
    tip = tip_of(driver, second)
    assert tip.is_displayed()
    for words in ("allowed tokens\n12 of 403", "draft probability\n50.00 %", "rejected"):
        assert words in tip.text
    box, token = (driver.execute_script(BOX, element) for element in (tip, second))
    assert 0 <= box["left"] < box["right"] <= width
    assert box["bottom"] <= HEIGHT
    is_beside = token["right"] <= box["left"]
    assert is_beside or token["bottom"] <= box["top"], "the details hide their token"
    focused(driver).send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()
    ActionChains(driver).move_to_element(first).perform()
    assert tip_of(driver, first).is_displayed()
    assert not tip.is_displayed(), "two of them at once"
