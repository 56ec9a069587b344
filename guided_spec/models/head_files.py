"""What a saved draft head consists of, and the parts of config.json that all layouts share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.errors import ConfigError

__all__ = [
    "Embedding",
    "HeadFiles",
    "SaveKeywords",
    "SaveOptions",
    "architectures_of",
    "dtype_name",
    "rope_fields",
    "speculators_config",
]

Embedding = Literal["auto", "omit", "copy"]

# The release whose files these are.
SPECULATORS_VERSION = "0.9.0"


class HeadFiles(NamedTuple):
    """config: of config.json. tensors: of model.safetensors, by the names of the layout.

    exact: parts of names of tensors that keep their dtype.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    exact: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SaveOptions:
    """How a head is written.

    dtype: of its weights. speculative_tokens: how many to draft, which layouts of speculators tell
    the engine. embedding: "copy" writes what the head borrows of the target, its embedding and
    where the layout has a place for it the output head; "omit" leaves it out, which is smaller;
    "auto" writes it where the layout's own loader does not take it from the target.

    Raises ConfigError, naming the option, for a value that cannot be.
    """

    dtype: torch.dtype = torch.bfloat16
    speculative_tokens: int = 5
    embedding: Embedding = "auto"

    def __post_init__(self) -> None:
        if not self.dtype.is_floating_point or self.dtype.itemsize < 2:
            fix = "must be torch.bfloat16, torch.float16 or torch.float32"
            raise ConfigError("dtype", self.dtype, fix)
        if self.speculative_tokens < 1:
            raise ConfigError("speculative_tokens", self.speculative_tokens, "must be at least 1")
        if self.embedding not in get_args(Embedding):
            raise ConfigError("embedding", self.embedding, "must be 'auto', 'omit' or 'copy'")


class SaveKeywords(TypedDict, total=False):
    """The fields of ``SaveOptions`` as keyword arguments."""

    dtype: torch.dtype
    speculative_tokens: int
    embedding: Embedding


def dtype_name(dtype: torch.dtype) -> str:
    """As config.json has it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def architectures_of(target: PreTrainedModel) -> list[str]:
    """The class names in the target's config.json."""
    found: list[str] | None = target.config.architectures
    return found or [type(target).__name__]


def rope_fields(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A rotary embedding as transformers 5 reads it, and as earlier releases and engines do.

    parameters: ``rope_parameters`` of a configuration, the same for all layers.
    """
    kept = dict(parameters)
    scaling = {name: value for name, value in kept.items() if name != "rope_theta"}
    is_plain = scaling.get("rope_type", "default") == "default"
    return {
        "rope_parameters": kept,
        "rope_theta": kept.get("rope_theta", 10000.0),
        "rope_scaling": None if is_plain else scaling,
    }


def speculators_config(target: PreTrainedModel, options: SaveOptions) -> dict[str, Any]:
    """The two keys by which speculators and vLLM know how to draft, and for which target.

    Raises ConfigError for a target that was not loaded from a folder or the hub.
    """
    path = getattr(target.config, "name_or_path", None)
    if not path:
        fix = (
            "must have been loaded from a folder or a hub id, which this layout names; load it "
            "so, or set target.config.name_or_path"
        )
        raise ConfigError("target.config.name_or_path", path, fix)
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": options.speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": str(path), "architectures": architectures_of(target)},
        },
    }
