"""LoRA adapters per request: each text of a batch is that of the base with its adapter merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import RequestOutput
from guided_spec.engine.request import Request
from guided_spec.engine.runner import Wanted
from guided_spec.engine.scheduler import Scheduler
from guided_spec.errors import ConfigError, ModelError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.integrations.vllm.arguments import read_arguments
from guided_spec.models.packed.blocks import BLOCK
from guided_spec.types import SamplingParams
from tests.adapters import merged, write_adapter
from tests.learned_heads import HeadedTarget
from tests.models.tiny import kv_bytes_per_token
from tests.tiers import examples
from tests.tiny_llm import make_llm, tiny_model

PROMPT = "The name of the cat is"
NAMES = ("none", "first", "second", "wide")
# Another rank and scaling each; the last in all its layers, with ranks and scalings of some alone.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "first": {"rank": 2},
    "second": {
        "rank": 4,
        "use_rslora": True,
        "lora_alpha": 24,
        "target_modules": r".*layers\.1\..*\.(k_proj|o_proj|down_proj)",
    },
    "wide": {
        "target_modules": "all-linear",
        "rank_pattern": {"gate_proj": 7, r"layers\.0\.self_attn\.q_proj": 1},
        "alpha_pattern": {"gate_proj": 20},
        "lora_alpha": 12,
    },
}
FORMS = [("llama", "packed"), ("llama", "auto"), ("llama", "stock"), ("llama4", "packed")]
FORMS += [(n, "auto") for n in ("gpt_oss", "qwen3_5", "deepseek_v3", "phi3", "mamba", "rwkv")]

# Where peft would adapt more of a model than its linear layers.
LAYERS = {
    "llama4": ["q_proj", "v_proj", "o_proj"],
    "mamba": ["in_proj", "x_proj"],
    "deepseek_v3": r".*\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|o_proj)",
}


class Adapters:
    """Folders of adapters for tiny models, written once each, and the texts of merged bases."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @cache  # noqa: B019 - one object a session
    def folders(self, name: str) -> dict[str, str]:
        found = {}
        for seed, (lora, own) in enumerate(SETTINGS.items()):
            if name != "llama":
                own = {"rank": 2 + seed, "target_modules": LAYERS.get(name, "all-linear")}
            found[lora] = write_adapter(tiny_model(name), self._root / name / lora, seed, **own)
        return found

    @cache  # noqa: B019
    def texts(self, name: str, lora: str, params: SamplingParams) -> list[int]:
        model = tiny_model(name)
        whole = model if lora == "none" else merged(model, self.folders(name)[lora])
        with make_llm(whole, kernels="stock", verifier="coupled") as llm:
            return llm.generate(PROMPT, params)[0].token_ids


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("adapters"))


def lora(name: str) -> str | None:
    return None if name == "none" else name


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.token_ids for output in outputs]


GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, seed=11)


@pytest.mark.parametrize(("name", "kernels"), FORMS)
def test_each_row_of_a_batch_has_its_adapter(adapters: Adapters, name: str, kernels: str) -> None:
    asked = [*NAMES, *reversed(NAMES)]
    expected = [adapters.texts(name, one, GREEDY) for one in asked]
    assert len({tuple(text) for text in expected}) == len(NAMES)
    with make_llm(name, kernels=kernels, loras=adapters.folders(name)) as llm:
        assert llm.loras == NAMES[1:]
        params = [replace(GREEDY, lora=lora(one)) for one in asked]
        assert tokens(llm.generate([PROMPT] * len(asked), params)) == expected


@pytest.mark.parametrize("proposer", ["eagle3", "chain:grammar_forced+ngram", "suffix"])
@pytest.mark.parametrize("kernels", ["packed", "stock"])
def test_drafts_come_from_the_base(
    adapters: Adapters, headed: HeadedTarget, proposer: str, kernels: str
) -> None:
    spec = GrammarSpec.regex("[0-9]{3}-[a-z]{4,8}")
    kinds = [GREEDY, SAMPLED, replace(SAMPLED, grammar=spec, ignore_eos=False)]
    asked = [(name, params) for params in kinds for name in NAMES]
    expected = [adapters.texts("llama", *one) for one in asked]
    options = {"kernels": kernels, "verifier": "coupled", "prefill_tokens": 5, "max_batch_size": 4}
    head = headed.draft if proposer == "eagle3" else None
    with make_llm("llama", proposer, head, loras=adapters.folders("llama"), **options) as llm:
        params = [replace(one, lora=lora(name)) for name, one in asked]
        for _ in range(2):  # learned texts and kept prompts change nothing
            outputs = llm.generate([PROMPT] * len(asked), params)
            assert tokens(outputs) == expected
        drafted = sum(sum(one.stats.drafted) for output in outputs for one in output.completions)
        assert drafted > 0


