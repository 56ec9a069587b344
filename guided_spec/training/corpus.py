"""The documents of a run: written anew if asked for, tokenized, split, and cut into batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from guided_spec.bench.workload import WorkItem
from guided_spec.engine.llm import LLM
from guided_spec.errors import ConfigError
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.models.draft_vocabulary import DraftVocabulary
from guided_spec.models.loading import end_of_text_ids
from guided_spec.training.data.batches import TokenBatches
from guided_spec.training.data.collate import Collator
from guided_spec.training.data.dataset import load_examples, read_grammar_text, split_heldout
from guided_spec.training.data.draft_tokens import (
    count_tokens,
    forced_tokens,
    select_draft_vocabulary,
)
from guided_spec.training.data.grammar_masks import GrammarMasks
from guided_spec.training.data.records import read_lines
from guided_spec.training.data.regenerate import regenerate
from guided_spec.training.options import TrainOptions
from guided_spec.training.stopping import ignore_stop_signals
from guided_spec.training.trainer import TrainingData
from guided_spec.types import SamplingParams

__all__ = ["Corpus"]

FORCED_DOCUMENTS, FORCED_WALKS = 1000, 4  # a sample: what a grammar forces shows soon


@dataclass(frozen=True)
class Corpus:
    """Documents in tokens, and their grammars.

    train, heldout: ``datasets.Dataset``s as ``load_examples`` makes them; heldout may be empty.
    """

    train: Any
    heldout: Any
    vocabulary: Vocabulary
    masks: GrammarMasks
    options: TrainOptions

    @classmethod
    def load(
        cls,
        options: TrainOptions,
        accelerator: Any,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
    ) -> Corpus:
        """Read ``options.data``, the answers written anew first where that is asked for.

        Raises ConfigError for data that cannot be used.
        """
        paths: Sequence[str | Path] = options.data
        if options.regenerate:
            paths = _regenerate(options, accelerator, target, tokenizer)
        stop_ids = end_of_text_ids(target, tokenizer)
        config: Any = target.config.get_text_config(decoder=True)
        context = getattr(config, "max_position_embeddings", None) or options.max_length
        dataset = load_examples(
            paths,
            tokenizer,
            stop_ids=stop_ids,
            max_length=min(options.max_length, context),
            limit=options.limit,
        )
        split = split_heldout(dataset, options.heldout_share, options.seed)
        vocabulary = Vocabulary.from_tokenizer(tokenizer, config.vocab_size, stop_ids)
        return cls(split.train, split.heldout, vocabulary, GrammarMasks(vocabulary), options)

    def draft_vocabulary(self, device: Any) -> DraftVocabulary | None:
        """The tokens the draft scores, on ``device``; None for the target's own.

        What ends a text is among them, and what the grammars were seen to force. Raises ConfigError
        when ``draft_vocab_size`` is too small for these, or larger than the target's vocabulary.
        """
        size = self.options.draft_vocab_size
        if size is None:
            return None
        keep = set(self.vocabulary.stop_token_ids)
        if self.options.grammar_masks != "off":
            settings = {"limit": FORCED_DOCUMENTS, "walks": FORCED_WALKS}
            keep |= forced_tokens(self.train, self.masks, seed=self.options.seed, **settings)
        counts = count_tokens(self.train, self.vocabulary.vocab_size)
        try:
            found = select_draft_vocabulary(counts, size, keep)
        except ConfigError as error:
            raise ConfigError("draft_vocab_size", size, error.fix) from error
        return DraftVocabulary(found.target_ids.to(device), found.target_size)

    def batches(self, accelerator: Any) -> TrainingData:
        """The batches of this process."""
        heldout = self._loader(self.heldout, accelerator) if len(self.heldout) else None
        return TrainingData(self._loader(self.train, accelerator), heldout)

    def decode_items(self, limit: int) -> list[WorkItem]:
        """The first ``limit`` held-out documents that have a prompt, as requests."""
        rows = (row for row in self.heldout if row["answer_start"] > 0)
        return [
            WorkItem(
                [int(token) for token in row["input_ids"][: int(row["answer_start"])]],
                read_grammar_text(str(row["grammar"])),
            )
            for row in islice(rows, limit)
        ]

    def _loader(self, dataset: Any, accelerator: Any) -> Any:
        options = self.options
        sampler = TokenBatches(
            dataset["seq_len"][:],
            batch_tokens=options.batch_tokens,
            seed=options.seed,
            rank=accelerator.process_index,
            world=accelerator.num_processes,
        )
        masks = None if options.grammar_masks == "off" else self.masks
        collator = Collator(masks, vocab_size=self.vocabulary.vocab_size)
        return DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=collator,
            worker_init_fn=ignore_stop_signals,
            num_workers=options.workers,
            persistent_workers=options.workers > 0,
            pin_memory=accelerator.device.type == "cuda",
        )


def _regenerate(
    options: TrainOptions,
    accelerator: Any,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Path]:
    """Each process writes the answers of its share; returns all their files. Kept for a resume."""
    folder = Path(options.output) / "regenerated"
    rank, world = accelerator.process_index, accelerator.num_processes
    paths = [folder / f"part_{part}_of_{world}.jsonl" for part in range(world)]
    if not (options.resume and paths[rank].exists()):
        folder.mkdir(parents=True, exist_ok=True)
        source, partial = (paths[rank].with_suffix(end) for end in (".source", ".partial"))
        lines = islice(read_lines(options.data), rank, options.limit, world)
        _write_lines(source, [line.record for line in lines])
        params = SamplingParams(
            max_tokens=options.regenerate_max_tokens,
            temperature=options.regenerate_temperature,
            seed=options.seed + rank * 2**32,
        )
        with LLM(target, tokenizer=tokenizer) as llm:
            regenerate([source], partial, llm, params)
        source.unlink()
        partial.rename(paths[rank])
    accelerator.wait_for_everyone()
    return paths


def _write_lines(path: Path, records: Sequence[object]) -> None:
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_text("".join(lines), encoding="utf-8")
