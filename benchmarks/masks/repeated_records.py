"""A workload of records of few kinds: ``python -m benchmarks.masks.repeated_records FILE``.

Every kind has one wording and one schema, as the requests of one application have; the values
differ. ``guided-spec bench --workload FILE --proposers ngram,suffix`` measures it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

FIRST = ["Nils", "Rosa", "Jonas", "Maria", "Anna", "Victor", "Heidi", "Omar", "Lena", "Tariq"]
LAST = ["Lopez", "Klickgalm", "Brindourshu", "Weber", "Torvalds", "Nguyen", "Sato", "Haddad"]
TOWNS = ["Lurut Hills", "Chounjos", "Port Arlen", "Vienna", "New Bremmel", "Osaka"]
POOLS: dict[str, Sequence[str]] = {
    "name": [f"{first} {last}" for first in FIRST for last in LAST],
    "town": TOWNS,
    "day": [f"20{20 + at % 15}-0{1 + at % 9}-{10 + at % 18}" for at in range(90)],
    "phone": [f"+{10 + at % 60} {100 + 7 * at} {4000000 + 7919 * at}" for at in range(90)],
    "job": ["architect", "sales lead", "nurse", "data engineer", "driver"],
    "level": ["INFO", "WARNING", "ERROR"],
    "host": [f"108.{at % 7}.{at}.{3 * at % 250}" for at in range(1, 90)],
    "service": ["billing", "storage", "login", "search"],
    "sensor": [f"Z{at}" for at in range(400, 490)],
    "weather": ["snowy", "sunny", "cloudy", "rainy"],
}


class Kind(NamedTuple):
    """One kind of record: its wording, and the pool of each field, in the schema's order."""

    wording: str
    fields: dict[str, str]


KINDS = (
    Kind(
        "A new person for the staff list. Name: {full_name} / Tel: {customer_phone} / "
        "Job title: {job} / Town: {townName}",
        {"full_name": "name", "job": "job", "customer_phone": "phone", "townName": "town"},
    ),
    Kind(
        "One more line of the log. [{log_level}] {service} on {event_day}. From host {host_name}.",
        {
            "event_day": "day",
            "log_level": "level",
            "service": "service",
            "host_name": "host",
        },
    ),
    Kind(
        "One more reading from the station. Sensor {sensor_id}. Weather: {weather_condition}. "
        "Located in {townName}. The date is {event_day}.",
        {
            "sensor_id": "sensor",
            "townName": "town",
            "weather_condition": "weather",
            "event_day": "day",
        },
    ),
)


def records(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Requests of all kinds in turn, as ``guided_spec.evaluate.measurement`` reads them."""
    dice = random.Random(seed)
    found = []
    for at in range(count):
        wording, fields = KINDS[at % len(KINDS)]
        values = {field: dice.choice(POOLS[pool]) for field, pool in fields.items()}
        prompt = f"{wording.format(**values)}\n\nFields: {', '.join(fields)}\nJSON: "
        schema = {
            "type": "object",
            "properties": {field: {"type": "string"} for field in fields},
            "required": [*fields],
        }
        found.append({"prompt": prompt, "schema": schema, "answer": json.dumps(values)})
    return found


def main(
    file: Annotated[Path, typer.Argument(help="To be written: JSON Lines.")],
    count: Annotated[int, typer.Option(help="Records, of all kinds together.")] = 90,
    seed: Annotated[int, typer.Option(help="Of their values.")] = 0,
) -> None:
    """Write the workload."""
    lines = (json.dumps(record) for record in records(count, seed))
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
