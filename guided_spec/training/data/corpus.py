"""The documents of a run: written anew if asked for, tokenized, split, and cut into batches.

A draft learns most from texts that its target would write: so the target can write the responses
anew, under each record's own grammar. This module also counts which of the target's tokens a draft
with a smaller vocabulary should score.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from guided_spec.engine.chats.picture_reader import PictureReader
from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import OnError, RequestOutput
from guided_spec.engine.prompt import Prompt, PromptEncoder
from guided_spec.errors import ConfigError, GuidedSpecError
from guided_spec.evaluate.measurement import WorkItem
from guided_spec.grammar.protocol import CompiledGrammar, legal_row
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.models.pictures.picture import PicturePrompt, Sight
from guided_spec.models.tokenizer import end_of_text_ids
from guided_spec.ops.bitmask import only_legal_token
from guided_spec.training.card import CorpusFigures
from guided_spec.training.data.batches import Collator, GrammarMasks, MaskTable, TokenBatches
from guided_spec.training.data.dataset import (
    encode_prompt,
    load_examples,
    make_encoder,
    read_grammar_text,
    split_heldout,
)
from guided_spec.training.data.endpoint import Endpoint
from guided_spec.training.data.pictures import TargetSight, picture_parts, read_pictures_text
from guided_spec.training.data.records import (
    CHAT_NAMES,
    RESPONSE_NAMES,
    SHAREGPT_ROLES,
    Example,
    Line,
    read_example,
    read_lines,
)
from guided_spec.training.options import TrainOptions
from guided_spec.training.pictures import TrainingTarget, num_rows
from guided_spec.training.trainer import TrainingData, WorkerSignals
from guided_spec.types import SamplingParams, sample_seed

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

CALL_RECORDS = 512  # a call's last requests run alone: it is worth many batches
CALL_BYTES = 2**30  # of pictures
UNSEEN = TargetSight(PictureReader(None, Sight("with regenerate_url no picture is sent")))


class Writer(Protocol):
    """What writes the responses: an ``LLM``, or an ``Endpoint``."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the target that writes."""

    def generate(
        self, prompts: Any, params: Sequence[SamplingParams], *, on_error: OnError
    ) -> list[RequestOutput]:
        """One output for each prompt's token ids."""


class Regenerated(NamedTuple):
    """How many records were written, failed, and were cut by ``max_tokens`` or by the context."""

    written: int
    failed: int
    cut: int


def regenerate(
    paths: Sequence[str | Path],
    output: Path,
    writer: Writer,
    params: SamplingParams,
    *,
    limit: int | None = None,
    sight: TargetSight | None = None,
) -> Regenerated:
    """Copy the records of ``paths`` to ``output`` with responses from ``writer``.

    A prompt gets its text as ``response``; in a chat it replaces the assistant's last message, or
    comes after the user's. Everything else is kept, and so is the order. Only complete responses
    are written: requests that fail and texts that were cut are left out and counted.

    params: for every request; the grammar is the record's where it has one, and a seed is that of
        the first record, from which the others count on. ``n`` must be 1, ``echo`` False.
    limit: records to read at most. sight: how ``writer`` reads pictures; None refuses them.

    Every record is read before anything is generated, but for the pixels of pictures. Raises
    ConfigError naming file and line for one without a prompt.
    """
    if params.n != 1 or params.echo:
        raise ConfigError("params", params, "must have n=1 and echo=False")
    if output.resolve() in [Path(path).resolve() for path in paths]:
        raise ConfigError("output", str(output), "is one of the inputs; write to another file")
    return write_responses(lambda: islice(read_lines(paths), limit), output, writer, params, sight)


def write_responses(
    read: Callable[[], Iterator[Line]],
    output: Path,
    writer: Writer,
    params: SamplingParams,
    sight: TargetSight | None,
) -> Regenerated:
    """``regenerate`` for the records that ``read`` gives: it is called twice."""
    encoder = make_encoder(writer.tokenizer, sight)
    for line in read():
        _check_pictures(line, _read(line), encoder)
    counts = dict.fromkeys(("stop", "error", "length"), 0)
    done = 0
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w", encoding="utf-8") as file:
        for chunk in _calls(read(), encoder):
            for reason, record, problem in _generate(chunk, writer, params, done):
                if problem and not counts["error"]:
                    logger.warning("left out, and maybe others after it: %s", problem)
                counts[reason] += 1
                if record is not None:
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
            done += len(chunk)
    return Regenerated(counts["stop"], counts["error"], counts["length"])


