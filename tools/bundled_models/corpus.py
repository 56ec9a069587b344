"""The corpus as batches of token ids, made by worker processes in a fixed order."""

import multiprocessing
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tools.bundled_models.documents import sample_document
from tools.bundled_models.tokenizer import END

Job = TypeVar("Job")
Made = TypeVar("Made")
LONGEST = 512  # tokens; longer documents are left out
_KEY = re.compile(r'(?<=[{ ]")\w\w+(?=": )')
_MULTIPLE = 16  # batch widths are rounded up to this


@dataclass(frozen=True)
class CorpusConfig:
    """Where the documents come from and how they are batched.

    `tokens` is the padded size of a batch; `shard` the number of documents that are sorted by
    length together, so that a batch holds documents of like length.
    """

    tokenizer_file: str
    seed: int = 0
    tokens: int = 65_536
    shard: int = 8_192
    workers: int = 0


@dataclass(frozen=True)
class Batch:
    """Right-padded documents: ids [documents, width], and per document the length of the prompt
    and of the whole, in tokens."""

    ids: npt.NDArray[np.int32]
    prompts: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]


def batches(config: CorpusConfig, shards: int) -> Iterator[Batch]:
    """Yield the batches of `shards` shards; the order does not depend on the workers."""
    jobs = ((config, index) for index in range(shards))
    for shard in made_in_order(_make_shard, jobs, config.workers):
        yield from shard


def made_in_order(make: Callable[[Job], Made], jobs: Iterable[Job], workers: int) -> Iterator[Made]:
    """What is made of each job, by worker processes; 0 makes it here."""
    if workers == 0:
        yield from map(make, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, initializer=_quiet_worker) as pool:
        yield from pool.imap(make, jobs)


def _quiet_worker() -> None:
    # One tokenizer thread a worker: the workers themselves fill the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _make_shard(job: tuple[CorpusConfig, int]) -> list[Batch]:
    config, index = job
    rng = random.Random(f"{config.seed}/{index}")
    tokenizer = Tokenizer.from_file(config.tokenizer_file)
    documents = [sample_document(rng) for _ in range(config.shard)]
    prompts = tokenizer.encode_batch_fast([document.prompt for document in documents])
    cuts = [cut_in_key(rng, document.answer) for document in documents]
    answers = tokenizer.encode_batch_fast([left for left, _ in cuts])
    rests = tokenizer.encode_batch_fast([right for _, right in cuts])
    end = tokenizer.token_to_id(END)
    if end is None:
        raise ValueError(f"the tokenizer has no {END}")
    rows = [
        (prompt.ids, [*answer.ids, *rest.ids, end])
        for prompt, answer, rest in zip(prompts, answers, rests, strict=True)
        if len(prompt.ids) + len(answer.ids) + len(rest.ids) < LONGEST
    ]
    rows.sort(key=lambda row: len(row[0]) + len(row[1]))
    found = []
    while rows:
        width = -(-(len(rows[-1][0]) + len(rows[-1][1])) // _MULTIPLE) * _MULTIPLE
        count = max(1, config.tokens // width)
        found.append(_pad(rows[-count:], width, end))
        del rows[-count:]
    rng.shuffle(found)
    return found


def cut_in_key(rng: random.Random, answer: str) -> tuple[str, str]:
    """Cut one answer in ten inside a key, so that the key gets an unusual tokenization.

    Under a grammar a model that does not expect the coming key may spell it in other tokens
    than the tokenizer would; it has to read such keys.
    """
    if rng.random() < 0.9 or not (keys := list(_KEY.finditer(answer))):
        return answer, ""
    key = rng.choice(keys)
    place = rng.randint(key.start() + 1, key.end() - 1)
    return answer[:place], answer[place:]


def _pad(rows: list[tuple[list[int], list[int]]], width: int, end: int) -> Batch:
    ids = np.full((len(rows), width), end, dtype=np.int32)
    for row, (prompt, answer) in enumerate(rows):
        ids[row, : len(prompt) + len(answer)] = prompt + answer
    return Batch(
        ids,
        np.array([len(prompt) for prompt, _ in rows], dtype=np.int32),
        np.array([len(prompt) + len(answer) for prompt, answer in rows], dtype=np.int32),
    )
