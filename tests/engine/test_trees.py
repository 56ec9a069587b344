"""Drafts that are trees: the texts are those of plain decoding, in fewer steps than of chains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from guided_spec.engine.outputs import Completion
from guided_spec.engine.target import SlotTarget
from guided_spec.errors import ConfigError
from guided_spec.ops.trees import token_tree
from guided_spec.types import SamplingParams
from tests.cases import pairwise
from tests.engine.test_equality import PARAMS, PROMPTS
from tests.learned_heads import HeadedTarget, write_head
from tests.models.tiny import build
from tests.tiny_llm import VOCAB_SIZE, make_llm

METHODS = ("dflash", "dflash2", "dspark", "p_eagle", "eagle3", "mtp")
FREE = [replace(params, grammar=None) for params in PARAMS]
NODES = 15
LUCKY = (("dflash", True), ("dflash", False), ("p_eagle", True))  # heads that find some branches

Heads = Callable[[str], HeadedTarget]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    """Of each method one that nobody taught: most of what it likes best is wrong."""

    @cache
    def make(method: str) -> HeadedTarget:
        return write_head(tmp_path_factory.mktemp("heads") / method, method, VOCAB_SIZE)

    return make


@pytest.fixture(scope="module")
def plain(heads: Heads) -> Callable[..., list[tuple[list[int], str]]]:
    """What a head's target writes without it."""

    @cache
    def write(method: str, *, is_guided: bool) -> list[tuple[list[int], str]]:
        params = PARAMS if is_guided else FREE
        return tokens(generate(heads(method), "none", params, max_batch_size=1))

    return write


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each step accepted that stood elsewhere than in the chain."""
    found, commit = list[int](), SlotTarget.commit

    def counting(target: Any, batch: Any, accepted: Any, hidden: Any, branch: Any = None) -> None:
        if branch is not None:
            steps = torch.arange(1, branch.kept.shape[1] + 1)
            found.append(int(((branch.kept >= 0) & (branch.kept != steps)).sum()))
        commit(target, batch, accepted, hidden, branch)

    monkeypatch.setattr(SlotTarget, "commit", counting)
    return found


def generate(
    headed: HeadedTarget, proposer: str, params: list[SamplingParams], **options: Any
) -> list[Completion]:
    with make_llm(headed.target, proposer, headed.draft, **options) as llm:
        outputs = llm.generate(PROMPTS, params, on_error="return")
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return [output.completions[0] for output in outputs]


def tokens(completions: list[Completion]) -> list[tuple[list[int], str]]:
    return [(c.token_ids, c.finish_reason) for c in completions]


def num_accepted(completions: list[Completion]) -> int:
    return sum(sum(c.stats.accepted) for c in completions)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "is_guided", "batch_size"), pairwise(METHODS, (True, False), (1, 5))
)
def test_greedy_text_is_that_of_plain_decoding(
    heads: Heads, plain: Any, beside: list[int], method: str, *, is_guided: bool, batch_size: int
) -> None:
    headed, params = heads(method), PARAMS if is_guided else FREE
    expected = plain(method, is_guided=is_guided)
    options: Any = {"max_batch_size": batch_size}
    chain = generate(headed, method, params, **options)
    assert not beside
    tree = generate(headed, method, params, tree_nodes=NODES, **options)
    assert tokens(tree) == tokens(chain) == expected
    assert num_accepted(tree) >= num_accepted(chain)
    assert sum(beside) > 2 or (method, is_guided) not in LUCKY


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dflash", "dspark", "eagle3"])
def test_coupled_text_is_that_of_plain_decoding(
    heads: Heads, beside: list[int], method: str
) -> None:
    """At a temperature, with penalties, and read along with prompts that come later."""
    drawn = [
        replace(params, temperature=0.8, seed=row, frequency_penalty=0.5 * (row % 2))
        for row, params in enumerate(PARAMS)
    ]
    headed, options = heads(method), {"verifier": "coupled", "prefill_tokens": 16}
    expected = tokens(generate(headed, "none", drawn, max_batch_size=1, **options))
    found = generate(headed, method, drawn, tree_nodes=NODES, max_batch_size=3, **options)
    assert tokens(found) == expected
    assert beside


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_does_not_depend_on_who_is_drafted_for(
    heads: Heads, beside: list[int], temperature: float
) -> None:
    """Under rejection, where what is drafted decides which text of the law it is."""
    drawn = [replace(p, temperature=temperature, seed=row) for row, p in enumerate(PARAMS)]
    options: Any = {"tree_nodes": NODES, "max_batch_size": 4}
    together = generate(heads("dflash"), "dflash", drawn, **options)
    with make_llm(heads("dflash").target, "dflash", heads("dflash").draft, **options) as llm:
        for prompt, params, one in zip(PROMPTS, drawn, together, strict=True):
            (alone,) = llm.generate(prompt, params)[0].completions
            assert alone.token_ids == one.token_ids
    assert sum(beside) > 2


@pytest.mark.parametrize("spec", ["chain:grammar_forced+dflash", "chain:ngram+dflash"])
@pytest.mark.parametrize("kernels", ["auto", "packed"])
def test_in_a_chain(heads: Heads, plain: Any, beside: list[int], spec: str, kernels: str) -> None:
    """Trees grow around what several proposers drafted, and where forwards are filled up."""
    headed, expected = heads("dflash"), plain("dflash", is_guided=True)
    options: Any = {"max_batch_size": 3, "kernels": kernels, "grammar_tables": "always"}
    assert tokens(generate(headed, spec, PARAMS, tree_nodes=40, **options)) == expected
    assert sum(beside) > 2


def test_many_requests_draft_chains(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_tree, "TREE_TOKENS", 24)  # seven for each of three, eleven of two
    sizes, commit = {True: set[int](), False: set[int]()}, SlotTarget.commit

    def telling(target: Any, batch: Any, accepted: Any, hidden: Any, branch: Any = None) -> None:
        sizes[branch is not None].add(len(batch))
        commit(target, batch, accepted, hidden, branch)

    monkeypatch.setattr(SlotTarget, "commit", telling)
    same = [SamplingParams(max_tokens=12, ignore_eos=True)] * len(PARAMS)
    generate(heads("dflash"), "dflash", same, tree_nodes=NODES, max_batch_size=3)
    assert sizes[True]
    assert sizes[True] <= {1, 2}
    assert 3 in sizes[False]


def test_texts_of_every_length_end_where_they_should(heads: Heads) -> None:
    """No token of a tree is one too many, for the request or for its slot."""
    headed = heads("dflash")
    lengths = (1, 2, 3, 5, 8)
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    prompts = [list(range(3, 19 + at)) for at in range(len(lengths))]
    found = []
    for nodes in (0, 63):
        options: Any = {"max_model_len": 24, "tree_nodes": nodes, "max_batch_size": 1}
        with make_llm(headed.target, "dflash", headed.draft, **options) as llm:
            outputs = llm.generate(prompts, params)
        found.append([output.completions[0].token_ids for output in outputs])
    assert found[0] == found[1]
    assert [len(text) for text in found[1]] == [1, 2, 3, 5, 4]  # the last fills its slot


def test_what_cannot_be_is_refused(heads: Heads) -> None:
    headed = heads("dflash")
    with pytest.raises(
        ConfigError, match="'ngram' drafts chains: pass 0, or take one with a model"
    ):
        make_llm(headed.target, "ngram", None, tree_nodes=NODES)
    with pytest.raises(ConfigError, match="whole slots or states, which hold no trees"):
        make_llm(headed.target, "dflash", headed.draft, tree_nodes=NODES, kernels="stock")
    with pytest.raises(ConfigError, match="whole slots or states, which hold no trees"):
        make_llm("qwen3_5", "ngram", None, tree_nodes=NODES)
    with pytest.raises(ConfigError, match="tree_nodes=64"):
        make_llm(build("llama", vocab_size=VOCAB_SIZE), "none", None, tree_nodes=64)
