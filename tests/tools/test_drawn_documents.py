"""Drawn documents: what they say is what is printed, and a model learns from them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from guided_spec.bundled import bundled_asset
from tools.bundled_models.evaluate import leaves
from tools.drawn_documents.corpus import PICTURE, WIDTH, CorpusConfig, batches
from tools.drawn_documents.document import KINDS, sample_document
from tools.drawn_documents.evaluate import Score, heldout_documents
from tools.drawn_documents.model import make_tokenizer
from tools.drawn_documents.page import CELL, CELLS, CHARACTERS, SIDE, DoesNotFit, Page

TOKENIZER = bundled_asset("reader")


def printed(page: Page) -> str:
    """All characters of a page, line by line."""
    inks = sorted(page.inks, key=lambda ink: (ink.y, ink.x))
    return "".join(ink.character for ink in inks)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_fit_their_schemas_and_stand_on_the_page(kind: str) -> None:
    rng = random.Random(kind)
    strings, copied = 0, 0
    for _ in range(20):
        document = sample_document(rng, kind)
        jsonschema.validate(document.answer, document.schema)
        assert json.loads(document.text) == document.answer
        for value in leaves(document.answer).values():
            strings += isinstance(value, str)
            copied += isinstance(value, str) and value.replace(" ", "") in printed(document.page)
    assert strings / 2 < copied < strings  # others are dates, and options by other names


def test_the_same_seed_draws_the_same() -> None:
    first, second = (sample_document(random.Random(7)) for _ in range(2))
    assert first.text == second.text
    assert first.page.image.tobytes() == second.page.image.tobytes()


def test_labels_name_what_a_cell_shows() -> None:
    page = Page()
    page.text(CELL + 1, 2 * CELL + 2, "A", 12)
    page.text(SIDE - 4, 5 * CELL + 2, "zz", 12, "r")
    labels = page.labels()
    assert labels.shape == (CELLS * CELLS, 4)
    assert CHARACTERS[labels[2 * CELLS + 1, 0] - 1] == "A"
    row = labels[5 * CELLS : 6 * CELLS]
    assert [CHARACTERS[n - 1] for n in row[row > 0]] == ["z", "z"]
    assert np.count_nonzero(labels) == 3


@pytest.mark.parametrize(("x", "y"), [(250, 10), (10, 250), (-3, 10)])
def test_what_leaves_the_page_is_not_drawn(x: float, y: float) -> None:
    page = Page()
    with pytest.raises(DoesNotFit):
        page.text(x, y, "wide", 14)
    assert not page.inks
    assert set(page.image.tobytes()) == {255}


def test_a_batch_holds_pictures_questions_and_answers() -> None:
    (batch,) = batches(CorpusConfig(f"{TOKENIZER}/tokenizer.json", rows=6), 1)
    assert batch.pages.shape == (6, SIDE, SIDE)
    assert batch.ids.shape == (6, WIDTH)
    tokenizer = Tokenizer.from_file(f"{TOKENIZER}/tokenizer.json")
    image = tokenizer.token_to_id("<image>")
    for ids, answered in zip(batch.ids, batch.answered, strict=True):
        assert np.count_nonzero(ids == image) == PICTURE
        text = tokenizer.decode(ids[answered].tolist(), skip_special_tokens=True)
        assert isinstance(json.loads(text), dict)


def test_the_tokens_of_a_picture_are_added_to_the_pairs() -> None:
    own, pair = (make_tokenizer(bundled_asset("target")), Tokenizer.from_file)
    vocabulary = pair(f"{bundled_asset('target')}/tokenizer.json").get_vocab()
    assert {name: own.get_vocab()[name] for name in vocabulary} == vocabulary


def test_a_score_counts_values_and_pages() -> None:
    document, other = heldout_documents(2)
    score = Score()
    score.add(document, document.text)
    score.add(other, "{}")
    assert score.pages["all"] == 2
    assert score.whole["all"] == 1
    assert score.right["all"] == len(leaves(document.answer))


def test_shown_pages_are_whole() -> None:
    folder = Path(bundled_asset("pages"))
    lines = (folder / "pages.jsonl").read_text(encoding="utf-8").splitlines()
    assert {json.loads(line)["image"] for line in lines} == {p.name for p in folder.glob("*.png")}
    for line in lines:
        page = json.loads(line)
        jsonschema.validate(page["answer"], page["schema"])


@pytest.mark.slow
def test_a_few_steps_of_training(tmp_path: Path) -> None:
    from tools.drawn_documents.__main__ import main

    options = ["--steps", "2", "--rows", "2", "--pages", "1", "--shown", "3", "--no-compile"]
    main([*options, "--output", str(tmp_path / "reader"), "--device", "cpu", "--workers", "0"])
    assert (tmp_path / "reader" / "model.safetensors").stat().st_size < 10e6
    assert len(list((tmp_path / "pages").glob("*.png"))) == 3
