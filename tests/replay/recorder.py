"""Runs one case and records what it gave.

Two seams are used, and no private name:

- What ``LLM.generate(..., trace=True)`` returns: tokens, texts, log-probabilities, counters, and
  the trace with the drafts, their authors and their outcomes.
- ``guided_spec.step.verify(logits, bitmask, draft, rows) -> Accepted``, which is watched for the
  mask rows: the trace has only their numbers of legal tokens. It is the one place at which mask,
  draft and decision meet, for any proposer and any source of masks, and its records ``Draft`` and
  ``Accepted`` are part of the public interface. Its rows are assigned to requests by their noise
  keys and by what they drafted and accepted, which at the same time proves the traces.

A record depends on nothing but its case. Each case has an LLM of its own, since a prefix cache and
a proposer that learns remember the requests before. All requests of a wave are submitted in one
call, to an engine that has nothing to do, with their grammars compiled: they join in one order,
whatever the clock says. Drafting is "always", all is float32 on the CPU, by one thread.
"""

from __future__ import annotations

import copy
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from guided_spec import LLM, Accepted, Draft, GrammarSpec, SamplingParams
from guided_spec.engine.outputs import Completion
from guided_spec.ops.bitmask import unpack_bitmask
from guided_spec.ops.sampling.verify import verify
from guided_spec.ops.sampling.warp import VerifyRows
from guided_spec.trace.record import StepTrace, Trace
from tests.learned_heads import write_head
from tests.replay.cases import Case
from tests.replay.record import CaseRecord, Fingerprint, RequestRecord, StepRecord
from tests.tiny_llm import VOCAB_SIZE, make_llm, near_copy, tiny_model

FIRST_SEED, SEEDS = 11, 10  # of the first request, and from one to the next: n samples take n
CLOCKS = ("seconds", "mask_seconds", "tokens_per_second")
DERIVED = ("seed", "acceptance_length", "forwards_per_token", "prompt_tokens", "output_tokens")
PARD_TOKEN = 3


