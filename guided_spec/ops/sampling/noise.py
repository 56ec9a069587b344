"""Counter-based noise: a number is a function of (seed, position, stream, column), nothing else.

A request's rows have its ``request_key`` for a seed. So it draws the same noise alone and in any
batch, and an accepted prefix never moves the noise of what follows. The generator is Philox4x32-10
(Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011), in 64-bit
integer arithmetic that is exact on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields
from enum import IntEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from guided_spec.ops.kernels import has_triton, kernels_of
from guided_spec.types import MAX_BAD_WORDS, Noise, SamplingParams, Verifier

if TYPE_CHECKING:
    from guided_spec.grammar.spec import GrammarSpec

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_LOW = 0xFFFFFFFF
_ROUNDS = 10
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24
# Parameters that a key leaves out: those it has anyway, the model's own, those that change no text,
# and those that say where it ends. With the same seed a text is then cut earlier or later.
_HAD_ANYWAY = ("seed", "n", "grammar", "lora")
_REPORTED = ("cache_salt", "logprobs", "logprobs_mode", "echo", "on_short", "return_routed_experts")
_ENDS = ("max_tokens", "stop", "stop_token_ids", "ignore_eos", "complete")
_MANY = MAX_BAD_WORDS  # more are tokens and their biases: numbers, which take long to write out
_NOT_IN_KEYS = frozenset((*_HAD_ANYWAY, *_REPORTED, *_ENDS))


def request_key(
    seed: int,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    verifier: Verifier = "rejection",
) -> int:
    """In [0, 2**63): which noise a request draws, the seed of its rows; the same in every process.

    Equal seeds give other requests other noise: they have another prompt, another grammar, or draw
    or draft otherwise. Else the choices of one would foretell those of another. A coupled text is
    the same under each draft policy, so its key leaves that out.

    seed: in [0, 2**63), of this sample.
    """
    left_out = _NOT_IN_KEYS | {"draft_policy"} if verifier == "coupled" else _NOT_IN_KEYS
    known = [field for field in fields(params) if field.name not in left_out]
    pairs = [(field, getattr(params, field.name)) for field in known]
    # Those at their defaults are left out: a parameter that is added later changes no text.
    given = [(field.name, _plain(value)) for field, value in pairs if value != field.default]
    return noise_key(seed, prompt_ids, params.grammar, ascii(given) if given else "")


def noise_key(
    seed: int, prompt_ids: Sequence[int], grammar: GrammarSpec | None = None, settings: str = ""
) -> int:
    """``request_key`` of these arguments. The grammar backend makes no difference.

    settings: ASCII characters for the rest of what makes requests differ.
    """
    constraint = None if grammar is None else _constraint(grammar)
    found = blake2b(seed.to_bytes(8, "little"), digest_size=8)
    found.update(np.asarray(prompt_ids, dtype="<i8").tobytes())
    found.update(ascii(constraint).encode())  # no byte of it is 0, as the last of each token is
    found.update(settings.encode())
    return int.from_bytes(found.digest(), "little") >> 1


def _plain(value: object) -> object:
    """Equal numbers as the same one: 1 and 1.0, 0.0 and -0.0. Of very many, what tells them."""
    if isinstance(value, tuple) and len(value) > _MANY:
        numbers = np.asarray(value, dtype="<f8") + 0.0
        return blake2b(numbers.tobytes()).hexdigest()
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) + 0.0
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def _constraint(grammar: GrammarSpec) -> tuple[object, ...]:
    """Its fields in their order. ``replace`` and ``astuple`` took longer than the prompt's tokens:
    one reads every value again, the other copies it."""
    own: dict[str, object] = {"backend": None, "value_type": None}
    if grammar.start is not None:
        own["start"] = astuple(grammar.start)
    names = [field.name for field in fields(grammar)]
    return tuple(own[name] if name in own else getattr(grammar, name) for name in names)


class Stream(IntEnum):
    """What the noise is for: different uses at one position never share a number."""

    ACCEPT = 0
    SAMPLE = 1
    DRAFT = 2

    @classmethod
    def of_drafts(cls, verifier: Verifier) -> Stream:
        """What drafts are drawn with: coupled ones share the target's noise."""
        return cls.SAMPLE if verifier == "coupled" else cls.DRAFT


