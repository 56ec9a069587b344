"""Where training records come from: JSON Lines, Parquet, datasets of the hub, and presets."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from guided_spec.errors import ConfigError
from guided_spec.training.data.records import RECORD_KEYS

__all__ = ["PRESETS", "Line", "Preset", "check_sources", "read_lines", "require_datasets"]

logger = logging.getLogger(__name__)

Record = dict[str, Any]


class Line(NamedTuple):
    """One record. place: ``name:number``, for messages."""

    place: str
    record: Record


class Preset(NamedTuple):
    """A dataset of the hub, and how one of its rows is read as a record."""

    dataset: str
    split: str
    convert: Callable[[Mapping[str, Any]], Record]


def _chat_of(name: str) -> Callable[[Mapping[str, Any]], Record]:
    return lambda row: {name: row[name]}


def _tool_calls(row: Mapping[str, Any]) -> Record:
    """Of xLAM: calls as a JSON list, of the tools that were offered."""
    tools = json.loads(row["tools"])
    call = {
        "type": "object",
        "properties": {
            "name": {"enum": [tool["name"] for tool in tools]},
            "arguments": {"type": "object"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    return {
        "messages": [{"role": "user", "content": row["query"]}],
        "tools": [{"type": "function", "function": tool} for tool in tools],
        "response": row["answers"],
        "schema": {"type": "array", "items": call},
    }


def _document(row: Mapping[str, Any]) -> Record:
    """Of JSONSchemaBench: schemas alone, so that the target has to write the answers."""
    prompt = f"Write a JSON document that satisfies this schema:\n{row['json_schema']}\n"
    message = {"role": "user", "content": prompt}
    return {"messages": [message], "schema": json.loads(row["json_schema"])}


PRESETS = {
    "jsonschemabench": Preset("epfl-dlab/JSONSchemaBench", "train", _document),
    "sharegpt": Preset("Aeala/ShareGPT_Vicuna_unfiltered", "train", _chat_of("conversations")),
    "ultrachat": Preset("HuggingFaceH4/ultrachat_200k", "train_sft", _chat_of("messages")),
    "xlam": Preset("Salesforce/xlam-function-calling-60k", "train", _tool_calls),
}
HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<split>[^:]+))?(:(?P<config>[^:]+))?")
LINES = (".json", ".jsonl")
PARQUET = ".parquet"


def check_sources(sources: Sequence[str | Path]) -> None:
    """Raise ConfigError for a source that is no file, no preset and no name of a dataset."""
    for source in sources:
        _reader(source)


def read_lines(sources: Sequence[str | Path]) -> Iterator[Line]:
    """Every record of the sources, in order, read as they are asked for.

    A source is a file of JSON Lines, whose blank lines are skipped, a Parquet file, a dataset of
    the hub (``org/name``, ``org/name:split`` or ``org/name:split:config``; the split is "train" by
    default), or one of ``PRESETS``. What else a Parquet file or a dataset holds beside
    ``RECORD_KEYS`` is left out, and a warning names it.

    Raises ConfigError naming the source, or file and line, where one cannot be read.
    """
    for source in sources:
        yield from _reader(source)()


def require_datasets() -> Any:
    """The library ``datasets``. Raises ConfigError where it is not installed."""
    if importlib.util.find_spec("datasets") is None:
        fix = "reading it needs the datasets library: pip install 'guided-spec[train]'"
        raise ConfigError("data", "training data", fix)
    import datasets

    return datasets


def _reader(source: str | Path) -> Callable[[], Iterator[Line]]:
    path, name = Path(source), str(source)
    if path.suffix == PARQUET and path.is_file():
        return lambda: _read_rows(name, "parquet", data_files=name, split="train")
    if path.is_file():
        return lambda: _read_file(path)
    if name in PRESETS:
        preset = PRESETS[name]
        return lambda: _read_rows(name, preset.dataset, preset.convert, split=preset.split)
    found = HUB.fullmatch(name)
    if found is None or path.suffix in (*LINES, PARQUET):
        known = ", ".join(PRESETS)
        fix = f"cannot be read: there is no such file, and it is no dataset org/name nor {known}"
        raise ConfigError("data", name, fix)
    dataset, config = found["name"], found["config"]
    return lambda: _read_rows(name, dataset, split=found["split"] or "train", name=config)


def _read_file(path: Path) -> Iterator[Line]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    place = f"{path.name}:{number}"
                    yield Line(place, _read_object(text, place))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("data", str(path), f"cannot be read: {error}") from error


def _read_rows(
    source: str,
    dataset: str,
    convert: Callable[[Mapping[str, Any]], Record] | None = None,
    **arguments: Any,
) -> Iterator[Line]:
    """arguments: of ``load_dataset``."""
    library = require_datasets()
    try:
        rows = iter(library.load_dataset(dataset, streaming=True, **arguments))
        first = next(rows, None)
    except Exception as error:  # the library raises nearly every class of exception here
        raise ConfigError("data", source, f"cannot be read: {error}") from error
    if first is None:
        return
    unread = sorted(set(first) - RECORD_KEYS) if convert is None else []
    if unread:
        logger.warning("data=%r: its columns %s are not read", source, ", ".join(unread))
    number = 0
    while first is not None:
        number += 1
        known = {key: value for key, value in first.items() if key not in unread}
        yield Line(f"{source}:{number}", known if convert is None else convert(first))
        first = next(rows, None)


def _read_object(text: str, place: str) -> Record:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError("data", place, f"is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError("data", place, "must be a JSON object")
    return record
