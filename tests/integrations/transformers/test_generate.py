"""``custom_generate=guided_spec.generate``: what it writes, keeps, refuses and leaves alone."""

from __future__ import annotations

import copy
import functools
import gc
import json
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from guided_spec.bundled import bundled_asset
from guided_spec.errors import ConfigError, UnsupportedSchemaError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.integrations.transformers.generate import generate, release
from guided_spec.integrations.transformers.processor import GrammarLogitsProcessor
from guided_spec.types import MAX_SEED, SamplingParams
from tests.integrations.transformers.assisted import left_padded
from tests.tiny_llm import make_llm, near_copy, tiny_model, tiny_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
JSON = GrammarSpec.json_schema(SCHEMA)
PROMPTS = ("A", "The name of the cat is Ada and", "on and on and on")
GRAMMARS = (JSON, GrammarSpec.regex("[a-z ]{6,12}"), None)
ENDS: dict[str, Any] = {"eos_token_id": 0, "pad_token_id": 7}


@pytest.fixture
def model() -> Iterator[Any]:
    """The tiny llama, which all tests share, without an engine of this test's."""
    yield tiny_model("llama")
    release(tiny_model("llama"))


def guided(model: Any, prompts: tuple[str, ...] = PROMPTS, **arguments: Any) -> Any:
    names = {"max_new_tokens": 20, "complete": False, "tokenizer": tiny_tokenizer(), **ENDS}
    inputs = left_padded(prompts)
    return model.generate(**inputs, custom_generate=generate, **{**names, **arguments})


def plain(model: Any, prompt: str, grammar: GrammarSpec | None, **arguments: Any) -> list[int]:
    """The new tokens of transformers' own loop, alone and without padding."""
    inputs = left_padded([prompt])
    processors = [] if grammar is None else [GrammarLogitsProcessor(grammar, tiny_tokenizer())]
    names = {"max_new_tokens": 20, **ENDS, **arguments}
    found = model.generate(**inputs, logits_processor=processors, **names)
    tokens: list[int] = found[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens


def padded(rows: list[list[int]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[7] * (longest - len(row))] for row in rows])


def text_of(tokens: Tensor) -> str:
    return str(tiny_tokenizer().decode(tokens, skip_special_tokens=True))


def engines() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "guided-spec-engine"}


@pytest.mark.parametrize("proposer", [None, "none", "draft_model", "chain:grammar_forced+ngram"])
def test_a_batch_has_the_texts_of_plain_decoding(proposer: str | None, model: Any) -> None:
    draft = near_copy("llama") if proposer == "draft_model" else None
    found = guided(model, grammar=list(GRAMMARS), proposer=proposer, draft=draft)
    pairs = zip(PROMPTS, GRAMMARS, strict=True)
    expected = padded([plain(model, prompt, grammar) for prompt, grammar in pairs])
    inputs = left_padded(PROMPTS)["input_ids"]
    assert torch.equal(found, torch.cat([inputs, expected], 1))


def test_settings_of_generate_are_followed(model: Any) -> None:
    """Free and greedy, so that transformers' own loop says what is right."""
    free = plain(model, PROMPTS[1], None)
    settings: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "bad_words_ids": [[free[1]], free[2:4]],
        "suppress_tokens": [free[0]],
        "sequence_bias": {(free[5],): -3.0, (30,): 2.0},
        "min_new_tokens": 6,
        "eos_token_id": [free[4], 0],
    }
    for at in range(len(settings) + 1):  # each one alone, and all together
        some = dict([list(settings.items())[at]]) if at < len(settings) else settings
        expected = plain(model, PROMPTS[1], None, max_new_tokens=10, **some)
        found = guided(model, (PROMPTS[1],), proposer="ngram", max_new_tokens=10, **some)
        assert found[0, left_padded((PROMPTS[1],))["input_ids"].shape[1] :].tolist() == expected