@pytest.fixture(scope="module")
def adapted(adapters: Adapters) -> Any:
    options = {"kernels": "packed", "verifier": "coupled", "prefill_tokens": 7, "max_batch_size": 3}
    with make_llm("llama", "ngram", loras=adapters.folders("llama"), **options) as llm:
        yield llm


@settings(max_examples=examples(30))
@given(rows=st.lists(st.tuples(st.sampled_from(NAMES), st.booleans()), min_size=1, max_size=7))
def test_any_batch(adapters: Adapters, adapted: LLM, rows: list[tuple[str, bool]]) -> None:
    asked = [(name, SAMPLED if is_sampled else GREEDY) for name, is_sampled in rows]
    params = [replace(one, lora=lora(name)) for name, one in asked]
    found = tokens(adapted.generate([PROMPT] * len(rows), params))
    assert found == [adapters.texts("llama", *one) for one in asked]


def test_samples_streams_and_logprobs(adapters: Adapters, adapted: LLM) -> None:
    model = merged(tiny_model("llama"), adapters.folders("llama")["first"])
    params = replace(SAMPLED, n=3, logprobs=2)
    with make_llm(model, kernels="stock", verifier="coupled") as llm:
        expected = llm.generate(PROMPT, params)[0]
    own = replace(params, lora="first")
    found = adapted.generate(PROMPT, own)[0]
    assert [one.token_ids for one in found.completions] == [
        one.token_ids for one in expected.completions
    ]
    for one, other in zip(found.completions, expected.completions, strict=True):
        assert one.logprobs
        assert other.logprobs
        values = ([token.logprob for token in found] for found in (one.logprobs, other.logprobs))
        torch.testing.assert_close(*map(torch.tensor, values), rtol=0, atol=1e-4)
    texts = [""] * 3
    for chunk in adapted.stream(PROMPT, own):
        texts[chunk.sample_index] += chunk.text
    assert texts == [one.text for one in expected.completions]


def test_choices(adapters: Adapters, adapted: LLM) -> None:
    choices = ["cat", "dog", "cattle"]
    for name in NAMES:
        model = tiny_model("llama")
        whole = model if name == "none" else merged(model, adapters.folders("llama")[name])
        with make_llm(whole, kernels="stock") as llm:
            expected = llm.choose(PROMPT, choices).logprobs
        found = adapted.choose(PROMPT, choices, lora=lora(name)).logprobs
        assert found == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ConfigError, match="lora='x': must be one of"):
        adapted.choose(PROMPT, choices, lora="x")


@pytest.mark.parametrize("proposer", ["none", "eagle3"])
def test_the_prefix_cache_keeps_adapters_apart(
    adapters: Adapters, headed: HeadedTarget, proposer: str
) -> None:
    prompt = [5 + at * 7 % 300 for at in range(2 * BLOCK + 5)]
    head = headed.draft if proposer == "eagle3" else None
    options = {"kernels": "packed", "loras": adapters.folders("llama")}
    with make_llm("llama", proposer, head, prefix_cache=False, **options) as llm:
        params = [replace(GREEDY, lora=lora(name)) for name in NAMES]
        expected = [llm.generate([prompt], one)[0].token_ids for one in params]
    assert len({tuple(text) for text in expected}) == len(NAMES)
    with make_llm("llama", proposer, head, **options) as llm:
        for is_known in (False, True):
            for one, text in zip(params, expected, strict=True):
                (output,) = llm.generate([prompt], one)
                assert output.token_ids == text
                assert (output.stats.cached_tokens > 0) == is_known
        together = llm.generate([prompt] * 2 * len(NAMES), [one for one in params for _ in "ab"])
        assert tokens(together) == [text for text in expected for _ in "ab"]


