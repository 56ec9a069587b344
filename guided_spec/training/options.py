"""The options of a training run, for all algorithms: data, steps, rates, where results go."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from guided_spec.config import option
from guided_spec.errors import ConfigError
from guided_spec.kinds import require_field_kinds
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
    data: list[str] = _required("JSON Lines or Parquet files, hub datasets, presets; see the docs.")
    output: str = _required("Folder for the draft, its checkpoints and logs.")
    layout: str | None = option("Format of the draft; the algorithm's first.", default=None)
    limit: int | None = option("Documents to read at most.", default=None)
    max_length: int = option("Longer documents are left out; in tokens.", default=2048)
    heldout_share: float = option("Share of the documents kept for validation.", default=0.05)
    draft_vocab_size: int | None = option(
        "Tokens the draft scores, the most frequent ones; all by default.", default=None
    )
    grammar_masks: Literal["loss", "metrics", "off"] = option(
        "Where the documents' grammars count: in the loss too, in the metrics only, or nowhere.",
        default="loss",
    )
    regenerate: bool = option("Let the target write the answers first.", default=False)
    regenerate_url: str | None = option(
        "A server that runs it and writes them instead, such as http://host:8000/v1.",
        default=None,
    )
    regenerate_temperature: float = option("Temperature of that; 0 is greedy.", default=0.0)
    regenerate_max_tokens: int = option("Tokens of a written answer at most.", default=512)
    regenerate_batch_size: int = option("Answers that it writes together.", default=16)
    features: str | None = option(
        "Folder of the target's hidden states; what is missing there is written to it.",
        default=None,
    )
    feature_dtype: Literal["target", "fp8"] = option(
        "How they are written: in the target's dtype, or in 8 bits with a scale each.",
        default="target",
    )
    features_url: str | None = option(
        "Who makes them: a vLLM server that extracts them, such as http://host:8000/v1.",
        default=None,
    )
    epochs: int = option("Passes over the documents.", default=1)
    max_steps: int | None = option("Optimizer steps at most.", default=None)
    batch_tokens: int = option("Tokens of a batch, padding included, on one device.", default=8192)
    gradient_accumulation: int = option("Batches of one optimizer step.", default=1)
    learning_rate: float = option("The highest one, after the warm-up.", default=1e-4)
    warmup_share: float = option("Share of the steps in which the rate rises.", default=0.03)
    weight_decay: float = option("AdamW's, for matrices.", default=0.0)
    clip_norm: float = option("Norm that gradients are clipped to.", default=0.5)
    seed: int = option("For the order of the documents and fresh weights.", default=0)
    eval_every: int = option(
        "Steps between validations, of which the best draft is kept; 0: at the end only.",
        default=1000,
    )
    save_every: int = option("Steps between checkpoints; 0: none.", default=500)
    keep_checkpoints: int = option("Checkpoints to keep, the newest.", default=2)
    resume: bool = option("Go on from the newest checkpoint in the output folder.", default=False)
    log_every: int = option("Steps between lines of the log.", default=10)
    tracker: list[str] = field(
        default_factory=lambda: ["tensorboard"],
        metadata={"help": "Where metrics go: tensorboard, wandb, trackio, mlflow, none; repeat."},
    )
    project: str = option("Name under which trackers file the run.", default="guided-spec")
    push_to_hub: str | None = option(
        "Repository of the hub for the finished draft, such as org/name.", default=None
    )
    hub_private: bool = option("Make that repository a private one.", default=False)
    decode_limit: int = option(
        "Held-out documents to decode with the draft at the end.", default=32
    )
    num_draft_tokens: int = option("Tokens drafted a step in that.", default=5)
    decode_max_tokens: int = option("Tokens of a decoded answer at most.", default=256)
    sharding: Literal["none", "fsdp"] = option(
        "Whether each process holds the whole draft or a part of it.", default="none"
    )
    device: Literal["cpu", "cuda"] | None = option("CUDA where there is one.", default=None)
    target_dtype: str | None = option(
        "Of the target: float32, bfloat16, ...; by default the checkpoint's, float32 on the CPU.",
        default=None,
    )
    device_map: str | None = option(
        "Spread the target over devices: auto, or JSON that maps its modules to devices.",
        default=None,
    )
    tensor_parallel: bool = option(
        "Split each layer of the target over the processes of torchrun.", default=False
    )
    trust_remote_code: bool = option("Run code that the target's repository brings.", default=False)
    workers: int = option("Processes that prepare batches; 0: none but the trainer.", default=2)

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
            _require(name in TRACKERS, "tracker", name, f"must be one of {', '.join(TRACKERS)}")
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
