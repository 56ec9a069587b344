"""Tables: names of columns, and rows."""

import random

from tools.bundled_models import words
from tools.bundled_models.domains import FIELDS
from tools.bundled_models.values import Schema, Value
from tools.drawn_documents.flow import Flow
from tools.drawn_documents.page import Page
from tools.drawn_documents.printed import Said, answer, key, printed, rows_of, string

_ROWS = ("rows", "entries", "items", "table", "records", "lines", "list")
_TITLE = ("title", "name", "heading", "table_title")
_COLUMNS = words.table(
    "person city product sku stock price quantity color rating status company role priority "
    "service version issued total order_id weight country"
)
_TITLES = (
    "Stock",
    "Orders",
    "Staff",
    "Prices",
    "Delivery",
    "Overview",
    "Week 12",
    "Report",
    "List",
)


def draw_table(rng: random.Random, page: Page) -> tuple[dict[str, object], Schema]:
    """Draw one; return what it says and the schema of that."""
    flow = Flow.anywhere(rng, page, 14)
    said: Said = {}
    if rng.random() < 0.5:
        title = string(rng.choice(_TITLES))
        flow.line(title.text, rng.choice("lm"), 3)
        said[key(rng, _TITLE)] = title
    names = rng.sample(_COLUMNS, rng.randint(2, 4))
    keys = [key(rng, FIELDS[name].keys) for name in names]
    page.require(len(keys) + len(said), len({*keys, *said}))
    longest = 40 // len(names)
    rows = [
        [printed(rng, FIELDS[name].sample, longest) for name in names]
        for _ in range(rng.randint(2, 6))
    ]
    _print(rng, flow, [rng.choice(FIELDS[name].labels) for name in names], rows)
    said[key(rng, _ROWS)] = rows_of(
        [dict(zip(keys, _alike(row, rows), strict=True)) for row in rows]
    )
    return answer(rng, said)


def _alike(row: list[Value], rows: list[list[Value]]) -> list[Value]:
    """The row with the schemas of the first one, made wide enough for all."""
    found = []
    for at, value in enumerate(row):
        schemas = [one[at].schema for one in rows]
        options = {option: None for one in schemas for option in one.get("enum", ())}
        schema = {**schemas[0], "enum": list(options)} if options else schemas[0]
        found.append(value._replace(schema=schema))
    return found


def _print(rng: random.Random, flow: Flow, names: list[str], rows: list[list[Value]]) -> None:
    page, size = flow.page, flow.size
    gap = rng.randint(8, 14)
    texts = [names, *([value.text for value in row] for row in rows)]
    widths = [max(page.width(row[at], size) for row in texts) for at in range(len(names))]
    page.require(sum(widths) + gap * (len(names) - 1), flow.right - flow.left)
    spare = (flow.right - flow.left - sum(widths)) / max(1, len(names) - 1)
    step = gap if rng.random() < 0.4 else min(spare, 50)
    numeric = [not isinstance(value.json, str) and rng.random() < 0.6 for value in rows[0]]
    ruled = rng.random() < 0.5
    for row in texts:
        x = flow.left
        for text, width, right in zip(row, widths, numeric, strict=True):
            page.text(x + width if right else x, flow.y, text, size, "r" if right else "l")
            x += width + step
        flow.y += flow.pitch
        if ruled or row is names:
            page.line(flow.left, flow.y - 2, flow.right, flow.y - 2)
            flow.y += 2
