"""The options of a training run, for all algorithms: data, steps, rates, where results go."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from guided_spec.config import option
from guided_spec.errors import ConfigError
from guided_spec.kinds import require_field_kinds, require_one_of
from guided_spec.types import require_int

DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow", "none")
BEST = "best"  # in the output folder of a run: the draft of the best validation

_AT_LEAST_1 = (
    *("epochs", "max_steps", "batch_tokens", "gradient_accumulation", "max_length", "limit"),
    *(
        "draft_vocab_size",
        "regenerate_max_tokens",
        "regenerate_batch_size",
        "keep_checkpoints",
        "log_every",
    ),
    *("num_draft_tokens", "decode_max_tokens"),
)
_AT_LEAST_0 = ("seed", "eval_every", "save_every", "workers", "decode_limit")


def _required(help_text: str) -> Any:
    return field(metadata={"help": help_text})


@dataclass(frozen=True)
class TrainOptions:
    """The common options of ``guided-spec train``; each field is one, with its help text.

    Raises ConfigError for a value of another kind or out of range.
    """

    algorithm: str = _required("How to train the draft; see the list below.")
    target: str = _required("The model to draft for: a folder, a hub id, or 'bundled'.")
    data: list[str] = _required("JSON Lines or Parquet files, hub datasets, or presets.")
    output: str = _required("Folder for the draft, its checkpoints and logs.")
    layout: str | None = option("Checkpoint format; default: the algorithm's first.", default=None)
    limit: int | None = option("Maximum number of documents.", default=None)
    max_length: int = option("Maximum tokens of a document; longer ones are skipped.", default=2048)
    heldout_share: float = option("Share of the documents kept for validation.", default=0.05)
    draft_vocab_size: int | None = option(
        "Size of the draft vocabulary, the most frequent tokens; by default all.", default=None
    )
    grammar_masks: Literal["loss", "metrics", "off"] = option(
        "Where the grammars of documents apply: loss and metrics, metrics only, or off.",
        default="loss",
    )
    regenerate: bool = option("Replace answers by the target's own before training.", default=False)
    regenerate_url: str | None = option(
        "Server that generates these answers, such as http://host:8000/v1.",
        default=None,
    )
    regenerate_temperature: float = option("Their temperature; 0 is greedy.", default=0.0)
    regenerate_max_tokens: int = option("Maximum tokens of such an answer.", default=512)
    regenerate_batch_size: int = option("Answers generated at a time.", default=16)
    features: str | None = option(
        "Folder that caches the target's hidden states.",
        default=None,
    )
    feature_dtype: Literal["target", "fp8"] = option(
        "Their dtype on disk: the target's, or fp8 with a scale each.",
        default="target",
    )
    features_url: str | None = option(
        "vLLM server that extracts hidden states, such as http://host:8000/v1.",
        default=None,
    )
    epochs: int = option("Passes over the documents.", default=1)
    max_steps: int | None = option("Maximum optimizer steps.", default=None)
    batch_tokens: int = option("Tokens per batch and device, padding included.", default=8192)
    gradient_accumulation: int = option("Batches per optimizer step.", default=1)
    learning_rate: float = option("Peak learning rate, after the warm-up.", default=1e-4)
    warmup_share: float = option("Share of steps used for warm-up.", default=0.03)
    weight_decay: float = option("Weight decay of AdamW, for matrices.", default=0.0)
    clip_norm: float = option("Maximum gradient norm.", default=0.5)
    seed: int = option("Seed of the document order and of fresh weights.", default=0)
    eval_every: int = option(
        "Steps between validations; the best draft is kept. 0: at the end only.",
        default=1000,
    )
    save_every: int = option("Steps between checkpoints; 0: none.", default=500)
    keep_checkpoints: int = option("How many of the newest checkpoints to keep.", default=2)
    resume: bool = option("Resume from the newest checkpoint in the output folder.", default=False)
    log_every: int = option("Steps between log lines.", default=10)
    tracker: list[str] = field(
        default_factory=lambda: ["tensorboard"],
        metadata={
            "help": "Metric trackers: tensorboard, wandb, trackio, mlflow, none; can be repeated."
        },
    )
    project: str = option("Project name for trackers.", default="guided-spec")
    push_to_hub: str | None = option(
        "Hub repository for the finished draft, such as org/name.", default=None
    )
    hub_private: bool = option("Make that repository private.", default=False)
    decode_limit: int = option(
        "Held-out documents to decode with the draft at the end.", default=32
    )
    num_draft_tokens: int = option("Draft tokens per step in that run.", default=5)
    decode_max_tokens: int = option("Maximum tokens of a decoded answer.", default=256)
    sharding: Literal["none", "fsdp"] = option(
        "fsdp shards the draft over processes; none replicates it.", default="none"
    )
    device: Literal["cpu", "cuda"] | None = option(
        "Device; by default CUDA if available.", default=None
    )
    target_dtype: str | None = option(
        "Dtype of the target; by default the checkpoint's, and float32 on the CPU.",
        default=None,
    )
    device_map: str | None = option(
        "Spread the target over devices: auto, or a JSON map of its modules.",
        default=None,
    )
    tensor_parallel: bool = option(
        "Split each layer of the target over the processes of torchrun.", default=False
    )
    trust_remote_code: bool = option("Run code from the target's repository.", default=False)
    workers: int = option("Data worker processes; 0 prepares batches in the trainer.", default=2)

    def __post_init__(self) -> None:
        require_field_kinds(self)
        for name in (*_AT_LEAST_1, *_AT_LEAST_0):
            value: int | None = getattr(self, name)
            if value is not None:
                require_int(name, value, low=int(name in _AT_LEAST_1))
        _require(self.learning_rate > 0, "learning_rate", self.learning_rate, "must be above 0")
        _require(self.clip_norm > 0, "clip_norm", self.clip_norm, "must be above 0")
        _require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "must be at least 0")
        for name, share in (
            ("warmup_share", self.warmup_share),
            ("heldout_share", self.heldout_share),
        ):
            _require(0 <= share < 1, name, share, "must be at least 0, below 1")
        if self.device_map is not None:
            read_device_map(self.device_map)
        temperature = self.regenerate_temperature
        _require(temperature >= 0, "regenerate_temperature", temperature, "must be at least 0")
        if self.regenerate_url is not None:
            fix = "is of use with regenerate alone; pass that too"
            _require(self.regenerate, "regenerate_url", self.regenerate_url, fix)
        if self.tensor_parallel:
            self._check_split()
        if self.feature_dtype != "target":
            fix = "is how files are written: name their folder by features"
            _require(self.features is not None, "feature_dtype", self.feature_dtype, fix)
        for name in self.tracker:
            require_one_of("tracker", name, TRACKERS)
        _require(bool(self.project), "project", self.project, "must not be empty")
        _require(bool(self.data), "data", self.data, "name at least one file")

    def _check_split(self) -> None:
        """A target in parts runs for hidden states alone."""
        for name in ("device_map", "features_url"):
            fix = "excludes tensor_parallel: choose one of the two"
            _require(getattr(self, name) is None, name, getattr(self, name), fix)
        fix = "must be 0 with tensor_parallel: a target in parts does not decode"
        _require(not self.decode_limit, "decode_limit", self.decode_limit, fix)
        fix = "needs regenerate_url with tensor_parallel: a target in parts does not decode"
        _require(not self.regenerate or self.regenerate_url, "regenerate", self.regenerate, fix)


def read_device_map(text: str) -> str | dict[str, Any]:
    """A name that accelerate knows, or JSON of modules and devices; ConfigError for neither."""
    if text in DEVICE_MAPS:
        return text
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    fix = f'must be one of {", ".join(DEVICE_MAPS)}, or JSON such as {{"": "cuda:1"}}'
    _require(isinstance(found, dict) and found, "device_map", text, fix)
    return dict(found)


def _require(condition: object, name: str, value: object, fix: str) -> None:
    if not condition:
        raise ConfigError(name, value, fix)
