"""A target of which only the ends are read from its checkpoint: embedding, last norm, output head.

What trains a draft from hidden states on disk needs no more of it, and a target may be far larger
than what trains.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)

from guided_spec.errors import ModelError
from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.loading import resolve_dtype

__all__ = ["has_layers", "load_ends", "without_layers"]


def load_ends(
    path: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: torch.device,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model of a checkpoint with no weights in its layers, which take no memory.

    Where the names in the checkpoint are the module's own and nothing is quantized, the last layer
    has its weights too: modules of multi-token prediction may start as a copy of it. No weight
    takes a gradient.

    path: a folder or a hub id. dtype: as of ``load_model``.

    Raises ModelError for a checkpoint that has the ends under other names, or quantized.
    """
    checkpoint = Checkpoint.open(path)
    model = _build_empty(str(path), resolve_dtype(dtype, device), trust_remote_code)
    names = {id(module): name for name, module in model.named_modules()}
    decoder = model.get_decoder()
    ends = [model.get_input_embeddings(), decoder.norm]
    if not model.config.get_text_config(decoder=True).tie_word_embeddings:
        ends.append(model.get_output_embeddings())
    for module in ends:
        missing = _fill(module, names[id(module)], checkpoint)
        if missing:
            problem = f"expected plain weights {', '.join(missing)}, found none"
            raise ModelError(f"model={str(path)!r}: {problem}; load all of it")
    if "quantization_config" not in checkpoint.config:
        _fill(decoder.layers[-1], names[id(decoder.layers[-1])], checkpoint)
    model.tie_weights()
    for module in model.modules():
        for name, tensor in module.named_buffers(recurse=False):
            setattr(module, name, tensor.to(device))
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    model.requires_grad_(requires_grad=False).eval()
    assert isinstance(model, PreTrainedModel)
    return model


def has_layers(model: PreTrainedModel) -> bool:
    """Whether the layers have their weights; a device map may keep them outside of the model."""
    is_mapped = getattr(model, "hf_device_map", None) is not None
    return is_mapped or not any(parameter.is_meta for parameter in model.parameters())


@contextmanager
def without_layers(decoder: nn.Module) -> Iterator[None]:
    """While it is open the decoder runs from its embedding to its last norm at once."""
    layers, decoder.layers = decoder.layers, nn.ModuleList()
    try:
        yield
    finally:
        decoder.layers = layers


def _build_empty(source: str, dtype: Any, trust_remote_code: bool) -> Any:  # noqa: FBT001
    """With parameters that have a shape only, and real buffers: those of rotary embeddings."""
    from accelerate import init_empty_weights  # an extra

    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        stored = config.dtype or torch.float32
        with init_empty_weights(include_buffers=False):
            model: Any = AutoModelForCausalLM.from_config(
                config,
                dtype=stored if dtype == "auto" else dtype,
                trust_remote_code=trust_remote_code,
            )
    except Exception as error:  # transformers raises nearly every class of exception here
        raise ModelError(f"model={source!r} cannot be built without weights: {error}") from error
    with suppress(OSError):  # it has none
        model.generation_config = GenerationConfig.from_pretrained(source)
    return model


def _fill(module: nn.Module, prefix: str, checkpoint: Checkpoint) -> list[str]:
    """Read the weights of ``module``, in the dtype that they are to have, if all are there.

    Returns the names of those that are not.
    """
    stored = {f"{prefix}.{name}": name for name, _ in module.named_parameters()}
    missing = sorted(set(stored) - checkpoint.names)
    tensors = {} if missing else checkpoint.read(stored)
    for full, tensor in tensors.items():
        owner, _, name = stored[full].rpartition(".")
        holder: Any = module.get_submodule(owner)
        empty = getattr(holder, name)
        if empty.shape != tensor.shape:
            found, expected = list(tensor.shape), list(empty.shape)
            problem = f"{full}: expected {expected}, found {found}"
            raise ModelError(f"model={checkpoint.source!r}: {problem}")
        setattr(holder, name, nn.Parameter(tensor.to(empty.dtype), requires_grad=False))
    return missing
