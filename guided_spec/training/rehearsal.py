"""The end of a run, tried before its first step: a draft is exported, loaded and asked.

What cannot be written, read back or decoded is refused here, by the very code that would refuse it
after hours of training. A new algorithm or layout has nothing to declare for that.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from guided_spec.bench.workload import WorkItem
from guided_spec.errors import ConfigError, GuidedSpecError
from guided_spec.models.draft_vocabulary import DraftVocabulary
from guided_spec.models.head_loading import forget_head
from guided_spec.training.options import TrainOptions
from guided_spec.training.validation import check_decoding, decoding_params

__all__ = ["Rehearsal", "choose_layout"]

FOLDER = "rehearsal"


@dataclass(frozen=True)
class Rehearsal:
    """What a run will do once its draft is trained; a context manager.

    Entering makes an untrained draft and exports it below the output folder, leaving deletes both.
    The generators of random numbers are left as they were. algorithm: a ``DraftAlgorithm`` class.

    Raises what ``algorithm`` and its ``export`` raise.
    """

    options: TrainOptions
    algorithm: Any
    algorithm_options: Mapping[str, Any]
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def folder(self) -> Path:
        """Where the untrained draft is."""
        return Path(self.options.output) / FOLDER

    @property
    def _text_config(self) -> Any:
        return self.target.config.get_text_config(decoder=True)

    def __enter__(self) -> Rehearsal:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        try:
            self._export()
        except BaseException:
            self._clean()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._clean()

    def decode(self, items: Sequence[WorkItem]) -> None:
        """Begin to decode ``items`` with the untrained draft.

        Raises ConfigError where ``decode_heldout`` would raise something.
        """
        options = self.options
        if not items:
            return
        try:
            check_decoding(
                self.target,
                self.tokenizer,
                self.folder,
                items,
                decoding_params(options),
                num_draft_tokens=options.num_draft_tokens,
            )
        except GuidedSpecError as error:
            fix = f"{error}; correct that, or pass --decode-limit 0"
            raise ConfigError("decode_limit", options.decode_limit, fix) from error

    def _export(self) -> None:
        device = self.target.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            model = self.algorithm.from_training_args(
                self._text_config,
                target=self.target,
                vocabulary=self._vocabulary(),
                **self.algorithm_options,
            )
            layout = choose_layout(self.options, tuple(model.layouts))
            model.export(self.folder, layout=layout)

    def _vocabulary(self) -> DraftVocabulary | None:
        """Of the size that is asked for; which tokens are in it is not known yet."""
        size, target_size = self.options.draft_vocab_size, self._text_config.vocab_size
        if size is None:
            return None
        if size > target_size:
            raise ConfigError("draft_vocab_size", size, f"the target has {target_size} tokens")
        return DraftVocabulary(torch.arange(size, device=self.target.device), target_size)

    def _clean(self) -> None:
        forget_head(self.folder, self.target)
        shutil.rmtree(self.folder, ignore_errors=True)


def choose_layout(options: TrainOptions, layouts: tuple[str, ...]) -> str:
    """The layout that is asked for, or the first. Raises ConfigError for one not in ``layouts``."""
    if options.layout is not None and options.layout not in layouts:
        fix = f"this {options.algorithm} draft is written as {' or '.join(layouts)}"
        raise ConfigError("layout", options.layout, fix)
    return options.layout or layouts[0]
