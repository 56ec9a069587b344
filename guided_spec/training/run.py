"""A whole training run: target, data, draft, training, export, validation, report.

Its end is tried before its first step. A run has one process, or those that torchrun or
``accelerate launch`` started.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from os.path import exists
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from guided_spec.bundled import named_model
from guided_spec.errors import ConfigError, GuidedSpecError, ModelError, TrainingStoppedError
from guided_spec.kinds import require_kinds
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.models.heads.loading import forget_head
from guided_spec.models.loading import has_layers, load_ends, load_model
from guided_spec.training.algorithm import TrainerKwargs
from guided_spec.training.card import (
    CARD,
    HubRepository,
    command_of,
    model_card,
    write_plots,
)
from guided_spec.training.data.corpus import Corpus
from guided_spec.training.data.records import check_sources, have_pictures
from guided_spec.training.features import (
    Features,
    KeptFeatures,
    OnlineFeatures,
    ServedFeatures,
    SplitFeatures,
    StoredFeatures,
)
from guided_spec.training.options import TrainOptions, read_device_map
from guided_spec.training.pictures import TrainingTarget, why_blind
from guided_spec.training.registry import find_algorithm
from guided_spec.training.run_log import LINES, LOGS, chosen_trackers
from guided_spec.training.trainer import (
    Trainer,
    TrainingResult,
    check_folder,
    check_output,
    choose_layout,
)
from guided_spec.training.validation import HeldoutDecoding
from guided_spec.types import SamplingParams

logger = logging.getLogger(__name__)

FOLDER = "rehearsal"


@contextmanager
def rehearse(
    options: TrainOptions,
    algorithm: Any,
    algorithm_options: Mapping[str, Any],
    target: PreTrainedModel,
) -> Iterator[Path]:
    """While it is open, an untrained draft is exported below the output folder; yields its folder.

    So what cannot be written, read back or decoded is refused before the first step, by the very
    code that would refuse it after hours of training. The generators of random numbers are left as
    they were. algorithm: a ``DraftAlgorithm`` class. Raises what it and its ``export`` raise.
    """
    folder, config = Path(options.output) / FOLDER, target.config.get_text_config(decoder=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    device, size, known = target.device, options.draft_vocab_size, config.vocab_size
    try:
        if size is not None and size > known:
            raise ConfigError("draft_vocab_size", size, f"the target has {known} tokens")
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            vocabulary = None
            if size is not None:  # which tokens are in it is not known yet
                vocabulary = DraftVocabulary(torch.arange(size, device=device), known)
            given = {"target": target, "vocabulary": vocabulary, **algorithm_options}
            model = algorithm.from_training_args(config, **given)
            model.export(folder, layout=choose_layout(options, tuple(model.layouts)))
            del model  # for its memory
        yield folder
    finally:
        forget_head(folder, target)
        shutil.rmtree(folder, ignore_errors=True)


PACKAGES = ("accelerate", "datasets")
LONGEST_WAIT = timedelta(hours=2)  # for the process that writes answers the longest


def make_accelerator(options: TrainOptions) -> Any:
    """The ``accelerate.Accelerator`` of this process; on CUDA it computes in bfloat16.

    Raises ModelError where a package is missing, and ConfigError where the device or a tracker is,
    or where there is nothing to shard over.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        fix = "pip install 'guided-spec[train]'"
        raise ModelError(f"training needs {', '.join(missing)}: {fix}")
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import InitProcessGroupKwargs, set_seed

    has_cuda = torch.cuda.is_available()
    if options.device == "cuda" and not has_cuda:
        raise ConfigError("device", "cuda", "torch sees no CUDA device; pass cpu")
    on_cpu = options.device == "cpu" or not has_cuda
    plugin, processes = None, int(os.environ.get("WORLD_SIZE", "1"))
    if options.sharding == "fsdp" and on_cpu:
        raise ConfigError("sharding", "fsdp", "needs CUDA devices; pass none")
    for name in ("tensor_parallel", "sharding"):
        if getattr(options, name) in (True, "fsdp") and processes < 2:
            fix = "needs several processes: start with torchrun --nproc-per-node=<devices> ..."
            raise ConfigError(name, str(getattr(options, name)), fix)
    if options.device_map is not None and processes > 1:
        fix = "is for one process: let it write all features, then train from them without a map"
        raise ConfigError("device_map", options.device_map, fix)
    if options.sharding == "fsdp":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
        )
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision="no" if on_cpu else "bf16",
        gradient_accumulation_steps=options.gradient_accumulation,
        log_with=chosen_trackers(options) or None,
        project_dir=Path(options.output) / LOGS,
        fsdp_plugin=plugin,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=LONGEST_WAIT)],
    )
    set_seed(options.seed)
    return accelerator


