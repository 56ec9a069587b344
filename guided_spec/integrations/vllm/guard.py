"""A second opinion on the masks of vLLM's target, where a worker is about to apply them.

vLLM's scheduler fills a mask row for each position of a step, the worker puts them where it sampled
and verifies. A row may be lost in between: the scheduler does not name its request, or refuses a
draft that is not the one the worker verifies, or its matcher is at another text. Where that row is
all ones the target writes free text, and where it is another's, tokens that its grammar refuses.

Here the worker looks at the rows first. What forbids nothing is suspect, and so is a first row that
is not the one of this worker's own grammar, where that stands at the end of the text without
waiting. Only for these the worker waits for its tokens and drafts and fills the rows anew. A
request whose own grammar is lost keeps vLLM's rows; vLLM itself ends one whose tokens it refuses.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.integrations.patches import Patch
from guided_spec.integrations.vllm.plugin import (
    ENDINGS,
    acceptable_drafts,
    counter,
    in_workers,
    log,
    requested,
    warn,
)
from guided_spec.integrations.vllm.reasoning import REPORTS
from guided_spec.integrations.vllm.requests import (
    NOTES_V1,
    NOTES_V2,
    GrammarRequests,
    note_states,
    requests_of,
    track_requests,
)
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.rows import row_allows
from guided_spec.ops.mask_words import num_mask_words

COUNTER = "guided_spec_vllm_mask_rows"
Rows = NDArray[np.int32]
_PLACE = "guided_spec_guard"  # on the runner


class Step(NamedTuple):
    """What a runner is about to sample.

    names: [B] its requests. is_reading: [B], whether the prompt is still read, so that nothing is
    sampled. num_drafts: draft tokens of a request by its name. drafts: gives [B] those tokens, and
    waits for the device.
    """

    names: Sequence[str]
    is_reading: Sequence[bool]
    num_drafts: Callable[[str], int]
    drafts: Callable[[], list[list[int]]]


class _Anew(NamedTuple):
    """Rows of one request, from row ``at`` of its step on; those before are left as they are."""

    at: int
    rows: Rows


class Guard:
    """The mask rows of one worker's requests, checked and filled anew.

    requests: as the worker notes them, before ``check``. config: vLLM's VllmConfig.
    """

    def __init__(self, requests: GrammarRequests, config: Any) -> None:
        self.requests = requests
        self._words = num_mask_words(requests.vocab_size)
        # From 0.33 on each request has a block of as many rows, in older releases those it needs.
        manager: Any = importlib.import_module("vllm.v1.structured_output").StructuredOutputManager
        is_even = "mask_stride" in inspect.getsource(manager.grammar_bitmask)
        self._block = config.num_speculative_tokens + 1 if is_even else None
        self._rank = str(config.parallel_config.rank)
        self._is_wrong = _lets_through if ENDINGS in requested() else _is_other
        self._total = 0
        self._unnamed: dict[str, int] = {}

    def check(self, step: Step, output: Any) -> Any:
        """``output`` with the rows that its requests' grammars have; as it is where it has them.

        output: vLLM's GrammarOutput of the step, which is not changed; None where none came.
        """
        self._count_unnamed(step.names)
        starts = {} if output is None else self._row_starts(step, output)
        suspects = {
            name: at
            for at, name in enumerate(step.names)
            if not step.is_reading[at]
            and self.requests.any_grammar([name])
            and self._is_suspect(name, step, output, starts.get(name))
        }
        if not suspects:
            return output
        drafts, anew = step.drafts(), dict[str, _Anew]()
        for name, constraint in zip(suspects, self.requests.stand(suspects), strict=True):
            draft = drafts[suspects[name]][: step.num_drafts(name)]
            at, rows = self._rows(name, constraint, draft)
            start = starts.get(name)
            if not len(rows):
                continue
            if start is None:
                self._unnamed[name] = len(rows)
                anew[name] = _Anew(at, rows)
                continue
            sent = output.grammar_bitmask[start + at : start + at + len(rows)]
            if wrong := _wrong(sent, rows, self._is_wrong):
                for reason in wrong:
                    self._count(reason, 1)
                anew[name] = _Anew(at, rows)
        return self._mended(step, output, starts, anew) if anew else output

    def _rows(self, name: str, constraint: Constraint | None, draft: Sequence[int]) -> _Anew:
        """The rows that a grammar has in a step; constraint: as ``GrammarRequests.stand``."""
        if constraint is not None:
            return _Anew(0, legal_rows(constraint, draft, self._words))
        begins = self.requests.begins_in(name, draft)
        if begins is None:
            return _Anew(0, np.empty((0, self._words), dtype=np.int32))
        grammar, masks = begins.bounds
        rows = legal_rows(begins.constraint, draft[grammar:], self._words)
        return _Anew(masks, rows[masks - grammar :])

    def _is_suspect(self, name: str, step: Step, output: Any, start: int | None) -> bool:
        if start is None:
            return True
        checked = step.num_drafts(name) + 1
        acceptable = acceptable_drafts(output)
        if acceptable is not None:  # the worker verifies no draft token after these
            at = output.structured_output_request_ids.index(name)
            checked = min(checked, acceptable[at] + 1)
        rows = output.grammar_bitmask[start : start + checked]
        if any((row == -1).all() for row in rows[rows[:, 0] == -1]):
            return True
        own = self.requests.at_hand(name)
        return own is not None and self._is_wrong(rows[:1], legal_rows(own, (), self._words))

    def _size(self, step: Step, name: str) -> int:
        return self._block or step.num_drafts(name) + 1

    def _row_starts(self, step: Step, output: Any) -> dict[str, int]:
        """Where the rows of each request that ``output`` names begin."""
        names, starts = output.structured_output_request_ids, [0]
        for name in names:
            starts.append(starts[-1] + self._size(step, name))
        return dict(zip(names, starts, strict=False))

    def _mended(
        self, step: Step, output: Any, starts: Mapping[str, int], anew: Mapping[str, _Anew]
    ) -> Any:
        """A copy of ``output`` with these rows."""
        output = _empty_output(self._words) if output is None else copy.copy(output)
        names, blocks = [*output.structured_output_request_ids], [output.grammar_bitmask.copy()]
        acceptable = acceptable_drafts(output)
        acceptable = None if acceptable is None else [*acceptable]
        for name, (at, rows) in anew.items():
            start = starts.get(name)
            if start is None:
                names.append(name)
                block = np.full((self._size(step, name), self._words), -1, dtype=np.int32)
                block[at : at + len(rows)] = rows
                blocks.append(block)
            else:
                blocks[0][start + at : start + at + len(rows)] = rows
            if acceptable is not None:
                end = at + len(rows) - 1
                acceptable[names.index(name) : names.index(name) + 1] = [end]
        output.structured_output_request_ids = names
        output.grammar_bitmask = np.concatenate(blocks)
        if acceptable is not None:
            output.num_acceptable_drafts = acceptable
        return output

    def _count_unnamed(self, names: Sequence[str]) -> None:
        """Count the rows of requests that continue: one that has ended is not named either."""
        for name, rows in self._unnamed.items():
            if name in names:
                self._count("missing", rows)
        self._unnamed.clear()

    def _count(self, reason: str, rows: int) -> None:
        _counter().labels(reason, self._rank).inc(rows)
        before, self._total = self._total, self._total + rows
        if before.bit_length() < self._total.bit_length():  # not a line for each
            warn(f"{self._total} mask rows of the target filled anew so far; the last: {reason}")


def legal_rows(constraint: Constraint, draft: Sequence[int], words: int) -> Rows:
    """int32 [<= len(draft) + 1, W]: masks after the text and after each legal draft token.

    One row of all ones where the text cannot continue. The fork is rolled back to its position.
    """
    fork = constraint.fork()
    rows = np.full((len(draft) + 1, words), -1, dtype=np.int32)
    count = 0
    for token_id in (*draft, None):
        if fork.text.is_terminated():
            break
        fork.text.fill_next_token_bitmask(rows, count)
        count += 1
        is_legal = token_id is not None and row_allows(rows[count - 1], token_id)
        if not is_legal or token_id is None or not fork.text.accept_token(token_id):
            break
    fork.rollback_to(0)
    return rows[: max(1, count)]


def _wrong(sent: Rows, rows: Rows, is_wrong: Callable[[Rows, Rows], bool]) -> list[str]:
    """Why each wrong row of the scheduler's is wrong: "missing" (all ones), or "stale"."""
    pairs = zip(sent, rows, strict=True)
    return [
        "missing" if (one == -1).all() else "stale" for one, right in pairs if is_wrong(one, right)
    ]


