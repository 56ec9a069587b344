"""A plain model that drafts a block: what it is fed, what it drafts, and which models it takes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from guided_spec.engine.llm import LLM
from guided_spec.errors import ModelError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.masks.lookahead import Lookahead
from guided_spec.models.heads.loading import find_method
from guided_spec.proposers import build_proposer
from guided_spec.types import Draft, SamplingParams
from tests.models.tiny import build
from tests.tiny_llm import make_llm, near_copy, tiny_model
from tests.toys import VOCAB_SIZE, toy_batch, toy_context

TOKEN, WIDTH = 3, 5


def with_token(model: Any, **fields: Any) -> Any:
    changed = copy.deepcopy(model)
    changed.config.update({"pard_token": TOKEN, **fields})
    return changed


def draft_of(proposer: Any, contexts: list[list[int]]) -> Draft:
    batch = toy_batch(contexts, [None] * len(contexts), k=WIDTH)
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    draft: Draft = proposer.begin(batch, lookahead).finish()
    return draft


@pytest.mark.parametrize("spec", ["pard", "pard:validate"])
@torch.inference_mode()
def test_a_block_is_one_forward(spec: str) -> None:
    """Texts of any length, some of which grow by less than was drafted, one of which does not."""
    model: Any = with_token(build("llama", vocab_size=VOCAB_SIZE))
    proposer = build_proposer(spec, toy_context(draft=model))
    contexts = [[4, 1, 2, 0, 1, 5, 2, 7, 1, 1], [0], [2, 2, 6]]
    for more in ([], [5], [1, 2, 3, 4, 0]):
        contexts = [contexts[0] + more, contexts[1] + more[:1], contexts[2]]
        found = draft_of(proposer, contexts).token_ids
        for row, text in zip(found.tolist(), contexts, strict=True):
            fed = torch.tensor([text + [TOKEN] * (WIDTH - 1)])
            expected = model(fed).logits[0, -WIDTH:].argmax(-1)
            assert row == expected.tolist()


REGEX = GrammarSpec.regex("[0-9]{3}-[a-z]{4,8}")
PROMPTS = ["call 123-abcd 123-abcd", "A", "cat or dog?"]


def write(llm: LLM, temperature: float) -> Any:
    params = [
        SamplingParams(grammar=grammar, temperature=temperature, seed=7, max_tokens=20)
        for grammar in (REGEX, None, GrammarSpec.choice(["a cat", "a dog", "a caterpillar"]))
    ]
    return llm.generate(PROMPTS, params)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("spec", ["pard", "pard:mask", "chain:grammar_forced+pard"])
def test_texts_are_those_of_plain_decoding(spec: str, temperature: float) -> None:
    """Sampled ones too, where draft and target share their noise."""
    options: dict[str, Any] = {"verifier": "coupled", "max_batch_size": 2, "prefill_tokens": 7}
    with make_llm("llama", "none", **options) as llm:
        expected = write(llm, temperature)
    with make_llm("llama", spec, with_token(near_copy("llama")), **options) as llm:
        found = write(llm, temperature)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert sum(sum(one.stats.accepted) for one in found) > 3


def test_it_is_found_by_its_config(tmp_path: Path) -> None:
    target, draft = tiny_model("llama"), with_token(near_copy("llama"))
    draft.save_pretrained(tmp_path)
    assert find_method(tmp_path, target) == "pard"
    with make_llm("llama", "auto", draft) as llm:
        assert llm.proposer == "pard"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pard_token": None}, "expected pard_token in the draft's config.json, below 403, found"),
        ({"pard_token": -1}, "found -1; pass a model that was trained for it, or use draft_model"),
        ({"spd_type": "pard2"}, "found one of PARD-2, which reads the target's hidden states"),
    ],
)
def test_other_models_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make_llm("llama", "pard", with_token(near_copy("llama"), **fields))


def test_a_linear_state_is_refused() -> None:
    draft = with_token(tiny_model("qwen3_5"))
    with pytest.raises(ModelError, match="expected a draft of attention alone, found qwen3_5"):
        make_llm("llama", "pard", draft)