def close_accelerator(accelerator: Any) -> None:
    """End a run; nothing may use its model any more. One of several processes starts no other."""
    # What is wrapped for several processes has to go before their connection does.
    accelerator.free_memory()
    gc.collect()
    accelerator.end_training()


def shard_layers(accelerator: Any, layers: nn.ModuleList) -> None:
    """Let FSDP, where it is used, shard each of ``layers``; before the model is prepared."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        plugin.transformer_cls_names_to_wrap = sorted({type(layer).__name__ for layer in layers})


REPORT = "training.json"


@dataclass(frozen=True)
class TrainingReport:
    """What came out of a run; ``REPORT`` in its output folder.

    draft: the folder of the draft. steps, tokens, seconds: of training, over all processes; a
    resumed run counts all of it. peak_cuda_bytes: of the main process, and
    expected_cuda_bytes, what was stated for it before the first step; None without CUDA. metrics:
    means over the steps since the last line of the log but one. heldout: the same of the held-out
    documents. best_step: the validation at which drafts were accepted the longest; its draft is in
    the folder ``BEST`` below, unless it was the last, and 0 where nothing was validated.
    decoded: what decoding them with the draft gave; None where it was not asked for. pushed: the
    address of the draft on the hub, if it was pushed there.
    """

    draft: str
    layout: str
    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    peak_cuda_bytes: int | None
    expected_cuda_bytes: int | None
    metrics: dict[str, float]
    heldout: dict[str, float]
    best_step: int
    options: dict[str, Any]
    algorithm_options: dict[str, Any]
    decoded: dict[str, Any] | None = None
    pushed: str | None = None

    def write(self) -> None:
        """Write it as JSON into the folder of the draft."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        (Path(self.draft) / REPORT).write_text(text + "\n", encoding="utf-8")


def train(options: TrainOptions, algorithm_options: Mapping[str, Any]) -> TrainingReport:
    """Train a draft, export it, and try it out.

    algorithm_options: keyword arguments, the fields of the algorithm's ``config_class``.
    In a run of several processes each of them has to call it; all get the report, the main one
    writes the files. What can be refused is refused before the first step, by ConfigError and
    ModelError: see ``rehearse``. Raises TrainingStoppedError as ``Trainer.run`` does.
    """
    options = replace(options, target=named_model(options.target))
    algorithm = _algorithm(options)
    require_kinds(algorithm_options, get_type_hints(algorithm.config_class))
    masked = options.grammar_masks == "loss"
    forward = algorithm.get_trainer_kwargs(masked=masked, **algorithm_options)
    if options.sharding == "fsdp" and algorithm_options.get("gradient_checkpointing"):
        fix = "does not go with sharding='fsdp', with which nobody has tried it: leave one out"
        raise ConfigError("gradient_checkpointing", "True", fix)
    with _without_empty_folders(options):
        _check_outputs(options)
        repository = HubRepository.of(options)
        accelerator = make_accelerator(options)
        stopped: TrainingStoppedError | None = None
        try:
            report = _run(options, algorithm_options, algorithm, accelerator, forward, repository)
        except TrainingStoppedError as error:
            stopped = error.with_traceback(None)  # its frames hold the model
        close_accelerator(accelerator)
    if stopped is not None:
        raise stopped
    return report


