"""Records from files, from datasets of the hub, and from presets of these."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pytest

from guided_spec.errors import ConfigError
from guided_spec.training.data.records import PRESETS, check_sources, read_example, read_lines

ROWS: dict[str, dict[str, Any]] = {
    "jsonschemabench": {"json_schema": '{"type": "string"}', "unique_id": "a"},
    "sharegpt": {
        "id": "a",
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}],
    },
    "ultrachat": {
        "prompt": "Hi",
        "prompt_id": "a",
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}],
    },
    "xlam": {
        "id": 1,
        "query": "Add 1 and 2.",
        "tools": '[{"name": "add", "description": "", "parameters": {"a": {"type": "int"}}}]',
        "answers": '[{"name": "add", "arguments": {"a": 1, "b": 2}}]',
    },
}


def test_lines_of_several_files(tmp_path: Path) -> None:
    # The second separator ends no line of JSON Lines, though str.splitlines thinks so.
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": "\u2028"}\n', encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"a": {"b": 3}}', encoding="utf-8")
    lines = list(read_lines([tmp_path / "a.jsonl", str(tmp_path / "b.jsonl")]))
    assert [line.source for line in lines] == ["a.jsonl:1", "a.jsonl:3", "b.jsonl:1"]
    assert [line.record["a"] for line in lines] == [1, "\u2028", {"b": 3}]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1}\n{', "a.jsonl:2': is not JSON"),
        (b"[]", "a.jsonl:1': must be a JSON object"),
        (b"\xff", "cannot be read"),
    ],
)
def test_broken_files(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        list(read_lines([path]))
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_lines([tmp_path / "absent.jsonl"]))


def test_a_parquet_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.parquet"
    rows = {"prompt": ["a", "b"], "response": ["c", None], "schema": [None, "{}"], "votes": [1, 2]}
    datasets.Dataset.from_dict(rows).to_parquet(path)
    with caplog.at_level(logging.WARNING):
        lines = list(read_lines([path]))
    assert "its columns votes are not read" in caplog.text
    assert [line.source for line in lines] == [f"{path}:1", f"{path}:2"]
    examples = [read_example(line.record) for line in lines]
    assert [(e.prompt, e.response, e.grammar is None) for e in examples] == [
        ("a", "c", True),
        ("b", None, False),
    ]
    path.write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="data=.*a.parquet.*cannot be read"):
        list(read_lines([path]))


@pytest.mark.parametrize(
    ("source", "split", "config"),
    [("org/name", "train", None), ("org/name:test", "test", None), ("org/n:test:en", "test", "en")],
)
def test_a_dataset_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, source: str, split: str, config: str | None
) -> None:
    asked: list[Any] = []

    def load(path: str, **arguments: Any) -> list[dict[str, Any]]:
        asked.append((path, arguments))
        return [{"prompt": "a", "answer": "b"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    check_sources([source])
    assert not asked  # nothing is fetched to see whether the name can be one
    assert [line.source for line in read_lines([source])] == [f"{source}:1"]
    name = source.partition(":")[0]
    assert asked == [(name, {"split": split, "name": config, "streaming": True})]


@pytest.mark.parametrize("name", PRESETS)
def test_presets(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """By rows with the columns of these datasets."""
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [ROWS[name]])
    (line,) = read_lines([name])
    example = read_example(line.record)
    assert (example.response is None) == (name == "jsonschemabench")
    assert (example.grammar is None) == (name in ("sharegpt", "ultrachat"))
    assert (example.tools is None) == (name != "xlam")
    if example.grammar is not None:
        schema = json.loads(example.grammar.source)
        assert schema["type"] == ("array" if name == "xlam" else "string")


@pytest.mark.parametrize("source", ["absent", "absent.jsonl", "a/absent.parquet", "/a/b", "a/b/c"])
def test_what_is_no_source(source: str) -> None:
    with pytest.raises(ConfigError, match="data=.*no such file, and it is no dataset org/name nor"):
        check_sources([source])
