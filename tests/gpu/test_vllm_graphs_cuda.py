"""FlashAttention 3 in a graph for any queries, captured as vLLM does it and as ``graphs`` does it.

Skipped where vLLM and its library of FlashAttention 3 are not there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu

flash: Any = pytest.importorskip("vllm.vllm_flash_attn.flash_attn_interface")
if not flash.is_fa_version_supported(3):
    pytest.skip("FlashAttention 3 is not there", allow_module_level=True)

CUDA = torch.device("cuda")
ROWS, BLOCK, LONGEST, WIDTH = 16, 16, 2048, 128
HEADS, KV_HEADS, SPLITS = 32, 8, 1


class Attention:
    """One layer's, for ``num_tokens`` positions in any queries of up to ``ROWS`` texts; ``longest``
    says what it is told of their lengths. A graph reads all of it where it lies."""

    def __init__(self, num_tokens: int, longest: Callable[[Sequence[int]], int]) -> None:
        self.num_tokens, self._longest = num_tokens, longest
        self.query = torch.randn(num_tokens, HEADS, WIDTH, dtype=torch.bfloat16, device=CUDA)
        blocks = (ROWS * LONGEST // BLOCK, BLOCK, KV_HEADS, WIDTH)
        self._keys, self._values = (
            torch.randn(blocks, dtype=torch.bfloat16, device=CUDA) for _ in range(2)
        )
        places = torch.randperm(blocks[0], device=CUDA, dtype=torch.int32)
        self._tables = places.view(ROWS, -1)
        self._starts, self._lengths = (
            torch.zeros(size, dtype=torch.int32, device=CUDA) for size in (ROWS + 1, ROWS)
        )
        self.schedule: Tensor | None = None

    def set(self, counts: Sequence[int], contexts: Sequence[int]) -> int:
        """As vLLM prepares a step; returns the longest query that it is told of."""
        empty = [0] * (ROWS - len(counts))
        self._starts.copy_(torch.tensor([0, *counts, *empty]).cumsum(0))
        lengths = [have + new for have, new in zip(contexts, counts, strict=True)]
        self._lengths.copy_(torch.tensor([*lengths, *empty]))
        longest = self._longest(counts)
        found = flash.get_scheduler_metadata(
            batch_size=ROWS,
            max_seqlen_q=longest,
            max_seqlen_k=LONGEST,
            num_heads_q=HEADS,
            num_heads_kv=KV_HEADS,
            headdim=WIDTH,
            cache_seqlens=self._lengths,
            qkv_dtype=torch.bfloat16,
            cu_seqlens_q=self._starts,
            page_size=BLOCK,
            causal=True,
            window_size=(-1, -1),
            num_splits=SPLITS,
        )
        if self.schedule is None:
            self.schedule = found.clone()
        self.schedule.copy_(found)
        return longest

    def run(self, longest: int, schedule: Tensor | None) -> Tensor:
        output = torch.full_like(self.query, 7.0)
        flash.flash_attn_varlen_func(
            q=self.query,
            k=self._keys,
            v=self._values,
            out=output,
            cu_seqlens_q=self._starts,
            max_seqlen_q=longest,
            seqused_k=self._lengths,
            max_seqlen_k=LONGEST,
            softmax_scale=WIDTH**-0.5,
            causal=True,
            block_table=self._tables,
            scheduler_metadata=schedule,
            fa_version=3,
            num_splits=SPLITS,
        )
        return output

    def capture(self) -> tuple[Any, Tensor]:
        """For a dummy batch that shares the tokens among the rows."""
        each, more = divmod(self.num_tokens, ROWS)
        counts = [each] * (ROWS - 1) + [each + more]
        longest = self.set(counts, [0] * ROWS)
        self.run(longest, self.schedule)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self.run(longest, self.schedule)
        return graph, output


def share_left_out(num_tokens: int, longest: Callable[[Sequence[int]], int], steps: int) -> float:
    """Of the positions of random batches, those that differ from the kernel without a graph."""
    attention, dice, wrong, total = Attention(num_tokens, longest), random.Random(0), 0, 0
    graph, output = attention.capture()
    for _ in range(steps):
        counts, left = list[int](), num_tokens
        for _ in range(dice.randint(1, ROWS)):
            if left > 0:
                counts.append(dice.randint(1, left) if dice.random() < 0.5 else min(6, left))
                left -= counts[-1]
        contexts = [dice.randint(0, 900) for _ in counts]
        own = max(counts)
        attention.set(counts, contexts)
        graph.replay()
        found, kept = output[: sum(counts)].clone(), sum(counts)
        expected = attention.run(own, None)[:kept]
        wrong += int((found != expected).flatten(1).any(1).sum())
        total += kept
    return wrong / total


@pytest.mark.parametrize("num_tokens", [48, 256, 384])
def test_no_position_is_left_out(num_tokens: int) -> None:
    assert share_left_out(num_tokens, lambda _: num_tokens, 40) == 0


def test_with_its_own_longest_query_some_are() -> None:
    """What vLLM 0.25.1 does in its mode FULL, for which ``graphs`` is there: else it could go."""
    assert share_left_out(256, max, 40) > 0.05
