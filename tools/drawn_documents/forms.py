"""Forms: a title, and labels with what was filled in."""

import random

from tools.bundled_models.domains import DOMAINS, FIELDS
from tools.bundled_models.values import Schema, Value
from tools.drawn_documents.flow import Flow
from tools.drawn_documents.page import Page
from tools.drawn_documents.printed import Said, answer, key, printed

_TITLES = ("Form", "Registration", "Application", "Details", "Record", "Sheet", "Questionnaire")


def draw_form(rng: random.Random, page: Page) -> tuple[dict[str, object], Schema]:
    """Draw one; return what it says and the schema of that."""
    flow = Flow.anywhere(rng, page, 20)
    kind = rng.choice(list(DOMAINS))
    if rng.random() < 0.7:
        flow.line(f"{kind.capitalize()} {rng.choice(_TITLES).lower()}", rng.choice("lm"), 3)
    style = rng.choice((_beside, _in_columns, _below))
    names = [name for name in DOMAINS[kind].fields if name not in ("items", "tags")]
    said: Said = {}
    for name in rng.sample(names, rng.randint(3, min(7, len(names)))):
        field = FIELDS[name]
        value = printed(rng, field.sample)
        style(flow, rng.choice(field.labels), value)
        said[key(rng, field.keys)] = value
    return answer(rng, said)


def _beside(flow: Flow, label: str, value: Value) -> None:
    at = flow.page.text(flow.left, flow.y, label + ":", flow.size) + 5
    _fill(flow, flow.left + at, value)
    flow.y += flow.pitch


def _in_columns(flow: Flow, label: str, value: Value) -> None:
    taken = flow.page.text(flow.left, flow.y, label, flow.size)
    middle = flow.left + (flow.right - flow.left) * 0.42
    flow.page.require(taken + 5, middle - flow.left)
    _fill(flow, middle, value)
    flow.y += flow.pitch


def _below(flow: Flow, label: str, value: Value) -> None:
    flow.page.text(flow.left, flow.y, label, flow.size)
    flow.y += flow.size + 2
    _fill(flow, flow.left + 4, value)
    flow.y += flow.size + 2
    flow.rule()


def _fill(flow: Flow, x: float, value: Value) -> None:
    """A value in its place; booleans are a box that is ticked or not, or a word."""
    if isinstance(value.json, bool) and value.text.islower():
        flow.page.box(x, flow.y + 1, flow.size - 2, crossed=value.json)
    else:
        flow.page.text(x, flow.y, value.text, flow.size)
