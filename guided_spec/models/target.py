"""What a target shares with its draft heads: embedding, output head, layers, hidden states."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from guided_spec.errors import ModelError
from guided_spec.models.linear_layer import product
from guided_spec.models.pictures.embedding import token_rows


class TargetEnds:
    """Not a module, so that a head that keeps one does not own the target's parameters."""

    def __init__(self, target: PreTrainedModel) -> None:
        model: Any = target
        self._dtype = target.dtype
        self._embedding: nn.Module = model.get_input_embeddings()
        self._head: nn.Module = model.get_output_embeddings()

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids int64 [...] to rows of the embedding [..., H], on the device of the ids.

        No gradient reaches the embedding.
        """
        if type(self._embedding).forward is nn.Embedding.forward:
            embedded: Tensor = self._embedding(token_ids)
        else:
            # Gemma scales in its embedding; heads are trained on a copy of the bare rows.
            weight: Any = self._embedding.weight
            embedded = functional.embedding(token_ids.to(weight.device), weight)
        return embedded.detach().to(token_ids.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] to logits [..., V], on the device of the hidden states.

        They are in the target's dtype, whatever that of the hidden states is.
        """
        return product(self._head, hidden.to(self._dtype)).to(hidden.device)

    def output_rows(self, token_ids: Tensor | None, width: int) -> Tensor | None:
        """A copy of the output head's rows of ``token_ids`` int64 [D], float32 [D, width].

        token_ids: None is all. None where the head has no plain weights of that width.
        """
        weight = getattr(self._head, "weight", None)
        return _plain_rows(weight, token_ids, width)

    def without_copies(self, tensors: Mapping[str, Tensor], *, output: bool) -> dict[str, Tensor]:
        """The tensors of a head, but for an ``embed_tokens.weight`` that is the target's own.

        It may be rounded to another dtype. What a head was trained with, and shares, needs no
        memory of its own. output: so it is with an ``lm_head.weight``.
        """
        kept = _without(tensors, "embed_tokens.weight", self._embedding)
        return _without(kept, "lm_head.weight", self._head) if output else kept

    def embedding_rows(self, width: int) -> Tensor | None:
        """A copy of the embedding, float32 [V, width], or None as of ``output_rows``."""
        return _plain_rows(token_rows(self._embedding), None, width)


def _without(tensors: Mapping[str, Tensor], name: str, part: nn.Module) -> dict[str, Tensor]:
    """The tensors but for ``name``, where that is the weight of ``part``."""
    kept, own = dict(tensors), token_rows(part)
    copy = kept.get(name)
    if copy is None or not isinstance(own, Tensor) or own.shape != copy.shape:
        return kept
    if torch.equal(own.detach().to(copy.dtype), copy.to(own.device)):
        del kept[name]
    return kept


def _plain_rows(weight: Any, token_ids: Tensor | None, width: int) -> Tensor | None:
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return None
    if weight.dim() != 2 or weight.shape[1] != width:
        return None
    rows = weight.detach()
    return rows.float().clone() if token_ids is None else rows[token_ids.to(rows.device)].float()


NEEDED = ("layers", "norm", "rotary_emb")


class TargetLayers:
    """Not a module, so that a head that keeps one does not own the target's parameters.

    config: the target's configuration of its text layers; not a copy.
    layer_class, norm_class: of its last decoder layer, and of its final norm.
    last: its last decoder layer.
    counts_axes: whether its positions may have three axes.
    exact: parts of names of what the target's class keeps in float32: router biases.

    Raises ModelError for a target whose layers cannot be used alone.
    """

    def __init__(self, target: PreTrainedModel) -> None:
        model: Any = target
        decoder = model.get_decoder()
        self.config: Any = model.config.get_text_config(decoder=True)
        lacking = [f"decoder.{name}" for name in NEEDED if not hasattr(decoder, name)]
        lacking += [] if hasattr(self.config, "rms_norm_eps") else ["config.rms_norm_eps"]
        if lacking:
            raise ModelError(
                f"model_type={self.config.model_type!r}: expected decoder layers, RMS norms and "
                f"a rotary embedding for all layers, found no {', '.join(lacking)}; a head of "
                "this kind cannot be made of its layers: use EAGLE-3"
            )
        self.last: nn.Module = decoder.layers[-1]
        self.layer_class: Any = type(self.last)
        self.norm_class: Any = type(decoder.norm)
        self._rotary: Any = decoder.rotary_emb
        self.counts_axes = hasattr(self._rotary, "mrope_section")
        self.exact = set(target._keep_in_fp32_modules_strict or ())
        if target.dtype == torch.float16:
            self.exact |= set(target._keep_in_fp32_modules or ())

    def rotate(
        self, hidden: Tensor, position_ids: Tensor, layer_type: str
    ) -> tuple[Tensor, Tensor]:
        """(cos, sin) of positions int64 [B, T], in the dtype and on the device of ``hidden``.

        Or of [3, B, T], on each axis. layer_type: of the layer that is to use them, for targets
        whose layers differ in that.
        """
        if self.counts_axes and position_ids.dim() == 2:
            # Time, height and width: the same for text, as the model itself makes them.
            position_ids = position_ids.expand(3, *position_ids.shape)
        rope = getattr(self.config, "rope_parameters", None) or {}
        kind = {"layer_type": layer_type} if layer_type in rope else {}
        cos, sin = self._rotary(hidden, position_ids, **kind)
        return cos, sin

    def copy_last(self, layer: nn.Module) -> bool:
        """Fill ``layer`` with the weights of the target's last, where it has the same ones.

        Raises ModelError for a target without weights in its layers, see ``load_ends``.
        """
        own, theirs = layer.state_dict(), self.last.state_dict()
        if own.keys() != theirs.keys():
            return False
        if any(own[name].shape != theirs[name].shape for name in own):
            return False
        if any(tensor.is_meta for tensor in theirs.values()):
            raise ModelError(
                f"model_type={self.config.model_type!r}: the weights of the target's last layer "
                "were not read, which a module starts as: pass --initialize random"
            )
        layer.load_state_dict(theirs)
        return True


