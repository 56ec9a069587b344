"""The proposer for vLLM, made and called by the real vLLM: config, loader, runner, grammars."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from guided_spec.errors import ConfigError
from guided_spec.integrations.vllm.proposer import PATCHES, GuidedProposer

vllm = pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.integrations.vllm.guarded import REASONING_ENDS, add_parser  # noqa: E402
from tests.integrations.vllm.parts import (  # noqa: E402
    NUM_DRAFT,
    add_request,
    first_step,
    keep_functions,
    make_config,
    make_scheduler,
    sampling_params,
    tokenizer,
    wait_for_grammar,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own
SPECULATIVE = {
    "method": "custom_class",
    "model": "guided_spec.integrations.vllm.proposer.GuidedProposer",
}
RUNNER = "vllm.v1.worker.gpu_model_runner"
SCHEMA = {
    "type": "object",
    "properties": {"temperature": {"type": "integer"}, "description": {"type": "string"}},
    "required": ["temperature", "description"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", autouse=True)
def restored() -> Iterator[None]:
    """The proposer replaces functions of vLLM for good."""
    with pytest.MonkeyPatch.context() as patch:
        keep_functions(patch, PATCHES)
        yield


class Runner:
    """As much of a model runner as its real ``propose_draft_token_ids`` uses."""

    def __init__(self, config: Any) -> None:
        module: Any = importlib.import_module(RUNNER)
        self.drafter = module.create_custom_proposer(config)
        self.speculative_config = config.speculative_config
        self.requests: dict[str, Any] = {}
        self.use_async_scheduling = False
        self.input_batch = SimpleNamespace(
            req_ids=[],
            num_tokens_no_spec=np.zeros(8, dtype=np.int32),
            token_ids_cpu=np.zeros((8, 512), dtype=np.int32),
        )
        self._propose = module.GPUModelRunner.propose_draft_token_ids
        self._new_request = importlib.import_module(
            "vllm.v1.worker.gpu_input_batch"
        ).CachedRequestState

    def add(self, name: str, prompt: Sequence[int], params: Any) -> None:
        self.requests[name] = self._new_request(
            req_id=name,
            prompt_token_ids=list(prompt),
            mm_features=[],
            sampling_params=params,
            generator=None,
            block_ids=([0],),
            num_computed_tokens=0,
            output_token_ids=[],
        )

    def propose(self, texts: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
        """Drafts for the requests of a batch, each behind its whole text."""
        batch = self.input_batch
        batch.req_ids = list(texts)
        for at, (name, text) in enumerate(texts.items()):
            state = self.requests[name]
            state.output_token_ids = list(text[state.num_prompt_tokens :])
            batch.num_tokens_no_spec[at] = len(text)
            batch.token_ids_cpu[at, : len(text)] = text
        sampled = [[text[-1]] for text in texts.values()]
        step = SimpleNamespace(total_num_scheduled_tokens=1, num_spec_tokens_to_schedule=NUM_DRAFT)
        drafts = self._propose(self, step, sampled, *[None] * 7)
        return dict(zip(texts, drafts, strict=True))

    def propose_compiled(self, name: str, text: Sequence[int]) -> list[int]:
        """The draft once the request's grammar is there: it is compiled beside the first steps."""
        self.propose({name: text[: self.requests[name].num_prompt_tokens]})
        wait_for_grammar(self.drafter._requests, name)
        return self.propose({name: text})[name]


def encode(text: str) -> list[int]:
    found: list[int] = tokenizer().encode(text, add_special_tokens=False)
    return found


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(make_config(speculative=SPECULATIVE))


def text_of(draft: Sequence[int]) -> str:
    decoded: str = tokenizer().decode(draft)
    return decoded


def test_vllm_makes_the_proposer(runner: Runner) -> None:
    assert isinstance(runner.drafter, GuidedProposer)


@pytest.mark.parametrize(
    ("grammar", "written", "forced"),
    [
        ({"json": SCHEMA}, '{"', 'temperature": '),
        ({"json": SCHEMA}, '{"temperature": 3, ', '"description": "'),
        ({"regex": "(yes|no), thank you"}, "yes", ", thank you"),
        ({"choice": ["Monday", "Tuesday"]}, "M", "onday"),
        ({"grammar": 'root ::= ("a" | "b") " is a letter"'}, "a", " is a letter"),
    ],
)
def test_what_the_grammar_forces_is_drafted(
    runner: Runner, grammar: dict[str, Any], written: str, forced: str
) -> None:
    runner.requests.clear()
    runner.add("request", [5, 6, 7], sampling_params(make_config(), **grammar))
    draft = runner.propose_compiled("request", [5, 6, 7, *encode(written)])
    assert 0 < len(draft) <= NUM_DRAFT
    assert forced.startswith(text_of(draft)) or text_of(draft).startswith(forced)


