"""Drawn documents as batches, made by worker processes in a fixed order."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tools.bundled_models.corpus import cut_in_key, made_in_order
from tools.bundled_models.tokenizer import END
from tools.drawn_documents.document import Document, sample_document
from tools.drawn_documents.page import CELLS, SIDE, SLOTS

WIDTH = 480  # tokens of a row: the picture, the question and the answer
PICTURE = CELLS * CELLS
HEAD = 2  # tokens before the picture's


@dataclass(frozen=True)
class CorpusConfig:
    """Where documents come from. rows: of a batch."""

    tokenizer_file: str
    seed: int = 0
    rows: int = 192
    workers: int = 0


@dataclass(frozen=True)
class Batch:
    """Pages [rows, SIDE, SIDE] uint8, characters [rows, PICTURE, SLOTS] uint8,
    ids [rows, WIDTH] int32, padded on the right, and answered [rows, WIDTH] bool: what is learned.
    """

    pages: npt.NDArray[np.uint8]
    characters: npt.NDArray[np.uint8]
    ids: npt.NDArray[np.int32]
    answered: npt.NDArray[np.bool_]


def batches(config: CorpusConfig, count: int) -> Iterator[Batch]:
    """Yield `count` batches; their order does not depend on the workers."""
    jobs = ((config, index) for index in range(count))
    yield from made_in_order(_make, jobs, config.workers)


def _make(job: tuple[CorpusConfig, int]) -> Batch:
    config, index = job
    rng = random.Random(f"{config.seed}/{index}")
    tokenizer = Tokenizer.from_file(config.tokenizer_file)
    batch = Batch(
        np.zeros((config.rows, SIDE, SIDE), np.uint8),
        np.zeros((config.rows, PICTURE, SLOTS), np.uint8),
        np.zeros((config.rows, WIDTH), np.int32),
        np.zeros((config.rows, WIDTH), np.bool_),
    )
    row = 0
    while row < config.rows:
        document = sample_document(rng)
        prompt, answer = _tokens(tokenizer, document, rng)
        if len(prompt) + len(answer) > WIDTH:
            continue
        batch.pages[row] = document.page.pixels(rng)
        batch.characters[row] = document.page.labels()
        batch.ids[row, : len(prompt) + len(answer)] = prompt + answer
        batch.answered[row, len(prompt) : len(prompt) + len(answer)] = True
        row += 1
    return batch


def _tokens(
    tokenizer: Tokenizer, document: Document, rng: random.Random
) -> tuple[list[int], list[int]]:
    known = tokenizer.get_vocab()
    around, image, whole, end = (
        known[name] for name in ("<fake_token_around_image>", "<image>", "<global-img>", END)
    )
    question = tokenizer.encode(f"{document.question}\n\nJSON: ").ids
    prompt = [around, whole, *[image] * PICTURE, around, *question]
    left, right = cut_in_key(rng, document.text)
    return prompt, [*tokenizer.encode(left).ids, *tokenizer.encode(right).ids, end]
