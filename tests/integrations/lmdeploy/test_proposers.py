"""Our proposers as methods of LMDeploy: drafts, and an engine's steps without a draft model."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from guided_spec.errors import ModelError
from guided_spec.integrations.lmdeploy.agent import METHODS, Drafting
from guided_spec.integrations.lmdeploy.helper import GuidedHelper
from guided_spec.integrations.lmdeploy.manager import GuidedManager
from tests.integrations.lmdeploy.test_steps import (
    Drafter,
    K,
    generate,
    greedy,
    regex_format,
    toy_manager,
)
from tests.integrations.lmdeploy.world import Requests, toy_tokenizer
from tests.toys import EOS, VOCAB_SIZE, ToyCompiled, hashed_rule, text_rule


@pytest.fixture
def manager() -> Iterator[GuidedManager]:
    made = GuidedManager(toy_tokenizer(), VOCAB_SIZE, [EOS])
    made.num_draft = K
    yield made
    made.close()


def _draft(
    drafting: Drafting, manager: GuidedManager, prompt: list[int], pattern: Any
) -> list[int]:
    """The draft behind a prompt, with nothing committed yet."""
    formats = [None if pattern is None else {"type": "regex_schema", "regex_schema": pattern}]
    drafting.read((0, 0), 0, prompt)
    places = manager.get_processors([{"session_id": 0, "seq_id": 0}], formats)
    return drafting.draft((0, 0), places.get(0))


@pytest.mark.parametrize(
    ("proposer", "prompt", "pattern", "expected"),
    [
        ("ngram", [3, 0, 1, 2, 3], None, [0, 1, 2]),
        ("ngram", [3, 0, 1, 2, 3], "abd", [0, 1, 2]),  # "c" is illegal, and stays to be refused
        ("ngram", [3, 1, 9, 9, 3], "b[ab]*", [1, 9, 0]),  # the padding behind it is not walked
        ("ngram", [5], "[ab]*", [0, 0, 0]),
        ("grammar_forced", [5], "bc[da]", [1, 2, 0]),
        ("grammar_forced", [5], None, [0, 0, 0]),
        ("chain:grammar_forced+ngram", [2, 0, 1, 3, 5], "c[ab]d", [2, 0, 3]),
    ],
)
def test_drafts(
    manager: GuidedManager, proposer: str, prompt: list[int], pattern: Any, expected: list[int]
) -> None:
    assert _draft(Drafting(proposer, manager, K), manager, prompt, pattern) == expected


def test_what_was_drafted_is_masked_as_verification_needs_it(manager: GuidedManager) -> None:
    """Behind the illegal "1" no row forbids anything: nothing that is legal may stand there."""
    _draft(Drafting("ngram", manager, K), manager, [3, 1, 9, 9, 3], "b[ab]*")
    place = manager.get_processors(
        [{"session_id": 0, "seq_id": 0}], [{"type": "regex_schema", "regex_schema": "b[ab]*"}]
    )[0]
    assert not place.missing(K)
    rows = place.verify_rows(K, None)
    assert rows is not None
    assert [int(row[0]) & 0xFFF for row in rows[:2]] == [0b10, 0b11 | 1 << EOS]


def test_texts_follow_prompts_outputs_chunks_and_turns(manager: GuidedManager) -> None:
    drafting, helper = Drafting("ngram", manager, 2), GuidedHelper(None)
    sampling = SimpleNamespace(
        session_ctx=[{"session_id": 5, "seq_id": 0}],
        response_formats=(None,),
        session_to_cleanup=[],
    )

    def step(tokens: list[int], output: list[int] | None, history: int, **flags: bool) -> list[int]:
        known = {"is_decoding": False, "is_chunk": False, "is_last_chunk": False, **flags}
        inputs = SimpleNamespace(
            input_ids=torch.tensor([tokens]),
            seq_length=torch.tensor([len(tokens)]),
            history_lengths=torch.tensor([history]),
            **known,
        )
        extra = SimpleNamespace(output_token_ids=torch.tensor([output]) if output else None)
        found: list[int] = drafting.propose(inputs, extra, sampling, helper)[0].tolist()
        return found

    assert step([1, 2], None, 0, is_chunk=True) == [0, 0]
    assert step([3, 4], [1], 2, is_chunk=True, is_last_chunk=True) == [2, 3]
    assert step([1, 0, 0], [2, 3, -1], 4, is_decoding=True) == [4, 1]
    assert step([9, 8], [4], 7) == [1, 2]  # a second turn, behind 1 2 3 4 1 2 3
    sampling.session_to_cleanup = [5]
    assert step([7, 6], [7], 0) == [6, 7]


def test_a_text_that_is_written_anew_is_looked_at_anew(manager: GuidedManager) -> None:
    drafting = Drafting("ngram", manager, 2)
    drafting.read((0, 0), 0, [1, 2, 7, 7, 5, 6, 3, 4])
    drafting.draft((0, 0), None)
    drafting.read((0, 0), 2, [8, 8, 5, 6, 3, 4, 1, 2])  # ends as before, where that ended
    assert drafting.draft((0, 0), None) == [8, 8]


def test_a_manager_without_tokens_cannot_draft(manager: GuidedManager) -> None:
    manager.error = ModelError("unreadable")
    with pytest.raises(ModelError, match="ngram"):
        Drafting("ngram", manager, K)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_greedy_text_is_that_of_plain_constrained_decoding(modules: Any, method: str) -> None:
    rules = {str(seed): hashed_rule(seed) for seed in range(6)}
    rules["forced"] = text_rule([b"abcdabcd{1}"])
    manager = toy_manager(modules, {name: ToyCompiled(rule) for name, rule in rules.items()})
    requests = Requests(modules, K, manager, method)
    formats = [regex_format(name) for name in rules]
    texts = generate(requests, Drafter(requests), formats, {"top_k": 1})
    assert texts == [greedy(rule) for rule in rules.values()]


def test_sampled_texts_with_drafts_are_legal(modules: Any) -> None:
    rule = hashed_rule(2, share=0.7)
    manager = toy_manager(modules, {"a": ToyCompiled(rule)})
    requests = Requests(modules, K, manager, "guided_spec_chain")
    formats = [regex_format("a")] * 20
    for text in generate(requests, Drafter(requests), formats, {"temperature": 2.0}):
        assert all(token in rule(tuple(text[:at])) for at, token in enumerate(text))


@pytest.mark.parametrize("method", sorted(METHODS))
def test_an_engine_starts_without_a_draft_model(modules: Any, method: str, tmp_path: Any) -> None:
    """LMDeploy's own life of a drafter, up to a GPU: configuration, model, caches, graphs."""
    transformers = importlib.import_module("transformers")
    config = transformers.Qwen2Config(
        hidden_size=64, intermediate_size=64, num_attention_heads=2, num_hidden_layers=2
    )
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(tmp_path)
    lmdeploy_config = modules.config
    target = lmdeploy_config.ModelConfig.from_pretrained(
        str(tmp_path), dtype="float16", spec_method=method, num_spec_tokens=K, device_type="cuda"
    )
    assert target.model_paradigm == "ar_spec"
    caches = lmdeploy_config.CacheConfig(
        max_batches=2, block_size=64, num_cpu_blocks=0, num_gpu_blocks=0
    )
    drafter = lmdeploy_config.SpecDecodeConfig.from_config(
        method=method,
        num_speculative_tokens=K,
        model="",
        target_cache_cfg=caches,
        target_model=str(tmp_path),
        dtype="float16",
    )
    assert drafter.cache_config is None
    agent = Requests(modules, K, None, method).agent
    agent.build_model(empty_init=False, target_model="target")
    assert agent.build_cache_plan(None) == 0
    agent.build_graph_runner()
    agent.build_cache_engine(None)
    agent.reset_graph_runner()
    assert agent.get_model() is None
    plan = agent.proposer.get_warmup_plan(2, target, agent.proposer.model.get_capture_batch_sizes())
    assert plan.cases == ()


def test_dflash_drafts_guided_requests(modules: Any) -> None:
    """LMDeploy raises for them; here its block of drafts is walked when it is verified."""
    manager = toy_manager(modules, {"a": ToyCompiled(text_rule([b"abcd"]))})
    requests = Requests(modules, K, manager, "dflash")
    agent = requests.agent

    async def propose_block(*args: Any, **kwargs: Any) -> torch.Tensor:
        del args, kwargs
        return torch.tensor([[1, 2, 9], [1, 2, 9]])

    agent.proposer.propose_block = propose_block
    sampling = requests.sampling([1, 2], {"top_k": 1}, [regex_format("a"), None])
    drawn = requests.prefill(torch.zeros(VOCAB_SIZE), sampling)
    inputs = requests.inputs(2, 0, width=3, is_decoding=False)
    drafts = requests.draft(inputs, drawn.extra, sampling)
    assert drafts.tolist() == [[1, 2, 9], [1, 2, 9]]
    tokens = requests.decode(torch.zeros(K + 1, VOCAB_SIZE), drafts, sampling).token_ids
    assert tokens.tolist() == [[1, 2, 3, -1], [0, -1, -1, -1]]
