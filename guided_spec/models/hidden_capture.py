"""The decoder of a model, and its hidden states, read while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from guided_spec.errors import ModelError

__all__ = ["capture_hidden", "check_layers", "find_decoder"]


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """The part of ``model`` in front of its output head."""
    stock: Any = model
    # ModernBERT calls its output head "decoder", and that is what transformers takes for one.
    is_head = stock.get_decoder() is stock.get_output_embeddings()
    found: nn.Module = stock.base_model if is_head else stock.get_decoder()
    return found


@contextmanager
def capture_hidden(decoder: nn.Module, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Collect hidden states of the forwards of ``decoder`` while it is open.

    layers: index i is the input of layer i, n (the number of layers) the output of the last layer,
        and -1 that output after the final norm.

    Yields a list in the order of ``layers``, which each forward fills with [B, T, H]; these are the
    decoder's own tensors, on the devices of the layers. Raises ModelError for a layer that the
    decoder does not have, or when it has no list of layers.
    """
    captured: list[Tensor] = [torch.empty(0)] * len(layers)
    with ExitStack() as stack:
        for place, layer in enumerate(layers):
            stack.enter_context(_hook(decoder, layer, captured, place))
        yield captured


def check_layers(layers: Sequence[int], num_layers: int) -> None:
    """Raises ModelError for an index of a hidden state that the model does not have."""
    for layer in layers:
        if not -1 <= layer <= num_layers:
            raise ModelError(f"hidden layer {layer}: the model has {num_layers} layers")


def _hook(decoder: nn.Module, layer: int, captured: list[Tensor], place: int) -> Any:
    modules = getattr(decoder, "layers", None)
    if not isinstance(modules, nn.ModuleList):
        kind = type(decoder).__name__
        raise ModelError(f"decoder={kind}: it has no list of layers to tap")
    check_layers([layer], len(modules))

    def keep_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captured[place] = args[0] if args else kwargs["hidden_states"]

    def keep_output(_: nn.Module, __: Any, output: Any) -> None:
        captured[place] = output if isinstance(output, Tensor) else output[0]

    if layer == -1:
        return decoder.register_forward_hook(keep_output)
    if layer == len(modules):
        return modules[-1].register_forward_hook(keep_output)
    return modules[layer].register_forward_pre_hook(keep_input, with_kwargs=True)