def record_case(case: Case) -> CaseRecord:
    """Run the case, and return what it gave."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with TemporaryDirectory() as folder, open_llm(case, Path(folder)) as llm:
            requests = list(_requests(llm, case))
    finally:
        torch.set_num_threads(threads)
    return CaseRecord(fingerprint=Fingerprint.of_this_run(), requests=requests)


def open_llm(case: Case, folder: Path) -> LLM:
    """The LLM of a case, which writes a learned head to ``folder`` if it needs one."""
    options: dict[str, Any] = {"drafting": "always", "grammar_tables": "off"}
    options |= case.options
    if case.head is not None:
        headed = write_head(folder / case.head, case.head, VOCAB_SIZE)
        return make_llm(headed.target, case.proposer, headed.draft, **options)
    if case.model == "bundled":
        options = {"max_batch_size": 4, "max_model_len": 512, **options}
        return LLM(None, case.proposer, dtype=torch.float32, **options)
    draft = copy.deepcopy(near_copy(case.model)) if _has_draft_model(case.proposer) else None
    if draft is not None and "pard" in case.proposer:
        draft.config.update({"pard_token": PARD_TOKEN})
    return make_llm(tiny_model(case.model), case.proposer, draft, **options)


def _has_draft_model(proposer: str) -> bool:
    return "draft_model" in proposer or "pard" in proposer


def _requests(llm: LLM, case: Case) -> Iterator[RequestRecord]:
    seed = FIRST_SEED
    for number, wave in enumerate(case.waves):
        params = [replace(one.params, seed=seed + SEEDS * at) for at, one in enumerate(wave)]
        seed += SEEDS * len(wave)
        llm.compile(_grammars(params))
        with watched() as rows:
            prompts = [one.prompt for one in wave]
            outputs = llm.generate(prompts, params, on_error="return", trace=True)
        unclaimed = _sequences(rows)
        for prompt, output in enumerate(outputs):
            for sample, completion in enumerate(output.completions):
                name = f"wave {number}, prompt {prompt}, sample {sample}"
                yield _request_record(name, completion, unclaimed)
        assert not unclaimed, f"{case.name}: {len(unclaimed)} requests have no trace"


def _grammars(params: Sequence[SamplingParams]) -> list[GrammarSpec]:
    """All that the requests may be bound to: without their start, if a prompt has it."""
    specs = [one.grammar for one in params if one.grammar is not None]
    return [*specs, *(replace(spec, start=None) for spec in specs if spec.start is not None)]


class SeenRow(NamedTuple):
    """One request's row of a verified step.

    key: of its noise, the same in all its steps. masks: a hash for each of the draft's positions
    and the one after it, () where the whole batch is free.
    """

    key: int
    draft: tuple[int, ...]
    accepted: tuple[int, ...]
    masks: tuple[str, ...]


@contextmanager
def watched() -> Iterator[list[SeenRow]]:
    """Inside, the rows of all verified steps are added to the list, in their order."""
    seen = list[SeenRow]()

    def watching(
        logits: Tensor, bitmask: Tensor | None, draft: Draft, rows: VerifyRows
    ) -> Accepted:
        accepted = verify(logits, bitmask, draft, rows)
        seen.extend(_rows(logits.shape[-1], bitmask, draft, rows, accepted))
        return accepted

    with mock.patch("guided_spec.step.verify", watching):
        yield seen


def _rows(
    vocab_size: int, bitmask: Tensor | None, draft: Draft, rows: VerifyRows, accepted: Accepted
) -> Iterator[SeenRow]:
    counts = draft.num_tokens.tolist()
    for request, key in enumerate(rows.sampling.seeds.tolist()):
        tokens = draft.token_ids[request, : counts[request]].tolist()
        num_accepted = int(accepted.num_accepted[request])
        masks: tuple[str, ...] = ()
        if bitmask is not None:
            rows_of = bitmask[request, : counts[request] + 1]
            masks = tuple(mask_hash(row, vocab_size) for row in rows_of)
        yield SeenRow(key, tuple(tokens), tuple(tokens[:num_accepted]), masks)


def mask_hash(row: Tensor, vocab_size: int) -> str:
    """Eight hex digits of the set of legal tokens, however a row int32 [W] holds it."""
    bits = np.packbits(unpack_bitmask(row.cpu().unsqueeze(0), vocab_size)[0].numpy())
    return hashlib.blake2b(bits.tobytes(), digest_size=4).hexdigest()


def _sequences(rows: Sequence[SeenRow]) -> list[list[SeenRow]]:
    """The rows of each request, in their order."""
    sequences = defaultdict[int, list[SeenRow]](list)
    for row in rows:
        sequences[row.key].append(row)
    return list(sequences.values())


def _request_record(
    name: str, completion: Completion, unclaimed: list[list[SeenRow]]
) -> RequestRecord:
    """unclaimed: rows of requests, from which the completion's own are taken."""
    trace, logprobs = completion.trace, completion.logprobs
    steps: list[StepRecord] = []
    if trace is not None and trace.steps:
        rows = _claim(name, trace, unclaimed)
        is_free = trace.grammar is None
        pairs = zip(trace.steps, rows, strict=True)
        steps = [_step_record(step, row, is_free=is_free) for step, row in pairs]
    error = completion.error
    return RequestRecord(
        request=name,
        steps=steps,
        token_ids=completion.token_ids,
        text=completion.text,
        finish_reason=completion.finish_reason,
        error=None if error is None else type(error).__name__,
        stats=_counters(completion.stats.as_dict()),
        logprobs=None if logprobs is None else [_shortest(one.logprob) for one in logprobs],
    )


def _claim(name: str, trace: Trace, unclaimed: list[list[SeenRow]]) -> list[SeenRow]:
    wanted = [(_ids(step.drafted), _accepted(step)) for step in trace.steps]
    for rows in unclaimed:
        if [(row.draft, row.accepted) for row in rows] == wanted:
            unclaimed.remove(rows)
            return rows
    raise AssertionError(f"{name}: the trace is not what was verified: {wanted}")


def _ids(tokens: Sequence[Any]) -> tuple[int, ...]:
    return tuple(token.id for token in tokens)


def _accepted(step: StepTrace) -> tuple[int, ...]:
    return _ids([token for token in step.drafted if token.outcome == "accepted"])


def _step_record(step: StepTrace, row: SeenRow, *, is_free: bool) -> StepRecord:
    authors = [(name, len(list(run))) for name, run in groupby(t.source for t in step.drafted)]
    positions = [*step.drafted]
    if step.drawn is not None and step.drawn.outcome == "bonus":
        positions.append(step.drawn)
    masks = ["-" if token.allowed is None else row.masks[at] for at, token in enumerate(positions)]
    return StepRecord(
        by=" ".join(f"{name}:{count}" for name, count in authors),
        draft=list(row.draft),
        masks=None if is_free else " ".join(masks),
        accepted=list(row.accepted),
        drawn=None if step.drawn is None else step.drawn.id,
        kept=step.num_kept,
    )


def _counters(stats: dict[str, Any]) -> dict[str, Any]:
    dropped = {*CLOCKS, *DERIVED}
    return {name: value for name, value in stats.items() if value and name not in dropped}


def _shortest(logprob: float) -> float:
    """The float64 with the fewest digits that is this float32, so that files stay short."""
    return float(str(np.float32(logprob)))
