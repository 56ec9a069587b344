"""One decoder layer's weights inside a wider layer's: zeros but for a corner of each tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.widening.shape import Carrier, Shape

# Times the constant channel, behind the last norm: some thousands below every real logit, and
# finite in bfloat16. It would overflow float16.
PENALTY = -(2.0**24)

HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")  # of Qwen3's layers

Sizes = tuple[int, ...]


class WideTensor(NamedTuple):
    """One tensor of a widened model, not yet made.

    name, shape: as in its checkpoint. fill: writes what is not zero into zeros of that shape, of
    any float dtype on any device. dtype: None is the model's.
    """

    name: str
    shape: Sizes
    fill: Callable[[Tensor], None]
    dtype: torch.dtype | None = None


class Widening(NamedTuple):
    """From which sizes to which, and the constant channel between them."""

    small: Shape
    wide: Shape
    carrier: Carrier

    @property
    def plain_scales(self) -> tuple[float, float]:
        """What queries and keys are multiplied with, so that scores are divided by sqrt(d)."""
        return math.sqrt(self.wide.head_dim / self.small.head_dim), 1.0

    @property
    def normed_scales(self) -> tuple[float, float]:
        """The same where they are normed behind that.

        A norm over a head of D dimensions divides by sqrt(sum(x^2) / D + eps'), with the eps' of
        the layers' norms. So scaled, that is the small one's up to a factor in the norm's weight.
        """
        small, wide, carrier = self.small, self.wide, self.carrier
        eps = (wide.hidden_size * carrier.eps + carrier.value**2) / small.hidden_size
        scale = math.sqrt(carrier.eps * wide.head_dim / (small.head_dim * eps))
        return scale, scale


def wide_rows(name: str, rows: Tensor, size: int, how: Widening, *, is_output: bool) -> WideTensor:
    """An embedding, or an output head, [v, h] to [size, H].

    Rows of an embedding carry the constant; those of an output head that are new are pushed down
    by it, so that their tokens have no probability.
    """
    channel = how.carrier.channel

    def fill(out: Tensor) -> None:
        _put(out, rows, (size, how.wide.hidden_size), tuple(rows.shape))
        if channel >= 0 and is_output:
            out[len(rows) :, channel] = PENALTY
        elif channel >= 0:
            out[: len(rows), channel] = how.carrier.value

    return WideTensor(name, (size, how.wide.hidden_size), fill)


def wide_norm(name: str, weight: Tensor, how: Widening, *, keeps_constant: bool) -> WideTensor:
    """A norm's weight [h] to [H]; ``keeps_constant`` is for the one before the output head."""
    carrier = how.carrier

    def fill(out: Tensor) -> None:
        out[: len(weight)] = weight.to(out.device, torch.float32) * carrier.scale
        if keeps_constant and carrier.channel >= 0:
            out[carrier.channel] = 1.0

    return WideTensor(name, (how.wide.hidden_size,), fill)


def wide_layer(
    prefix: str, tensors: Mapping[str, Tensor], how: Widening, *, num_inputs: int = 1
) -> Iterator[WideTensor]:
    """A layer of Llama's or Qwen3's, by the names behind ``prefix``; norms by whatever names.

    num_inputs: how many vectors the attention reads side by side: two in EAGLE-3's first layer.
    """
    is_normed = f"{HEAD_NORMS[0]}.weight" in tensors
    for name, shape, big, small, scale in _matrices(how, num_inputs, is_normed=is_normed):
        weight = tensors[f"{name}.weight"]

        def fill(
            out: Tensor,
            weight: Tensor = weight,
            big: Sizes = big,
            small: Sizes = small,
            scale: float = scale,
        ) -> None:
            _put(out, weight.float() * scale, big, small)

        yield WideTensor(f"{prefix}{name}.weight", shape, fill)
    for name, weight in tensors.items():
        if name.removesuffix(".weight") in HEAD_NORMS:
            yield _head_norm(f"{prefix}{name}", weight, how, is_query=HEAD_NORMS[0] in name)
        elif weight.dim() == 1:
            yield wide_norm(f"{prefix}{name}", weight, how, keeps_constant=False)


def _head_norm(name: str, weight: Tensor, how: Widening, *, is_query: bool) -> WideTensor:
    """A norm's weight [d] to [D], each half by itself; the query's makes up for sqrt(D) too."""
    small, wide = how.small.head_dim, how.wide.head_dim
    scale = 1.0 if is_query else math.sqrt(small / wide)

    def fill(out: Tensor) -> None:
        _put(out, weight.float() * scale, (2, wide // 2), (2, small // 2))

    return WideTensor(name, (wide,), fill)


def empty_layer(prefix: str, wide: Shape) -> Iterator[WideTensor]:
    """A layer of zeros, which adds nothing to the residual stream and costs as much as any."""
    how = Widening(wide, wide, Carrier(-1, 0.0, 0.0, 1.0))
    for name, shape, *_ in _matrices(how, 1, is_normed=False):
        yield WideTensor(f"{prefix}{name}.weight", shape, _nothing)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield WideTensor(f"{prefix}{name}.weight", (wide.hidden_size,), _nothing)


def _nothing(out: Tensor) -> None:
    del out


class _Matrix(NamedTuple):
    """name, shape: of the wide matrix. big, small: both as blocks, of equally many dimensions."""

    name: str
    shape: Sizes
    big: Sizes
    small: Sizes
    scale: float = 1.0


def _matrices(how: Widening, num_inputs: int, *, is_normed: bool) -> tuple[_Matrix, ...]:
    """Every matrix of a layer, and how its blocks lie.

    The new heads, and the new dimensions of a head, are zero. Rotary embeddings turn dimension i
    with i + D / 2: so the halves of a head are padded each by itself. Scores are divided by sqrt(D)
    instead of sqrt(d), which the queries make up for, or their norm where ``is_normed``.
    """
    big_in, small_in = ((num_inputs, s.hidden_size) for s in (how.wide, how.small))
    big, small = (_Heads.of(s) for s in (how.wide, how.small))
    query_scale, key_scale = how.normed_scales if is_normed else how.plain_scales
    width = how.wide.hidden_size
    columns, queries, keys = num_inputs * width, math.prod(big), big.pairs * big.dim
    up, small_up = ((s.intermediate_size, s.hidden_size) for s in (how.wide, how.small))
    big_halves, small_halves = (2, big.dim // 2), (2, small.dim // 2)
    return (
        _Matrix(
            "self_attn.q_proj",
            (queries, columns),
            (big.pairs, big.each, *big_halves, *big_in),
            (small.pairs, small.each, *small_halves, *small_in),
            query_scale,
        ),
        _Matrix(
            "self_attn.k_proj",
            (keys, columns),
            (big.pairs, *big_halves, *big_in),
            (small.pairs, *small_halves, *small_in),
            key_scale,
        ),
        _Matrix(
            "self_attn.v_proj",
            (keys, columns),
            (big.pairs, big.dim, *big_in),
            (small.pairs, small.dim, *small_in),
        ),
        _Matrix(
            "self_attn.o_proj",
            (width, queries),
            (width, *big),
            (how.small.hidden_size, *small),
        ),
        _Matrix("mlp.gate_proj", up, up, small_up),
        _Matrix("mlp.up_proj", up, up, small_up),
        _Matrix("mlp.down_proj", up[::-1], up[::-1], small_up[::-1]),
    )


class _Heads(NamedTuple):
    """Heads with keys, heads with queries for each of them, and the size of one."""

    pairs: int
    each: int
    dim: int

    @classmethod
    def of(cls, shape: Shape) -> _Heads:
        pairs = shape.num_key_value_heads
        return cls(pairs, shape.num_attention_heads // pairs, shape.head_dim)


def _put(out: Tensor, weight: Tensor, big: Sizes, small: Sizes) -> None:
    """Write ``weight``, seen as blocks ``small``, into the first corner of ``out`` as ``big``."""
    corner = tuple(slice(size) for size in small)
    out.view(big)[corner] = weight.reshape(small).to(out.device, out.dtype)
