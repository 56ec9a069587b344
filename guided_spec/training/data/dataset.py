"""Documents ready to train on, as a ``datasets.Dataset``.

The columns ``input_ids``, ``loss_mask`` and ``seq_len`` are named as in the prepared datasets of
speculators.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from guided_spec.errors import ConfigError, GuidedSpecError
from guided_spec.grammar.spec import GrammarSpec, Start
from guided_spec.training.data.records import read_lines
from guided_spec.training.data.segments import Encoded, encode_record

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["Split", "load_examples", "read_grammar_text", "split_heldout", "write_grammar_text"]

logger = logging.getLogger(__name__)

CHUNK = 4096  # documents that are Python lists at a time; the others are Arrow's


class Split(NamedTuple):
    """A dataset in two. heldout: documents that are not trained on; it may be empty."""

    train: Dataset
    heldout: Dataset


def load_examples(
    paths: Sequence[str | Path],
    tokenizer: Any,
    *,
    stop_ids: Sequence[int],
    max_length: int,
    limit: int | None = None,
) -> Dataset:
    """Read and tokenize JSON Lines files; everything stays in memory.

    max_length: tokens that a document may have; longer ones, and those without an answer, are left
        out, and a warning tells how many. limit: documents at most.

    Columns: ``input_ids`` int64 [T]; ``loss_mask`` bool [T], see ``Encoded``; ``seq_len`` T;
    ``answer_start``; ``grammar``, a text for ``read_grammar_text``, "" for none; ``index``, the
    row's number, which selecting and shuffling keep. Rows hold numpy arrays.

    Raises ConfigError naming file and line for a record that cannot be used, and where no document
    is left or ``datasets`` is not installed.
    """
    library = _require_datasets()
    chunks: list[Any] = []
    rows: list[dict[str, Any]] = []
    kept = too_long = unanswered = 0
    for encoded in _encode_all(paths, tokenizer, stop_ids):
        if kept == limit:
            break
        if not any(encoded.loss_mask):
            unanswered += 1
        elif len(encoded.input_ids) > max_length:
            too_long += 1
        else:
            rows.append(_row(encoded, kept))
            kept += 1
            if len(rows) == CHUNK:
                chunks.append(_chunk(library, rows))
                rows = []
    left_out = f"{too_long} longer than {max_length} tokens, {unanswered} without an answer"
    if not kept:
        fix = f"no document to train on ({left_out}): pass other files, or raise max_length"
        raise ConfigError("data", [str(path) for path in paths], fix)
    if too_long or unanswered:
        total = kept + too_long + unanswered
        logger.warning("left out %d of %d documents: %s", total - kept, total, left_out)
    if rows:
        chunks.append(_chunk(library, rows))
    dataset: Dataset = library.concatenate_datasets(chunks).with_format("numpy")
    return dataset


def split_heldout(dataset: Dataset, share: float, seed: int) -> Split:
    """Keep ``share`` of the documents, in [0, 1), apart; a function of ``seed`` and their number.

    At least one is kept apart unless ``share`` is 0, and at least one is left to train on; both
    parts keep the order. Raises ConfigError where that cannot be.
    """
    if not 0 <= share < 1:
        raise ConfigError("share", share, "must be at least 0 and below 1")
    total = len(dataset)
    apart = max(1, round(share * total)) if share else 0
    if apart >= total:
        raise ConfigError("share", share, f"leaves nothing to train on of {total} documents")
    order = np.random.default_rng(seed).permutation(total)
    train, heldout = (sorted(part.tolist()) for part in (order[apart:], order[:apart]))
    return Split(dataset.select(train), dataset.select(heldout))


def write_grammar_text(grammar: GrammarSpec | None) -> str:
    """A grammar as one line of JSON, for a column of text; "" for None."""
    return "" if grammar is None else json.dumps(asdict(grammar), ensure_ascii=False)


def read_grammar_text(text: str) -> GrammarSpec | None:
    """The inverse of ``write_grammar_text``."""
    if not text:
        return None
    fields = json.loads(text)
    start = fields.pop("start")
    return GrammarSpec(**fields, start=None if start is None else Start(**start))


def _encode_all(
    paths: Sequence[str | Path], tokenizer: Any, stop_ids: Sequence[int]
) -> Iterator[Encoded]:
    for place, record in read_lines(paths):
        try:
            yield encode_record(record, tokenizer, stop_ids)
        except GuidedSpecError as error:
            raise ConfigError("data", place, str(error)) from error


def _row(encoded: Encoded, index: int) -> dict[str, Any]:
    return {
        "input_ids": encoded.input_ids,
        "loss_mask": encoded.loss_mask,
        "seq_len": len(encoded.input_ids),
        "answer_start": encoded.answer_start,
        "grammar": write_grammar_text(encoded.grammar),
        "index": index,
    }


def _chunk(library: Any, rows: list[dict[str, Any]]) -> Any:
    number = library.Value("int64")
    features = library.Features(
        input_ids=library.List(number),
        loss_mask=library.List(library.Value("bool")),
        seq_len=number,
        answer_start=number,
        grammar=library.Value("string"),
        index=number,
    )
    columns = {name: [row[name] for row in rows] for name in features}
    return library.Dataset.from_dict(columns, features=features)


def _require_datasets() -> Any:
    if importlib.util.find_spec("datasets") is None:
        fix = "reading them needs the datasets library: pip install 'guided-spec[train]'"
        raise ConfigError("data", "JSON Lines files", fix)
    import datasets

    return datasets