@contextmanager
def _without_empty_folders(options: TrainOptions) -> Iterator[None]:
    """Remove the folders that a failed run has made and written nothing to."""
    named = [Path(name).absolute() for name in (options.output, options.features) if name]
    missing = {path for folder in named for path in (folder, *folder.parents) if not exists(path)}
    try:
        yield
    except BaseException:
        for path in sorted(missing, reverse=True):  # a folder before the one that it is in
            with suppress(OSError):  # it holds something, or was never made
                path.rmdir()
        raise


def _check_outputs(options: TrainOptions) -> None:
    """Refuse what a run could not read from or write to."""
    check_output(Path(options.output), resume=options.resume)
    check_sources(options.data)
    if options.features is not None:
        check_folder("features", Path(options.features))


def _run(
    options: TrainOptions,
    algorithm_options: Mapping[str, Any],
    algorithm: Any,
    accelerator: Any,
    forward: TrainerKwargs,
    repository: HubRepository | None,
) -> TrainingReport:
    parts = TrainingTarget.of(_open_target(options, accelerator.device), options)
    target, tokenizer = parts.language, parts.tokenizer(options)
    given = (options, algorithm, algorithm_options, parts)
    corpus, decoding = _read_documents(*given, tokenizer, accelerator)
    if accelerator.is_main_process and repository is not None:
        repository.create()
    model = algorithm.from_training_args(
        target.config.get_text_config(decoder=True),
        target=target,
        vocabulary=corpus.draft_vocabulary(accelerator.device),
        **algorithm_options,
    )
    shard_layers(accelerator, model.layers)
    with closing(_features(options, target, tuple(model.feature_layers), corpus)) as features:
        data = corpus.batches(accelerator)
        trainer = Trainer(accelerator, model, features, data, forward, options)
        result = trainer.run(Path(options.output))
    trainer.export(Path(options.output))
    report = _report(options, algorithm_options, result, tuple(model.layouts))
    if accelerator.is_main_process:
        report.write()
        report = _decode(report, decoding)
        _describe(report, corpus, algorithm.config_class)
        if repository is not None:
            report = replace(report, pushed=repository.push(Path(options.output)))
    return report


class _Documents(NamedTuple):
    """What is trained on, and how the end of the run decodes what is not."""

    corpus: Corpus
    decoding: HeldoutDecoding


def _read_documents(
    options: TrainOptions,
    algorithm: Any,
    algorithm_options: Mapping[str, Any],
    target: TrainingTarget,
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Any,
) -> _Documents:
    """While they are read the end of the run is rehearsed, by the main process."""
    with ExitStack() as stack:
        folder = None
        if accelerator.is_main_process:
            rehearsal = rehearse(options, algorithm, algorithm_options, target.language)
            folder = stack.enter_context(rehearsal)
        corpus = Corpus.load(options, accelerator, target, tokenizer)
        items = corpus.decode_items(options.decode_limit)
        params = SamplingParams(max_tokens=options.decode_max_tokens)
        given = (target.whole, tokenizer, items, params, options.num_draft_tokens)
        decoding = HeldoutDecoding(*given, target.sight.reader.processor)
        if folder is not None and items:
            try:
                decoding.check(folder)
            except GuidedSpecError as error:
                fix = f"{error}; correct that, or pass --decode-limit 0"
                raise ConfigError("decode_limit", options.decode_limit, fix) from error
    return _Documents(corpus, decoding)


def _describe(report: TrainingReport, corpus: Corpus, config: type) -> None:
    """Write the card, and the plots where they can be drawn."""
    output, options = Path(report.draft), TrainOptions(**report.options)
    (output / CARD).write_text(model_card(report, corpus.figures(), config), encoding="utf-8")
    command = command_of(options, report.algorithm_options, config)
    write_plots(output, output / LOGS / LINES, command)


def _algorithm(options: TrainOptions) -> Any:
    algorithm = find_algorithm(options.algorithm)
    if options.draft_vocab_size is not None and not algorithm.reduced_vocabulary:
        fix = f"{options.algorithm} drafts score all tokens of the target; leave it out"
        raise ConfigError("draft_vocab_size", options.draft_vocab_size, fix)
    return algorithm


