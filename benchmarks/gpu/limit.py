"""What a device could do at most: tokens per second if it never waited for the host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Completion
from guided_spec.engine.steps.draft_length import ForwardTimes

_PIECE = 512  # prompt tokens of a forward that reads them
_COPIED, _COPIES = 2**30, 10  # bytes, and how often


def device_limit(
    llm: LLM, completions: Sequence[Completion], batch: int, depth: int, head: str | None
) -> float | None:
    """Tokens per second of a run if its forwards followed each other without a pause.

    The forwards are as ``LLM`` measured them: prompts in pieces of 512 tokens, and a verify forward
    of ``batch`` texts and ``depth`` draft tokens for each step. A head, whose folder is ``head``,
    has to be read once for each draft token, by the bandwidth of a copy. None where no forward was
    measured, because there are no CUDA graphs.
    """
    engine: Any = llm._runner.setup.engine  # type: ignore[attr-defined]
    with torch.inference_mode():
        times = ForwardTimes(engine.model.forward_seconds(engine._layers))
    if not times:
        return None
    stats = [completion.stats for completion in completions]
    read = sum(one.prompt_tokens - one.cached_tokens for one in stats) / _PIECE
    steps = sum(one.steps for one in stats) / batch
    draft = 0.0 if head is None else depth * _bytes_of(head) / _bandwidth(engine.model.device)
    seconds = read * times.of(_PIECE) + steps * (times.of(batch * (1 + depth)) + draft)
    limit: float = sum(one.output_tokens for one in stats) / seconds
    return limit


def _bytes_of(head: str) -> int:
    return sum(path.stat().st_size for path in Path(head).glob("*.safetensors"))


def _bandwidth(device: torch.device) -> float:
    """Bytes read per second while a gigabyte is copied."""
    source = torch.zeros(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(_COPIES):
        target.copy_(source)
    torch.cuda.synchronize(device)
    return 2 * _COPIES * _COPIED / (time.perf_counter() - began)
