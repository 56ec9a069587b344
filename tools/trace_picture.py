"""The picture of docs/trace.md: ``python -m tools.trace_picture [OUTPUT]``; chromium is needed.

Traces one text of the bundled model, opens its page, and takes the picture of a few steps, with the
details of one token.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from guided_spec import LLM, GrammarSpec, SamplingParams
from guided_spec.trace.page import render_page

__all__ = ["find_browser", "open_browser", "show"]

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "trace.png"
PROMPT = "Please call Maria Lopez at +49 170 5551234.\n\nJSON: "
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "phone": {"type": "string"}},
    "required": ["name", "phone"],
}
PROPOSER = "chain:grammar_forced+draft_model"
WIDTH, HEIGHT = 1000, 700
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


def _page() -> str:
    params = SamplingParams(grammar=GrammarSpec.json_schema(SCHEMA))
    with LLM(proposer=PROPOSER) as llm:
        llm.generate(PROMPT, params)  # the first run is never typical
        (output,) = llm.generate(PROMPT, params, trace=True)
    assert output.trace is not None  # it was asked for
    return render_page([output.trace], prompt=PROMPT)


def main() -> None:
    """Write the picture."""
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    found = find_browser()
    if found is None:
        raise SystemExit("chromium and chromedriver are needed: apt-get install chromium-driver")
    with tempfile.TemporaryDirectory() as folder, open_browser(*found) as driver:
        page = Path(folder) / "trace.html"
        page.write_text(_page(), encoding="utf-8")
        show(driver, page.as_uri(), WIDTH, HEIGHT)
        name = "tip-" + "-".join(map(str, TOKEN))
        driver.execute_script(f"document.querySelector('[aria-describedby={name}]').focus()")
        driver.execute_script("document.querySelector('.legend').scrollIntoView()")
        driver.save_screenshot(str(output))


if __name__ == "__main__":
    main()
