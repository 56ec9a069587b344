"""Format tasks: rewrite one detail of a text as a plain string that matches a regex."""

import random
from collections.abc import Callable
from typing import NamedTuple

from tools.bundled_models import values, words

_LABELS = {
    "complaint": ("is broken", "arrived too late", "does not work", "is the wrong one"),
    "praise": ("is wonderful", "works very well", "made me happy", "is great"),
    "question": ("comes in which sizes?", "costs how much?", "ships when?", "is for children?"),
}


class FormatTask(NamedTuple):
    """A text, the label that asks for the answer, the regex of the answer, and the answer."""

    text: str
    label: str
    regex: str
    answer: str


def _date(rng: random.Random) -> FormatTask:
    value = values.date(rng)
    text = _choose(
        rng,
        ("We met on {}.", "The contract ends on {}.", "Delivery is planned for {}.", "{}"),
    ).format(value.text)
    return FormatTask(text, _choose(rng, ("Date", "ISO date")), value.schema["pattern"], value.json)


def _time(rng: random.Random) -> FormatTask:
    value = values.clock(rng)
    text = _choose(
        rng, ("The bus leaves at {}.", "Wake me at {}.", "Dinner is at {}.", "{}")
    ).format(value.text)
    return FormatTask(text, "Time", value.schema["pattern"], value.json)


def _phone(rng: random.Random) -> FormatTask:
    area, number = (
        str(rng.randint(1, 9)) + words.digits(rng, rng.randint(1, 3)),
        words.digits(rng, 7),
    )
    country = rng.choice((49, 33, 43, 44))
    written = _choose(
        rng,
        (
            f"+{country} {area} {number}",
            f"+{country} ({area}) {number}",
            f"00{country} {area} {number[:3]} {number[3:]}",
            f"+{country}/{area}/{number}",
        ),
    )
    text = _choose(rng, ("Call me: {}", "My number is {}.", "Tel. {}", "Reach us at {} all day."))
    answer = f"+{country}-{area}-{number}"
    pattern = r"\+[0-9]{2}-[0-9]{2,4}-[0-9]{7}"
    return FormatTask(text.format(written), "Phone", pattern, answer)


def _version(rng: random.Random) -> FormatTask:
    parts = [str(rng.randint(0, 30)) for _ in range(3)]
    written = _choose(
        rng,
        (
            "v" + ".".join(parts),
            "version {} point {} point {}".format(*parts),
            "release " + "-".join(parts),
        ),
    )
    text = _choose(rng, ("We run {} now.", "Please update to {}.", "Seen in {} only."))
    return FormatTask(text.format(written), "Version", r"[0-9]+\.[0-9]+\.[0-9]+", ".".join(parts))


def _label(rng: random.Random) -> FormatTask:
    answer = rng.choice(list(_LABELS))
    text = f"The {words.product(rng)} {rng.choice(_LABELS[answer])}"
    options = list(_LABELS)
    rng.shuffle(options)
    return FormatTask(text, "Label", "|".join(options), answer)


def _code(rng: random.Random) -> FormatTask:
    letters = "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(3))
    number = words.digits(rng, 4)
    written = _choose(
        rng, (f"{letters}{number}", f"{letters.lower()} {number}", f"{letters} no. {number}")
    )
    text = _choose(
        rng, ("Your parcel {} is on its way.", "Look up {} please.", "The locker is {}.")
    )
    return FormatTask(text.format(written), "Code", "[A-Z]{3}-[0-9]{4}", f"{letters}-{number}")


def _email(rng: random.Random) -> FormatTask:
    value = words.email(rng)
    text = _choose(rng, ("Write to {} today.", "{} is my address.", "Mail us: {}")).format(value)
    return FormatTask(text, "Email", r"[a-z0-9._-]+@[a-z0-9.-]+", value)


def _price(rng: random.Random) -> FormatTask:
    cents = rng.randint(100, 99_999)
    written = _choose(
        rng, (f"${cents / 100:.2f}", f"{cents // 100} dollars and {cents % 100} cents")
    )
    text = _choose(rng, ("The {} costs {}.", "I paid for the {} exactly {}."))
    text = text.format(words.product(rng), written)
    return FormatTask(text, "Price", r"[0-9]+\.[0-9]{2}", f"{cents / 100:.2f}")


def _choose(rng: random.Random, options: tuple[str, ...]) -> str:
    return rng.choice(options)


FORMATS: dict[str, Callable[[random.Random], FormatTask]] = {
    "date": _date,
    "time": _time,
    "phone": _phone,
    "version": _version,
    "label": _label,
    "code": _code,
    "email": _email,
    "price": _price,
}
