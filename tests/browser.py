"""A browser for tests of pages, and what holds of every page that is shown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tools.pictures import find_browser, open_browser

FOUND = find_browser()
NEEDS_BROWSER = pytest.mark.skipif(FOUND is None, reason="chromium or its driver is not installed")

WIDTHS = (400, 1280)
HEIGHT = 900
SCHEMES = ("light", "dark")

# The smallest contrast of any text with what is behind it (WCAG 2, relative luminance).
CONTRAST = """
const channel = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const behind = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const colour = numbers(getComputedStyle(at).backgroundColor);
    if (colour.length === 3 || colour[3] > 0) return colour;
  }
};
const ratio = (element) => {
  const a = light(numbers(getComputedStyle(element).color)), b = light(behind(element));
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
};
const texts = [...document.querySelectorAll("main *, header *")].filter((element) =>
  [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim())
  && !element.closest("svg"));
return Math.min(...texts.map(ratio));
"""


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    """One for all tests of a module; it keeps its log."""
    assert FOUND is not None
    with open_browser(*FOUND) as opened:
        yield opened
