"""A whole training run: target, data, draft, training, export, validation, report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from guided_spec.bench.workload import WorkItem
from guided_spec.engine.setup import bundled_asset
from guided_spec.errors import ConfigError, TrainingStoppedError
from guided_spec.models.loading import load_model, load_tokenizer
from guided_spec.training.algorithm import TrainerKwargs
from guided_spec.training.checkpoints import check_folder, check_output
from guided_spec.training.corpus import Corpus
from guided_spec.training.feature_files import KeptFeatures
from guided_spec.training.features import Features, OnlineFeatures
from guided_spec.training.options import TrainOptions
from guided_spec.training.processes import close_accelerator, make_accelerator, shard_layers
from guided_spec.training.registry import find_algorithm
from guided_spec.training.rehearsal import Rehearsal, choose_layout
from guided_spec.training.trainer import Trainer, TrainingResult
from guided_spec.training.validation import decode_heldout, decoding_params

__all__ = ["REPORT", "TrainingReport", "train"]

REPORT = "training.json"
BUNDLED = "bundled"  # as a target: the one that comes with the package


@dataclass(frozen=True)
class TrainingReport:
    """What came out of a run; ``REPORT`` in its output folder.

    draft: the folder of the draft. steps, tokens, seconds: of training, over all processes; a
    resumed run counts all of it. peak_cuda_bytes: of the main process; None without CUDA. metrics:
    means over the steps since the last line of the log but one. heldout: the same of the held-out
    documents. decoded: what decoding them with the draft gave; None where it was not asked for.
    """

    draft: str
    layout: str
    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    peak_cuda_bytes: int | None
    metrics: dict[str, float]
    heldout: dict[str, float]
    options: dict[str, Any]
    algorithm_options: dict[str, Any]
    decoded: dict[str, Any] | None = None

    def write(self) -> None:
        """Write it as JSON into the folder of the draft."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        (Path(self.draft) / REPORT).write_text(text + "\n", encoding="utf-8")


def train(options: TrainOptions, algorithm_options: Mapping[str, Any]) -> TrainingReport:
    """Train a draft, export it, and try it out.

    algorithm_options: keyword arguments, the fields of the algorithm's ``config_class``.
    In a run of several processes each of them has to call it; all get the report, the main one
    writes the files. What can be refused is refused before the first step, by ConfigError and
    ModelError: see ``Rehearsal``. Raises TrainingStoppedError as ``Trainer.run`` does.
    """
    if options.target == BUNDLED:
        options = replace(options, target=bundled_asset("target"))
    algorithm = _algorithm(options)
    masked = options.grammar_masks == "loss"
    forward = algorithm.get_trainer_kwargs(masked=masked, **algorithm_options)
    check_output(Path(options.output), resume=options.resume)
    if options.features is not None:
        check_folder("features", Path(options.features))
    accelerator = make_accelerator(options)
    stopped: TrainingStoppedError | None = None
    try:
        report = _run(options, algorithm_options, algorithm, accelerator, forward)
    except TrainingStoppedError as error:
        stopped = error.with_traceback(None)  # its frames hold the model
    close_accelerator(accelerator)
    if stopped is not None:
        raise stopped
    return report


def _run(
    options: TrainOptions,
    algorithm_options: Mapping[str, Any],
    algorithm: Any,
    accelerator: Any,
    forward: TrainerKwargs,
) -> TrainingReport:
    target = load_model(options.target, dtype=options.target_dtype, device=accelerator.device)
    target.requires_grad_(requires_grad=False)
    tokenizer = load_tokenizer(options.target)
    with ExitStack() as stack:
        rehearsal = Rehearsal(options, algorithm, algorithm_options, target, tokenizer)
        if accelerator.is_main_process:
            stack.enter_context(rehearsal)
        corpus = Corpus.load(options, accelerator, target, tokenizer)
        if accelerator.is_main_process:
            rehearsal.decode(corpus.decode_items(options.decode_limit))
    model = algorithm.from_training_args(
        target.config.get_text_config(decoder=True),
        target=target,
        vocabulary=corpus.draft_vocabulary(accelerator.device),
        **algorithm_options,
    )
    layout = choose_layout(options, tuple(model.layouts))
    shard_layers(accelerator, model.layers)
    features = _features(options, target, tuple(model.feature_layers), corpus)
    trainer = Trainer(accelerator, model, features, corpus.batches(accelerator), forward, options)
    result = trainer.run(Path(options.output))
    tensors = accelerator.get_state_dict(trainer.model)
    report = _report(options, algorithm_options, result, layout)
    if accelerator.is_main_process:
        draft = accelerator.unwrap_model(trainer.model)
        draft.export(Path(options.output), layout=layout, tensors=tensors)
        report.write()
        report = _decode(
            report, options, target, tokenizer, corpus.decode_items(options.decode_limit)
        )
    return report


def _algorithm(options: TrainOptions) -> Any:
    algorithm = find_algorithm(options.algorithm)
    if options.draft_vocab_size is not None and not algorithm.reduced_vocabulary:
        fix = f"{options.algorithm} drafts score all tokens of the target; leave it out"
        raise ConfigError("draft_vocab_size", options.draft_vocab_size, fix)
    return algorithm


def _features(
    options: TrainOptions, target: PreTrainedModel, layers: tuple[int, ...], corpus: Corpus
) -> Features:
    online = OnlineFeatures(target, layers)
    if options.features is None:
        return online
    kept = KeptFeatures(Path(options.features), layers, online)
    for dataset in (corpus.train, corpus.heldout):
        kept.check(dataset)
    return kept


def _report(
    options: TrainOptions,
    algorithm_options: Mapping[str, Any],
    result: TrainingResult,
    layout: str,
) -> TrainingReport:
    progress = result.progress
    return TrainingReport(
        draft=options.output,
        layout=layout,
        steps=progress.step,
        tokens=progress.tokens,
        seconds=progress.seconds,
        tokens_per_second=progress.tokens / max(progress.seconds, 1e-9),
        peak_cuda_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        metrics=result.metrics,
        heldout=result.heldout,
        options=asdict(options),
        algorithm_options=dict(algorithm_options),
    )


def _decode(
    report: TrainingReport,
    options: TrainOptions,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[WorkItem],
) -> TrainingReport:
    """The report with what decoding gave, written again; unchanged where there are no items."""
    if not items:
        return report
    counted = decode_heldout(
        target,
        tokenizer,
        Path(options.output),
        items,
        decoding_params(options),
        num_draft_tokens=options.num_draft_tokens,
    )
    report = replace(report, decoded=counted.as_dict())
    report.write()
    return report
