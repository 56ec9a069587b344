"""Learned draft heads on a CUDA device: reading, drafting under every policy, translated masks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from guided_spec.engine.outputs import RequestOutput
from guided_spec.engine.steps.planner import Turns
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.models.heads.loading import load_head
from guided_spec.ops.bitmask import only_legal_token, pack_bitmask, translate_bitmask
from guided_spec.proposers import learned_head
from guided_spec.proposers.device_masks import DeviceMasks
from guided_spec.proposers.draft_graphs import DraftGraphs
from guided_spec.types import SamplingParams
from tests.gpu.test_engine_cuda import GRAMMARS, PROMPTS, SCHEMA
from tests.learned_heads import TARGETS, HeadedTarget, write_head
from tests.tiny_llm import VOCAB_SIZE, make_llm

pytestmark = pytest.mark.gpu
FLOAT = torch.float32
BLOCKS = ("dflash", "dflash2", "domino", "dspark", "lilicorr", "p_eagle")


def on_cuda(folder: Path, method: str, dtype: torch.dtype) -> HeadedTarget:
    target, draft = write_head(folder, method, VOCAB_SIZE)
    model: Any = target
    return HeadedTarget(model.to("cuda", dtype), draft)


def generate(
    headed: HeadedTarget,
    proposer: str,
    temperature: float,
    grammars: Sequence[GrammarSpec | None] = GRAMMARS,
    **options: Any,
) -> list[RequestOutput]:
    params = [
        SamplingParams(max_tokens=50, temperature=temperature, seed=4, grammar=grammar)
        for grammar in grammars
    ]
    options = {"prefill_tokens": 24, "max_batch_size": 3, **options}
    with make_llm(headed.target, proposer, headed.draft, **options) as llm:
        return llm.generate(PROMPTS[: len(params)], params)


@pytest.mark.parametrize("method", TARGETS)
def test_greedy_equals_plain(tmp_path: Path, method: str) -> None:
    headed = on_cuda(tmp_path / "head", method, torch.float32)
    plain = generate(headed, "none", 0.0)
    proposers = [f"{method}:{policy}" for policy in ("mask", "validate")]
    for proposer in (*proposers, f"chain:grammar_forced+{method}"):
        found = generate(headed, proposer, 0.0)
        assert [output.error for output in found] == [None] * len(PROMPTS)
        assert [output.token_ids for output in found] == [output.token_ids for output in plain]
        assert sum(sum(output.stats.drafted) for output in found) > 20
    head: Any = load_head(method, headed.draft, headed.target)
    assert all(parameter.is_cuda for parameter in head.parameters())


@pytest.mark.parametrize("policy", ["mask", "validate"])
@pytest.mark.parametrize("method", TARGETS)
def test_sampled_in_bfloat16(tmp_path: Path, method: str, policy: str) -> None:
    headed = on_cuda(tmp_path / "head", method, torch.bfloat16)
    outputs = generate(headed, f"{method}:{policy}", 1.0)
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    assert outputs[3].text in ("cat", "dog", "cattle")


GRAPHED = pytest.mark.parametrize("method", ["eagle3", "dflash", "dspark", "p_eagle"])


@pytest.mark.usefixtures("drafted_from_the_start")
@GRAPHED
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_graph_that_waits_for_masks_drafts_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, temperature: float
) -> None:
    headed = on_cuda(tmp_path / "head", method, torch.float32)
    walks: list[int] = []
    launch = DraftGraphs.launch

    def watched(*arguments: Any) -> DeviceMasks:
        walks.append(len(arguments[2]))
        return launch(*arguments)

    monkeypatch.setattr(DraftGraphs, "launch", watched)
    found = generate(headed, f"{method}:mask", temperature)
    assert len(walks) > 10
    assert max(walks) == 3
    monkeypatch.setattr(learned_head, "can_share", lambda _: False)
    expected = generate(headed, f"{method}:mask", temperature)
    assert [output.error for output in found] == [None] * len(PROMPTS)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert [o.stats.drafted for o in found] == [o.stats.drafted for o in expected]
    assert [o.stats.accepted for o in found] == [o.stats.accepted for o in expected]


@pytest.mark.usefixtures("drafted_from_the_start")
@GRAPHED
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("at_a_time", [1, 3])
def test_a_graph_that_walks_along_tables_drafts_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, temperature: float, at_a_time: int
) -> None:
    """Alone, where nobody waits for the host, and beside texts without a table."""
    headed = on_cuda(tmp_path / "head", method, torch.float32)
    waits: list[bool] = []
    launch = DraftGraphs.launch

    def watched(*arguments: Any) -> DeviceMasks:
        masks = launch(*arguments)
        texts = arguments[4]
        waits.append(texts is None or not texts.is_alone)
        return masks

    monkeypatch.setattr(DraftGraphs, "launch", watched)
    untabled = GrammarSpec.json_schema(SCHEMA).with_backend("llguidance")
    options: dict[str, Any] = {"max_batch_size": at_a_time, "grammar_tables": "always"}
    options["grammars"] = [GRAMMARS[0], untabled, GRAMMARS[1], GRAMMARS[3]]
    found = generate(headed, f"{method}:mask", temperature, **options)
    assert True in waits
    assert False in waits or at_a_time == 3
    expected = generate(headed, f"{method}:mask", temperature, **options, device_table_bytes=0)
    assert [output.error for output in found] == [None] * len(PROMPTS)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert [o.stats.drafted for o in found] == [o.stats.drafted for o in expected]
    assert [o.stats.accepted for o in found] == [o.stats.accepted for o in expected]
    assert [o.stats.tabled for o in found] == [o.stats.tabled for o in expected]
    assert [output.stats.device_steps > 0 for output in found] == [True, False, True, True]
    assert not any(output.stats.device_steps for output in expected)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", ["mtp", "dflash2", "draft_model"])
def test_a_loop_that_walks_along_tables_drafts_the_same(
    tmp_path: Path, method: str, temperature: float
) -> None:
    """Alone, and beside texts without a table."""
    headed: Any = on_cuda(tmp_path / "head", "eagle3" if method == "draft_model" else method, FLOAT)
    if method == "draft_model":
        headed = headed._replace(draft=copy.deepcopy(headed.target))
    untabled = GrammarSpec.json_schema(SCHEMA).with_backend("llguidance")
    for at_a_time in (1, 3):
        options: dict[str, Any] = {"max_batch_size": at_a_time, "grammar_tables": "always"}
        options["grammars"] = [GRAMMARS[0], untabled, GRAMMARS[1], GRAMMARS[3]]
        found = generate(headed, f"{method}:mask", temperature, **options)
        expected = generate(headed, f"{method}:mask", temperature, **options, device_table_bytes=0)
        assert [output.error for output in found] == [None] * len(found)
        assert [output.token_ids for output in found] == [output.token_ids for output in expected]
        for name in ("drafted", "accepted", "tabled", "starved"):
            counts, own = ([getattr(o.stats, name) for o in one] for one in (expected, found))
            assert own == counts, name
        assert [output.stats.device_steps > 0 for output in found] == [True, False, True, True]
        assert not any(output.stats.device_steps for output in expected)


@pytest.mark.parametrize(("vocab_size", "draft_size"), [(12, 5), (4097, 1000), (151_669, 32_000)])
def test_masks_are_translated_alike(vocab_size: int, draft_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    bitmask = pack_bitmask(torch.rand(3, 2, vocab_size, generator=generator) < 0.3)
    target_ids = torch.randperm(vocab_size, generator=generator)[:draft_size]
    expected = translate_bitmask(bitmask, target_ids)
    assert torch.equal(translate_bitmask(bitmask.cuda(), target_ids.cuda()).cpu(), expected)
    alone = pack_bitmask(torch.arange(vocab_size) == torch.arange(vocab_size)[-3:, None])
    assert torch.equal(only_legal_token(alone.cuda()).cpu(), torch.arange(vocab_size)[-3:])


@pytest.mark.parametrize("tables", ["off", "always"])
@pytest.mark.parametrize("proposer", ["eagle3", "dspark", "chain:grammar_forced+eagle3", "ngram"])
def test_texts_that_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proposer: str, tables: str
) -> None:
    """Drafts run beside forwards of other texts, and what these read is not overwritten."""
    method = proposer.rpartition("+")[2].replace("ngram", "eagle3")
    headed = on_cuda(tmp_path / "head", method, torch.float32)
    grammars = [*GRAMMARS * 8, *GRAMMARS[:2]]
    params = [
        SamplingParams(max_tokens=50, temperature=0.8 * (at % 2), seed=at, grammar=grammar)
        for at, grammar in enumerate(grammars)
    ]
    prompts = [PROMPTS[at % len(PROMPTS)] for at in range(len(params))]
    options: dict[str, Any] = {"prefill_tokens": 24, "max_batch_size": 11}
    found = list[list[list[int]]]()
    with make_llm(headed.target, proposer, headed.draft, grammar_tables=tables, **options) as llm:
        for takes_turns in (False, True, True, True):
            least = 2 if takes_turns else 1000
            monkeypatch.setattr(Turns, "are_taken", lambda _, count, __, most=least: count >= most)
            outputs = llm.generate(prompts, params, on_error="return")
            assert [output.error for output in outputs] == [None] * len(params)
            found.append([output.token_ids for output in outputs])
    assert found[1:] == found[:1] * 3
