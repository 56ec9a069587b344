"""What a guarded worker of vLLM gets: the rows of the real scheduler, on their way to a runner.

What a runner gets is taken from its ``sample_tokens``. Import it behind a check that vLLM is there.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from guided_spec.integrations.vllm import guard as vllm_guard
from guided_spec.integrations.vllm import requests as vllm_requests
from tests.integrations.vllm.parts import (
    BLOCK,
    NUM_DRAFT,
    PROMPT,
    RELEASE,
    Step,
    add_request,
    end_step,
    first_step,
    make_config,
    make_scheduler,
    next_step,
    tokenizer,
)

REGEXES = {"x": "a[bc]d[ef]g+", "y": "h[ij]k[lm]n+"}
WRITTEN = {"x": "a", "y": "h"}
DRAFTS = {"x": "bd", "y": "ik"}
LEGAL = {"x": ["bc", "d", "ef"], "y": ["ij", "k", "lm"]}


def ids(text: str) -> list[int]:
    found = [tokenizer().encode(one, add_special_tokens=False) for one in text]
    assert all(len(one) == 1 for one in found)
    return [one[0] for one in found]


def first_letter(token_id: Any) -> str:
    text: str = tokenizer().decode([int(token_id)])
    return text[:1]


class Runner:
    """As much of the older runner as is looked at. is_reading: the ``prompt`` of its requests."""

    prompt: Sequence[int] = PROMPT

    def __init__(self, config: Any) -> None:
        self.vllm_config = config
        self.use_async_scheduling = False
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=[])
        self.is_reading = False
        vllm_guard.guard_runner(lambda _: None)(self)

    def add(self, name: str, params: Any, output: Sequence[int] = ()) -> None:
        """A request begins, or goes on behind what it has written."""
        state = SimpleNamespace(
            sampling_params=params, output_token_ids=[*output], prompt_token_ids=self.prompt
        )
        self.requests[name] = state

    def note(self, names: Sequence[str], sampled: Sequence[Sequence[int]]) -> None:
        """A step samples these tokens, and the runner writes them down."""
        self.input_batch.req_ids = [*names]
        mask = torch.full((len(names),), self.is_reading)
        self.discard_request_mask = SimpleNamespace(gpu=mask, np=mask.numpy())
        output = SimpleNamespace(sampled_token_ids=torch.tensor(sampled))
        vllm_requests.note_sampled_v1(lambda *_: output)(self, None, None)
        for name, tokens in zip(names, () if self.is_reading else sampled, strict=False):
            self.requests[name].output_token_ids.extend(one for one in tokens if one >= 0)

    def guarded(self, step: Step, drafts: dict[str, list[int]], output: Any) -> Any:
        """What the runner gets in the place of ``output``, where it verifies ``drafts``."""
        names = self.input_batch.req_ids
        flat = torch.tensor([token for name in names for token in drafts[name]])
        metadata = SimpleNamespace(
            draft_token_ids=flat, num_draft_tokens=[len(drafts[name]) for name in names]
        )
        self.discard_request_mask.np[:] = self.is_reading
        self.execute_model_state = SimpleNamespace(
            scheduler_output=step.scheduled, logits=0, spec_decode_metadata=metadata
        )
        return vllm_guard.guard_masks_v1(lambda _, given: given)(self, output)


class NewRunner(Runner):
    """The same of the new runner."""

    def __init__(self, config: Any) -> None:
        self.speculator = None
        self.req_states = SimpleNamespace(req_id_to_index={})
        super().__init__(config)

    def add(self, name: str, params: Any, output: Sequence[int] = ()) -> None:
        states, places = self.req_states, self.req_states.req_id_to_index
        places.setdefault(name, len(places))
        lengths = np.full(8, len(self.prompt))
        states.prompt_len = states.prefill_len = SimpleNamespace(np=lengths)
        states.num_computed_prefill_tokens = lengths
        tokens = [*self.prompt, *output]
        new = SimpleNamespace(req_id=name, sampling_params=params, prefill_token_ids=tokens)
        scheduled = SimpleNamespace(scheduled_new_reqs=[new])
        vllm_requests.note_requests(lambda *_: None)(self, scheduled)

    def note(self, names: Sequence[str], sampled: Sequence[Sequence[int]]) -> None:
        self.input_batch.req_ids = [*names]
        counts = torch.tensor([0 if self.is_reading else len(tokens) for tokens in sampled])
        output = (SimpleNamespace(sampled_token_ids=torch.tensor(sampled)), counts, None)
        vllm_requests.note_sampled_v2(lambda *_: output)(self, None, self.input_batch, None)

    def guarded(self, step: Step, drafts: dict[str, list[int]], output: Any) -> Any:
        names = self.input_batch.req_ids
        lines = [[0, *drafts[name]] for name in names]
        ends = np.cumsum([0, *map(len, lines)])
        scheduled = step.scheduled.scheduled_spec_decode_tokens
        batch = SimpleNamespace(
            req_ids=names,
            num_draft_tokens_per_req=np.array([len(scheduled.get(name, ())) for name in names]),
            cu_num_logits_np=ends,
            cu_num_logits=torch.tensor(ends),
            input_ids=torch.tensor([token for line in lines for token in line]),
            logits_indices=torch.arange(ends[-1]),
            idx_mapping_np=np.array([self.req_states.req_id_to_index[name] for name in names]),
            num_scheduled_tokens=np.array([-1 if self.is_reading else len(x) for x in lines]),
        )
        self.execute_model_state = SimpleNamespace(input_batch=batch, hidden_states=0)
        return vllm_guard.guard_masks_v2(lambda _, given: given)(self, output)


LONG_PROMPT = (*range(5, 5 + BLOCK + 4),)
REASONING_ENDS = "v"  # the token that ends it


@cache
def add_parser() -> str:
    """Make a reasoning parser known to vLLM, whose tokens are letters; its name."""
    base: Any = importlib.import_module("vllm.reasoning.basic_parsers")
    start, end = tokenizer().convert_ids_to_tokens(ids("u" + REASONING_ENDS))

    class LetterParser(base.BaseThinkingReasoningParser):  # type: ignore[misc]
        start_token = start
        end_token = end

    parsers: Any = importlib.import_module("vllm.reasoning").ReasoningParserManager
    parsers.register_module("letters", module=LetterParser)
    return "letters"


Make = Callable[[Any], Runner]


HISTORIES = (
    "none",
    "steps without drafts",
    "preempted",
    "prompts read in chunks",
    "prompts found in the cache",
    "reasoning",
)


class World:
    """Two requests behind their first token, and the step that verifies two drafts of each.

    written: that token. history: what came before it, see ``HISTORIES``; or "still reasoning".
    """

    def __init__(
        self,
        make: Make,
        drafts: dict[str, str] = DRAFTS,
        regex: str | None = None,
        stops: Sequence[int] = (),
        history: str = "none",
        written: dict[str, str] = WRITTEN,
    ) -> None:
        is_late, is_cached = "reasoning" in history, history == "prompts found in the cache"
        config = make_config(outputs={"reasoning_parser": add_parser()} if is_late else None)
        config.cache_config.enable_prefix_caching = is_cached
        if history == "prompts read in chunks":
            config.scheduler_config.long_prefill_token_threshold = 2
        self.scheduler = scheduler = make_scheduler(config)
        self.runner = make(config)
        self.runner.prompt = prompt = LONG_PROMPT if is_cached else PROMPT
        if is_cached:
            self._fill_cache(prompt)
        before = "uv" if history in ("steps without drafts", "preempted", "reasoning") else ""
        for name, own in REGEXES.items():
            pattern = ("" if is_late else before) + (regex or own)
            request = add_request(scheduler, name, stops, prompt, regex=pattern)
            self.runner.add(name, request.sampling_params)
        step = first_step(scheduler, len(REGEXES))
        if is_cached:
            assert {*step.num_scheduled_tokens.values()} == {len(prompt) - BLOCK}
        if history == "prompts read in chunks":
            step = self._read(step)
        for at, letter in enumerate(before):
            self.runner.note([*REGEXES], [ids(letter)] * len(REGEXES))
            self._end(step, letter)
            if history == "preempted":
                self._preempt(before[: at + 1])
            step = scheduler.schedule()
        sampled = {name: ids("a" if regex else text) for name, text in written.items()}
        self.runner.note([*REGEXES], [*sampled.values()])
        self.drafts = {name: ids(text) for name, text in drafts.items()}
        self.step = next_step(scheduler, step, sampled, {**self.drafts})
        self.output = copy.deepcopy(self.step.grammar)

    def _fill_cache(self, prompt: Sequence[int]) -> None:
        """Another request with this prompt has run."""
        add_request(self.scheduler, "before", prompt=prompt)
        step = first_step(self.scheduler, 1)
        end_step(self.scheduler, step, {"before": ids("a")}, {"before": []})
        status: Any = importlib.import_module("vllm.v1.request").RequestStatus
        self.scheduler.finish_requests("before", status.FINISHED_ABORTED)

    def _end(self, step: Any, text: str) -> None:
        """Each request got these tokens, and no draft."""
        sampled = {name: ids(text) for name in REGEXES}
        end_step(self.scheduler, step, sampled, {name: [] for name in REGEXES})

    def _read(self, step: Any) -> Any:
        """What a runner samples inside of a prompt is dropped."""
        assert [*step.num_scheduled_tokens.values()] == [2, 2]
        self.runner.is_reading = True
        self.runner.note([*REGEXES], [ids("z")] * len(REGEXES))
        self.runner.is_reading = False
        self._end(step, "")
        self.scheduler.scheduler_config.long_prefill_token_threshold = 0  # it shortens drafts too
        return self.scheduler.schedule()

    def _preempt(self, written: str) -> None:
        """All requests lose their KV cache and begin again behind their texts."""
        self.scheduler.reset_prefix_cache(reset_running_requests=True)
        for name, request in self.scheduler.requests.items():
            self.runner.add(name, request.sampling_params, ids(written))

    def know(self) -> None:
        """The runner has its tokens and its grammars, as drafting under grammars leaves it."""
        guard = vllm_guard.guard_of(self.runner)
        assert guard is not None
        guard.requests.stand([*REGEXES])

    def size(self, name: str) -> int:
        if RELEASE >= (0, 33):
            return NUM_DRAFT + 1
        return len(self.step.scheduled.scheduled_spec_decode_tokens.get(name, ())) + 1

    def rows(self, output: Any, name: str) -> Any:
        names = output.structured_output_request_ids
        start = sum(map(self.size, names[: names.index(name)]))
        return output.grammar_bitmask[start : start + self.size(name)]

    def check(self) -> Any:
        return self.runner.guarded(self.step, self.drafts, self.output)

    def legal(self, output: Any, name: str) -> list[str]:
        """The letters that tokens may begin with by each of a request's rows."""
        bits = np.unpackbits(self.rows(output, name).view(np.uint8), axis=-1, bitorder="little")
        rows = bits[: len(self.drafts[name]) + 1]
        return ["".join(sorted({*map(first_letter, np.flatnonzero(row))})) for row in rows]
