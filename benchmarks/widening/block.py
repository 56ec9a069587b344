"""A DFlash or DSpark head widened with its target: the same drafts, at the cost of a large head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.widening.head import aux_layers, head_carrier, wide_fusion
from benchmarks.widening.layer import Widening, WideTensor, wide_layer, wide_norm, wide_rows
from benchmarks.widening.shape import check_growth, rope_theta, shape_of
from guided_spec.errors import ModelError
from guided_spec.models.heads.block.model import BlockHead
from guided_spec.models.heads.export import rope_fields

NAMES = {True: "Qwen3DSparkModel", False: "DFlashDraftModel"}


def block_config(head: BlockHead, target: Widening) -> dict[str, Any]:
    """config.json in DeepSeek's layout of a head with a Markov head, else in z-lab's.

    target: how the head's target was widened; the head takes its shape, and one layer for each of
    its own. Raises ModelError for a head that cannot be widened, ConfigError for the sizes.
    """
    how = _widening(head, target)
    layout, wide, rope = head.layout, how.wide, head.config.rope_parameters
    theta = rope_theta(rope["rope_theta"], how.small.head_dim, wide.head_dim)
    sizes = wide._asdict()
    del sizes["draft_vocab_size"]
    layers = [index - 1 for index in aux_layers(head.aux_hidden_layers, target)]
    own: dict[str, Any] = {"mask_token_id": layout.mask_token_id, "target_layer_ids": layers}
    if layout.markov is None:
        own = {"dflash_config": own}
    else:
        own |= {
            "markov_rank": layout.markov.rank,
            "markov_head_type": layout.markov.kind,
            "enable_confidence_head": layout.confidence_width > 0,
            "confidence_head_with_markov": layout.confidence_width > layout.config.hidden_size,
        }
    return {
        "architectures": [NAMES[layout.markov is not None]],
        "model_type": "qwen3",
        **sizes,
        "num_hidden_layers": head.config.num_hidden_layers,
        "layer_types": head.config.layer_types,
        "hidden_act": head.config.hidden_act,
        "rms_norm_eps": how.carrier.eps,
        **rope_fields({"rope_type": "default", "rope_theta": theta}),
        **dict.fromkeys(("attention_bias", "tie_word_embeddings"), False),
        "block_size": layout.block_size,
        **own,
    }


def block_tensors(head: BlockHead, target: Widening) -> Iterator[WideTensor]:
    """The weights that go with ``block_config``; raises as it does."""
    how = _widening(head, target)
    weights: dict[str, Tensor] = head.state_dict()
    size, constant = how.wide.vocab_size, "norm.weight"
    yield wide_fusion(weights["fc.weight"], how, len(head.aux_hidden_layers))
    yield wide_norm("hidden_norm.weight", weights["hidden_norm.weight"], how, keeps_constant=False)
    for index in range(len(head.layers)):
        prefix = f"layers.{index}."
        found = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        yield from wide_layer(prefix, found, how)
    yield wide_norm(constant, weights[constant], how, keeps_constant=True)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            is_output = name.startswith("lm_head")
            yield wide_rows(name, weights[name], size, how, is_output=is_output)
    for name, weight in weights.items():
        if name.startswith("markov_head.markov_w"):
            yield _padded(name, weight, (size, weight.shape[1]))
        elif name.startswith(("markov_head.", "confidence_head.")):
            yield _beside_output(name, weight, how)


def _padded(name: str, weight: Tensor, shape: tuple[int, int]) -> WideTensor:
    """Rows of tokens; those that fill up neither say nor gain anything."""

    def fill(out: Tensor) -> None:
        out[: len(weight)] = weight.to(out.device, out.dtype)

    return WideTensor(name, shape, fill)


def _beside_output(name: str, weight: Tensor, how: Widening) -> WideTensor:
    """A matrix over [output ; what else is read], [n, h + r] to [n, H + r]; a bias as it is."""
    if weight.dim() == 1:
        return WideTensor(name, tuple(weight.shape), lambda out: _copy(out, weight))
    small, wide = how.small.hidden_size, how.wide.hidden_size
    rest = weight.shape[1] - small

    def fill(out: Tensor) -> None:
        _copy(out[:, :small], weight[:, :small])
        _copy(out[:, wide:], weight[:, small:])

    return WideTensor(name, (len(weight), wide + rest), fill)


def _copy(out: Tensor, weight: Tensor) -> None:
    out.copy_(weight.to(torch.float32))


def _widening(head: BlockHead, target: Widening) -> Widening:
    layout = head.layout
    plain = layout._replace(embedding_scale=1.0, logit_scale=1.0, softcap=0.0)
    windows = {kind for kind in head.config.layer_types if kind != "full_attention"}
    if layout != plain._replace(conv=None, selector=None) or layout.is_causal or windows:
        problem = "found other parts, scales, windows or a causal block"
        raise ModelError(f"widening a head: expected a plain DFlash or DSpark head, {problem}")
    if head.vocabulary is not None or layout.from_anchor != (layout.markov is not None):
        problem = "all tokens, and from its last token's place if it has a Markov head"
        raise ModelError(f"widening a head: expected one that drafts {problem}; train such a one")
    small = shape_of(head.config, "qwen3")
    check_growth(small, target.wide)
    return Widening(small, target.wide, head_carrier(head.config, target))
