"""Token bitmasks: int32 [..., W], bit ``t % 32`` of word ``t // 32`` is 1 when token t is legal.

This is xgrammar's layout, and llguidance's. A row of all ones (-1 in every word) forbids nothing.
On CUDA, masks are applied and translated by kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from guided_spec.ops.kernels import has_triton, kernels_of
from guided_spec.ops.mask_words import BITS, num_mask_words


def unpack_bitmask(bitmask: Tensor, vocab_size: int) -> Tensor:
    """Bitmask int32 [..., W] to bool [..., V] on the same device; True is legal."""
    shifts = torch.arange(BITS, dtype=torch.int32, device=bitmask.device)
    bits = (bitmask.unsqueeze(-1) >> shifts) & 1
    return bits.flatten(-2)[..., :vocab_size].bool()


def pack_bitmask(legal: Tensor) -> Tensor:
    """Bool [..., V] to bitmask int32 [..., W]; the unused bits of the last word are 0."""
    vocab_size = legal.shape[-1]
    num_words = num_mask_words(vocab_size)
    padding = num_words * BITS - vocab_size
    bits = torch.nn.functional.pad(legal.to(torch.int64), (0, padding))
    bits = bits.view(*legal.shape[:-1], num_words, BITS)
    words = (bits << torch.arange(BITS, device=legal.device)).sum(-1)
    # Words with the top bit set do not fit int32: wrap them to the negative number they mean.
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def apply_token_bitmask(logits: Tensor, bitmask: Tensor | None) -> Tensor:
    """Logits [..., V] with illegal tokens at -inf; ``logits`` is not changed.

    bitmask: int32 [..., W] on the device of the logits; None forbids nothing and returns
        ``logits`` itself.
    """
    if bitmask is None:
        return logits
    if _is_fused(logits, bitmask):
        masked: Tensor = kernels_of(__name__).apply_token_bitmask(logits, bitmask)
        return masked
    legal = unpack_bitmask(bitmask, logits.shape[-1])
    return logits.masked_fill(~legal, float("-inf"))


def translate_bitmask(bitmask: Tensor, target_ids: Tensor) -> Tensor:
    """A mask over target tokens to one over draft tokens: int32 [..., W] to [..., ceil(D / 32)].

    target_ids: int64 [D], which target token each draft token is; on the device of the mask, where
        all of this happens: one gather of words, no atomics, nothing waits for the host. Bit i of
        the result is bit ``target_ids[i]`` of the mask; unused bits of the last word are 0.
    """
    if bitmask.is_cuda and bitmask.numel() and len(target_ids) and has_triton():
        translated: Tensor = kernels_of(__name__).translate_bitmask(bitmask, target_ids)
        return translated
    words = bitmask.index_select(-1, target_ids >> 5)  # [..., D]: the word of each draft token
    bits = words >> (target_ids & 31).to(torch.int32)
    return pack_bitmask((bits & 1).bool())


def only_legal_token(bitmask: Tensor) -> Tensor:
    """int64 [...]: the one legal token of each row of int32 [..., W]; -1 where there is another."""
    used = bitmask != 0
    word = bitmask.to(torch.int64).sum(-1) & 0xFFFFFFFF  # that of the only word in use, if any
    is_single = (used.sum(-1) == 1) & (word & (word - 1) == 0)
    # Not log2, which some devices round below the exponent of an exact power of two.
    bit = torch.frexp(word.double()).exponent.long() - 1
    return torch.where(is_single, used.int().argmax(-1) * BITS + bit, -1)


def _is_fused(logits: Tensor, bitmask: Tensor) -> bool:
    """Whether the kernel can apply the mask: row by row, and without a gradient."""
    has_rows = logits.shape[:-1] == bitmask.shape[:-1] and logits.numel() > 0
    has_words = bitmask.shape[-1] >= num_mask_words(logits.shape[-1])
    is_served = logits.is_cuda and has_triton() and not logits.requires_grad
    return is_served and has_rows and has_words
