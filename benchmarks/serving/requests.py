"""What clients ask for: the data sets of vLLM's ``benchmark_serving_structured_output``, and ours.

Prompts and schemas are our own, of the same kinds and shapes.
"""

from __future__ import annotations

import itertools
import json
import random
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from guided_spec.bundled import bundled_asset
from guided_spec.errors import ConfigError
from guided_spec.evaluate.measurement import (
    TASKS,
    WorkItem,
    is_valid,
    load_tasks,
    load_workload,
)
from guided_spec.grammar.spec import GrammarSpec

_EVALUATION = "NousResearch/json-mode-eval"  # what vLLM calls xgrammar_bench

_FIELDS = ("name", "city", "occupation", "company", "email", "biography")
_SCHEMA: Mapping[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {**dict.fromkeys(_FIELDS, {"type": "string"}), "age": {"type": "integer"}},
        "required": [*_FIELDS, "age"],
    },
}
_QUERY = """
root ::= "SELECT " column " FROM " table " WHERE " column " = " number
column ::= "name" | "email"
table ::= "users" | "orders"
number ::= [1-9] [0-9]? [0-9]?
"""
_COLUMN = "(name|email)"
_SAME_QUERY = f"SELECT {_COLUMN} FROM (users|orders) WHERE {_COLUMN} = [1-9][0-9]?[0-9]?"


class Request(NamedTuple):
    """prompt: text, or the messages of a chat.

    grammar: of the answer; None for free text. judge: the same language as a kind that can be
    judged without it; None for an answer that is not judged.
    """

    prompt: Any
    grammar: GrammarSpec | None
    judge: GrammarSpec | None

    def is_correct(self, text: str) -> bool | None:
        """Whether a text is all of what was asked for; None for free text."""
        return None if self.judge is None else is_valid(text, self.judge)


class Asked(NamedTuple):
    """A data set, and how its requests are made.

    name: one of ``DATASETS``, or a workload's file. part: of the command's number of requests.
    share: of them that keep their grammar. tokens: of an answer at most.
    """

    name: str
    part: float = 1.0
    share: float = 1.0
    tokens: int = 128
    temperature: float = 0.0


_READ: Mapping[str, Callable[[str], Any]] = {
    "part": float,
    "share": float,
    "tokens": int,
    "temperature": float,
}


def read_datasets(text: str, default: Asked) -> dict[str, Asked]:
    """``NAME:KEY=VALUE:...,...``, each by its own text; the rest of it is ``default``'s.

    Raises ConfigError for another key, or a value that is no number.
    """
    return {one: _read_dataset(one, default) for one in text.split(",")}


def _read_dataset(text: str, default: Asked) -> Asked:
    name, *settings = text.split(":")
    found = dict[str, Any]()
    for setting in settings:
        key, _, value = setting.partition("=")
        try:
            found[key] = _READ[key](value)
        except (KeyError, ValueError) as error:
            fix = f"must be NAME:KEY=NUMBER, with KEY of {', '.join(_READ)}"
            raise ConfigError("datasets", text, fix) from error
    return default._replace(name=name, **found)


def make_requests(dataset: str, count: int, constrained_share: float, seed: int) -> list[Request]:
    """``count`` requests of a data set, which starts over where it is shorter.

    dataset: one of ``DATASETS``, or a workload's file, as ``guided-spec bench`` takes it.
    constrained_share: of the requests, drawn by ``seed``, keep their grammar.

    Raises ConfigError for another data set, or a share that is none.
    """
    if not 0.0 <= constrained_share <= 1.0:
        raise ConfigError("share", constrained_share, "must be from 0 to 1")
    if dataset in DATASETS:
        made = DATASETS[dataset](count)
    elif Path(dataset).is_file():
        made = [_of_item(item) for item in load_workload(Path(dataset), count)]
    else:
        fix = f"must be one of {', '.join(DATASETS)}, or a workload's file"
        raise ConfigError("datasets", dataset, fix)
    kept = set(random.Random(seed).sample(range(count), int(count * constrained_share)))
    requests = [made[at % len(made)] for at in range(count)]
    return [
        request if at in kept else request._replace(grammar=None, judge=None)
        for at, request in enumerate(requests)
    ]


