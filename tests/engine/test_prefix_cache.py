"""Prompts that begin as others did take their blocks: the texts are the same, and less is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import RequestOutput
from guided_spec.engine.steps import planner
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.models.heads.loading import load_head
from guided_spec.models.packed.blocks import BLOCK
from guided_spec.types import SamplingParams
from tests.engine.reads import watch_reads
from tests.learned_heads import HeadedTarget, overfit
from tests.models.heads.block_checkpoints import write_dflash
from tests.tiny_llm import make_llm

SYSTEM = [5 + at * 7 % 300 for at in range(2 * BLOCK + 5)]
PROMPTS = [SYSTEM + [40 + row] * (3 * row + 1) for row in range(4)]
CALL = GrammarSpec.regex("[0-9]{3}-[a-z]{4,8}")
FREE = SamplingParams(max_tokens=14)
SAMPLED = SamplingParams(max_tokens=20, temperature=1.0, seed=7)
PARAMS = [FREE, replace(FREE, grammar=CALL), SAMPLED, replace(SAMPLED, grammar=CALL, max_tokens=14)]
PROPOSERS = [
    *(
        "none",
        "eagle3",
        "dflash",
        "chain:grammar_forced+ngram",
        "chain:grammar_forced+eagle3",
        "chain:grammar_forced:start+eagle3",
    ),
    "chain:grammar_forced+dflash",
]


@pytest.fixture(scope="module")
def block_head(headed: HeadedTarget, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_dflash(tmp_path_factory.mktemp("head") / "dflash", headed.target))


def make(
    headed: HeadedTarget, proposer: str = "none", draft: str | None = None, **options: Any
) -> LLM:
    draft = headed.draft if "eagle3" in proposer else draft
    options = {"kernels": "packed", "verifier": "coupled", **options}
    return make_llm(headed.target, proposer, draft, **options)


def tokens(outputs: Sequence[RequestOutput]) -> list[tuple[list[int], str]]:
    return [(c.token_ids, c.finish_reason) for output in outputs for c in output.completions]


def cached(outputs: Sequence[RequestOutput]) -> list[int]:
    return [c.stats.cached_tokens for output in outputs for c in output.completions]


@pytest.fixture(scope="module")
def expected(headed: HeadedTarget) -> list[tuple[list[int], str]]:
    """Without a prefix cache, and without drafts; twice the same, and nothing is found."""
    with make(headed, prefix_cache=False) as llm:
        found = [llm.generate(PROMPTS, PARAMS) for _ in range(2)]
    assert [cached(one) for one in found] == [[0] * 4] * 2
    assert tokens(found[0]) == tokens(found[1])
    return tokens(found[0])


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_the_same_prompts_again(
    headed: HeadedTarget, block_head: str, proposer: str, expected: list[tuple[list[int], str]]
) -> None:
    draft = block_head if "dflash" in proposer else None
    with make(headed, proposer, draft) as llm:
        first, again = (llm.generate(PROMPTS, PARAMS) for _ in range(2))
    assert tokens(first) == tokens(again) == expected
    lag = BLOCK if {"eagle3", "dflash"} & {*proposer.replace("+", ":").split(":")} else 0
    assert cached(first) == [0, *[2 * BLOCK - lag] * 3]  # who comes together reads it once
    assert cached(again) == [2 * BLOCK - lag] * 4


def test_latents_are_cached_too() -> None:
    """Of a model with latent attention."""
    options: dict[str, Any] = {"kernels": "packed", "verifier": "coupled"}
    with make_llm("deepseek_v3", "none", prefix_cache=False, **options) as llm:
        alone = tokens(llm.generate(PROMPTS, PARAMS))
    with make_llm("deepseek_v3", "chain:grammar_forced+ngram", **options) as llm:
        outputs = [llm.generate(PROMPTS, PARAMS) for _ in range(2)]
    assert [tokens(some) for some in outputs] == [alone, alone]
    assert cached(outputs[1]) == [2 * BLOCK] * len(PROMPTS)


@pytest.mark.parametrize("proposer", ["none", "eagle3"])
def test_a_text_of_one_token_leaves_its_prompt_too(headed: HeadedTarget, proposer: str) -> None:
    with make(headed, proposer) as llm:
        found = [llm.generate([SYSTEM], replace(FREE, max_tokens=1)) for _ in range(2)]
    assert tokens(found[0]) == tokens(found[1])
    assert cached(found[0]) == [0]
    assert cached(found[1])[0] > 0


def test_what_is_cached_is_not_read_again(
    headed: HeadedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = watch_reads(monkeypatch)

    def starts() -> list[int]:
        """Of each token that was read, where its piece of a prompt begins."""
        pieces = [prompt for one in reads for prompt in one.prompts]
        return [piece.start for piece in pieces for _ in piece.token_ids]

    with make(headed) as llm:
        (one,) = llm.generate(SYSTEM, FREE)
        assert starts() == [0] * (len(SYSTEM) - 1)
        reads.clear()
        (other,) = llm.generate(SYSTEM, FREE)
        assert starts() == [2 * BLOCK] * 4
        assert tokens([other]) == tokens([one])


def test_requests_of_one_batch_share_what_was_there_before(headed: HeadedTarget) -> None:
    """More of them than slots: those that come later also take what their batch read."""
    with make(headed, max_batch_size=1) as llm:
        found = cached(llm.generate(PROMPTS, FREE))
    assert found == [0, 2 * BLOCK, 2 * BLOCK, 2 * BLOCK]


@pytest.mark.parametrize("proposer", ["none", "eagle3"])
def test_what_is_known_keeps_nobody_waiting(
    headed: HeadedTarget, monkeypatch: pytest.MonkeyPatch, proposer: str
) -> None:
    """A head reads the last known block again, though others read it in the same step."""
    reads = watch_reads(monkeypatch)
    with make(headed, proposer) as llm:
        llm.generate(SYSTEM, FREE)
        reads.clear()
        llm.generate([[*SYSTEM, 40 + row, 9] for row in range(4)], FREE)
    assert [len(one.prompts) for one in reads if one.prompts] == [4]


def test_prompts_wait_for_the_head_of_one_that_begins_alike(
    headed: HeadedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is read in pieces beside a text that decodes, and its head reads it behind that."""
    monkeypatch.setattr(planner, "prompt_tokens_per_step", lambda *_: BLOCK + 2)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    prompts = [[3, 4], *([*SYSTEM, 40 + row, 9] for row in range(3))]
    with make(headed, "eagle3", prefill_tokens=8) as llm:
        found = llm.generate(prompts, params)
    assert cached(found) == [0, 0, BLOCK, BLOCK]
    with make(headed, prefix_cache=False) as plain:
        assert tokens(found) == tokens(plain.generate(prompts, params))


