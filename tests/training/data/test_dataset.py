"""Files as a dataset: what is in it, what is left out, and its two parts."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.errors import ConfigError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.training.data import dataset as dataset_module
from guided_spec.training.data.dataset import (
    encode_record,
    load_examples,
    read_grammar_text,
    split_heldout,
    write_grammar_text,
)

COLUMNS = ["input_ids", "loss_mask", "seq_len", "response_start", "grammar", "index", "pictures"]


def load(paths: list[Path], tokenizer: Any, max_length: int = 2048, **options: Any) -> Any:
    return load_examples(paths, tokenizer, stop_ids=[0], max_length=max_length, **options)


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_held_out_documents(
    heldout: Path,
    records: list[dict[str, Any]],
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Schemas of any shape side by side, over the border of a chunk, nothing lost, no warning."""
    monkeypatch.setattr(dataset_module, "CHUNK", 16)
    dataset = load([heldout], tokenizer, limit=40)
    assert dataset.column_names == COLUMNS
    assert len(dataset) == 40
    assert dataset.features["input_ids"].feature.dtype == "int64"
    for number, (row, record) in enumerate(zip(dataset, records, strict=False)):
        encoded = encode_record(record, tokenizer, [0])
        assert row["input_ids"].tolist() == encoded.input_ids
        assert row["loss_mask"].tolist() == encoded.loss_mask
        assert row["seq_len"] == len(encoded.input_ids)
        assert row["response_start"] == encoded.response_start
        assert read_grammar_text(row["grammar"]) == encoded.grammar
        assert row["index"] == number
    assert not caplog.records


def test_what_is_left_out_is_told(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    records: list[dict[str, Any]] = [
        {"prompt": "a", "response": "b"},
        {"prompt": "a"},
        {"prompt": "a", "response": "b " * 50},
        {"text": "one, two, three", "schema": {"type": "object", "properties": {"a": {}}}},
        {"text": "four", "schema": {"const": 4}},
    ]
    path = write(tmp_path / "data.jsonl", records)
    with caplog.at_level(logging.WARNING):
        dataset = load([path, path], tokenizer, 12)
    assert list(dataset["index"]) == [0, 3, 4, 5, 8, 9]  # files of hidden states have these numbers
    (warning,) = caplog.messages
    assert warning == ("left out 4 of 10 documents: 2 longer than 12 tokens, 2 without a response")
    assert len(load([path], tokenizer, 12, limit=2)) == 2


def test_tokens_are_taken_as_they_are(tmp_path: Path, tokenizer: Any) -> None:
    """A folder as speculators prepares it, whose rows are tensors, and labels in JSON Lines."""
    import datasets

    ids, mask = [5, 6, 7, 0, 9, 10, 11, 12, 0, 13], [1, 0, 1, 1, 1, 0, 0, 1, 1, 1]
    rows = {"input_ids": [[5, 6], ids], "loss_mask": [[0, 0], mask], "seq_len": [2, 10]}
    folder = tmp_path / "prepared"
    datasets.Dataset.from_dict(rows).with_format("torch").save_to_disk(folder)
    labels = [token if trained else -100 for token, trained in zip(ids, mask, strict=True)]
    record = {"input_ids": ids, "labels": labels, "schema": {"const": 1}}
    lines = write(tmp_path / "data.jsonl", [record])
    dataset = load([folder, lines], tokenizer)
    assert list(dataset["index"]) == [1, 2]  # the first row has no answer
    for row in dataset:
        assert (
            row["input_ids"].tolist() == ids[:9]
        )  # token 0 ends a text: nothing is said behind it
        assert row["loss_mask"].tolist() == [bool(at in (2, 3, 7, 8)) for at in range(9)]
        assert row["response_start"] == 7
    assert [bool(text) for text in dataset["grammar"]] == [False, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": [-100, 6]}, "need one of loss_mask and labels"),
        ({"loss_mask": None}, "need one of loss_mask and labels"),
        ({"loss_mask": [1]}, "a number for each of the 2 input_ids"),
        ({"loss_mask": None, "labels": [6, -100]}, "labels=6: must be the tokens of input_ids"),
        ({"input_ids": [5, 10**6]}, "holds token 1000000, and the target's tokenizer has"),
        ({"input_ids": "56"}, "must be a list of whole numbers"),
        ({"attention_mask": [1, 1]}, "attention_mask=.*is unknown"),
    ],
)
def test_tokens_that_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path, tokenizer: Any
) -> None:
    record = {"input_ids": [5, 6], "loss_mask": [0, 1], **changes}
    with pytest.raises(ConfigError, match=rf"data.jsonl:1.*{message}"):
        load([write(tmp_path / "data.jsonl", [record])], tokenizer)


def test_errors(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "data.jsonl", [{"prompt": "a", "response": "b c d"}, {"prompt": 3}])
    with pytest.raises(ConfigError, match=r"data='data.jsonl:2': prompt=3: must be"):
        load([path], tokenizer)
    with pytest.raises(ConfigError, match=r"no document.*1 longer than 2 tokens, 0 without.*raise"):
        load([write(path, [{"prompt": "a", "response": "b c d"}])], tokenizer, 2)
    with pytest.raises(ConfigError, match=r"no document"):
        load([], tokenizer)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'guided-spec\[train\]'"):
        load([path], tokenizer)


@given(st.floats(0, 0.99), st.integers(0, 5), st.integers(2, 30))
def test_the_two_parts(share: float, seed: int, total: int) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"index": list(range(total))})
    apart = 0 if share == 0 else max(1, round(share * total))
    if apart == total:
        with pytest.raises(ConfigError, match="nothing to train on"):
            split_heldout(rows, share, seed)
        return
    train, heldout = split_heldout(rows, share, seed)
    again = split_heldout(rows, share, seed)
    assert list(heldout["index"]) == list(again.heldout["index"])
    assert len(heldout) == apart
    for part in (train, heldout):
        assert list(part["index"]) == sorted(part["index"])
    assert sorted([*train["index"], *heldout["index"]]) == list(range(total))


def test_the_seed_decides_who_is_held_out() -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"index": np.arange(50)})
    first, second = (tuple(split_heldout(rows, 0.2, seed).heldout["index"]) for seed in (0, 1))
    assert first != second
    with pytest.raises(ConfigError, match="share=1"):
        split_heldout(rows, 1.0, 0)


@pytest.mark.parametrize(
    "grammar",
    [
        None,
        GrammarSpec.json_schema({"const": "ü"}, any_whitespace=True),
        GrammarSpec.json_schema({"type": "object"}, unsupported="rewrite", key_order="any"),
        GrammarSpec.ebnf('word ::= "a"', root="word").after("</think>", reasoning_budget=9),
        GrammarSpec.regex("a").after((5, 7)).with_backend("llguidance"),
        GrammarSpec.regex('"[a-z]"\n'),
        GrammarSpec.choice(["a", "b"]),
    ],
)
def test_grammars_as_text(grammar: GrammarSpec | None) -> None:
    text = write_grammar_text(grammar)
    assert "\n" not in text
    assert read_grammar_text(text) == grammar