def _open_target(options: TrainOptions, device: torch.device) -> PreTrainedModel:
    """All of the target, or its ends alone where nothing but them may be needed."""
    may_be_absent = options.features is not None or options.features_url is not None
    may_be_absent = may_be_absent or options.tensor_parallel
    may_be_absent = may_be_absent and not options.regenerate and not options.decode_limit
    # A drafter reads pictures by its target's vision tower.
    if may_be_absent and (why_blind(options) or not have_pictures(options.data)):
        try:
            return load_ends(
                options.target,
                dtype=options.target_dtype,
                device=device,
                trust_remote_code=options.trust_remote_code,
            )
        except ModelError as error:
            if options.tensor_parallel:
                fix = f"needs the ends of the target next to its parts, and {error}"
                raise ConfigError("tensor_parallel", "True", fix) from error
            logger.info("the whole target is loaded: %s", error)
    return _load_target(options, device)


def _load_target(options: TrainOptions, device: torch.device) -> PreTrainedModel:
    """All of it, frozen: on ``device``, or where the device map puts its modules."""
    if options.device_map is None:
        placement: dict[str, Any] = {"device": device}
    else:
        placement = {"device_map": read_device_map(options.device_map)}
    target = load_model(
        options.target,
        dtype=options.target_dtype,
        trust_remote_code=options.trust_remote_code,
        pictures=True,
        **placement,
    )
    model: Any = target
    norm = getattr(model.get_decoder(), "norm", nn.Identity())
    ends = nn.ModuleList([model.get_input_embeddings(), norm, model.get_output_embeddings()])
    if any(parameter.is_meta for parameter in ends.parameters()):
        fix = "leaves the embedding, the last norm or the output head off the devices: map them"
        raise ConfigError("device_map", options.device_map, fix)
    return target.requires_grad_(requires_grad=False)


def _features(
    options: TrainOptions, target: PreTrainedModel, layers: tuple[int, ...], corpus: Corpus
) -> Features:
    """Raises ConfigError for files of other documents or layers."""
    url, dtype = options.features_url, options.feature_dtype
    if options.features is None:
        if options.tensor_parallel:
            return _split_features(options, layers)
        return OnlineFeatures(target, layers) if url is None else ServedFeatures(url, layers)
    folder = Path(options.features)
    stored = StoredFeatures(folder, layers)
    complete = [stored.check(dataset) for dataset in (corpus.train, corpus.heldout)]
    if all(complete):
        return stored
    if url is not None:
        return ServedFeatures(url, layers, folder, dtype)
    if options.tensor_parallel:
        split = _split_features(options, layers)
        return KeptFeatures(folder, layers, split, dtype, split.any_of_all)
    if not has_layers(target):  # it is, after all, needed
        target = _load_target(options, target.device)
    return KeptFeatures(folder, layers, OnlineFeatures(target, layers), dtype)


def _split_features(options: TrainOptions, layers: tuple[int, ...]) -> SplitFeatures:
    target = load_model(
        options.target,
        dtype=options.target_dtype,
        tp_plan="auto",
        trust_remote_code=options.trust_remote_code,
    )
    return SplitFeatures(target.requires_grad_(requires_grad=False), layers)


def _report(
    options: TrainOptions,
    algorithm_options: Mapping[str, Any],
    result: TrainingResult,
    layouts: tuple[str, ...],
) -> TrainingReport:
    progress = result.progress
    return TrainingReport(
        draft=options.output,
        layout=choose_layout(options, layouts),
        steps=progress.step,
        tokens=progress.tokens,
        seconds=progress.seconds,
        tokens_per_second=progress.tokens / max(progress.seconds, 1e-9),
        peak_cuda_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        expected_cuda_bytes=result.expected_bytes,
        metrics=result.metrics,
        heldout=result.heldout,
        best_step=progress.best_step,
        options=asdict(options),
        algorithm_options=dict(algorithm_options),
    )


def _decode(report: TrainingReport, decoding: HeldoutDecoding) -> TrainingReport:
    """The report with what decoding gave, written again; unchanged where there are no items."""
    if decoding.items:
        report = replace(report, decoded=decoding.run(Path(report.draft)).as_dict())
        report.write()
    return report