def _of_item(item: WorkItem) -> Request:
    return Request(item.prompt, item.grammar, item.grammar)


def _documents(count: int) -> list[Request]:
    return [_of_item(item) for item in load_workload(Path(bundled_asset("heldout.jsonl")), count)]


def _noted_documents(count: int, name: Callable[[int], str]) -> list[Request]:
    """Each schema with an optional property of its own. name: of the i-th one."""
    found = list[Request]()
    items = load_workload(Path(bundled_asset("heldout.jsonl")))
    for item in itertools.cycle(items):
        if len(found) == count:
            return found
        schema = _schema_of(item.grammar)
        if "properties" in schema:
            schema["properties"][f"note_{name(len(found))}"] = {"type": "string"}
            grammar = GrammarSpec.json_schema(schema)
            found.append(Request(item.prompt, grammar, grammar))
    return found


def _unique_documents(count: int) -> list[Request]:
    """Schemas that nobody has compiled before."""
    return _noted_documents(count, lambda _at: uuid.uuid4().hex)


def _known_documents(count: int) -> list[Request]:
    """The same in each run: what ``_unique_documents`` costs from the second run on."""
    return _noted_documents(count, lambda at: uuid.uuid5(uuid.NAMESPACE_OID, str(at)).hex)


def _schema_of(grammar: GrammarSpec | None) -> dict[str, Any]:
    if grammar is None or grammar.kind != "json_schema":
        return {}
    schema: dict[str, Any] = json.loads(grammar.source)
    return schema


def _tasks(names: tuple[str, ...], count: int) -> list[Request]:
    """By turns of each task, so that any number of them has all."""
    rows = [[_of_item(item) for item in load_tasks([name], count)] for name in names]
    return [row[at % len(row)] for at in range(max(map(len, rows))) for row in rows]


def _profile(schema: Mapping[str, Any]) -> Request:
    prompt = f"Write one short user profile that follows this JSON schema: {json.dumps(schema)}\n"
    grammar = GrammarSpec.json_schema(dict(schema))
    return Request(prompt, grammar, grammar)


def _unique_profile() -> Request:
    """With an optional property of its own, so that nobody has compiled the schema before."""
    items = _SCHEMA["items"]
    own = {f"note_{uuid.uuid4().hex}": {"type": "string"}}
    properties = {**items["properties"], **own}
    return _profile({**_SCHEMA, "items": {**items, "properties": properties}})


def _regex(_count: int) -> list[Request]:
    grammar = GrammarSpec.regex(r"\w+@\w+\.com\n")
    prompt = "Write an email address for Maria Lopez, who works at Acme, such as mlopez@acme.com\n"
    return [Request(prompt, grammar, grammar)]


def _choice(_count: int) -> list[Request]:
    grammar = GrammarSpec.choice(["Positive", "Negative"])
    return [Request("Classify this sentiment: the train was on time!\n", grammar, grammar)]


def _grammar(_count: int) -> list[Request]:
    prompt = "Write an SQL query for the name of the user with the number 7.\n"
    return [Request(prompt, GrammarSpec.ebnf(_QUERY), GrammarSpec.regex(_SAME_QUERY))]


def _evaluation(count: int) -> list[Request]:
    """Chats, each with its schema; from the hub, or from where ``datasets`` keeps it."""
    import datasets

    rows = datasets.load_dataset(_EVALUATION, split="train")
    found = []
    for row in rows.select(range(min(count, len(rows)))):
        grammar = GrammarSpec.json_schema(json.loads(row["schema"]))
        found.append(Request(row["prompt"], grammar, grammar))
    return found


DATASETS: Mapping[str, Callable[[int], list[Request]]] = {
    "documents": _documents,
    "documents-known": _known_documents,
    "documents-unique": _unique_documents,
    "json": lambda _count: [_profile(_SCHEMA)],
    "json-unique": lambda count: [_unique_profile() for _ in range(count)],
    "grammar": _grammar,
    "regex": _regex,
    "choice": _choice,
    "xgrammar_bench": _evaluation,
    "tasks": partial(_tasks, TASKS),
    **{task: partial(_tasks, (task,)) for task in TASKS},
}
"""By name: what makes up to so many requests."""