def _is_other(sent: Rows, right: Rows) -> bool:
    return not np.array_equal(sent, right)


def _lets_through(sent: Rows, right: Rows) -> bool:
    """Whether rows allow what the grammar forbids, or nothing; budgets of texts forbid more."""
    return bool((sent & ~right).any() or not (sent & right).any())


def _counter() -> Any:
    text = "Mask rows of the target that guided_spec filled anew."
    return counter(COUNTER, text, "reason", "rank")


def _empty_output(words: int) -> Any:
    output: Any = importlib.import_module("vllm.v1.core.sched.output").GrammarOutput
    made = output([], np.empty((0, words), dtype=np.int32))
    if hasattr(made, "num_acceptable_drafts"):
        made.num_acceptable_drafts = []
    return made


def guard_runner(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around a runner's ``load_model``: it is guarded from then on."""

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        _take_up(self)
        return result

    return load_model


def _take_up(runner: Any) -> None:
    """Guard a runner, once, where that can be done."""
    if hasattr(runner, _PLACE):
        return
    config, guard = runner.vllm_config, None
    if config.model_config.is_diffusion:
        warn("guard is off: this model does not write from left to right")
    elif config.kv_transfer_config is not None:
        # Where it fails to load what was written, vLLM takes tokens back that were noted here.
        warn("guard is off: with a KV connector tokens may be taken back")
    else:
        owners = (getattr(runner, "drafter", None), getattr(runner, "speculator", None))
        guard = Guard(requests_of(*owners) or track_requests(runner, config), config)
        log("the masks of the target are guarded")
    setattr(runner, _PLACE, guard)


def guard_of(runner: Any) -> Guard | None:
    """What guards a runner; None where nothing does."""
    found: Guard | None = getattr(runner, _PLACE, None)
    return found


def guard_masks_v1(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around the older runner's ``sample_tokens``: checks the masks that it gets."""

    @functools.wraps(original)
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        _take_up(self)  # vLLM's runner for CPUs loads its model by a method of its own
        guard, state = guard_of(self), self.execute_model_state
        if guard is not None and state is not None and state.logits is not None:
            note_states(self, guard.requests)
            grammar_output = guard.check(_step_v1(self, state), grammar_output)
        return original(self, grammar_output)

    return sample_tokens


def _step_v1(runner: Any, state: Any) -> Step:
    names = runner.input_batch.req_ids
    scheduled = state.scheduler_output.scheduled_spec_decode_tokens

    def drafts() -> list[list[int]]:
        metadata = state.spec_decode_metadata
        if metadata is None:
            return [[] for _ in names]
        tokens = iter(metadata.draft_token_ids.tolist())
        return [[*itertools.islice(tokens, count)] for count in metadata.num_draft_tokens]

    is_reading = runner.discard_request_mask.np[: len(names)].tolist()
    return Step(names, is_reading, lambda name: len(scheduled.get(name, ())), drafts)


def guard_masks_v2(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around the new runner's ``sample_tokens``: checks the masks that it gets."""

    @functools.wraps(original)
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        guard, state = guard_of(self), self.execute_model_state
        if guard is not None and state is not None and state.hidden_states is not None:
            grammar_output = guard.check(_step_v2(self, state.input_batch), grammar_output)
        return original(self, grammar_output)

    return sample_tokens


def _step_v2(runner: Any, batch: Any) -> Step:
    counts = batch.num_draft_tokens_per_req
    counts = np.diff(batch.cu_num_logits_np) - 1 if counts is None else counts
    by_name = dict(zip(batch.req_ids, counts.tolist(), strict=True))

    def drafts() -> list[list[int]]:
        tokens = batch.input_ids[batch.logits_indices].tolist()
        ends = batch.cu_num_logits.tolist()  # on the device drafts may be shorter than scheduled
        return [tokens[start + 1 : end] for start, end in itertools.pairwise(ends)]

    states, rows = runner.req_states, batch.idx_mapping_np
    read = states.num_computed_prefill_tokens[rows] + batch.num_scheduled_tokens
    is_reading = (read < states.prefill_len.np[rows]).tolist()
    return Step(batch.req_ids, is_reading, lambda name: by_name.get(name, 0), drafts)


_V1 = "vllm.v1.worker.gpu_model_runner"
_V2 = "vllm.v1.worker.gpu"
_SAMPLES = "self grammar_output"
_ROWS = (
    Patch("vllm.v1.core.sched.output", "GrammarOutput",
          attributes="structured_output_request_ids grammar_bitmask"),
    Patch("vllm.v1.structured_output", "StructuredOutputManager.grammar_bitmask",
          "self requests structured_output_request_ids scheduled_spec_decode_tokens"),
    Patch("vllm.config.model", "ModelConfig", attributes="is_diffusion"),
    Patch("vllm.config.vllm", "VllmConfig",
          attributes="kv_transfer_config num_speculative_tokens parallel_config"),
)  # fmt: skip
_V1_PATCHES = (
    *_ROWS,
    *NOTES_V1,
    Patch("vllm.v1.core.sched.output", "SchedulerOutput",
          attributes="scheduled_spec_decode_tokens"),
    Patch("vllm.v1.spec_decode.metadata", "SpecDecodeMetadata",
          attributes="draft_token_ids num_draft_tokens"),
    Patch(_V1, "ExecuteModelState", attributes="scheduler_output logits spec_decode_metadata"),
    Patch(_V1, "GPUModelRunner.load_model", "self ...", guard_runner),
    Patch(_V1, "GPUModelRunner.sample_tokens", _SAMPLES, guard_masks_v1),
)  # fmt: skip
_V2_PATCHES = (
    *_ROWS,
    *NOTES_V2,
    Patch(f"{_V2}.input_batch", "InputBatch",
          attributes="req_ids num_draft_tokens_per_req cu_num_logits cu_num_logits_np input_ids "
          "logits_indices idx_mapping_np num_scheduled_tokens"),
    Patch(f"{_V2}.states", "RequestState", attributes="num_computed_prefill_tokens prefill_len"),
    Patch(f"{_V2}.model_runner", "ExecuteModelState", attributes="input_batch hidden_states"),
    Patch(f"{_V2}.model_runner", "GPUModelRunner.load_model", "self ...", guard_runner),
    Patch(f"{_V2}.model_runner", "GPUModelRunner.sample_tokens", _SAMPLES, guard_masks_v2),
)  # fmt: skip

WORKER_PATCHES = (_V1_PATCHES, _V2_PATCHES)
PATCHES = (in_workers("guard", WORKER_PATCHES), *REPORTS)
PARTS = {
    "old runner": (*PATCHES, *_V1_PATCHES),
    "new runner": (*PATCHES, *_V2_PATCHES),
}
