"""With coupled verification a seed gives one text: that of plain sampling, token for token.

Whatever drafts, however long the drafts are, and whoever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from guided_spec.core import from_propose
from guided_spec.engine.llm import LLM
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.proposers import PROPOSERS, build_proposer, takes_draft
from guided_spec.proposers.drafting import NoDraft
from guided_spec.types import DraftPolicy, SamplingParams
from tests.cases import rotated
from tests.engine.test_equality import PARAMS as GREEDY
from tests.engine.test_equality import PROMPTS, SCHEMA, STORY_PAIR
from tests.learned_heads import TARGETS, HeadedTarget, write_head
from tests.loops import speculate
from tests.models.tiny import build
from tests.tiny_llm import VOCAB_SIZE, make_llm, near_copy
from tests.toys import VOCAB_SIZE as TOY_SIZE
from tests.toys import ToyTarget, hashed_rule, text_rule, toy_context

SETTINGS: tuple[dict[str, Any], ...] = ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9})
PARAMS = [
    replace(params, max_tokens=min(params.max_tokens, 24), seed=10 + row, **SETTINGS[row % 2])
    for row, params in enumerate(GREEDY)
]
# Texts that are cut off are as good here, and the shortest ones would be longer.
PARAMS = [replace(params, complete=None if params.grammar is None else False) for params in PARAMS]
WITHOUT_HEADS = sorted(set(PROPOSERS) - set(TARGETS) - {"chain"})
CHAINS = [
    "chain:grammar_forced+ngram",
    "chain:grammar_forced+suffix",
    "chain:grammar_forced+draft_model",
    "chain:grammar_forced+ngram+draft_model:validate",
]
POLICIES = ["draft_model:validate"]
Texts = list[tuple[list[int], str]]


def texts(llm: LLM, order: Sequence[int] | None = None) -> Texts:
    """The requests in the order of ``PROMPTS``, submitted in another."""
    order = range(len(PROMPTS)) if order is None else order
    outputs = llm.generate(
        [PROMPTS[row] for row in order], [PARAMS[row] for row in order], on_error="return"
    )
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    found = dict(zip(order, outputs, strict=True))
    return [(found[row].token_ids, found[row].finish_reason) for row in range(len(PROMPTS))]


def run(model: Any, proposer: str, draft: Any = None, **options: Any) -> Texts:
    with make_llm(model, proposer, draft, verifier="coupled", **options) as llm:
        return texts(llm)


@cache
def plain(model: str) -> Texts:
    """``none``, one request after another."""
    return run(model, "none", max_batch_size=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("proposer", "size"), rotated([*WITHOUT_HEADS, *CHAINS, *POLICIES], [1, 3])
)
def test_every_proposer(proposer: str, size: int) -> None:
    draft = near_copy("llama") if "draft_model" in proposer or proposer == "pard" else None
    if draft is not None:
        draft.config.pard_token = 3  # what marks a model that was trained for pard
    assert run("llama", proposer, draft, max_batch_size=size) == plain("llama")


@pytest.mark.parametrize("k", range(1, 9))
def test_every_draft_length(k: int) -> None:
    proposer = ("draft_model", "chain:grammar_forced+draft_model")[k % 2]
    found = run("llama", proposer, near_copy("llama"), num_draft_tokens=k, max_batch_size=3)
    assert found == plain("llama")


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HeadedTarget]:
    folder = tmp_path_factory.mktemp("heads")
    return {method: write_head(folder / method, method, VOCAB_SIZE) for method in TARGETS}


@pytest.mark.slow
@pytest.mark.parametrize("method", TARGETS)
def test_every_head(headed: dict[str, HeadedTarget], method: str) -> None:
    target, draft = headed[method]
    expected = run(target, "none", max_batch_size=1)
    specs = (method, f"{method}:validate", f"chain:grammar_forced+{method}")
    for k, spec in zip((1, 3, 8), specs, strict=True):
        found = run(target, spec, draft, num_draft_tokens=k, max_batch_size=1 + k % 4)
        assert found == expected


@pytest.mark.parametrize("proposer", ["draft_model", "chain:grammar_forced+draft_model"])
def test_any_order_of_arrival(proposer: str) -> None:
    with make_llm("llama", proposer, near_copy("llama"), verifier="coupled") as llm:
        assert texts(llm, range(len(PROMPTS))[::-1]) == plain("llama")
        with ThreadPoolExecutor(3) as pool:  # three callers at once, each with its own requests
            rows = range(len(PROMPTS))
            parts = [pool.submit(llm.generate, PROMPTS[r], PARAMS[r]) for r in rows]
            found = [part.result()[0] for part in parts]
        assert [(one.token_ids, one.finish_reason) for one in found] == plain("llama")


def test_a_request_that_joins_while_others_run() -> None:
    with make_llm("llama", "draft_model", near_copy("llama"), verifier="coupled") as llm:
        late = None
        for chunk in llm.stream(PROMPTS[:2], PARAMS[:2]):
            if late is None:
                (late,) = llm.generate(PROMPTS[5], PARAMS[5])
            if chunk.completion is not None:
                assert chunk.completion.token_ids == plain("llama")[chunk.prompt_index][0]
    assert late is not None
    assert late.token_ids == plain("llama")[5][0]


def test_a_request_may_choose_its_policy() -> None:
    policies: list[DraftPolicy | None] = ["validate", "mask", None] * len(PARAMS)
    params = [
        replace(one, draft_policy=policy) for one, policy in zip(PARAMS, policies, strict=False)
    ]
    chain = "chain:grammar_forced+draft_model"
    with make_llm("llama", chain, near_copy("llama"), verifier="coupled") as llm:
        outputs = llm.generate(PROMPTS, params)
    assert [output.token_ids for output in outputs] == [tokens for tokens, _ in plain("llama")]


@pytest.mark.parametrize("proposer", ["ngram", "suffix", "draft_model", *CHAINS[2:]])
def test_stories(proposer: str) -> None:
    """Real weights that nobody here trained."""
    model = STORY_PAIR["model"]
    draft = STORY_PAIR["draft"] if takes_draft(proposer) else None
    found = run(model, proposer, draft, max_batch_size=3, num_draft_tokens=6)
    assert found == plain(model)
    assert len({tuple(tokens) for tokens, _ in found}) == len(found)


@pytest.mark.slow
def test_the_bundled_pair() -> None:
    params = [
        SamplingParams(seed=row, max_tokens=40, grammar=GrammarSpec.json_schema(SCHEMA), **setting)
        for row, setting in enumerate(SETTINGS * 2)
    ]
    prompts = ["Ada, 36, has a cat.\n\nJSON: ", "Bob is 41.\n\nJSON: "] * 2
    found = {}
    for proposer in ("none", "ngram", "draft_model", "chain:grammar_forced+draft_model"):
        with LLM(proposer=proposer, verifier="coupled") as llm:
            outputs = llm.generate(prompts, params)
            found[proposer] = [output.token_ids for output in outputs]
            accepted = sum(sum(output.stats.accepted) for output in outputs)
            assert proposer in ("none", "ngram") or accepted > 10
    assert all(one == found["none"] for one in found.values())


@pytest.mark.parametrize("k", [1, 2, 5, 8])
@pytest.mark.parametrize("setting", SETTINGS, ids=["plain", "top_p"])
def test_toys(setting: dict[str, Any], k: int) -> None:
    """By the step alone, over matchers that check how they are used."""
    rules = [hashed_rule(1), None, text_rule([b'{"ab":1}', b'{"cd":0}']), hashed_rule(2)]
    target, params = ToyTarget(2), SamplingParams(**setting)
    draft = build("llama", vocab_size=TOY_SIZE)
    draft.config.pard_token = 3
    context = toy_context(draft=draft)
    expected = speculate(
        target, from_propose(NoDraft(context)), rules, [4], length=10, k=0, params=params
    )
    for spec in (*WITHOUT_HEADS, *CHAINS, *POLICIES):
        if spec != "auto":
            with torch.inference_mode():
                proposer = build_proposer(spec, context)
                assert speculate(target, proposer, rules, [4], length=10, k=k, params=params) == (
                    expected
                )
