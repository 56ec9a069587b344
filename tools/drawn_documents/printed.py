"""Values as they are printed: in ASCII, and short enough for a line."""

import random

from tools.bundled_models import words
from tools.bundled_models.fields import object_schema
from tools.bundled_models.values import Sampler, Schema, Value
from tools.drawn_documents.page import DoesNotFit

Said = dict[str, Value]  # by the keys of the answer


def printed(rng: random.Random, sample: Sampler, longest: int = 28) -> Value:
    """Sample a value that the font can draw on one line; DoesNotFit where none is short."""
    for _ in range(20):
        value = sample(rng)
        if value.text.isascii() and len(value.text) <= longest:
            return value
    raise DoesNotFit


def key(rng: random.Random, keys: tuple[str, ...]) -> str:
    """One of the keys, at times in camel case."""
    head, *tail = rng.choice(keys).split("_")
    if rng.random() < 0.15:
        return head + "".join(part.capitalize() for part in tail)
    return "_".join((head, *tail))


def money(cents: int, text: str | None = None) -> Value:
    """An amount as a till prints it; its JSON is a bare number."""
    number = cents // 100 if cents % 100 == 0 else cents / 100
    return Value(text or f"{cents / 100:.2f}", number, {"type": "number"})


def string(text: str) -> Value:
    """A text that is copied."""
    return Value(text, text, {"type": "string"})


def rows_of(rows: list[Said]) -> Value:
    """Rows with the same keys, as an array of objects."""
    schema = object_schema({name: value.schema for name, value in rows[0].items()})
    said = [{name: value.json for name, value in row.items()} for row in rows]
    return Value("", said, {"type": "array", "items": schema})


def answer(rng: random.Random, said: Said) -> tuple[dict[str, object], Schema]:
    """Some of what is said, mostly all, in some order; and its schema."""
    names = list(said)
    if rng.random() < 0.3:
        rng.shuffle(names)
    if rng.random() < 0.3:
        names = names[: rng.randint(1, len(names))]
    chosen = {name: said[name] for name in names}
    schema = object_schema({name: value.schema for name, value in chosen.items()})
    return {name: value.json for name, value in chosen.items()}, schema


def company(rng: random.Random) -> Value:
    """The name of a firm."""
    return printed(rng, lambda rng: string(words.company(rng)), 20)