@pytest.fixture
def requeued(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The numbers of requests that had to go back to the queue."""
    numbers, requeue = set[int](), Scheduler.requeue

    def requeuing(scheduler: Scheduler, request: Request) -> None:
        numbers.add(request.number)
        requeue(scheduler, request)

    monkeypatch.setattr(Scheduler, "requeue", requeuing)
    return numbers


def test_texts_that_go_back_to_the_queue(adapters: Adapters, requeued: set[int]) -> None:
    long = replace(GREEDY, max_tokens=BLOCK + 8)
    params = [replace(long, lora=lora(name)) for name in reversed(NAMES)]
    memory = 5 * BLOCK * kv_bytes_per_token(tiny_model("llama"))
    options: dict[str, Any] = {"kernels": "packed", "max_batch_size": 4}
    options["loras"] = adapters.folders("llama")
    with make_llm("llama", **options) as llm:
        expected = tokens(llm.generate([PROMPT] * 4, params))
    assert not requeued
    with make_llm("llama", kv_memory_bytes=memory, **options) as llm:
        assert tokens(llm.generate([PROMPT] * 4, params)) == expected
    assert requeued


@pytest.mark.parametrize("kernels", ["packed", "stock"])
def test_one_slot(adapters: Adapters, kernels: str) -> None:
    options: dict[str, Any] = {"kernels": kernels, "loras": adapters.folders("llama")}
    with make_llm("llama", max_batch_size=1, **options) as llm:
        params = [replace(GREEDY, lora=lora(name)) for name in NAMES]
        found = tokens(llm.generate([PROMPT] * len(NAMES), params))
    assert found == [adapters.texts("llama", name, GREEDY) for name in NAMES]


def test_a_second_llm_on_the_same_weights(adapters: Adapters) -> None:
    folders = adapters.folders("llama")
    model = tiny_model("llama")
    before = {name: type(module) for name, module in model.named_modules()}
    with make_llm("llama", loras=folders) as llm:
        assert llm.model is model
        with llm.with_proposer("ngram") as other:
            assert other.loras == llm.loras
            found = other.generate(PROMPT, replace(GREEDY, lora="first"))
        with make_llm("llama", loras={"only": folders["second"]}) as third:
            found += third.generate(PROMPT, replace(GREEDY, lora="only"))
        found += llm.generate(PROMPT, replace(GREEDY, lora="wide"))
    expected = [adapters.texts("llama", name, GREEDY) for name in ("first", "second", "wide")]
    assert tokens(found) == expected
    assert before == {name: type(module) for name, module in model.named_modules()}


def test_unknown_adapters_are_refused(adapted: LLM) -> None:
    with pytest.raises(ConfigError, match="lora='frist': must be one of first, second, wide; did"):
        adapted.generate(PROMPT, SamplingParams(lora="frist"))
    with pytest.raises(ConfigError, match="lora=3: must be a str, or None"):
        SamplingParams(lora=3)  # type: ignore[arg-type]
    with make_llm("llama") as llm:
        assert llm.loras == ()
        with pytest.raises(ConfigError, match=r"lora='a': this LLM has no adapters: pass loras="):
            llm.generate(PROMPT, SamplingParams(lora="a"))


@pytest.mark.parametrize(
    ("loras", "said"),
    [
        (["a"], r"loras=\['a'\]: must map names to folders or hub ids"),
        ({"": "x"}, "loras='': must map names"),
        ({3: "x"}, "loras=3: must map names"),
        ({"a": None}, r"loras\['a'\]=None: must be a folder or a hub id"),
        ({"a": ""}, r"loras\['a'\]='': must be a folder"),
    ],
)
def test_what_names_no_adapters(loras: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_llm("llama", loras=loras)


def test_names_of_others_lead_here() -> None:
    with pytest.raises(ConfigError, match="did you mean loras"):
        make_llm("llama", lora_modules={"a": "b"})
    with pytest.raises(ConfigError, match="did you mean lora?"):
        SamplingParams(lora_request="a")  # type: ignore[call-arg]


def test_other_engines_take_none() -> None:
    wanted = Wanted("some/model", None, None, {"loras": {"a": "b"}}, {})
    with pytest.raises(ConfigError, match="loras=.*not under engine='vllm'"):
        read_arguments(wanted, None, has_lookup=True)


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(ModelError, match=r"loras\['a'\]='./none': there is no such folder"):
        make_llm("llama", loras={"a": "./none"})