def test_the_scheduler_takes_every_draft(runner: Runner) -> None:
    config = make_config(speculative=SPECULATIVE)
    scheduler = make_scheduler(config)
    request = add_request(scheduler, "request", json=SCHEMA)
    step = first_step(scheduler, 1)
    runner.requests.clear()
    runner.add("request", request.prompt_token_ids, request.sampling_params)
    answer = encode('{"temperature": 31, "description": "mild"}')
    outputs = importlib.import_module("vllm.v1.outputs")
    written, num_steps = 0, 0
    draft: list[int] = []
    while written < len(answer):
        # What a target that writes ``answer`` would accept, and one token behind it.
        agreed = 0
        while agreed < len(draft) and draft[agreed : agreed + 1] == answer[written + agreed :][:1]:
            agreed += 1
        new = answer[written : written + agreed + 1]
        written += len(new)
        num_steps += 1
        result = outputs.ModelRunnerOutput(["request"], {"request": 0}, sampled_token_ids=[new])
        scheduler.update_from_output(step, result)
        text = [*request.prompt_token_ids, *answer[:written]]
        if num_steps == 1:
            runner.propose_compiled("request", text[:-1])
        draft = runner.propose({"request": text})["request"]
        scheduler.update_draft_token_ids(outputs.DraftTokenIds(["request"], [draft]))
        assert request.spec_token_ids == draft  # vLLM cut nothing off
        step = scheduler.schedule()
    assert num_steps < len(answer)


def test_requests_come_and_go(runner: Runner) -> None:
    runner.requests.clear()
    free = sampling_params(make_config())
    looped = [11, 12, 13, 14, 11, 12]
    runner.add("free", looped[:3], free)
    runner.add("forced", [5, 6, 7], sampling_params(make_config(), choice=["Monday", "Tuesday"]))
    forced = runner.propose_compiled("forced", [5, 6, 7, *encode("M")])
    both = {"forced": [5, 6, 7, *encode("M")], "free": looped}
    assert runner.propose(both) == {"forced": forced, "free": [13, 14, 11, 12]}
    del runner.requests["forced"]
    assert runner.propose({"free": looped}) == {"free": [13, 14, 11, 12]}
    # The same name again is another request.
    runner.add("forced", looped[:1], sampling_params(make_config()))
    assert runner.propose({"forced": looped[:2]}) == {"forced": []}


def test_no_draft_past_the_longest_text_and_behind_unfinished_prompts(runner: Runner) -> None:
    runner.requests.clear()
    runner.add("free", [1], sampling_params(make_config()))
    full = ([11, 12, 13] * 200)[:512]
    assert runner.propose({"free": full}) == {"free": []}
    assert len(runner.propose({"free": full[:510]})["free"]) == 2
    batch = runner.input_batch
    assert runner.drafter.propose([[]], batch.num_tokens_no_spec, batch.token_ids_cpu) == [[]]


def test_other_backends_are_left_to_lookup(runner: Runner) -> None:
    runner.requests.clear()
    params = sampling_params(make_config(), choice=["Monday", "Tuesday"])
    params.structured_outputs._backend = "guidance"
    runner.add("request", [5, 6, 7], params)
    assert runner.drafter._requests.grammars.spec_of(params) is None
    assert runner.propose({"request": [5, 6, 7, *encode("M")]}) == {"request": []}


def test_a_grammar_behind_reasoning_is_drafted_for_from_there_on(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.requests.clear()
    late = make_config(speculative=SPECULATIVE, outputs={"reasoning_parser": add_parser()})
    monkeypatch.setattr(runner, "drafter", GuidedProposer(late))
    params = sampling_params(make_config(), choice=["Monday", "Tuesday"])
    runner.add("request", [5, 6, 7], params)
    (end,) = encode(REASONING_ENDS)
    written = [5, 6, 7, *encode("no day")]
    assert runner.propose_compiled("request", written) == []
    draft = runner.propose({"request": [*written, end, *encode("M")]})["request"]
    assert text_of(draft).startswith("onday")


def test_pipeline_ranks_are_refused_at_the_start() -> None:
    config = make_config(speculative=SPECULATIVE)
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2: vLLM has no custom_class"):
        GuidedProposer(config)