def test_sampling_is_that_of_the_engine_and_repeats_itself(model: Any) -> None:
    settings: dict[str, Any] = {"temperature": 1.4, "top_k": 40, "top_p": 0.9}
    settings["repetition_penalty"] = 1.1
    names = {"do_sample": True, "num_return_sequences": 3, "grammar": GRAMMARS[1], **settings}
    torch.manual_seed(5)
    alone = guided(model, proposer="none", **names)
    torch.manual_seed(5)
    seeds = [int(torch.randint(MAX_SEED, ())) for _ in PROMPTS]
    rows = []
    with make_llm(model, "none") as llm:
        for prompt, seed in zip(PROMPTS, seeds, strict=True):
            asked = {"grammar": GRAMMARS[1], "max_tokens": 20, "complete": False, **settings}
            params = SamplingParams(n=3, seed=seed, **asked)
            rows += [one.token_ids for one in llm.generate(prompt, params)[0].completions]
    width = left_padded(PROMPTS)["input_ids"].shape[1]
    assert torch.equal(alone[:, width:], padded(rows))
    assert len(set(map(tuple, rows))) == 9
    names |= {"proposer": "draft_model", "draft": near_copy("llama")}
    torch.manual_seed(5)
    drafted = guided(model, **names)
    torch.manual_seed(5)
    assert torch.equal(guided(model, **names), drafted)
    assert not torch.equal(guided(model, **names), drafted)


def test_what_comes_back_and_what_is_streamed(model: Any) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.parts: list[list[int]] = []
            self.has_ended = False

        def put(self, value: Tensor) -> None:
            self.parts.append(value.flatten().tolist())

        def end(self) -> None:
            self.has_ended = True

    streamer = Streamer()
    found = guided(
        model, PROMPTS[:1], grammar=JSON, streamer=streamer, return_dict_in_generate=True
    )
    prompt = left_padded(PROMPTS[:1])["input_ids"][0].tolist()
    assert streamer.parts[0] == prompt
    assert len(streamer.parts) > 2
    assert sum(streamer.parts, []) == found.sequences[0].tolist()
    assert streamer.has_ended
    assert found.scores is None
    bound = functools.partial(generate, tokenizer=tiny_tokenizer())
    inputs = left_padded(PROMPTS[:1])
    names = {"max_new_tokens": 20, "complete": False, **ENDS}
    again = model.generate(**inputs, custom_generate=bound, grammar=JSON, **names)
    assert torch.equal(again, found.sequences)


def test_texts_end_in_time_and_at_stop_strings(model: Any) -> None:
    found = guided(model, PROMPTS[:1], grammar=JSON, complete=None, max_new_tokens=13)
    jsonschema.validate(json.loads(text_of(found[0]).removeprefix(PROMPTS[0])), SCHEMA)
    stop = StoppingCriteriaList([StopStringCriteria(tiny_tokenizer(), ["name"])])
    found = guided(model, PROMPTS[:1], grammar=JSON, stopping_criteria=stop)
    assert text_of(found[0]).endswith("name")


def test_the_model_is_as_it_was(model: Any) -> None:
    def state() -> list[Any]:
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        weights = [(p.data_ptr(), p.sum().item(), p.requires_grad) for p in model.parameters()]
        settings = [model.config.to_dict(), model.generation_config.to_dict()]
        return [hooks, weights, settings, model.config._attn_implementation, sorted(vars(model))]

    before = state()
    guided(model, grammar=JSON, proposer="draft_model", draft=near_copy("llama"))
    assert state() == before


def test_an_engine_stays_for_the_next_call_and_goes_with_its_model() -> None:
    gc.collect()  # what other tests left
    others = engines()
    own: PreTrainedModel = copy.deepcopy(tiny_model("llama"))
    guided(own, grammar=JSON)
    (first,) = engines() - others
    guided(own, PROMPTS[:1], proposer=None, grammar=GRAMMARS[1], max_new_tokens=5)
    assert engines() - others == {first}
    guided(own, PROMPTS[:1], proposer="none", grammar=JSON)  # another engine, in place of it
    (second,) = engines() - others
    assert second != first
    guided(own, PROMPTS * 2, proposer="none", grammar=JSON)  # a larger one
    assert len(engines() - others - {second}) == 1
    release(own)
    assert engines() <= others
    guided(own, PROMPTS[:1], grammar=JSON)
    gone = weakref.ref(own)
    del own
    gc.collect()
    assert gone() is None
    assert engines() <= others


