"""A draft of one matrix, and a target and documents to train it with."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from guided_spec.bundled import bundled_asset
from guided_spec.config import option
from guided_spec.training.algorithm import Metric, TargetStates, TrainingBatch, TrainingOutput
from guided_spec.training.options import TrainOptions
from guided_spec.training.registry import ALGORITHMS, register
from tests.models.tiny import build
from tests.tiny_llm import VOCAB_SIZE, tiny_tokenizer

ALGORITHMS.pop("toy", None)


@dataclass(frozen=True)
class ToyConfig:
    """Its own options."""

    aux_layer: int = option("The layer it reads.", default=1)
    spoil_step: int = option("The forward whose loss is not a number; -1: none.", default=-1)
    stop_step: int = option("The forward in which the process dies; -1: none.", default=-1)
    signal_step: int = option("The forward in which a signal comes; -1: none.", default=-1)
    signal_name: str = option("Which one.", default="SIGTERM")
    signal_rank: int = option("The process that gets it.", default=0)


@register("toy")
class ToyTraining(nn.Module):
    """Predicts the target's likeliest next token but one from a hidden state."""

    config_class = ToyConfig
    layouts = ("plain",)
    reduced_vocabulary = True
    latest: ClassVar[ToyTraining | None] = None

    def __init__(self, hidden_size: int, size: int, config: ToyConfig) -> None:
        super().__init__()
        layer = nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.Tanh())
        self.layers = nn.ModuleList([layer])
        self.score = nn.Linear(hidden_size, size)
        self.feature_layers = (config.aux_layer,)
        self._config = config
        self._forwards = 0

    @classmethod
    def from_training_args(
        cls, verifier_config: Any, *, target: Any, vocabulary: Any, **options: Any
    ) -> ToyTraining:
        size = verifier_config.vocab_size if vocabulary is None else len(vocabulary)
        toy = cls(verifier_config.hidden_size, size, ToyConfig(**options))
        toy.register_buffer("target_ids", None if vocabulary is None else vocabulary.target_ids)
        cls.latest = toy.to(target.device)
        return cls.latest

    @staticmethod
    def get_trainer_kwargs(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"masked": options["masked"]}, {"masked": options["masked"]}

    def forward(
        self, batch: TrainingBatch, states: TargetStates, *, masked: bool
    ) -> TrainingOutput:
        self._forwards += self.training
        if self.training and self._forwards == self._config.stop_step:
            raise KeyboardInterrupt
        is_hit = int(os.environ.get("RANK", "0")) == self._config.signal_rank
        if self.training and is_hit and self._forwards == self._config.signal_step:
            os.kill(os.getpid(), signal.Signals[self._config.signal_name])
        assert masked == (len(batch.bitmask) > 1)
        scores = self.score(self.layers[0](states.aux[:, :-2, 0].float()))
        goal = batch.token_ids[:, 2:]
        keep = batch.loss_mask[:, 2:]
        losses = functional.cross_entropy(
            scores.flatten(0, 1), goal.flatten() % scores.shape[-1], reduction="none"
        )
        total, count = (losses * keep.flatten()).sum(), keep.sum().float()
        right = ((scores.argmax(-1) == goal) & keep).sum().float()
        loss = total / count.clamp_min(1)
        if self.training and self._forwards == self._config.spoil_step:
            loss = loss * torch.nan
        metrics = {"loss_0": Metric(total.detach(), count), "accept_0": Metric(right, count)}
        return TrainingOutput(functional.pad(scores.argmax(-1), (0, 2), value=-1), loss, metrics)

    def export(
        self, folder: Path, *, layout: str, tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        assert layout == "plain"
        tensors = self.state_dict() if tensors is None else tensors
        save_file(dict(tensors), folder / "model.safetensors")


def write_target(folder: Path) -> str:
    """A random model and its tokenizer."""
    build("llama", 0, VOCAB_SIZE).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def write_documents(path: Path, count: int) -> str:
    """The first ``count`` short documents that come with the package."""
    lines = Path(bundled_asset("heldout.jsonl")).read_text(encoding="utf-8").splitlines()
    short = [line for line in lines if len(line) < 500 and json.loads(line)["schema"]][:count]
    assert len(short) == count
    path.write_text("\n".join(short) + "\n", encoding="utf-8")
    return str(path)


def make_options(target: str, data: str, output: Path, **changes: Any) -> TrainOptions:
    """Small settings; nothing is decoded."""
    settings: dict[str, Any] = {
        "algorithm": "toy",
        "target": target,
        "data": [data],
        "output": str(output),
        "batch_tokens": 1024,
        "max_length": 512,
        "heldout_share": 0.2,
        "learning_rate": 1e-2,
        "log_every": 1,
        "decode_limit": 0,
        "workers": 0,
        "device": "cpu",
    }
    return TrainOptions(**{**settings, **changes})
