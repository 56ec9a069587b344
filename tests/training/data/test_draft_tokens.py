"""Which tokens a smaller vocabulary holds."""

from __future__ import annotations

from collections import Counter
from itertools import compress
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.errors import ConfigError
from guided_spec.grammar.protocol import legal_row
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.ops.bitmask import translate_bitmask
from guided_spec.training.data import corpus
from guided_spec.training.data.batches import GrammarMasks
from guided_spec.training.data.corpus import (
    count_tokens,
    forced_tokens,
    select_draft_vocabulary,
)
from guided_spec.training.data.dataset import load_examples, write_grammar_text
from tests.masks.walks import BYTES, EOS
from tests.training.data.test_grammar_masks import rows_of

COUNTS = st.lists(st.integers(0, 4), min_size=1, max_size=40)


def one_row(text: bytes, grammar: GrammarSpec | None) -> dict[str, list[Any]]:
    return {
        "input_ids": [[7, *text]],
        "response_start": [1],
        "grammar": [write_grammar_text(grammar)],
    }


def test_tokens_of_answers_are_counted(heldout: Path, tokenizer: Any) -> None:
    dataset = load_examples([heldout], tokenizer, stop_ids=[0], max_length=512, limit=30)
    dataset = dataset.select([4, 2, 20])
    expected = Counter(
        token for row in dataset for token in compress(row["input_ids"], row["loss_mask"])
    )
    counts = count_tokens(dataset, 4096)
    assert counts.dtype == torch.int64
    assert {token: int(counts[token]) for token in counts.nonzero().flatten().tolist()} == expected
    assert counts[0] == 3  # every answer ends
    with pytest.raises(ConfigError, match="vocab_size=16: the data holds token"):
        count_tokens(dataset, 16)


def test_forced_tokens_of_answers_and_of_walks() -> None:
    grammar = GrammarSpec.regex("a(b|cd)e?")
    dataset = datasets.Dataset.from_dict(one_row(b"ab", grammar))
    masks = GrammarMasks(BYTES)
    assert forced_tokens(dataset, masks, limit=1, walks=0, seed=0) == {ord("a")}
    found = forced_tokens(dataset, masks, limit=1, walks=20, seed=0)
    assert found == {ord("a"), ord("d"), EOS}
    assert forced_tokens(dataset, masks, limit=0, walks=20, seed=0) == set()
    free = datasets.Dataset.from_dict(one_row(b"ab", None))
    assert forced_tokens(free, masks, limit=5, walks=5, seed=0) == set()
    broken = datasets.Dataset.from_dict(one_row(b"x", grammar))
    assert forced_tokens(broken, masks, limit=5, walks=0, seed=0) == set()
    assert ord("a") in forced_tokens(broken, masks, limit=5, walks=1, seed=0)


def test_no_more_positions_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many grammars there are; each is looked at before any is looked at again."""
    looked = list[int]()

    def counting(matcher: Any, size: int) -> Any:
        looked.append(id(matcher))
        return legal_row(matcher, size)

    monkeypatch.setattr(corpus, "legal_row", counting)
    texts = [one_row(b"xyz", GrammarSpec.regex(f"xyz{letter}w*")) for letter in "abcdefgh"]
    rows = {key: [text[key][0] for text in texts] for key in texts[0]}
    dataset, masks = datasets.Dataset.from_dict(rows), GrammarMasks(BYTES)
    every = forced_tokens(dataset, masks, limit=8, walks=1, seed=0)
    assert every == {*b"xyzabcdefgh"}
    looked.clear()
    few = forced_tokens(dataset, masks, limit=8, walks=1000, seed=0, most=60)
    assert len(looked) < 60 + 256
    assert few >= every - {*b"efgh"}
    # Two responses of three tokens, and the random text of one grammar.
    assert not forced_tokens(dataset, masks, limit=8, walks=5, seed=0, most=4) & {*b"defgh"}


def test_forced_tokens_of_documents(heldout: Path, tokenizer: Any, vocabulary: Vocabulary) -> None:
    """A draft vocabulary that holds them is never without a legal token along the answers."""
    dataset = load_examples([heldout], tokenizer, stop_ids=[0], max_length=512, limit=20)
    masks = GrammarMasks(vocabulary)
    forced = forced_tokens(dataset, masks, limit=20, walks=2, seed=0)
    assert forced == forced_tokens(dataset, masks, limit=20, walks=2, seed=0)
    assert 0 in forced
    selected = select_draft_vocabulary(count_tokens(dataset, 4096), len(forced) + 8, forced)
    for row in dataset:
        rows = rows_of(masks, row["input_ids"], int(row["response_start"]), row["grammar"])
        assert rows is not None
        full = torch.from_numpy(rows)
        single = torch.tensor([sum(int(w).bit_count() for w in r.view("u4")) == 1 for r in rows])
        reduced = translate_bitmask(full, selected.target_ids)
        assert reduced is not None
        assert (reduced[single] != 0).any(-1).all()


@given(COUNTS, st.data())
def test_the_most_frequent_are_selected(counts: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(counts)))
    keep = data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=size))
    vocabulary = select_draft_vocabulary(torch.tensor(counts), size, keep)
    ids = vocabulary.target_ids.tolist()
    assert ids == sorted({*ids})
    assert len(ids) == size
    assert keep <= {*ids}
    others = sorted({*range(len(counts))} - keep, key=lambda token: (-counts[token], token))
    assert {*ids} == keep | {*others[: size - len(keep)]}
    d2t, t2d = vocabulary.tensors().values()
    assert (d2t.dtype, t2d.dtype) == (torch.int64, torch.bool)
    again = DraftVocabulary.from_offsets(d2t, vocabulary.target_size, "test")
    assert torch.equal(again.target_ids, vocabulary.target_ids)
    assert t2d.nonzero().flatten().tolist() == ids
    assert len(t2d) == len(counts)


@pytest.mark.parametrize(
    ("size", "keep", "message"),
    [
        (2, {1, 2, 3}, "size=2: must be at least 3"),
        (0, set(), "size=0: must be between 1"),
        (6, set(), "vocabulary's 5"),
        (2, {5}, "keep=.5, 5.: must be tokens"),
        (2, {-1}, "keep"),
    ],
)
def test_sizes_that_cannot_be(size: int, keep: set[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select_draft_vocabulary(torch.ones(5, dtype=torch.int64), size, keep)