def test_other_salts_share_nothing(headed: HeadedTarget) -> None:
    salted = {salt: replace(FREE, cache_salt=salt) for salt in (None, "", "a", "b")}
    with make(headed) as llm:
        texts = [llm.generate(SYSTEM, params)[0] for params in salted.values()]
        assert cached(texts) == [0] * 4
        assert len({tuple(output.token_ids) for output in texts}) == 1
        again = [llm.generate(SYSTEM, params)[0] for params in salted.values()]
        assert cached(again) == [2 * BLOCK] * 4
        # Nor do requests that run at once, though their prompts are the same.
        params = [replace(FREE, cache_salt=salt) for salt in ("c", "d", "c", "b")]
        assert cached(llm.generate([SYSTEM] * 4, params)) == [0, 0, 0, 2 * BLOCK]


def test_turns_of_a_chat(headed: HeadedTarget) -> None:
    """A turn takes the ones before it, their answers too."""
    text, lengths = list(SYSTEM), []
    with make(headed, "eagle3") as llm, make(headed, prefix_cache=False) as plain:
        for turn in range(3):
            params = SamplingParams(max_tokens=20, ignore_eos=True)
            (output,), (expected,) = (one.generate(text, params) for one in (llm, plain))
            assert tokens([output]) == tokens([expected])
            lengths.append((len(text), output.stats.cached_tokens))
            text = [*text, *output.token_ids, 50 + turn, 9]
    assert lengths[0][1] == 0
    # All but the last token is read; of it whole blocks are taken, but for the last known one.
    for (before, _), (_, found) in zip(lengths, lengths[1:], strict=False):
        assert found == (before + 19) // BLOCK * BLOCK - BLOCK


def test_samples_of_a_cached_prompt(headed: HeadedTarget) -> None:
    params = replace(SAMPLED, n=7)  # more than slots
    for proposer in ("none", "eagle3"):
        with make(headed, proposer, prefix_cache=False) as llm:
            expected = tokens(llm.generate(SYSTEM, params))
        with make(headed, proposer) as llm:
            first, again = llm.generate(SYSTEM, params), llm.generate(SYSTEM, params)
        assert tokens(first) == tokens(again) == expected
        assert len({tuple(ids) for ids, _ in expected}) > 3
        assert max(cached(again)) > 0


@pytest.mark.slow
def test_a_taught_head_drafts_as_well_behind_what_it_took(headed: HeadedTarget) -> None:
    """Its own keys and values come with the target's, so that its drafts are taken as before."""
    params = [SamplingParams(max_tokens=40, ignore_eos=True)] * 4
    with make(headed) as llm:
        plain = llm.generate(PROMPTS, params)
    head = load_head("eagle3", headed.draft, headed.target)
    texts = [prompt + output.token_ids for prompt, output in zip(PROMPTS, plain, strict=True)]
    overfit(head, headed.target, texts)  # the head that the engine loads is this one
    with make(headed, "eagle3") as llm:
        passes = [llm.generate(PROMPTS, params) for _ in range(2)]
    assert [tokens(found) for found in passes] == [tokens(plain)] * 2
    assert cached(passes[1]) == [BLOCK] * 4
    first, second = (sum(sum(o.stats.accepted) for o in found) for found in passes)
    assert first > 20
    assert second >= first
