"""The experts of each token are those that the stock model chooses over the whole text."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from guided_spec.engine.outputs import Completion, RoutedExperts
from guided_spec.engine.scheduler import Scheduler
from guided_spec.engine.steps.planner import Turns
from guided_spec.errors import ConfigError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.models.packed import feed
from guided_spec.models.packed.blocks import BLOCK
from guided_spec.models.packed.decoder import PackedDecoder
from guided_spec.models.stock.routed import ExpertLayers, ExpertRecorder
from guided_spec.types import SamplingParams
from tests.cases import rotated
from tests.engine.test_run_ahead import running_ahead
from tests.models.tiny import build, kv_bytes_per_token
from tests.tiers import examples
from tests.tiny_llm import VOCAB_SIZE, make_llm, near_copy, tiny_model

KINDS = ["mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3"]
FORMS = ["packed", "blocks", "stock", "few", "unpadded"]
ASKS = SamplingParams(max_tokens=18, ignore_eos=True, return_routed_experts=True)
PROMPTS = [[5 + (at * 7 + row) % 300 for at in range(3 + 11 * row)] for row in range(4)]
SAMPLED = replace(ASKS, temperature=1.0, seed=5)
WORDS = replace(ASKS, grammar=GrammarSpec.regex("[0-9]{3}(-[a-z]{2}){4}"), max_tokens=40)
COMPANY = [ASKS, replace(SAMPLED, return_routed_experts=False), replace(SAMPLED, n=2), WORDS]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of an LLM that runs so."""
    if request.param == "blocks":
        monkeypatch.setattr(PackedDecoder, "of", lambda *_: None)
    if request.param == "few":  # each pair of a token and an expert is a product of its own
        monkeypatch.setattr(feed, "are_served", lambda *_: True)
    kernels = {"stock": "stock", "unpadded": "auto"}.get(request.param, "packed")
    return {"kernels": kernels, "prefill_tokens": 7}


