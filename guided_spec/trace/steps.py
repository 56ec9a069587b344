"""The steps of a text as HTML: a row for each, and a chip for each of its tokens."""

from __future__ import annotations

import re
from html import escape
from typing import NamedTuple

from guided_spec.trace.record import FORCED, StepTrace, TokenTrace

__all__ = ["SIGNS", "StepMarkup", "legend"]

SIGNS = {" ": "\u00b7", "\n": "\u21b5", "\t": "\u21e5", "\r": "\u240d"}
UNSEEN = re.compile("[ \n\t\r]")

LEGEND = (
    ("accepted", "drafted and accepted"),
    ("accepted forced", "forced by the grammar, and accepted"),
    ("rejected", "rejected by the target"),
    ("replacement", "what the target drew in its place"),
    ("unused", "drafted behind a rejected token"),
    ("bonus", "drawn behind a draft that was accepted whole"),
)


def legend() -> str:
    """The kinds of tokens, as a list."""
    items = [
        f'<li><span class="chip {kind}" aria-hidden="true">abc</span>{words}</li>'
        for kind, words in LEGEND
    ]
    return f'<ul class="legend" aria-label="Kinds of tokens">{"".join(items)}</ul>'


class StepMarkup(NamedTuple):
    """How the steps of one text are shown: each an ``<li>``, whose ids are the page's own.

    run: number of the text on the page. vocab_size, stop_token_ids: see ``Trace``.
    """

    run: int
    vocab_size: int
    stop_token_ids: tuple[int, ...]

    def step(self, number: int, step: StepTrace) -> str:
        """The ``number``-th step, from 0."""
        kept, requests = step.num_kept, step.num_requests
        head = [
            f"<strong>Step {number + 1}</strong>",
            f"{kept} token{'' if kept == 1 else 's'}",
            f"{step.seconds * 1e3:.1f} ms",
        ]
        if requests > 1:
            head.append(f"{requests} requests together")
        chips, place = [], ""
        for at, shown in enumerate(_shown(step)):
            name = f"{self.run}-{number}-{at}"
            is_new = shown.token.place not in (None, "", place)
            chips.append(self._chip(shown, name, shown.token.place if is_new else None))
            place = shown.token.place or place
        spans = "".join(f"<span>{part}</span>" for part in head)
        return (
            f'<li class="step"><p class="step-head">{spans}</p>'
            f'<ol class="chips">{"".join(chips)}</ol></li>'
        )

    def _chip(self, shown: _Shown, name: str, place: str | None) -> str:
        token = shown.token
        kinds: list[str] = [token.outcome]
        kinds += ["forced"] * (token.source == FORCED) + ["dropped"] * shown.is_dropped
        label = f"{', '.join(kinds)}: {token.text or self._unwritten(token)}"
        likely = "" if token.target_prob is None else f' style="--likely:{token.target_prob:.3f}"'
        where = "" if place is None else f'<span class="place">{escape(place)}</span>'
        return (
            f'<li>{where}<button type="button" class="chip {" ".join(kinds)}"{likely} '
            f'aria-label="{escape(label)}" aria-describedby="tip-{name}">{self._text(token)}'
            f'</button><div class="tip" role="tooltip" id="tip-{name}">'
            f"<dl>{self._details(shown)}</dl></div></li>"
        )

    def _text(self, token: TokenTrace) -> str:
        """What a chip shows, white space by signs."""
        if not token.text:
            return f'<span class="unseen">{self._unwritten(token)}</span>'
        return UNSEEN.sub(
            lambda found: f'<span class="unseen">{SIGNS[found[0]]}</span>', escape(token.text)
        )

    def _unwritten(self, token: TokenTrace) -> str:
        return "end" if token.id in self.stop_token_ids else f"#{token.id}"

    def _details(self, shown: _Shown) -> str:
        token, vocab_size = shown.token, self.vocab_size
        rows = {
            "token": f"{token.text!r}, id {token.id}",
            "output position": str(shown.position),
            "by": "the grammar" if token.source == FORCED else token.source,
            "outcome": token.outcome + (", behind the end of the text" * shown.is_dropped),
            "draft probability": _percent(token.draft_prob),
            "target probability": _percent(token.target_prob),
            "with temperature, filters": _percent(token.processed_prob),
        }
        if token.allowed is not None:
            rows["allowed tokens"] = f"{token.allowed:,} of {vocab_size:,}"
        if token.place is not None:
            rows["place in the JSON"] = token.place or "the whole text"
        return "".join(
            f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in rows.items() if value
        )


class _Shown(NamedTuple):
    """A token of a step as the page shows it. position: in the output. is_dropped: not in it."""

    token: TokenTrace
    position: int
    is_dropped: bool


def _shown(step: StepTrace) -> list[_Shown]:
    """The tokens of a step, the drawn one right behind what was accepted or rejected."""
    num_accepted = sum(token.outcome == "accepted" for token in step.drafted)
    drafted = [
        _Shown(token, step.start + at, step.num_kept <= at < num_accepted)
        for at, token in enumerate(step.drafted)
    ]
    if step.drawn is None:
        return drafted
    drawn = _Shown(step.drawn, step.start + num_accepted, step.num_kept <= num_accepted)
    split = num_accepted + 1
    return [*drafted[:split], drawn, *drafted[split:]]


def _percent(probability: float | None) -> str:
    if probability is None:
        return ""
    percent = 100 * probability
    return f"{percent:.2f} %" if percent >= 0.01 or percent == 0 else f"{percent:.1e} %"
