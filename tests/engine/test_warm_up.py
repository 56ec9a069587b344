"""Before the first request: what is captured serves all that follows, and nothing fails."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from guided_spec.bundled import bundled_asset
from guided_spec.engine import setup as warming
from guided_spec.engine.options import Options
from guided_spec.engine.outputs import Chunk
from guided_spec.engine.request import Job, Request
from guided_spec.engine.setup import Setup
from guided_spec.grammar.backends.llguidance import LLGuidanceBackend
from guided_spec.grammar.completion.search import SearchEndings, SearchTokens
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.ops.sampling.warm_up import SAMPLINGS, drafts_of_every_kind
from guided_spec.proposers.chain import Chain
from guided_spec.types import SamplingParams
from tests.by_chance import draft_by_chance
from tests.learned_heads import write_head
from tests.tiny_llm import VOCAB_SIZE, make_llm

SPEC = GrammarSpec.json_schema({"type": "object", "properties": {"name": {"type": "string"}}})


def build(**options: Any) -> Setup:
    found = Options.from_dict({"kernels": "packed", "max_batch_size": 2, **options})
    return Setup.build(None, "chain:grammar_forced+eagle3", bundled_asset("eagle3"), found)


def write(setup: Setup, temperature: float, batch: int) -> list[Chunk]:
    """The last chunks of ``batch`` texts under a grammar."""
    chunks: list[Chunk] = []
    params = SamplingParams(max_tokens=30, temperature=temperature)
    for at in range(batch):
        grammar = setup.grammars.queue.submit(SPEC)
        prompt = setup.encoder.encode("The name is Maria Lopez. " * (at + 1))
        job = Job(prompt, params, 200, at, grammar, setup.grammars.endings)
        setup.engine.add(Request(job, setup.vocabulary, chunks.append))
    while setup.engine.has_work:
        setup.engine.step()
    return [chunk for chunk in chunks if chunk.completion is not None]


@pytest.mark.slow
def test_no_step_captures_behind_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming, "SAMPLINGS", SAMPLINGS[:2])
    setup = build(max_model_len=256, drafting="auto")
    with caplog.at_level(logging.INFO, "guided_spec.engine.setup"):
        warming.warm_up(setup.engine, setup.vocabulary, setup.grammars)
    assert "failed" not in caplog.text
    assert "captured" in caplog.text
    chain: Any = setup.engine.proposer
    assert isinstance(chain, Chain)
    graphs = chain._members[1]._ahead.graphs  # type: ignore[attr-defined]
    before = len(graphs)
    assert before > 36  # of reading alone there are as many
    lengths = draft_by_chance(monkeypatch)
    for temperature in (0.0, 0.8):
        for chunk in write(setup, temperature, 2):
            assert chunk.completion is not None
            assert chunk.completion.error is None
    assert {*lengths} == {0, 3, 5}
    assert len(graphs) == before
    # What llguidance's grammars need is there as well: it would hold all texts for half a second.
    monkeypatch.setattr(LLGuidanceBackend, "__init__", None)
    monkeypatch.setattr(SearchTokens, "__init__", None)
    spec = GrammarSpec.json_schema({"type": "string", "maxLength": 601})
    grammar = setup.grammars.queue.submit(spec).result()
    assert setup.grammars.endings is not None
    assert isinstance(setup.grammars.endings.of(grammar), SearchEndings)
    setup.grammars.queue.close()


def test_kernels_are_compiled_for_the_drafts_that_a_proposer_makes() -> None:
    """Without probabilities, of the whole vocabulary, and of one of its own."""

    def kinds(proposer: str, draft: str) -> list[tuple[bool, bool]]:
        options = Options.from_dict({"kernels": "packed", "max_model_len": 64})
        setup = Setup.build(None, proposer, bundled_asset(draft), options)
        setup.grammars.queue.close()
        drafts = drafts_of_every_kind(warming.decisions_of(setup.engine), 1, 3)
        return [(draft.probs is not None, draft.columns is not None) for draft in drafts]

    none, whole, own = (False, False), (True, False), (True, True)
    assert kinds("eagle3", "eagle3") == [none, own]
    assert kinds("mtp", "mtp") == [none, whole]
    assert kinds("draft_model", "draft") == [none, whole, own]
    assert kinds("chain:grammar_forced+eagle3", "eagle3") == [none, own]
    assert kinds("chain:eagle3+eagle3", "eagle3") == [none, whole, own]


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["dflash", "dspark", "p_eagle"])
def test_what_is_captured_serves_a_block_head(tmp_path: Path, spec: str) -> None:
    """Neither under the policy of the proposer, nor under that of a request, nor for free texts."""
    headed = write_head(tmp_path, spec, VOCAB_SIZE)
    options: dict[str, Any] = {"kernels": "packed", "max_batch_size": 2, "max_model_len": 128}
    with make_llm(headed.target, spec, headed.draft, **options) as llm:
        setup: Any = llm._runner.setup
        with torch.inference_mode():
            for _ in setup.engine.capture():
                pass
        graphs = setup.engine.proposer._ahead._ahead.graphs
        before = len(graphs)
        assert before > 36  # of reading alone there are as many
        grammar = GrammarSpec.json_schema({"type": "array", "items": {"type": "integer"}})
        policies: list[Any] = [None, "validate", "mask"]
        params = [
            SamplingParams(max_tokens=9, grammar=one, draft_policy=policy)
            for policy in policies
            for one in (grammar, None)
        ]
        outputs = llm.generate([[5, 6, 7]] * len(params), params)
        assert [output.error for output in outputs] == [None] * len(params)
        assert len(graphs) == before


@pytest.mark.slow
def test_what_only_compiles_captures_nothing() -> None:
    setup = build(max_model_len=64)
    chain: Any = setup.engine.proposer
    graphs = chain._members[1]._ahead.graphs
    with setup.engine.compiling():
        count = sum(1 for _ in setup.engine.capture())
    assert len(graphs) == 0
    assert sum(1 for _ in setup.engine.capture()) == count == len(graphs)
    for chunk in write(setup, 0.0, 2):
        assert chunk.completion is not None
        assert chunk.completion.error is None
    setup.grammars.queue.close()


@pytest.mark.slow
def test_a_context_shorter_than_its_texts(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming, "SAMPLINGS", SAMPLINGS[:1])
    setup = build(max_model_len=12)
    with caplog.at_level(logging.WARNING, "guided_spec.engine.setup"):
        warming.warm_up(setup.engine, setup.vocabulary, setup.grammars)
    assert caplog.text == ""
    setup.grammars.queue.close()