class _Generated(NamedTuple):
    """reason: the request's finish reason. record: None unless it is "stop". problem: the error."""

    reason: str
    record: dict[str, Any] | None
    problem: str


class _Asked(NamedTuple):
    """A record, and what the target is asked."""

    line: Line
    example: Example
    prompt: Prompt


def _calls(lines: Iterator[Line], encoder: PromptEncoder) -> Iterator[list[_Asked]]:
    """The records of each call of the writer: not so many that pictures fill the memory."""
    call, num_bytes = list[_Asked](), 0
    for line in lines:
        example = _read(line)
        try:
            prompt = encode_prompt(example, encoder)
        except GuidedSpecError as error:
            raise ConfigError("data", line.source, str(error)) from error
        call.append(_Asked(line, example, prompt))
        num_bytes += prompt.num_bytes if isinstance(prompt, PicturePrompt) else 0
        if len(call) == CALL_RECORDS or num_bytes >= CALL_BYTES:
            yield call
            call, num_bytes = [], 0
    if call:
        yield call


def _check_pictures(line: Line, example: Example, encoder: PromptEncoder) -> None:
    """Open the pictures of a record, if it has any, and look at their sizes."""
    if isinstance(example.prompt, list) and next(picture_parts(example.prompt), None):
        try:
            encoder.read_chat(example.prompt)
        except GuidedSpecError as error:
            raise ConfigError("data", line.source, str(error)) from error


def _generate(
    call: Sequence[_Asked], writer: Writer, params: SamplingParams, done: int
) -> Iterator[_Generated]:
    asked = [
        replace(
            params,
            grammar=one.example.grammar or params.grammar,
            seed=None if params.seed is None else sample_seed(params.seed, done + at),
        )
        for at, one in enumerate(call)
    ]
    outputs = writer.generate([one.prompt for one in call], asked, on_error="return")
    for (line, _, _), output in zip(call, outputs, strict=True):
        is_whole = output.is_complete
        record = _with_response(line.record, output.text) if is_whole else None
        problem = "" if output.error is None else f"{line.source}: {output.error}"
        yield _Generated(output.finish_reason, record, problem)


def _read(line: Line) -> Example:
    try:
        example = read_example(line.record)
    except GuidedSpecError as error:
        raise ConfigError("data", line.source, str(error)) from error
    if example.prompt is None:
        raise ConfigError("data", line.source, "has no prompt: there is nothing to answer")
    return example


def _with_response(record: dict[str, Any], text: str) -> dict[str, Any]:
    name = next(name for name in CHAT_NAMES if record.get(name) is not None)
    turns = record[name]
    kept = {key: value for key, value in record.items() if key not in RESPONSE_NAMES}
    if isinstance(turns, str):
        return {**kept, "response": text}
    last = turns[-1]
    role = last["role"] if "role" in last else SHAREGPT_ROLES[last["from"]]
    turn = {"role": "assistant", "content": text}
    if "role" not in last:
        turn = {"from": "gpt", "value": text}
    if role == "assistant":
        return {**record, name: [*turns[:-1], turn]}
    return {**kept, name: [*turns, turn]}


CHUNK = 1024
LONGEST_WALK = 256
MOST_POSITIONS = 50_000  # seconds of a vocabulary of 50,000 tokens
CLOSING = b'"]}'  # unless these are preferred, a random text never leaves its first string


