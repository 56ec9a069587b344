"""The pictures of pages in docs: ``python -m tools.pictures [FOLDER]``; chromium is needed.

One is of a trace's page, one of the server's playground, both with the bundled model.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from guided_spec import LLM, GrammarSpec, SamplingParams
from guided_spec.trace.page import render_page

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "images"
PROMPT = "Please call Maria Lopez at +49 170 5551234.\n\nJSON: "
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "phone": {"type": "string"}},
    "required": ["name", "phone"],
}
PROPOSER = "chain:grammar_forced+draft_model"
WIDTH, HEIGHT = 1000, 700  # of the trace
WIDE, HIGH = 1280, 1000  # of the playground
TOKEN = (0, 0, 7)  # run, step and place of the token whose details are shown


def find_browser() -> tuple[str, str] | None:
    """Where chromium and its driver are; None unless both are installed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((found for name in names if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    return None if browser is None or driver is None else (browser, driver)


@contextmanager
def open_browser(browser: str, driver: str) -> Iterator[Any]:
    """A browser without a window, driven by selenium, that keeps its log."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    flags = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars")
    for flag in flags:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=driver)
    opened = webdriver.Chrome(options=options, service=service)
    try:
        yield opened
    finally:
        opened.quit()


def show(driver: Any, url: str, width: int, height: int, scheme: str = "light") -> None:
    """Open a page in a viewport of that many pixels. scheme: "light" or "dark"."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    driver.get(url)


def picture_of_trace(driver: Any, folder: Path) -> None:
    """Six steps of one text, with the details of a token."""
    params = SamplingParams(grammar=GrammarSpec.json_schema(SCHEMA))
    with LLM(proposer=PROPOSER) as llm:
        llm.generate(PROMPT, params)  # the first run is never typical
        (output,) = llm.generate(PROMPT, params, trace=True)
    assert output.trace is not None  # it was asked for
    with tempfile.TemporaryDirectory() as made:
        page = Path(made) / "trace.html"
        page.write_text(render_page([output.trace], prompt=PROMPT), encoding="utf-8")
        show(driver, page.as_uri(), WIDTH, HEIGHT)
        name = "tip-" + "-".join(map(str, TOKEN))
        driver.execute_script(f"document.querySelector('[aria-describedby={name}]').focus()")
        driver.execute_script("document.querySelector('.legend').scrollIntoView()")
        driver.save_screenshot(str(folder / "trace.png"))


def picture_of_playground(driver: Any, folder: Path) -> None:
    """The second example, drawn at a temperature, behind its last step."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    with LLM() as llm, _served(llm) as url:
        show(driver, url, WIDE, HIGH)
        driver.find_element(By.CSS_SELECTOR, "#example option[value='1']").click()
        for name, value in (("temperature", "0.8"), ("seed", "3")):
            driver.execute_script(f"document.getElementById('{name}').value = '{value}'")
        status = driver.find_element(By.ID, "status")
        for _ in range(2):  # the first run is never typical
            driver.find_element(By.ID, "run").click()
            WebDriverWait(driver, 60).until(lambda _: status.text.startswith("Done"))
        driver.save_screenshot(str(folder / "playground.png"))


@contextmanager
def _served(llm: LLM) -> Iterator[str]:
    """The address of a server in a thread."""
    from guided_spec.server.app import build_server
    from guided_spec.server.service import ServerSettings

    listener = socket.create_server(("127.0.0.1", 0))
    server = build_server(llm, ServerSettings(), "127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(prog="python -m tools.pictures")
    parser.add_argument("folder", nargs="?", type=Path, default=PICTURES)
    folder: Path = parser.parse_args().folder
    found = find_browser()
    if found is None:
        raise SystemExit("chromium and chromedriver are needed: apt-get install chromium-driver")
    with open_browser(*found) as driver:
        picture_of_trace(driver, folder)
        picture_of_playground(driver, folder)


if __name__ == "__main__":
    main()
