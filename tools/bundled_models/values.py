"""Value samplers: how a value is written in a text, what JSON it becomes, and its schema."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from tools.bundled_models import words

Schema = dict[str, Any]


class Value(NamedTuple):
    """A sampled value: its wording in the text, its JSON value and its JSON schema.

    `sentences`, where given, replaces the field's own sentences (used by booleans, whose
    wording depends on the value).
    """

    text: str
    json: Any
    schema: Schema
    sentences: tuple[str, ...] = ()


Sampler = Callable[[random.Random], Value]

_STRING: Schema = {"type": "string"}
_MONTHS = words.table(
    "January February March April May June July August September October November December"
)
_NUMBER_WORDS = words.table("zero one two three four five six seven eight nine ten eleven twelve")
_DATE_PATTERN = "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"
_TIME_PATTERN = "^[0-9]{2}:[0-9]{2}$"


def string(make: Callable[[random.Random], str]) -> Sampler:
    """Return a sampler of strings that the answer copies as they stand."""

    def sample(rng: random.Random) -> Value:
        text = make(rng)
        return Value(text, text, _STRING)

    return sample


def one_of(options: tuple[str, ...] | list[str]) -> Sampler:
    """Return a sampler of strings from `options` (a plain string in the schema)."""
    return string(lambda rng: rng.choice(options))


def enum(*options: str) -> Sampler:
    """Return a sampler of an enum; the schema lists a random subset that holds the value."""

    def sample(rng: random.Random) -> Value:
        chosen = rng.choice(options)
        others = [option for option in options if option != chosen]
        listed = [chosen, *rng.sample(others, rng.randint(min(1, len(others)), len(others)))]
        rng.shuffle(listed)
        text = chosen.replace("_", " ")
        text = rng.choice((text, text, text.capitalize(), text.upper()))
        return Value(text, chosen, {"type": "string", "enum": listed})

    return sample


def flag(yes: tuple[str, ...], no: tuple[str, ...]) -> Sampler:
    """Return a sampler of a boolean that the sentences of `yes` or `no` express."""

    def sample(rng: random.Random) -> Value:
        state = rng.random() < 0.5
        text = rng.choice(("yes", "true", "Yes") if state else ("no", "false", "No"))
        return Value(text, state, {"type": "boolean"}, yes if state else no)

    return sample


def integer(low: int, high: int) -> Sampler:
    """Return a sampler of integers, at times in words or with a thousands separator."""

    def sample(rng: random.Random) -> Value:
        number = rng.randint(low, rng.choice((high, max(low, min(high, 12)))))
        text = str(number)
        if 0 <= number <= 12 and rng.random() < 0.3:
            text = _NUMBER_WORDS[number]
        elif number >= 1000 and rng.random() < 0.3:
            text = f"{number:,}"
        return Value(text, number, {"type": "integer"})

    return sample


def decimal(low: float, high: float, places: int = 1, unit: str = "") -> Sampler:
    """Return a sampler of numbers with up to `places` decimals and an optional unit."""

    def sample(rng: random.Random) -> Value:
        number: float = round(rng.uniform(low, high), rng.randint(1, places))
        if rng.random() < 0.25:
            number = int(number)
        return Value(f"{number}{unit}", number, {"type": "number"})

    return sample


def money(rng: random.Random) -> Value:
    """Sample an amount of money; the JSON value is the bare number."""
    cents = rng.randint(50, rng.choice((2_000, 20_000, 900_000)))
    if rng.random() < 0.3:
        cents -= cents % 100 - 100
    number: float | int = cents // 100 if cents % 100 == 0 else cents / 100
    grouped = f"{cents / 100:,.2f}" if rng.random() < 0.4 else f"{cents / 100:.2f}"
    if cents % 100 == 0 and rng.random() < 0.7:
        grouped = f"{cents // 100}"
    shape = rng.choice(("${}", "€{}", "{} EUR", "{} euros", "USD {}", "{} dollars", "£{}", "{}"))
    return Value(shape.format(grouped), number, {"type": "number"})


def date(rng: random.Random) -> Value:
    """Sample a date; the JSON value is YYYY-MM-DD."""
    year, month, day = rng.randint(2015, 2035), rng.randint(1, 12), rng.randint(1, 28)
    iso = f"{year}-{month:02}-{day:02}"
    return Value(date_wording(rng, year, month, day), iso, {**_STRING, "pattern": _DATE_PATTERN})


def date_wording(rng: random.Random, year: int, month: int, day: int) -> str:
    """Return one of the ways in which people write a date."""
    name = _MONTHS[month - 1]
    ordinal = f"{day}{'th' if 10 < day < 20 else {1: 'st', 2: 'nd', 3: 'rd'}.get(day % 10, 'th')}"
    shapes = (
        f"{day} {name} {year}",
        f"{name} {day}, {year}",
        f"{name} {ordinal}, {year}",
        f"{ordinal} of {name} {year}",
        f"{day} {name[:3]} {year}",
        f"{name[:3]} {day}, {year}",
        f"{day:02}.{month:02}.{year}",
        f"{day}.{month}.{year}",
        f"{year}-{month:02}-{day:02}",
        f"{year}/{month:02}/{day:02}",
    )
    return rng.choice(shapes)


def clock(rng: random.Random) -> Value:
    """Sample a time of day; the JSON value is HH:MM on the 24-hour clock."""
    hour, minute = rng.randint(0, 23), rng.choice((0, 0, 15, 30, 45, rng.randint(0, 59)))
    return Value(
        time_wording(rng, hour, minute),
        f"{hour:02}:{minute:02}",
        {**_STRING, "pattern": _TIME_PATTERN},
    )


def time_wording(rng: random.Random, hour: int, minute: int) -> str:
    """Return one of the ways in which people write a time of day."""
    if rng.random() < 0.35:
        return f"{hour:02}:{minute:02}"
    if minute == 0 and hour == 12 and rng.random() < 0.5:
        return "noon"
    half = "am" if hour < 12 else "pm"
    shown = str((hour + 11) % 12 + 1) + (f":{minute:02}" if minute or rng.random() < 0.3 else "")
    return shown + rng.choice((half, f" {half}", f" {half.upper()}", half.upper()))


def phone(rng: random.Random) -> Value:
    """Sample a telephone number that the answer copies as it stands."""
    area, number = words.digits(rng, rng.randint(2, 4)), words.digits(rng, rng.randint(5, 8))
    shape = rng.randrange(5)
    text = (
        f"+{rng.randint(1, 99)} {area} {number}",
        f"+{rng.randint(1, 99)}-{area}-{number}",
        f"0{area}/{number}",
        f"({words.digits(rng, 3)}) 555-{words.digits(rng, 4)}",
        f"555-{words.digits(rng, 4)}",
    )[shape]
    return Value(text, text, _STRING)


def listing(make: Callable[[random.Random], str], longest: int = 4) -> Sampler:
    """Return a sampler of arrays of 1 to `longest` different strings."""

    def sample(rng: random.Random) -> Value:
        items = list(dict.fromkeys(make(rng) for _ in range(rng.randint(1, longest))))
        schema: Schema = {"type": "array", "items": _STRING}
        if rng.random() < 0.3:
            schema |= {"minItems": 1, "maxItems": longest + 1}
        return Value(join_words(rng, items), items, schema)

    return sample


def join_words(rng: random.Random, items: list[str]) -> str:
    """Return `items` as an enumeration in a sentence."""
    if len(items) == 1 or rng.random() < 0.5:
        return ", ".join(items)
    return ", ".join(items[:-1]) + " and " + items[-1]
