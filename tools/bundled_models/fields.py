"""Fields: what a document can state, the keys an answer can file it under, and the wording."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.bundled_models import values, words
from tools.bundled_models.values import Sampler, Value


@dataclass(frozen=True)
class Field:
    """One concept.

    `keys` and `labels` are alternatives separated by blanks and by '|'; the held-out ones
    occur in evaluation documents only. `{}` in a sentence stands for the value.
    """

    keys: tuple[str, ...]
    held_keys: tuple[str, ...]
    labels: tuple[str, ...]
    sentences: tuple[str, ...]
    sample: Sampler

    @property
    def held_sentence(self) -> str:
        """The sentence that only held-out documents use."""
        return self.sentences[-1]


def field(keys: str, held: str, labels: str, sentences: str, sample: Sampler) -> Field:
    """Build a field from '|'-separated alternatives; the last sentence is held out."""
    return Field(
        tuple(keys.split()),
        tuple(held.split()),
        tuple(labels.split("|")),
        tuple(part.strip() for part in sentences.split("|")) if sentences else (),
        sample,
    )


def string_field(
    keys: str, held: str, labels: str, sentences: str, make: Callable[[random.Random], str]
) -> Field:
    """Build a field whose value is copied from the text."""
    return field(keys, held, labels, sentences, values.string(make))


_LINE_KEYS: dict[str, tuple[str, ...]] = {
    "product": ("product", "item", "name", "article", "description"),
    "quantity": ("quantity", "qty", "count", "amount", "pieces"),
    "price": ("price", "unit_price", "cost", "price_each"),
}
_LINE_KEYS_HELD: dict[str, tuple[str, ...]] = {
    "product": ("item_name", "product_name"),
    "quantity": ("item_count", "product_count"),
    "price": ("item_price", "product_price"),
}


def _line_text(line: dict[str, Value], shape: int) -> str:
    quantity, product, price = (line[name].text for name in ("quantity", "product", "price"))
    return (
        f"{quantity} x {product} at {price}",
        f"{quantity} {product} for {price} each",
        f"{product} ({quantity}, {price})",
        f"{quantity}x {product} @ {price}",
    )[shape]


def lines(*, held: bool = False) -> Sampler:
    """Return a sampler of arrays of objects: the lines of an order."""
    line_keys = _LINE_KEYS_HELD if held else _LINE_KEYS

    def sample(rng: random.Random) -> Value:
        shape = rng.randrange(4)
        names = rng.sample(list(line_keys), rng.randint(2, 3))
        keys = {name: rng.choice(line_keys[name]) for name in names}
        rows = []
        for _ in range(rng.randint(1, 3)):
            number = rng.randint(1, 20)
            rows.append(
                {
                    "product": values.string(words.product)(rng),
                    "quantity": Value(str(number), number, {"type": "integer"}),
                    "price": values.money(rng),
                }
            )
        text = values.join_words(rng, [_line_text(row, shape) for row in rows])
        answer = [{keys[name]: row[name].json for name in names} for row in rows]
        properties = {keys[name]: rows[0][name].schema for name in names}
        return Value(text, answer, {"type": "array", "items": object_schema(properties)})

    return sample


def object_schema(properties: dict[str, values.Schema]) -> values.Schema:
    """Return a closed object schema that requires every one of `properties`."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
