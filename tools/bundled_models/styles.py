"""Styles: how the stated fields are laid out as a text."""

import random
from dataclasses import dataclass

from tools.bundled_models.compounds import sample_compound
from tools.bundled_models.domains import Domain
from tools.bundled_models.fields import Field
from tools.bundled_models.filler import around_label, disturb
from tools.bundled_models.values import Value


@dataclass(frozen=True)
class Style:
    """A layout of labelled values: `pair` joins label and value, `joint` joins the pairs."""

    pair: str
    joint: str
    lower: str = ""


LABELLED: tuple[Style, ...] = (
    Style("{}: {}", "\n"),
    Style("{}: {}", ", "),
    Style("{}: {}", " | "),
    Style("{}: {}", "; "),
    Style("{} = {}", "\n"),
    Style("{}={}", " ", "lower"),
    Style("- {}: {}", "\n"),
    Style("{} {}", ", ", "lower"),
)
HELD_LABELLED: tuple[Style, ...] = (Style("* {} - {}", "\n"), Style("{}: {}", " / "))

Mention = tuple[Field, Value]


def render(rng: random.Random, domain: Domain, named: dict[str, Mention], *, held: bool) -> str:
    """Return the text that states every mention, in the style that `rng` picks."""
    compound = sample_compound(rng, {n: m[1].text for n, m in named.items()}, held=held)
    if compound is None:
        return _separate(rng, domain, list(named.values()), held=held)
    rest = [mention for name, mention in named.items() if name not in compound.names]
    sentences = [_sentence(rng, mention, held=held) for mention in rest]
    if rng.random() < 0.3:
        sentences.insert(0, domain.openings[-1] if held else rng.choice(domain.openings[:-1]))
    sentences.insert(rng.randint(0, len(sentences)), compound.text)
    return " ".join(sentences)


def _separate(rng: random.Random, domain: Domain, mentions: list[Mention], *, held: bool) -> str:
    opening = domain.openings[-1] if held else rng.choice(domain.openings[:-1])
    if rng.random() < 0.55:
        body = " ".join(_sentence(rng, mention, held=held) for mention in mentions)
        return f"{opening} {body}" if rng.random() < 0.8 else body
    style = rng.choice(HELD_LABELLED if held else LABELLED)
    body = style.joint.join(_labelled(rng, style, mention) for mention in mentions)
    if rng.random() < 0.5:
        return body
    return opening + ("\n" if style.joint == "\n" else " ") + body


def _sentence(rng: random.Random, mention: Mention, *, held: bool) -> str:
    field, value = mention
    if value.sentences:
        return rng.choice(value.sentences)
    if not field.sentences:
        return f"{rng.choice(field.labels)}: {value.text}."
    if held and rng.random() < 0.5:
        return field.held_sentence.format(value.text)
    if held:
        return rng.choice(field.sentences[:-1]).format(value.text)
    if rng.random() < 0.15:
        return around_label(rng, rng.choice(field.labels)).format(value.text)
    return disturb(rng, rng.choice(field.sentences[:-1])).format(value.text)


def _labelled(rng: random.Random, style: Style, mention: Mention) -> str:
    field, value = mention
    label = rng.choice(field.labels)
    if style.lower:
        label = label.lower().replace(" ", "_" if style.pair == "{}={}" else " ")
    return style.pair.format(label, value.text)
