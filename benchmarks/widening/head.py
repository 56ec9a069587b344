"""An EAGLE-3 or P-EAGLE head widened with its target: the same drafts, at a large head's cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.widening.layer import (
    Widening,
    WideTensor,
    wide_layer,
    wide_norm,
    wide_rows,
)
from benchmarks.widening.shape import (
    Carrier,
    Shape,
    check_growth,
    place_layers,
    rope_theta,
    shape_of,
)
from guided_spec.errors import ConfigError, ModelError
from guided_spec.models.heads.draft_head import MASK, DraftVocabulary
from guided_spec.models.heads.eagle import LAYER_IDS, Eagle3Head
from guided_spec.models.heads.export import rope_fields

FLAGS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")


def head_config(head: Eagle3Head, target: Widening) -> dict[str, Any]:
    """config.json in SafeAILab's layout, which this package and other engines read.

    target: how the head's target was widened; the head takes its shape, and one layer for each of
    its own. Raises ModelError for a head that cannot be widened, ConfigError for the sizes.
    """
    how = _widening(head, target)
    wide, config = how.wide, head.config
    rope = config.rope_parameters
    theta = rope_theta(rope["rope_theta"], how.small.head_dim, wide.head_dim)
    layers = aux_layers(head.aux_hidden_layers, target)
    mask = head.layout.mask_token_id
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **wide._asdict(),
        "num_hidden_layers": config.num_hidden_layers,
        "target_hidden_size": wide.hidden_size,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": how.carrier.eps,
        **rope_fields({"rope_type": "default", "rope_theta": theta}),
        **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings"), False),
        **dict.fromkeys(("norm_before_fc", "norm_before_residual"), False),
        # Inputs of layers at the top level; their outputs in the dialect of SGLang and SpecForge.
        LAYER_IDS: layers,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "norm_before_fc": False,
            LAYER_IDS: [index - 1 for index in layers],
        },
        **({} if mask is None else {"ptd_token_id": mask}),
    }


def head_tensors(head: Eagle3Head, target: Widening) -> Iterator[WideTensor]:
    """The weights that go with ``head_config``, and d2t and t2d of the padded draft vocabulary.

    Raises as ``head_config`` does.
    """
    how = _widening(head, target)
    weights: dict[str, Tensor] = head.state_dict()
    yield wide_fusion(weights["fc.weight"], how, len(head.aux_hidden_layers))
    if head.mask_hidden is not None:
        yield _mask(head.mask_hidden, how, len(head.aux_hidden_layers))
    for index in range(len(head.layers)):
        source = f"layers.{index}."
        found = {n.removeprefix(source): w for n, w in weights.items() if n.startswith(source)}
        prefix = "midlayer." if index == 0 else source
        yield from wide_layer(prefix, found, how, num_inputs=2 if index == 0 else 1)
    yield wide_norm("norm.weight", weights["norm.weight"], how, keeps_constant=True)
    if head.embed_tokens is not None:
        rows = weights["embed_tokens.weight"]
        size = how.wide.vocab_size
        yield wide_rows("embed_tokens.weight", rows, size, how, is_output=False)
    size = how.wide.draft_vocab_size
    yield wide_rows("lm_head.weight", weights["lm_head.weight"], size, how, is_output=True)
    yield from _vocabulary(_checked_vocabulary(head), how.wide)


def wide_fusion(weight: Tensor, how: Widening, count: int) -> WideTensor:
    """[h, n * h] to [H, n * H]; the constant of the first hidden state is handed on."""
    small, wide = how.small.hidden_size, how.wide.hidden_size
    channel = how.carrier.channel

    def fill(out: Tensor) -> None:
        blocks = out.view(wide, count, wide)
        blocks[:small, :, :small] = weight.view(small, count, small).to(out.device, out.dtype)
        if channel >= 0:
            blocks[channel, 0, channel] = 1.0

    return WideTensor("fc.weight", (wide, count * wide), fill)


def _mask(hidden: Tensor, how: Widening, count: int) -> WideTensor:
    """[n * h] to [1, 1, n * H]; it stands for hidden states, so it has their constant."""
    small, wide = how.small.hidden_size, how.wide.hidden_size
    channel, value = how.carrier.channel, how.carrier.value

    def fill(out: Tensor) -> None:
        blocks = out.view(count, wide)
        blocks[:, :small] = hidden.view(count, small).to(out.device, out.dtype)
        if channel >= 0:
            blocks[:, channel] = value

    return WideTensor(MASK, (1, 1, count * wide), fill)


def _vocabulary(vocabulary: DraftVocabulary, wide: Shape) -> Iterator[WideTensor]:
    """Padded draft tokens are padded target tokens, each another one."""
    small, count = vocabulary.target_size, wide.draft_vocab_size - len(vocabulary)
    padding = torch.arange(small, small + count)
    ids = torch.cat([vocabulary.target_ids.cpu(), padding])
    for name, tensor in DraftVocabulary(ids, wide.vocab_size).tensors().items():
        yield WideTensor(name, tuple(tensor.shape), _copy(tensor), tensor.dtype)


def _copy(source: Tensor) -> Any:
    def fill(out: Tensor) -> None:
        out.copy_(source)

    return fill


def _widening(head: Eagle3Head, target: Widening) -> Widening:
    layout, vocabulary = head.layout, _checked_vocabulary(head)
    small = shape_of(head.config)._replace(draft_vocab_size=len(vocabulary))
    found = {name: getattr(layout, name) for name in FLAGS}
    found |= {"fc": head.fc is not None, "target_hidden_size": layout.target_hidden_size}
    expected = dict.fromkeys(FLAGS, False) | {"fc": True, "target_hidden_size": small.hidden_size}
    if found != expected:
        # Their constant channel would not be constant behind another norm.
        raise ModelError(f"widening a head: expected {expected}, found {found}; pass another head")
    check_growth(small, target.wide)
    added = target.wide.draft_vocab_size - len(vocabulary)
    room = target.wide.vocab_size - vocabulary.target_size
    if not 0 <= added <= room:
        fix = f"must be {len(vocabulary)} to {len(vocabulary) + room}: padding for padding"
        raise ConfigError("draft_vocab_size", target.wide.draft_vocab_size, fix)
    return Widening(small, target.wide, head_carrier(head.config, target))


def head_carrier(config: Any, target: Widening) -> Carrier:
    """Of a head whose layers have ``config``, with the constant that its target has."""
    widths = (config.hidden_size, target.wide.hidden_size)
    return Carrier.between(*widths, config.rms_norm_eps, target.carrier.value)


def _checked_vocabulary(head: Eagle3Head) -> DraftVocabulary:
    if head.vocabulary is None:
        raise ModelError(
            "widening a head: expected a draft vocabulary of its own (d2t), found none"
        )
    return head.vocabulary


def aux_layers(layers: Sequence[int], target: Widening) -> list[int]:
    """Where the target's layers, whose inputs a head reads, stand in the widened one."""
    small, wide = target.small.num_hidden_layers, target.wide.num_hidden_layers
    places = (*place_layers(small, wide), wide)
    return [places[index] for index in layers]
