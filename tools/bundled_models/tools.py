"""Tool calls: a spoken request and the call {"name": ..., "arguments": {...}} that serves it."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.bundled_models import values, words
from tools.bundled_models.fields import object_schema
from tools.bundled_models.filler import disturb
from tools.bundled_models.values import Sampler, Schema, string

_DAYS = words.table("Monday Tuesday Wednesday Thursday Friday Saturday Sunday today tomorrow")
_WRAPPERS = (("name", "arguments"), ("tool", "args"), ("function", "parameters"))
_SLOT = re.compile(r"{(\w+)}")


def _restaurant(rng: random.Random) -> str:
    owner = words.first_name(rng)
    return rng.choice((f"{owner}'s", f"Café {words.invented(rng).capitalize()}", words.city(rng)))


# Slot name -> (keys the answer may use, the last one held out; sampler).
SLOTS: dict[str, tuple[tuple[str, ...], Sampler]] = {
    "party": (
        ("people", "party_size", "guests", "number_of_people", "guest_count"),
        values.integer(1, 20),
    ),
    "place": (
        ("restaurant", "place", "venue", "restaurant_name", "place_name"),
        string(_restaurant),
    ),
    "day": (("day", "date", "on", "weekday", "day_name"), values.one_of(_DAYS)),
    "time": (("time", "at", "start_time", "hour", "time_of_day"), values.clock),
    "city": (("city", "location", "town", "city_name"), string(words.city)),
    "city2": (("to", "destination", "to_city", "destination_city"), string(words.city)),
    "city1": (("from", "origin", "from_city", "origin_city"), string(words.city)),
    "person": (("recipient", "to", "contact", "person", "recipient_name"), string(words.full_name)),
    "email": (("recipient", "to", "email", "address", "recipient_email"), string(words.email)),
    "text": (("message", "text", "body", "content", "message_text"), string(words.phrase)),
    "task": (("title", "task", "summary", "task_title"), string(words.phrase)),
    "minutes": (
        ("minutes", "duration_minutes", "duration", "length_minutes"),
        values.integer(1, 120),
    ),
    "genre": (("genre", "style", "music", "music_genre"), values.one_of(words.GENRES)),
    "level": (("volume", "level", "percent", "volume_level"), values.integer(0, 100)),
    "product": (("product", "item", "query", "product_name"), string(words.product)),
    "price": (("max_price", "price", "budget", "price_limit"), values.money),
    "amount": (("amount", "value", "sum", "amount_of_money"), values.money),
    "date": (("date", "day", "on", "date_of_day"), values.date),
    "room": (
        ("room", "place", "where", "room_name"),
        values.one_of(words.table("kitchen bathroom bedroom office hall garage living-room attic")),
    ),
    "degrees": (("temperature", "degrees", "target", "target_temperature"), values.integer(12, 28)),
    "language": (
        ("language", "target_language", "to", "to_language"),
        values.one_of(words.table("German French Spanish Italian Polish Japanese Korean Dutch")),
    ),
}


@dataclass(frozen=True)
class Tool:
    """A tool: its names and the requests it serves (the last request is held out)."""

    names: tuple[str, ...]
    requests: tuple[str, ...]


def _tool(names: str, requests: str) -> Tool:
    return Tool(tuple(names.split()), tuple(requests.split("|")))


TOOLS: tuple[Tool, ...] = (
    _tool(
        "book_table reserve_table make_reservation",
        "Book a table for {party} at {place} on {day} {time}|Reserve a table at {place} for {party}"
        "|I need a table for {party} people at {place}, {day} at {time}|Table for {party} on {day}"
        "|Please get us a table for {party} people at {place} at {time}",
    ),
    _tool(
        "get_weather weather weather_forecast",
        "What is the weather in {city}?|Will it rain in {city} on {day}?|Weather for {city} {day}"
        "|How is the weather going to be in {city} on {day}?",
    ),
    _tool(
        "search_flights find_flight book_flight",
        "Find a flight from {city1} to {city2} on {date}|Fly me from {city1} to {city2}"
        "|I need {party} seats from {city1} to {city2} on {day}"
        "|Show flights from {city1} to {city2} on {date} for {party} people",
    ),
    _tool(
        "send_message send_text message_contact",
        'Tell {person} "{text}"|Send a message to {person}: {text}|Text {person} that {text}'
        "|Let {person} know: {text}",
    ),
    _tool(
        "send_email email write_mail",
        "Send an email to {email} saying {text}|Mail {email}: {text}|Write to {email}: {text}"
        '|Email {email} the words "{text}"',
    ),
    _tool(
        "create_task add_todo add_reminder",
        "Remind me to {task} on {day} at {time}|Add a task: {task}|Todo for {day}: {task}"
        "|New task for {day}, {time}: {task}",
    ),
    _tool(
        "set_timer start_timer timer",
        "Set a timer for {minutes} minutes|Start a {minutes} minute timer"
        "|Wake me in {minutes} minutes|Give me a timer of {minutes} minutes",
    ),
    _tool(
        "set_alarm create_alarm alarm",
        "Wake me up at {time} on {day}|Set an alarm for {time}|Alarm at {time} {day}"
        "|I want an alarm on {day} at {time}",
    ),
    _tool(
        "play_music start_music music_player",
        "Play some {genre} in the {room}|Put on {genre} at volume {level}|Play {genre}"
        "|I want to hear {genre} in the {room} at volume {level}",
    ),
    _tool(
        "search_products find_product shop_search",
        "Find a {product} under {price}|Search for a {product}|Show me a {product} below {price}"
        "|I am looking for a {product} for less than {price}",
    ),
    _tool(
        "transfer_money send_money pay",
        "Send {amount} to {person}|Transfer {amount} to {person} on {date}|Pay {person} {amount}"
        "|Please move {amount} to {person} on {date}",
    ),
    _tool(
        "set_temperature set_thermostat heat_room",
        "Set the {room} to {degrees} degrees|Heat the {room} to {degrees} degrees at {time}"
        "|Make it {degrees} degrees in the {room}|The {room} should have {degrees} degrees",
    ),
    _tool(
        "translate translate_text translation",
        'Translate "{text}" to {language}|How do you say "{text}" in {language}?'
        '|I need "{text}" in {language}',
    ),
)


def sample_call(rng: random.Random, *, held: bool) -> tuple[str, dict[str, Any], Schema]:
    """Return a request, the tool call that serves it and the schema of the call."""
    tool = rng.choice(TOOLS)
    request = tool.requests[-1] if held else disturb(rng, rng.choice(tool.requests[:-1]))
    arguments: dict[str, Any] = {}
    properties: dict[str, Schema] = {}
    slots = _SLOT.findall(request)
    texts = {}
    for slot in rng.sample(slots, len(slots)):
        keys, sample = SLOTS[slot]
        value = sample(rng)
        texts[slot] = value.text
        key = keys[-1] if held and rng.random() < 0.5 else rng.choice(keys[:-1])
        if key not in arguments:
            arguments[key], properties[key] = value.json, value.schema
    name = rng.choice(tool.names)
    name_key, arguments_key = rng.choice(_WRAPPERS)
    names = [name]
    if rng.random() < 0.6:
        others = rng.sample([other for other in TOOLS if other is not tool], rng.randint(1, 4))
        names += [rng.choice(other.names) for other in others]
        rng.shuffle(names)
    schema = object_schema(
        {
            name_key: {"type": "string", "enum": names},
            arguments_key: object_schema(properties),
        }
    )
    text = request.format(**texts)
    polite: Callable[[], str] = lambda: rng.choice(("", "", "", "Hi, ", "Please: "))  # noqa: E731
    if len(names) > 1 or rng.random() < 0.5:
        return (
            f"{polite()}{text}\n\nTools: {', '.join(names)}",
            {
                name_key: name,
                arguments_key: arguments,
            },
            schema,
        )
    return polite() + text, {name_key: name, arguments_key: arguments}, schema
