"""JSON schemas with instances that are valid or not, read from files of three kinds."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from guided_spec.errors import ConfigError
from guided_spec.grammar.vocabulary import Vocabulary

_ENDINGS = (".json", ".jsonl", ".jsonl.gz")


class Instance(NamedTuple):
    """A JSON value, and whether its schema admits it."""

    data: Any
    valid: bool


class SchemaCase(NamedTuple):
    """One schema. id: unique within its split, which names the part of the corpus it is from."""

    id: str
    split: str
    schema: Any
    instances: tuple[Instance, ...]


def load_cases(paths: Sequence[Path], limit: int | None = None) -> list[SchemaCase]:
    """The cases of files and folders, at most ``limit`` of each split.

    - ``.jsonl`` and ``.jsonl.gz``: an object a line, with ``schema`` and ``tests``, a list of
      ``{"data": ..., "valid": ...}``; ``id`` and ``split`` where there are any. In place of
      ``tests`` one valid instance may stand under ``reference``.
    - ``.json``: the JSON-Schema-Test-Suite's, a list of groups with ``schema`` and ``tests``. The
      split is the folder's name.

    Folders are searched for all of these. Raises ConfigError for a file that cannot be read and
    where there is no case at all.
    """
    cases: list[SchemaCase] = []
    taken: dict[str, int] = {}
    for path in paths:
        for file in _files(path):
            for case in _read(file):
                taken[case.split] = taken.get(case.split, 0) + 1
                if limit is None or taken[case.split] <= limit:
                    cases.append(case)
    if not cases:
        raise ConfigError("paths", [str(path) for path in paths], "hold no schemas with tests")
    return cases


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(_ENDINGS))


def _read(path: Path) -> Iterator[SchemaCase]:
    try:
        if path.suffix == ".json":
            yield from _read_suite(path)
        else:
            yield from _read_lines(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("paths", str(path), f"cannot be read: {error!r}") from error


def _read_suite(path: Path) -> Iterator[SchemaCase]:
    groups = json.loads(path.read_text(encoding="utf-8"))
    for index, group in enumerate(groups):
        yield SchemaCase(
            f"{path.stem}/{index}", path.parent.name, group["schema"], _instances(group["tests"])
        )


def _read_lines(path: Path) -> Iterator[SchemaCase]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    name = path.name.partition(".")[0]
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        record = json.loads(line)
        tests = record.get("tests", [])
        if "reference" in record:
            tests = [*tests, {"data": record["reference"], "valid": True}]
        yield SchemaCase(
            str(record.get("id", number)),
            record.get("split", name),
            record["schema"],
            _instances(tests),
        )


def _instances(tests: list[dict[str, Any]]) -> tuple[Instance, ...]:
    return tuple(Instance(test["data"], test["valid"]) for test in tests)


def padded_vocabulary(tokenizer: Any) -> Vocabulary:
    """Of a loaded tokenizer, as many tokens as a model's logits have: a multiple of 128."""
    size = -(-len(tokenizer) // 128) * 128
    return Vocabulary.from_tokenizer(tokenizer, size, [tokenizer.eos_token_id])
