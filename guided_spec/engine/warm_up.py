"""What an engine does before its first request, so that no step captures or compiles anything.

Kernels are compiled first, by many threads at once: those of forwards and drafts by going through
their graphs' bodies, in which nothing then runs, and those of the verify decision over tensors that
nobody has written. Then graphs are captured, and some short texts show what is still missing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor
from tqdm.auto import tqdm

from guided_spec.engine.engine import Engine
from guided_spec.engine.outputs import Chunk
from guided_spec.engine.request import Job, Request
from guided_spec.grammar.pipeline import RequestGrammars
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.models.causal_lm import CausalLM
from guided_spec.ops.sampling.noise import NoiseKeys
from guided_spec.ops.sampling.verify import verify
from guided_spec.ops.sampling.warp import Sampling, VerifyRows
from guided_spec.types import Draft, SamplingParams

__all__ = ["warm_up"]

PROMPT = 8  # tokens
STEPS = 2  # of a text at least
# What has kernels of its own: greedy or not, and filters.
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
)
# Triton compiles a number that is 1 or a multiple of 16 by itself.
BATCHES = (1, 2, 16)
DRAFT_COLUMNS = 16  # of a draft's probabilities: kernels ask whether they are a multiple of 16

logger = logging.getLogger(__name__)


def warm_up(engine: Engine, vocabulary: Vocabulary, grammars: RequestGrammars) -> None:
    """Compile the kernels of ``engine``, capture its graphs, and write some short texts with it.

    Afterwards no step captures or compiles anything: a shape without a graph runs launch by launch.

    To be called in the engine's own thread, before its first request. Shows a bar on stderr.
    """
    began = time.perf_counter()
    spec = GrammarSpec.json_schema({"type": "array", "items": {"type": "integer"}})
    grammar = grammars.queue.submit(spec)
    if engine.model.device.type == "cuda":
        _compile(engine)
    compiled = time.perf_counter() - began
    left = engine.capture()
    with tqdm(desc="capturing CUDA graphs", unit="graph", leave=False) as bar:
        for _ in left:
            bar.update()
        captured = bar.n
    length = min(PROMPT * (STEPS + 1), engine.max_length)
    prompt = [0] * min(PROMPT, length - 1)
    batches = sorted({min(size, engine.num_slots) for size in BATCHES})
    for batch, sampling, one in product(batches, SAMPLINGS, (grammar, None)):
        params = replace(  # the salt: no request is drafted from these texts
            sampling,
            max_tokens=PROMPT * STEPS,
            ignore_eos=True,
            cache_salt="guided_spec.warm_up",
        )
        job = Job(prompt, params, length, 0, one, grammars.endings)
        _write(engine, [Request(job, vocabulary, _report) for _ in range(batch)])
    engine.close_captures()
    seconds = time.perf_counter() - began
    logger.info(
        "compiled kernels and captured %d CUDA graphs in %.1f s, %.1f of them compiling ahead",
        *(captured, seconds, compiled),
    )


@torch.inference_mode()
def _compile(engine: Engine) -> None:
    """All kernels of its steps that are known beforehand, many at a time."""
    from guided_spec.ops.launch_triton import compiling_ahead  # imported here: it needs triton

    with compiling_ahead():
        with engine.compiling():
            for _ in engine.capture():
                pass
        longest = engine.config.num_draft_tokens
        batches = {1, engine.num_slots}
        for batch, width, params in product(batches, {0, longest}, SAMPLINGS):
            for draft in _drafts(engine.model, batch, width):
                _verify_anything(engine, draft, params)


def _drafts(model: CausalLM, batch: int, width: int) -> Iterator[Draft]:
    """Drafts of every kind, [B, K]: without probabilities, and of a whole and a reduced vocabulary.

    What they hold is anything.
    """

    def anything(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=model.device)

    token_ids = anything(batch, width, dtype=torch.int64)
    draft = Draft(token_ids, anything(batch, dtype=torch.int64))
    yield draft
    if width:
        probs = anything(batch, width, DRAFT_COLUMNS, dtype=torch.float32)
        yield draft._replace(probs=probs)
        columns = anything(model.vocab_size, dtype=torch.int32)
        is_certain = anything(batch, width, dtype=torch.bool)
        yield draft._replace(probs=probs, columns=columns, is_certain=is_certain)


def _verify_anything(engine: Engine, draft: Draft, params: SamplingParams) -> None:
    batch, width = draft.token_ids.shape
    model = engine.model
    shape = (batch, width + 1, model.vocab_size)
    logits = torch.empty(shape, dtype=model.dtype, device=model.device)
    sampling = Sampling.stack([params] * batch, [0] * batch, model.device)
    noise = NoiseKeys(sampling.seeds, sampling.seeds)
    verify(logits, None, draft, VerifyRows(sampling, noise, engine.config.verifier))


def _write(engine: Engine, requests: Sequence[Request]) -> None:
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()


def _report(chunk: Chunk) -> None:
    if chunk.completion is not None and chunk.completion.error is not None:
        logger.warning("a text of the warm-up failed: %s", chunk.completion.error)
