"""Texts about pictures are those of transformers, however they are written."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.engine.llm import LLM
from guided_spec.models.causal_lm import stock_lm
from guided_spec.models.packed.blocks import BLOCK
from guided_spec.models.pictures.vision import split_vision
from guided_spec.types import SamplingParams
from tests.models.heads.heads import write_eagle3
from tests.pictures.sighted import FAMILIES, ask, picture, sighted

LENGTH = 12
HYBRIDS = ("qwen3_5",)  # keep a state in some layers, so that no prefix is shared
AXES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", *HYBRIDS)
SOME = ("internvl", "qwen2_vl", "qwen3_vl", "gemma3", "gemma4")
GREEDY = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
CAT, DOG = picture(1, (24, 16)), picture(2, (16, 32))
TWO = ask("the cat", CAT, "and the dog", DOG, "What is it?")
LONG = "The name of the cat is Ada and the name of the dog is Bob. " * 4
# Texts and pictures by turns, all of them longer than a block of the prefix cache.
PROMPTS = [TWO, ask(CAT, LONG), ask("The name of the dog is Bob"), ask(DOG, "and", DOG, LONG)]


def texts(llm: LLM, prompts: list[Any], params: SamplingParams = GREEDY) -> list[list[int]]:
    """All at once."""
    requests = [llm.prepare_chat(one, params=params) for one in prompts]
    found = llm.generate([one.prompt for one in requests], params)
    return [one.completions[0].token_ids for one in found]


def expected(family: str, prompts: list[Any]) -> list[list[int]]:
    return [sighted(family).expected(one, LENGTH) for one in prompts]


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_those_of_transformers(family: str) -> None:
    wanted = expected(family, PROMPTS)
    with sighted(family).llm() as llm:
        assert [texts(llm, [one])[0] for one in PROMPTS] == wanted  # alone
        assert texts(llm, PROMPTS) == wanted  # together, with the prefix cache
    swapped = ask("the cat", DOG, "and the dog", CAT, "What is it?")
    changed = sighted(family).expected(swapped, LENGTH)
    assert changed != wanted[0], "the model does not look at its pictures"


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        *(("idefics3", "packed"), ("idefics3", "stock"), ("qwen2_5_vl", "stock")),
        *((family, "packed") for family in (*AXES, "gemma3", "gemma4")),
    ],
)
@pytest.mark.parametrize("proposer", ["ngram", "suffix", "chain:grammar_forced+ngram"])
def test_drafts_change_nothing(family: str, kernels: str, proposer: str) -> None:
    with sighted(family).llm(proposer, kernels=kernels, verifier="coupled") as llm:
        first, again = texts(llm, PROMPTS), texts(llm, PROMPTS)
    assert first == again == expected(family, PROMPTS)


@pytest.mark.parametrize("own_embedding", [False, True])
@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        *(("llava", "packed"), ("llava", "stock"), ("qwen2_vl", "auto"), ("qwen3_vl", "stock")),
        ("gemma3", "auto"),
    ],
)
def test_a_head_reads_pictures_too(
    tmp_path: Path,
    family: str,
    kernels: str,
    own_embedding: bool,  # noqa: FBT001
) -> None:
    one = sighted(family)
    language = split_vision(one.model, 1).language
    write_eagle3(tmp_path / "head", language, draft_vocab_size=300, own_embedding=own_embedding)
    with one.llm("eagle3", draft=str(tmp_path / "head"), kernels=kernels) as llm:
        assert texts(llm, PROMPTS) == texts(llm, PROMPTS) == expected(family, PROMPTS)


@pytest.mark.parametrize("family", ["llava", "gemma3"])
def test_a_draft_model_reads_placeholders(family: str) -> None:
    one = sighted(family)
    draft = split_vision(copy.deepcopy(sighted(family, 1).model), 1).language
    with one.llm("draft_model", draft=draft) as llm:
        assert texts(llm, PROMPTS) == texts(llm, PROMPTS) == expected(family, PROMPTS)


@settings(max_examples=8, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 4),
    st.sampled_from(
        [("qwen3_5", "packed"), *((one, form) for one in SOME for form in ("packed", "stock"))]
    ),
)
def test_prompts_in_pieces(pieces: int, num_slots: int, form: tuple[str, str]) -> None:
    family, kernels = form
    options = {"prefill_tokens": pieces, "max_batch_size": num_slots, "kernels": kernels}
    with sighted(family).llm("ngram", **options) as llm:
        assert texts(llm, PROMPTS[:3]) == once(family)


@cache
def once(family: str) -> list[list[int]]:
    return expected(family, PROMPTS[:3])


@pytest.mark.parametrize(("family", "length"), [("mistral3", 150), ("gemma3", 80)])
def test_requests_that_lose_their_blocks_go_on(family: str, length: int) -> None:
    one, params = sighted(family), SamplingParams(max_tokens=length, ignore_eos=True)
    token = stock_lm(split_vision(one.model, 1).language, 1, 64).kv_bytes_per_token
    memory = 9 * BLOCK * token
    with one.llm(kv_memory_bytes=memory, picture_tokens=64, max_model_len=512) as llm:
        found = texts(llm, PROMPTS, params)
    assert found == [one.expected(prompt, length) for prompt in PROMPTS]
