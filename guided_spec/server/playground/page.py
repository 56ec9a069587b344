"""The playground as one page that needs nothing but the server, with the trace page's own parts."""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from importlib.resources import files
from string import Template
from typing import NamedTuple

from guided_spec.trace.page import asset
from guided_spec.trace.steps import legend

__all__ = ["Playground", "render_playground"]

_MOST_TOKENS = 256  # what the form says at first

_KEY = """<p class="field"><label for="key">API key</label>
<input id="key" type="password" autocomplete="off" required></p>"""


class Playground(NamedTuple):
    """html: the page. policy: its Content-Security-Policy, which lets its own scripts run alone."""

    html: str
    policy: str


def render_playground(max_tokens: int, *, asks_for_key: bool) -> Playground:
    """The page.

    max_tokens: the most that a request may ask for. asks_for_key: whether requests must bring one.
    """
    examples = json.loads(_file("examples.json"))
    names = [escape(example["name"]) for example in examples]
    options = [f'<option value="{at}">{name}</option>' for at, name in enumerate(names)]
    scripts = asset("page.js"), _file("page.js")
    html = Template(_file("page.html")).substitute(
        style=asset("page.css") + _file("page.css"),
        examples="\n".join(options),
        examples_json=json.dumps(examples).replace("<", "\\u003c"),
        max_tokens=min(max_tokens, _MOST_TOKENS),
        key=_KEY if asks_for_key else "",
        legend=legend(),
        trace_script=scripts[0],
        script=scripts[1],
    )
    return Playground(html, _policy(scripts))


def _file(name: str) -> str:
    folder = files("guided_spec") / "server" / "playground"
    return (folder / name).read_text(encoding="utf-8")


def _policy(scripts: tuple[str, ...]) -> str:
    """Nothing from elsewhere, no framing, and no script but these, each behind a line break."""
    digests = [hashlib.sha256(f"\n{script}".encode()).digest() for script in scripts]
    sources = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
