"""Documents: a prompt, the answer, and the schema or regex that the answer satisfies."""

import json
import random
import zlib
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tools.bundled_models.commerce import HELD_LINES
from tools.bundled_models.domains import DOMAINS, FIELDS
from tools.bundled_models.fields import object_schema
from tools.bundled_models.formats import FORMATS
from tools.bundled_models.styles import render
from tools.bundled_models.tools import sample_call
from tools.bundled_models.values import Schema, Value

Split = Literal["train", "heldout"]
_GROUP_KEYS = ("details", "info", "contact", "data", "meta", "address", "record")
_HELD_GROUP_KEYS = ("contact_info", "meta_data", "address_details")
_HELD_SHARE = 5  # one in five combinations of fields is kept for evaluation


@dataclass(frozen=True)
class Document:
    """One example; exactly one of `schema` and `regex` is set."""

    kind: str
    prompt: str
    answer: str
    schema: Schema | None = None
    regex: str | None = None

    def to_json(self) -> str:
        """Return the document as one line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)


def sample_document(rng: random.Random, split: Split = "train") -> Document:
    """Sample one document of the split; the same state of `rng` gives the same document."""
    draw = rng.random()
    if draw < 0.16:
        return _format_document(rng)
    if draw < 0.34:
        return _tool_document(rng, held=split == "heldout")
    while True:
        document = _record_document(rng, held=split == "heldout")
        if document is not None:
            return document


def combination_is_held(names: list[str]) -> bool:
    """Return whether this set of fields occurs in evaluation documents only."""
    return zlib.crc32(" ".join(sorted(names)).encode()) % _HELD_SHARE == 0


def _format_document(rng: random.Random) -> Document:
    kind = rng.choice(list(FORMATS))
    task = FORMATS[kind](rng)
    prompt = f"{task.text}\n\n{task.label}: "
    return Document(f"format_{kind}", prompt, task.answer, regex=task.regex)


def _tool_document(rng: random.Random, *, held: bool) -> Document:
    text, call, schema = sample_call(rng, held=held)
    return _finish(rng, "tool", text, call, schema)


def _record_document(rng: random.Random, *, held: bool) -> Document | None:
    kind = rng.choice(list(DOMAINS))
    domain = DOMAINS[kind]
    stated = rng.sample(domain.fields, rng.randint(2, min(8, len(domain.fields))))
    wanted = rng.sample(stated, rng.randint(1, min(6, len(stated))))
    if combination_is_held(wanted) != held:
        return None
    found = {name: _sample_value(rng, name, held=held) for name in stated}
    text = render(rng, domain, {name: (FIELDS[name], found[name]) for name in stated}, held=held)
    missing = [name for name in domain.fields if name not in stated]
    if missing and rng.random() < 0.15:
        absent = rng.choice(missing)
        found[absent] = _sample_value(rng, absent, held=held)._replace(json=None)
        wanted.insert(rng.randint(0, len(wanted)), absent)
    answer: dict[str, Any] = {}
    properties: dict[str, Schema] = {}
    for name in wanted:
        key, value = _key(rng, name, held=held), found[name]
        if key in answer:
            continue
        optional = value.json is None or rng.random() < 0.1
        answer[key] = value.json
        properties[key] = {"anyOf": [value.schema, {"type": "null"}]} if optional else value.schema
    if len(answer) >= 3 and rng.random() < 0.25:
        _nest(rng, answer, properties, held=held)
    return _finish(rng, kind, text, answer, object_schema(properties))


def _sample_value(rng: random.Random, name: str, *, held: bool) -> Value:
    if name == "items" and held and rng.random() < 0.5:
        return HELD_LINES(rng)
    return FIELDS[name].sample(rng)


def _key(rng: random.Random, name: str, *, held: bool) -> str:
    field = FIELDS[name]
    key = rng.choice(field.held_keys if held and rng.random() < 0.5 else field.keys)
    draw = rng.random()
    if draw < 0.06:
        return key.capitalize()
    if draw < 0.15:
        head, *tail = key.split("_")
        return head + "".join(part.capitalize() for part in tail)
    return key


def _nest(
    rng: random.Random, answer: dict[str, Any], properties: dict[str, Schema], *, held: bool
) -> None:
    """Move some of the answer's keys into a nested object, in place."""
    group = rng.choice(_HELD_GROUP_KEYS if held and rng.random() < 0.5 else _GROUP_KEYS)
    inner = rng.sample(list(answer), rng.randint(2, len(answer) - 1))
    if group in answer:
        return
    nested = {key: answer.pop(key) for key in inner}
    schema = object_schema({key: properties.pop(key) for key in inner})
    for target, value in ((answer, nested), (properties, schema)):
        rest = dict(target)
        target.clear()
        if len(inner) % 2:
            target.update({group: value, **rest})
        else:
            target.update({**rest, group: value})


def _finish(
    rng: random.Random, kind: str, text: str, answer: dict[str, Any], schema: Schema
) -> Document:
    hint = f"Fields: {describe_fields(schema)}\n" if rng.random() < 0.5 else ""
    prompt = f"{text}\n\n{hint}JSON: "
    return Document(kind, prompt, json.dumps(answer, ensure_ascii=False), schema=schema)


def describe_fields(schema: Schema) -> str:
    """Return the keys of an object schema as the prompt lists them."""
    parts = []
    for key, value in schema["properties"].items():
        inner = value.get("items", value) if isinstance(value, dict) else value
        nested = f" {{{describe_fields(inner)}}}" if "properties" in inner else ""
        parts.append(key + nested)
    return ", ".join(parts)