def cut_config(kind: TargetLayers, num_modules: int) -> Any:
    """A copy of the target's text configuration, cut down to ``num_modules`` layers like its last.

    A last layer of linear attention is none that a head can have: it attends to everything.
    """
    config: Any = copy.deepcopy(kind.config)
    # The layers' numbers start at 0 again, where the target's first layers are dense.
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    if hasattr(config, "mlp_only_layers"):
        has_experts = hasattr(getattr(kind.last, "mlp", None), "experts")
        config.mlp_only_layers = [] if has_experts else [*range(num_modules)]
        config.decoder_sparse_step = 1
    for field in ("layer_types", "mlp_layer_types"):
        kinds = getattr(config, field, None)
        if kinds is not None:
            last = "full_attention" if kinds[-1] == "linear_attention" else kinds[-1]
            setattr(config, field, [last] * num_modules)
    config.num_hidden_layers = num_modules
    return config


def kind_of(module: Any) -> str:
    """The name of transformers' kind of model that a module is of; "" for others."""
    name, _, kind = type(module).__module__.rpartition(".modeling_")
    return kind if name == f"transformers.models.{kind}" else ""


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """The part of ``model`` in front of its output head."""
    stock: Any = model
    # ModernBERT calls its output head "decoder", and that is what transformers takes for one.
    is_head = stock.get_decoder() is stock.get_output_embeddings()
    found: nn.Module = stock.base_model if is_head else stock.get_decoder()
    # Llama 4's text model takes itself for its decoder.
    return getattr(stock, "model", found) if found is model else found


@contextmanager
def implementing(config: Any, part: str, name: str) -> Iterator[None]:
    """Let a part of the decoder of ``config`` run by the function ``name`` while it is open.

    part: "attn" or "experts", for which transformers has tables of functions.
    """
    text_config, field = config.get_text_config(decoder=True), f"_{part}_implementation_internal"
    # The setter of the public name would change nested configurations as well.
    before = getattr(text_config, field)
    setattr(text_config, field, name)
    try:
        yield
    finally:
        setattr(text_config, field, before)


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
        for index, layer in enumerate(layers):
            stack.enter_context(_hook(decoder, layer, captured, index))
        yield captured


def check_layers(layers: Sequence[int], num_layers: int) -> None:
    """Raises ModelError for an index of a hidden state that the model does not have."""
    for layer in layers:
        if not -1 <= layer <= num_layers:
            raise ModelError(f"hidden layer {layer}: the model has {num_layers} layers")


def _hook(decoder: nn.Module, layer: int, captured: list[Tensor], index: int) -> Any:
    modules = getattr(decoder, "layers", None)
    if not isinstance(modules, nn.ModuleList):
        kind = type(decoder).__name__
        raise ModelError(f"decoder={kind}: it has no list of layers to tap")
    check_layers([layer], len(modules))

    def keep_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captured[index] = args[0] if args else kwargs["hidden_states"]

    def keep_output(_: nn.Module, __: Any, output: Any) -> None:
        captured[index] = output if isinstance(output, Tensor) else output[0]

    if layer == -1:
        return decoder.register_forward_hook(keep_output)
    if layer == len(modules):
        return modules[-1].register_forward_hook(keep_output)
    return modules[layer].register_forward_pre_hook(keep_input, with_kwargs=True)