class NoiseKeys(NamedTuple):
    """What noise is drawn from: ``seeds`` int64 [B], ``positions`` int64 [B] of the next tokens."""

    seeds: Tensor
    positions: Tensor

    def draw(self, num_draft: int, columns: int, *, at_each: bool) -> Noise:
        """The noise of a step whose draft has ``num_draft`` tokens.

        at_each: whether ``sample`` is [B, num_draft + 1, columns], that of each position; else it
            is that of the next one, [B, columns].
        """
        seeds, first = self
        positions = first.unsqueeze(1) + torch.arange(num_draft + 1, device=seeds.device)
        accept = uniform_noise(seeds, positions[:, :-1], Stream.ACCEPT)
        if not at_each:
            return Noise(accept, exponential_noise(seeds, first, Stream.SAMPLE, columns))
        repeated = seeds.repeat_interleave(num_draft + 1)
        sample = exponential_noise(repeated, positions.flatten(), Stream.SAMPLE, columns)
        return Noise(accept, sample.view(len(seeds), num_draft + 1, -1))


class DraftNoise(NamedTuple):
    """Which noise to draw with: the arguments of ``exponential_noise``, before any of it is made.

    seeds, positions: int64 [B], on the device of the logits. columns: V, the target's tokens.
    """

    seeds: Tensor
    positions: Tensor
    stream: Stream
    columns: int


def philox(seeds: Tensor, positions: Tensor, stream: Stream, columns: int) -> Tensor:
    """[B, columns] int64 in [0, 2**32): 32 random bits for each row and column.

    seeds, positions: int64 [B]. The counter is (column // 4, position low, position high, stream),
    the key is the seed; the four words of one counter are four neighbouring columns. On CUDA a
    kernel gives the same bits.
    """
    if seeds.is_cuda and has_triton():
        bits: Tensor = kernels_of(__name__).philox(seeds, positions, int(stream), columns)
        return bits
    blocks = torch.arange(-(-columns // 4), device=seeds.device)
    c0 = blocks.expand(len(seeds), -1)
    c1 = (positions & _LOW).unsqueeze(1).expand_as(c0)
    c2 = ((positions >> 32) & _LOW).unsqueeze(1).expand_as(c0)
    c3 = torch.full_like(c0, int(stream))
    key_0 = (seeds & _LOW).unsqueeze(1)
    key_1 = ((seeds >> 32) & _LOW).unsqueeze(1)
    for _ in range(_ROUNDS):
        # The product wraps modulo 2**64, which leaves its 64 bits right; the mask drops the sign.
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        high_0, high_1 = (product_0 >> 32) & _LOW, (product_1 >> 32) & _LOW
        c0, c1 = high_1 ^ c1 ^ key_0, product_1 & _LOW
        c2, c3 = high_0 ^ c3 ^ key_1, product_0 & _LOW
        key_0, key_1 = (key_0 + _WEYL_0) & _LOW, (key_1 + _WEYL_1) & _LOW
    return torch.stack((c0, c1, c2, c3), -1).flatten(1)[:, :columns]


def uniform_noise(seeds: Tensor, positions: Tensor, stream: Stream) -> Tensor:
    """[B, N] float32 uniform on [0, 1): one number for each of the ``positions`` int64 [B, N]."""
    rows, columns = positions.shape
    bits = philox(seeds.repeat_interleave(columns), positions.flatten(), stream, 1)
    return (bits >> 8).to(torch.float32).mul_(2.0**-24).view(rows, columns)


def exponential_noise(seeds: Tensor, positions: Tensor, stream: Stream, columns: int) -> Tensor:
    """[B, columns] float32, exponential(1), finite and strictly positive.

    Built so that small values keep their relative precision: they decide which token wins.
    """
    bits = philox(seeds, positions, stream, columns).to(torch.float32)
    uniform = bits.add_(0.5).mul_(2.0**-32).clamp_max_(_LARGEST_BELOW_ONE)
    return uniform.neg_().log1p_().neg_()
