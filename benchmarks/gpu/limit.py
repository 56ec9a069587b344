"""What a device could do at most: tokens per second if it never waited for the host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.device_time import read_bandwidth
from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Completion
from guided_spec.engine.steps.draft_length import ForwardTimes

_PIECE = 512  # prompt tokens of a forward that reads them


def device_limit(
    llm: LLM, completions: Sequence[Completion], batch: int, depth: int, head: str | None
) -> float | None:
    """Tokens per second of a run if its forwards followed each other without a pause.

    The forwards are as ``LLM`` measured them: prompts in pieces of 512 tokens, and a verify forward
    of ``batch`` texts and ``depth`` draft tokens for each step. A head, whose folder is ``head``,
    has to be read once for each draft token, at the device's bandwidth. None where no forward was
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
    draft = 0.0 if head is None else depth * _bytes_of(head) / read_bandwidth(engine.model.device)
    seconds = read * times.of(_PIECE) + steps * (times.of(batch * (1 + depth)) + draft)
    limit: float = sum(one.output_tokens for one in stats) / seconds
    return limit


def _bytes_of(head: str) -> int:
    return sum(path.stat().st_size for path in Path(head).glob("*.safetensors"))