def count_tokens(dataset: Dataset, vocab_size: int) -> Tensor:
    """int64 [V]: how often each token occurs in the responses of ``dataset``.

    Raises ConfigError for a token at or past ``vocab_size``.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    columns = dataset.select_columns(["input_ids", "loss_mask"]).with_format("arrow")
    for table in columns.iter(CHUNK):
        token_ids = _flat(table["input_ids"])[_flat(table["loss_mask"]).astype(bool)]
        if len(token_ids) and token_ids.max() >= vocab_size:
            fix = f"the data holds token {token_ids.max()}: it was tokenized for another target"
            raise ConfigError("vocab_size", vocab_size, fix)
        counts += np.bincount(token_ids, minlength=vocab_size)
    return torch.from_numpy(counts)


def forced_tokens(  # noqa: PLR0913
    dataset: Dataset,
    masks: GrammarMasks,
    *,
    limit: int,
    walks: int,
    seed: int,
    most: int = MOST_POSITIONS,
) -> set[int]:
    """Tokens that grammars of ``dataset`` can force: a draft without them has no legal one there.

    Looks at every position of the first ``limit`` responses, and at ``walks`` random texts of up to
    256 tokens of each of their grammars, the first text of each before the second of any. A sample:
    there may be more of them.

    most: positions that it looks at, of the responses and again of the random texts.
    """
    found: set[int] = set()
    grammars: dict[str, None] = {}
    left = most
    for row in dataset.select(range(min(limit, len(dataset)))):
        if left <= 0:
            break
        grammar = str(row["grammar"])
        start = int(row["response_start"])
        table = MaskTable(len(row["input_ids"]) - start, masks.vocabulary.vocab_size)
        masks.fill(table, row["input_ids"], start, grammar)
        found.update(only_legal_token(table.rows()).tolist())
        left -= len(row["input_ids"]) - start if grammar else 0
        grammars[grammar] = None
    dice, left = np.random.default_rng(seed), most
    for grammar in [*grammars] * walks:
        compiled = masks.compile(grammar) if left > 0 else None
        if compiled is not None:
            forced, length = _sample_forced(compiled, masks.vocabulary, dice)
            found.update(forced)
            left -= length
    return found - {-1}


def select_draft_vocabulary(
    counts: Tensor, size: int, keep: Collection[int] = ()
) -> DraftVocabulary:
    """The ``keep`` tokens and, of the others, the most frequent; of equals the lower id.

    counts: int64 [V], on the CPU. size: D. The target ids ascend. Raises ConfigError for a size
    that does not hold ``keep``, or that is more than V.
    """
    kept = sorted(set(keep))
    if not 1 <= size <= len(counts):
        raise ConfigError("size", size, f"must be between 1 and the vocabulary's {len(counts)}")
    if len(kept) > size:
        raise ConfigError("size", size, f"must be at least {len(kept)}: so many tokens are kept")
    if kept and not 0 <= kept[0] <= kept[-1] < len(counts):
        fix = f"must be tokens of the vocabulary, from 0 to {len(counts) - 1}"
        raise ConfigError("keep", [kept[0], kept[-1]], fix)
    order = torch.sort(counts, descending=True, stable=True).indices
    is_kept = torch.zeros(len(counts), dtype=torch.bool)
    is_kept[kept] = True
    frequent = order[~is_kept[order]][: size - len(kept)]
    is_kept[frequent] = True
    return DraftVocabulary(is_kept.nonzero().flatten(), len(counts))


def _flat(column: object) -> NDArray[np.int64]:
    """The values of an Arrow column of lists, one list after another."""
    flat: NDArray[np.int64] = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)  # type: ignore[attr-defined]
    return flat


class _Sampled(NamedTuple):
    """forced: tokens that were the only legal one somewhere in a random text. length: of it."""

    forced: list[int]
    length: int


def _sample_forced(
    compiled: CompiledGrammar, vocabulary: Vocabulary, dice: np.random.Generator
) -> _Sampled:
    """A random text of the grammar, of up to 256 tokens."""
    of_bytes = vocabulary.single_byte_ids[list(CLOSING)]
    closing = of_bytes[of_bytes >= 0]
    matcher, size = compiled.new_matcher(), vocabulary.vocab_size
    found: list[int] = []
    for length in range(LONGEST_WALK):
        if matcher.is_terminated():
            return _Sampled(found, length)
        row = legal_row(matcher, size)
        is_legal = np.unpackbits(row.view(np.uint8), bitorder="little")[:size]
        legal = np.flatnonzero(is_legal)
        if not len(legal):
            return _Sampled(found, length)
        if len(legal) == 1:
            found.append(int(legal[0]))
        liked = closing[is_legal[closing] != 0] if dice.random() < 0.5 else legal
        chosen = liked if len(liked) else legal
        if not matcher.accept_token(int(chosen[dice.integers(len(chosen))])):
            return _Sampled(found, length)
    return _Sampled(found, LONGEST_WALK)


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
    target: TrainingTarget

    @classmethod
    def load(
        cls,
        options: TrainOptions,
        accelerator: Any,
        target: TrainingTarget,
        tokenizer: PreTrainedTokenizerBase,
    ) -> Corpus:
        """Read ``options.data``; with ``options.regenerate`` the target writes responses first.

        Raises ConfigError for data that cannot be used.
        """
        paths: Sequence[str | Path] = options.data
        if options.regenerate:
            paths = _regenerate(options, accelerator, target, tokenizer)
        stop_ids = end_of_text_ids(target.whole, tokenizer)
        config: Any = target.whole.config.get_text_config(decoder=True)
        context = getattr(config, "max_position_embeddings", None) or options.max_length
        dataset = load_examples(
            paths,
            tokenizer,
            stop_ids=stop_ids,
            max_length=min(options.max_length, context),
            limit=options.limit,
            sight=target.sight,
        )
        split = split_heldout(dataset, options.heldout_share, options.seed)
        vocabulary = Vocabulary.from_tokenizer(tokenizer, config.vocab_size, stop_ids)
        masks = GrammarMasks(vocabulary)
        return cls(split.train, split.heldout, vocabulary, masks, options, target)

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
        return found.to(device)

    def batches(self, accelerator: Any) -> TrainingData:
        """The batches of this process."""
        signals = WorkerSignals()
        heldout = self._loader(self.heldout, accelerator, signals) if len(self.heldout) else None
        train = self._loader(self.train, accelerator, signals)
        return TrainingData(train, heldout, signals, self.target.place())

    def figures(self) -> CorpusFigures:
        """For the card of what is trained on it."""
        parts = [dataset["grammar"][:] for dataset in (self.train, self.heldout)]
        grammars = [bool(text) for part in parts for text in part]
        return CorpusFigures(len(self.train), len(self.heldout), sum(grammars) / len(grammars))

    def decode_items(self, limit: int) -> list[WorkItem]:
        """The first ``limit`` held-out documents that have a prompt, as requests.

        Raises ConfigError for a picture that cannot be read any more.
        """
        rows = (row for row in self.heldout if row["response_start"] > 0)
        return [
            WorkItem(self._prompt(row), read_grammar_text(str(row["grammar"])))
            for row in islice(rows, limit)
        ]

    def _prompt(self, row: Any) -> Prompt:
        token_ids = [int(token) for token in row["input_ids"][: int(row["response_start"])]]
        pictures = read_pictures_text(str(row["pictures"]))
        return pictures.prompt(token_ids, self.target.sight.reader) if pictures else token_ids

    def _loader(self, dataset: Any, accelerator: Any, signals: WorkerSignals) -> Any:
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
            worker_init_fn=signals,
            num_workers=options.workers,
            persistent_workers=options.workers > 0,
            pin_memory=accelerator.device.type == "cuda",
        )


def _regenerate(
    options: TrainOptions,
    accelerator: Any,
    target: TrainingTarget,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Path]:
    """Each process writes the responses of its share; returns all files. Kept for a resume."""
    folder = Path(options.output) / "regenerated"
    rank, world = accelerator.process_index, accelerator.num_processes
    paths = [folder / f"part_{part}_of_{world}.jsonl" for part in range(world)]
    if not (options.resume and paths[rank].exists()):
        folder.mkdir(parents=True, exist_ok=True)
        partial = paths[rank].with_suffix(".partial")
        lines = list(islice(read_lines(options.data), rank, options.limit, world))
        params = SamplingParams(
            max_tokens=options.regenerate_max_tokens,
            temperature=options.regenerate_temperature,
            seed=options.seed + rank * 2**32,
        )
        url = options.regenerate_url
        own: Any = {"tokenizer": tokenizer, "max_batch_size": options.regenerate_batch_size}
        own |= {"processor": target.sight.reader.processor, "picture_tokens": num_rows(options)}
        writer = LLM(target.whole, **own) if url is None else Endpoint(url, tokenizer)
        sight = target.sight if url is None else UNSEEN
        with writer:
            write_responses(lambda: iter(lines), partial, writer, params, sight)
        partial.rename(paths[rank])
    accelerator.wait_for_everyone()
    return paths
