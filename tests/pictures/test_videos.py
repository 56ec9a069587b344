"""Texts about videos are those of transformers, however they are written."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.engine.llm import LLM
from guided_spec.models.causal_lm import stock_lm
from guided_spec.models.packed.blocks import BLOCK
from guided_spec.models.pictures.axes import SlotAxes
from guided_spec.models.pictures.vision import split_vision
from guided_spec.types import SamplingParams
from tests.pictures.filmed import FILMED, expected, film, filmed, show
from tests.pictures.sighted import picture
from tests.pictures.test_texts import LONG
from tests.tiers import examples

LENGTH = 12
GREEDY = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
CAT, DOG, STILL = film(1), film(2, 5, 0.5), picture(3, (24, 16))
ASKED = "What is it?"
AXES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
# transformers' processor of SmolVLM puts a video's pixels over those of a picture.
MIXED = [family for family in FILMED if family != "smolvlm"]


def prompts(family: str) -> list[Any]:
    """Texts, pictures and videos by turns, most of them longer than a block of the cache."""
    other = CAT if family == "smolvlm" else STILL
    return [
        show("the cat", CAT, ASKED),
        show(LONG, DOG, "and", LONG),
        show("The name of the dog is Bob"),
        show("the cat", CAT, "and", other, LONG),
    ]


@cache
def wanted(family: str) -> list[list[int]]:
    return [expected(family, one, LENGTH) for one in prompts(family)]


def texts(llm: LLM, asked: list[Any]) -> list[list[int]]:
    """All at once."""
    requests = [llm.prepare_chat(one, params=GREEDY) for one in asked]
    found = llm.generate([one.prompt for one in requests], GREEDY)
    return [one.completions[0].token_ids for one in found]


def opened(family: str, proposer: str = "none", **options: Any) -> LLM:
    return filmed(family).llm(proposer, **{"max_model_len": 768, "picture_tokens": 768, **options})


@pytest.mark.parametrize("family", FILMED)
def test_texts_are_those_of_transformers(family: str) -> None:
    asked = prompts(family)
    with opened(family) as llm:
        assert [texts(llm, [one])[0] for one in asked] == wanted(family)  # alone
        assert texts(llm, asked) == wanted(family)  # together, with the prefix cache
        other = show("the cat", film(7), ASKED)
        changed = texts(llm, [other])[0]
    assert changed == expected(family, other, LENGTH)
    assert changed != wanted(family)[0], "the model does not look at its frames"


@pytest.mark.parametrize("kernels", ["packed", "stock"])
@pytest.mark.parametrize("family", [*AXES, "internvl", "smolvlm", "gemma4"])
def test_drafts_and_pieces_change_nothing(family: str, kernels: str) -> None:
    options = {"prefill_tokens": 7, "kernels": kernels, "verifier": "coupled"}
    with opened(family, "chain:grammar_forced+ngram", **options) as llm:
        first, again = texts(llm, prompts(family)), texts(llm, prompts(family))
    assert first == again == wanted(family)


@settings(max_examples=examples(8), deadline=None)
@given(st.sampled_from(AXES), st.integers(1, 40), st.integers(1, 4), st.booleans())
def test_prompts_in_pieces(
    family: str,
    pieces: int,
    num_slots: int,
    is_packed: bool,  # noqa: FBT001
) -> None:
    kernels = "packed" if is_packed else "stock"
    options = {"prefill_tokens": pieces, "max_batch_size": num_slots, "kernels": kernels}
    with opened(family, "ngram", **options) as llm:
        assert texts(llm, prompts(family)) == wanted(family)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_a_prefix_is_that_of_the_same_frames_at_the_same_rate(family: str) -> None:
    """Where the rate is in the positions alone, the tokens are the same."""
    frames = [*CAT.frames[:3], picture(99)]
    asked = [
        show(one, LONG, ASKED)
        for one in (CAT, CAT._replace(frames=frames), CAT._replace(fps=0.5), CAT)
    ]
    with opened(family) as llm:
        requests = [llm.prepare_chat(one, params=GREEDY) for one in asked]
        found = [llm.generate([one.prompt], GREEDY)[0] for one in requests]
    if family == "qwen2_5_vl":
        ids = [one.prompt_ids for one in requests]
        assert ids[0] == ids[1] == ids[2]
    texts_ = [one.completions[0].token_ids for one in found]
    assert texts_ == [expected(family, one, LENGTH) for one in asked]
    taken = [one.stats.cached_tokens for one in found]
    assert taken[:3] == [0, 0, 0]
    assert taken[3] >= BLOCK


def test_a_slot_goes_on_after_a_video_as_transformers_does() -> None:
    """The times of a slow video are larger than the positions after it."""
    slow = show("the cat", CAT._replace(fps=0.1), ASKED)
    with opened("qwen2_5_vl", "ngram", max_batch_size=1) as llm:
        asked = [slow, prompts("qwen2_5_vl")[2], slow]
        found = texts(llm, asked)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SlotAxes, "put", lambda *_: None)
            changed = texts(llm, [show("a dog", CAT._replace(fps=0.1), ASKED)])[0]
    assert found == [expected("qwen2_5_vl", one, LENGTH) for one in asked]
    assert changed != expected("qwen2_5_vl", show("a dog", CAT._replace(fps=0.1), ASKED), LENGTH)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_requests_that_lose_their_blocks_go_on(family: str) -> None:
    length = 100
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    token = stock_lm(split_vision(filmed(family).model, 1).language, 1, 64).kv_bytes_per_token
    asked = prompts(family)[:3]
    with opened(family, kv_memory_bytes=9 * BLOCK * token, max_model_len=384) as llm:
        requests = [llm.prepare_chat(one, params=params) for one in asked]
        found = llm.generate([one.prompt for one in requests], params)
    texts_ = [one.completions[0].token_ids for one in found]
    assert texts_ == [expected(family, one, length) for one in asked]


@pytest.mark.parametrize("family", MIXED)
def test_places_are_where_transformers_has_them(family: str) -> None:
    """A video may be in several spans, with its seconds between them."""
    with opened(family) as llm:
        prompt: Any = llm.prepare_chat(prompts(family)[3]).prompt
    video, still = prompt.pictures
    assert len(prompt.places) == video.count + still.count
    spans = {"qwen2_vl": 2, "qwen2_5_vl": 2, "internvl": 5, "gemma4": 5}
    assert len(prompt.spans) == spans.get(family, 3)
