"""What is done before the first request: CUDA graphs are captured and kernels compiled.

Afterwards no step captures or compiles anything: a shape without a graph runs launch by launch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from tqdm.auto import tqdm

from guided_spec.engine.engine import Engine
from guided_spec.engine.outputs import Chunk
from guided_spec.engine.request import Job, Request
from guided_spec.grammar.pipeline import RequestGrammars
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.types import SamplingParams

__all__ = ["warm_up"]

logger = logging.getLogger(__name__)

PROMPT = 8  # tokens of a prompt
STEPS = 3  # of a text at least
# What compiles kernels of its own: greedy or not, filters, and rows without a mask.
SAMPLINGS: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
)
# Triton compiles a number that is 1 or a multiple of 16 by itself.
BATCHES = (1, 2, 16)


def warm_up(engine: Engine, vocabulary: Vocabulary, grammars: RequestGrammars) -> None:
    """Capture the graphs of ``engine``, and write some short texts with it.

    To be called in the engine's own thread, before its first request. Shows a bar on stderr.
    """
    began, length = time.perf_counter(), min(PROMPT * (STEPS + 1), engine.max_length)
    prompt = [0] * min(PROMPT, length - 1)
    spec = GrammarSpec.json_schema({"type": "array", "items": {"type": "integer"}})
    grammar = grammars.queue.submit(spec)
    left = engine.capture()
    with tqdm(desc="capturing CUDA graphs", unit="graph", leave=False) as bar:
        for _ in left:
            bar.update()
        captured = bar.n
    for batch in sorted({min(size, engine.num_slots) for size in BATCHES}):
        for sampling in SAMPLINGS:
            params = SamplingParams(  # the salt: no request is drafted from these texts
                **sampling,  # type: ignore[arg-type]
                max_tokens=PROMPT * STEPS,
                ignore_eos=True,
                cache_salt="guided_spec.warm_up",
            )
            for one in (grammar, None):
                job = Job(prompt, params, length, 0, one, grammars.endings)
                _write(engine, [Request(job, vocabulary, _report) for _ in range(batch)])
    engine.close_captures()
    seconds = time.perf_counter() - began
    logger.info("captured %d CUDA graphs and compiled kernels in %.1f s", captured, seconds)


def _write(engine: Engine, requests: Sequence[Request]) -> None:
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()


def _report(chunk: Chunk) -> None:
    if chunk.completion is not None and chunk.completion.error is not None:
        logger.warning("a text of the warm-up failed: %s", chunk.completion.error)
