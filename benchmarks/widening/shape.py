"""Sizes of a model before and after widening, and the constant that a widened model carries."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from guided_spec.errors import ConfigError, ModelError


class Shape(NamedTuple):
    """The sizes of a Llama; the defaults are those of Llama-3.1-8B.

    draft_vocab_size: D of the EAGLE-3 head beside it, the default that of the published ones.
    """

    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 14336
    vocab_size: int = 128256
    max_position_embeddings: int = 131_072
    draft_vocab_size: int = 32000


LLAMA_8B = Shape()


class Carrier(NamedTuple):
    """A hidden channel that holds the same number for every token, and what it does to the norms.

    RMSNorm divides by sqrt(sum(x^2) / h + eps). Over H channels, of which h hold x, one holds c and
    the others 0, it divides by sqrt((sum(x^2) + c^2) / H + eps'). With

        eps' = (h * eps - c^2) / H

    the two differ by the factor sqrt(h / H) alone, which goes into the norm's weight: the channel
    takes the place of a part of eps. So widened models have a feature that does not depend on the
    text, with which the logits of padding can be pushed down: Llama has no bias for that.

    channel: h, the first new one; -1 where there is none, because the width stays. value: c.
    eps: eps'. scale: sqrt(h / H).
    """

    channel: int
    value: float
    eps: float
    scale: float

    @classmethod
    def between(cls, small: int, wide: int, eps: float, value: float | None = None) -> Carrier:
        """For widths ``small`` and ``wide``; c is a power of two with c^2 at most h * eps / 2.

        value: c where another module has chosen it. Raises ModelError when it is too large for eps.
        """
        scale = math.sqrt(small / wide)
        if wide == small:
            return cls(-1, 0.0, eps, scale)
        if value is None:
            value = 2.0 ** math.floor(math.log2(math.sqrt(small * eps / 2)))
        if small * eps <= value**2:
            raise ModelError(
                f"rms_norm_eps={eps}: expected more than {value**2 / small}, which the target's "
                "constant channel takes; widen a head whose eps is its target's"
            )
        return cls(small, value, (small * eps - value**2) / wide, scale)


def shape_of(config: Any, kind: str = "llama") -> Shape:
    """The sizes in a Llama's configuration; ``draft_vocab_size`` is its vocabulary.

    kind: "qwen3" for the layers of a block head. Raises ModelError for a model that is not plain:
    of another kind, with biases, with another rotary embedding.
    """
    rope = dict(getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    found = {"model_type": config.model_type, "rope_type": rope}
    biases = ("attention_bias", "mlp_bias")
    found |= {name: bool(getattr(config, name, False)) for name in biases}
    expected = {"model_type": kind, "rope_type": "default", **dict.fromkeys(biases, False)}
    if found != expected:
        raise ModelError(f"widening: expected {expected}, found {found}; pass a plain {kind}")
    sizes = {name: getattr(config, name) for name in Shape._fields[:-1]}
    return Shape(**sizes, draft_vocab_size=config.vocab_size)


def check_growth(small: Shape, wide: Shape) -> None:
    """Raise ConfigError, naming the size, where ``wide`` cannot hold ``small``.

    ``num_hidden_layers`` and ``draft_vocab_size`` are left to those who use them.
    """
    for name in set(Shape._fields) - {"num_hidden_layers", "draft_vocab_size"}:
        least, found = getattr(small, name), getattr(wide, name)
        if found < least:
            raise ConfigError(name, found, f"must be at least {least}, the small model's")
    least = small.num_attention_heads // small.num_key_value_heads
    if wide.num_attention_heads // wide.num_key_value_heads < least:
        fix = f"must be at least {least} times num_key_value_heads, as in the small model"
        raise ConfigError("num_attention_heads", wide.num_attention_heads, fix)
    if wide.head_dim % 2:
        raise ConfigError("head_dim", wide.head_dim, "must be even, for rotary embeddings")
    if wide.hidden_size == small.hidden_size and wide.vocab_size > small.vocab_size:
        fix = f"must be more than {small.hidden_size}: padded tokens need a channel of their own"
        raise ConfigError("hidden_size", wide.hidden_size, fix)


def rope_theta(theta: float, small: int, wide: int) -> float:
    """The base with which the first frequencies of head size ``wide`` are those of ``small``.

    Frequency i of D dimensions is theta^(-2 i / D): theta' = theta^(D / d) keeps it for every i.
    """
    return theta if wide == small else float(theta ** (wide / small))


def place_layers(small: int, wide: int) -> tuple[int, ...]:
    """[small]: where the layers of the small model stand among ``wide``, spread evenly.

    The input of layer i of the small model is the input of layer ``place_layers(...)[i]``.
    Raises ConfigError when there are fewer layers than before.
    """
    if wide < small:
        fix = f"must be at least {small}, the small model's"
        raise ConfigError("num_hidden_layers", wide, fix)
    return tuple(index * wide // small for index in range(small))