@torch.inference_mode()
def stock_experts(model: Any, token_ids: Sequence[int]) -> dict[int, Tensor]:
    """By layer, int64 [T, top_k]: what its routers choose in one forward of the model itself."""
    layers, found = model.get_decoder().layers, dict[int, Tensor]()
    handles = []
    for at, layer in enumerate(layers):
        block = getattr(layer, "mlp", None) or layer.feed_forward
        router = getattr(block, "gate", None) or getattr(block, "router", None)
        if router is not None:
            see: Any = lambda _, __, output, at=at: found.update({at: output[-1]})  # noqa: E731
            handles.append(router.register_forward_hook(see))
    model(torch.tensor([list(token_ids)]), use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def check(model: Any, prompt: Sequence[int], found: Completion) -> None:
    """Of all tokens but the last."""
    assert found.error is None
    read = [*prompt, *found.token_ids][:-1]
    expected, routed = stock_experts(model, read), found.routed_experts
    assert isinstance(routed, RoutedExperts)
    assert routed.experts.dtype == np.int16
    assert routed.layers == tuple(expected)
    assert routed.experts.shape == (len(read), len(expected), 2)
    stacked = torch.stack([*expected.values()], 1)
    # Routers that choose among groups give theirs in any order.
    assert routed.experts.tolist() == stacked.tolist() or np.array_equal(
        np.sort(routed.experts, -1), np.sort(stacked.numpy(), -1)
    )


def check_company(model: Any, llm: Any, params: Sequence[SamplingParams] = COMPANY) -> int:
    """Returns how many draft tokens were rejected."""
    rejected = 0
    for prompt, asked, output in zip(PROMPTS, params, llm.generate(PROMPTS, params), strict=True):
        for one in output.completions:
            rejected += sum(one.stats.drafted) - sum(one.stats.accepted)
            if asked.return_routed_experts:
                check(model, prompt, one)
            else:
                assert one.routed_experts is None
    return rejected


@pytest.mark.every_case
@pytest.mark.parametrize(("form", "kind"), rotated(FORMS, KINDS), indirect=["form"])
def test_drafted_and_in_company(form: dict[str, Any], kind: str) -> None:
    check_drafted(form, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_in_each_form(form: dict[str, Any], kind: str) -> None:
    check_drafted(form, kind)


def check_drafted(form: dict[str, Any], kind: str) -> None:
    with make_llm(kind, "draft_model", near_copy(kind, 0.03), **form) as llm:
        assert check_company(tiny_model(kind), llm) > 0


@pytest.mark.parametrize("proposer", ["none", "chain:grammar_forced+ngram", "suffix"])
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_next", "qwen3_5_moe", "jamba", "deepseek_v2"])
def test_models_of_all_kinds(kind: str, proposer: str) -> None:
    """States of layers, and texts one at a time."""
    if kind == "jamba":
        assert stock_experts(tiny_model(kind), [1, 2]).keys() == {1, 3}
    with make_llm(kind, proposer, prefill_tokens=7) as llm:
        check_company(tiny_model(kind), llm)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@torch.inference_mode()
def test_they_are_the_top_k_of_the_router_logits(kind: str) -> None:
    model: Any = build(kind, vocab_size=VOCAB_SIZE)  # the flag leaves hooks on it
    with make_llm(kind, "ngram") as llm:
        (output,) = llm.generate([PROMPTS[2]], ASKS)
    read = [*PROMPTS[2], *output.token_ids][:-1]
    logits = model(torch.tensor([read]), output_router_logits=True).router_logits
    expected = torch.stack([one.topk(2, -1).indices for one in logits], 1)
    assert output.routed_experts is not None
    assert output.routed_experts.experts.tolist() == expected.tolist()


@cache
def engine(kernels: str, proposer: str, piece: int, slots: int) -> Any:
    draft = near_copy("deepseek_v3", 0.03) if proposer == "draft_model" else None
    options = {"kernels": kernels, "prefill_tokens": piece, "max_batch_size": slots}
    return make_llm("deepseek_v3", proposer, draft, **options)


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    engine.cache_clear()


@settings(max_examples=examples(24))
@given(
    st.sampled_from(["packed", "stock"]),
    st.sampled_from(["none", "draft_model"]),
    st.sampled_from([(1, 2), (9, 5)]),
    st.lists(
        st.tuples(
            st.integers(0, 3), st.integers(1, 12), st.booleans(), st.sampled_from([0.0, 1.0])
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_any_company(
    kernels: str, proposer: str, sizes: tuple[int, int], rows: list[tuple[int, int, bool, float]]
) -> None:
    """Prompts that are shared or not, read in pieces of any size, next to texts that do not ask."""
    llm = engine(kernels, proposer, *sizes)
    params = [
        SamplingParams(max_tokens=most, temperature=heat, seed=most, return_routed_experts=asks)
        for _, most, asks, heat in rows
    ]
    prompts = [PROMPTS[at] for at, *_ in rows]
    outputs = llm.generate(prompts, params)
    for prompt, asked, output in zip(prompts, params, outputs, strict=True):
        if asked.return_routed_experts:
            check(tiny_model("deepseek_v3"), prompt, output.completions[0])
        else:
            assert output.routed_experts is None


def test_texts_that_have_to_go_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read their text again, and what is known of it stays."""
    gone, requeue = [0], Scheduler.requeue

    def requeuing(scheduler: Scheduler, request: Any) -> None:
        gone[0] += 1
        requeue(scheduler, request)

    monkeypatch.setattr(Scheduler, "requeue", requeuing)
    model = tiny_model("qwen3_moe")
    memory = 4 * BLOCK * kv_bytes_per_token(model)
    params = [replace(one, max_tokens=64) for one in COMPANY]
    options = {"kernels": "packed", "max_model_len": 4 * BLOCK, "kv_memory_bytes": memory}
    for uses_cache in (True, False):
        with make_llm("qwen3_moe", "suffix", prefix_cache=uses_cache, **options) as llm:
            check_company(model, llm, params)
        assert gone[0] > 0
        gone[0] = 0


def test_the_prefix_cache() -> None:
    """Who asks reads all of its prompt; others read what it left."""
    prompt = [5 + at % 60 for at in range(3 * BLOCK + 2)]
    with make_llm("mixtral", kernels="packed", max_model_len=5 * BLOCK) as llm:
        plain = replace(ASKS, return_routed_experts=False)
        cached = [llm.generate([prompt], one)[0] for one in (plain, ASKS, plain)]
        # Together: who asks takes nothing of who does not.
        for order in ([plain, ASKS, ASKS], [ASKS, plain, plain]):
            outputs = llm.generate([prompt] * 3, order)
            for asked, output in zip(order, outputs, strict=True):
                if asked is ASKS:
                    check(tiny_model("mixtral"), prompt, output.completions[0])
    assert [one.stats.cached_tokens for one in cached] == [0, 0, 3 * BLOCK]
    check(tiny_model("mixtral"), prompt, cached[1].completions[0])


@pytest.mark.parametrize("proposer", ["none", "suffix"])
def test_forwards_that_are_launched_ahead(proposer: str) -> None:
    with (
        running_ahead() as counts,
        make_llm("mixtral", proposer, kernels="packed", prefill_tokens=7) as llm,
    ):
        check_company(tiny_model("mixtral"), llm)
    assert counts["served"] > 0 or proposer != "none"


def test_halves_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Turns, "are_taken", lambda _, num_texts, *__: num_texts >= 2)
    with make_llm("mixtral", "suffix", kernels="packed", prefill_tokens=7) as llm:
        check_company(tiny_model("mixtral"), llm)


def test_a_text_that_ends_within_its_draft() -> None:
    """What was accepted after its end is none of it."""
    model = tiny_model("mixtral")
    with make_llm("mixtral", "draft_model", model, kernels="packed") as llm:
        whole = llm.generate([PROMPTS[1]], ASKS)[0]
        for end in whole.token_ids[3:9]:
            params = replace(ASKS, stop_token_ids=[end])
            (output,) = llm.generate([PROMPTS[1]], params)
            check(model, PROMPTS[1], output.completions[0])


@pytest.mark.parametrize("kernels", ["auto", "stock"])
def test_who_does_not_ask_pays_nothing(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm("mixtral", "ngram", kernels=kernels) as llm:
        made = []
        init = ExpertRecorder.__init__

        def making(recorder: ExpertRecorder, layers: ExpertLayers) -> None:
            made.append(recorder)
            init(recorder, layers)

        monkeypatch.setattr(ExpertRecorder, "__init__", making)
        llm.generate(PROMPTS, replace(ASKS, return_routed_experts=False))
        assert made == []
        llm.generate(PROMPTS[0], ASKS)
        assert made


def test_the_last_chunk_of_a_stream_has_them() -> None:
    with make_llm("mixtral", "ngram") as llm:
        *before, last = llm.stream([PROMPTS[1]], ASKS)
        assert all(chunk.completion is None for chunk in before)
        assert last.completion is not None
        check(tiny_model("mixtral"), PROMPTS[1], last.completion)
        assert pickle.loads(pickle.dumps(last.completion)) == last.completion
        assert last.completion.routed_experts != replace_last(last.completion.routed_experts)


def replace_last(routed: RoutedExperts | None) -> RoutedExperts:
    assert routed is not None
    changed = routed.experts.copy()
    changed[-1] += 1
    return RoutedExperts(changed, routed.layers)


@pytest.mark.parametrize("kind", ["llama", "llama4"])
def test_a_model_without_them_is_refused(kind: str) -> None:
    with make_llm(kind) as llm:
        with pytest.raises(ConfigError, match=r"return_routed_experts=True: a llama.* no routers"):
            llm.generate(PROMPTS[0], ASKS)
        outputs = llm.generate(
            PROMPTS[:2], [ASKS, replace(ASKS, return_routed_experts=False)], on_error="return"
        )
    assert [type(output.error) for output in outputs] == [ConfigError, type(None)]
    with pytest.raises(ConfigError, match="return_routed_experts=1: must be True or False"):
        SamplingParams(return_routed_experts=1)  # type: ignore[arg-type]


def test_layers_that_choose_different_numbers_are_refused() -> None:
    model: Any = build("mixtral")
    assert ExpertLayers.of(model).top_k == 2
    model.model.layers[1].mlp.gate.top_k = 1
    assert not ExpertLayers.of(model)
    assert not ExpertLayers.of(build("llama"))


@pytest.mark.parametrize("length", [1, 2, BLOCK, BLOCK + 1])
def test_samples_and_requests_that_share_a_prompt(length: int) -> None:
    """Of one token, which is nothing to share, too."""
    prompt = list(range(3, 3 + length))
    params = SamplingParams(return_routed_experts=True, temperature=0.9, seed=1, max_tokens=4)
    with make_llm("mixtral") as llm:
        found = llm.generate([prompt, prompt], replace(params, n=2))
    completions = [one for output in found for one in output.completions]
    assert len(completions) == 4
    for one in completions:
        assert one.error is None
        assert one.routed_experts is not None
        assert len(one.routed_experts.experts) == length + len(one.token_ids) - 1