def test_the_bundled_model_and_its_heads() -> None:
    path = bundled_asset("target")
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    item = json.loads(Path(bundled_asset("heldout.jsonl")).read_text().splitlines()[0])
    grammar = GrammarSpec.json_schema(item["schema"])
    inputs = tokenizer(item["prompt"], return_tensors="pt")
    processors = [GrammarLogitsProcessor(grammar, tokenizer, model=model)]
    expected = model.generate(**inputs, logits_processor=processors, max_new_tokens=40)
    for name in (None, "eagle3"):
        draft = None if name is None else bundled_asset(name)
        # Its tokenizer is found where the model is from.
        found = model.generate(
            **inputs, custom_generate=generate, grammar=grammar, draft=draft, max_new_tokens=40
        )
        assert torch.equal(found, expected)
    shown = tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert json.loads(str(shown)) == json.loads(item["answer"])


class Custom:
    """Neither a processor nor a criterion that anybody knows."""

    def __call__(self, *_: Tensor) -> Tensor:
        raise AssertionError("it must not be called")

    def put(self, *_: Tensor) -> None:
        """transformers shows every streamer the prompt."""


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "num_beams": ({"num_beams": 2}, "num_beams=2: the engine samples one text"),
    "penalty_alpha": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6"),
    "prompt_lookup": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3.*proposer="),
    "use_mtp": ({"use_mtp": True}, "use_mtp=True.*proposer="),
    "early_exit": ({"assistant_early_exit": 2}, "assistant_early_exit=2.*proposer="),
    "no_repeat": ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size="),
    "typical_p": ({"do_sample": True, "typical_p": 0.5}, "typical_p="),
    "min_p": ({"do_sample": True, "min_p": 0.1, "top_p": 0.9}, "min_p=0.1: with top_p"),
    "max_time": ({"max_time": 9.0}, "max_time="),
    "prefix": ({"prefix_allowed_tokens_fn": lambda *_: [1]}, "prefix_allowed_tokens_fn=.*grammar="),
    "processor": ({"logits_processor": [Custom()]}, "logits_processor='Custom'"),
    "criterion": ({"stopping_criteria": [Custom()]}, "stopping_criteria='Custom'"),
    "bias": ({"sequence_bias": {(5, 6): 1.0}}, "sequence_bias=.*single tokens"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores=True"),
    "positions": ({"position_ids": torch.arange(3, 9).repeat(3, 2)[:, :11]}, "position_ids="),
    "tokenizer": ({"tokenizer": None}, "tokenizer=None: the engine needs"),
    "length": ({"max_new_tokens": 600}, "max_new_tokens=.*512 together"),
    "grammar": ({"grammar": 5}, "grammar=5: .*pass a GrammarSpec, a type"),
    "grammars": ({"grammar": [JSON, JSON]}, "grammar='2 of them'.*each of the 3"),
    "complete": ({"complete": True}, "complete=True: needs a grammar"),
    "ends": ({"grammar": JSON, "eos_token_id": 9}, "eos_token_id='9': texts with a grammar end"),
    "option": ({"engine_options": {"nothing": 1}}, "nothing=1: is no option"),
    "proposer": ({"proposer": "nobody"}, "proposer='nobody'"),
    "synced_gpus": ({"synced_gpus": True}, "synced_gpus=True"),
    "streamer": ({"streamer": Custom()}, "streamer='Custom': it takes one text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_said(name: str, model: Any) -> None:
    arguments, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        guided(model, **arguments)


def test_what_is_wrong_with_the_model_or_the_inputs_is_said(model: Any) -> None:
    with pytest.raises(ConfigError, match="assistant_model='LlamaForCausalLM'.*proposer="):
        guided(model, PROMPTS[:1], assistant_model=near_copy("llama"))
    inputs = left_padded(PROMPTS)
    inputs["attention_mask"] = inputs["attention_mask"].flip(1)
    with pytest.raises(ConfigError, match="attention_mask='row 0'.*padding_side"):
        model.generate(**inputs, custom_generate=generate, max_new_tokens=4, **ENDS)
    training = copy.deepcopy(model).train()
    with pytest.raises(ConfigError, match=r"training mode.*model\.eval\(\)"):
        guided(training)
    with pytest.raises(ConfigError, match="generation_config=None"):
        generate(model, inputs["input_ids"])


def test_a_schema_that_cannot_be_enforced_is_refused(model: Any) -> None:
    unsupported = GrammarSpec.json_schema({"not": {"multipleOf": 2}})
    with pytest.raises(UnsupportedSchemaError, match="positive spelling"):
        guided(model, PROMPTS[:1], grammar=unsupported)
