"""Bias, bans and penalties in the engine: speculation writes the text of plain decoding.

Every setting runs alone and with all others, free and under a grammar, in one batch of 20 requests.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Completion
from guided_spec.errors import ConfigError, GrammarDeadEndError, NoTokenLeftError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.types import SamplingParams
from tests.learned_heads import HeadedTarget, write_head
from tests.tiny_llm import VOCAB_SIZE, make_llm, near_copy, tiny_model

NO = float("-inf")
PROMPT = "The name of the cat"
LETTERS = GrammarSpec.regex("[a-z ]{8,200}")
PLAIN = SamplingParams(max_tokens=20)
NAMES = (
    "nothing",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    "liked",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "all",
)


def settings(text: list[int]) -> dict[str, dict[str, Any]]:
    """Each setting, such that it forbids or discourages what ``text`` holds."""
    liked = {"logit_bias": dict.fromkeys(text[:4], 4.0)}
    found: dict[str, dict[str, Any]] = {
        "nothing": {},
        "logit_bias": {"logit_bias": {text[0]: NO, text[1]: -1.0, text[2]: 0.5, 5: 0.25}},
        "bad_words": {"bad_words": ["the", text[1:3], text[3:6], [text[7]]]},
        "allowed_token_ids": {"allowed_token_ids": [t for t in range(380) if t != text[1]]},
        "min_tokens": {"stop_token_ids": [text[3]], "min_tokens": 9},
        "liked": liked,  # tokens that would come again and again
        "repetition_penalty": {"repetition_penalty": 3.0, **liked},
        "frequency_penalty": {"frequency_penalty": 0.7, **liked},
        "presence_penalty": {"presence_penalty": 2.0, **liked},
    }
    return {**found, "all": {name: one[name] for name, one in found.items() if name in one}}


class Requests:
    """The requests for one target, made to fit what it writes by itself."""

    def __init__(self, model: Any) -> None:
        self.model = model
        free, guided = PLAIN, replace(PLAIN, grammar=LETTERS)
        with make_llm(model, "none") as llm:
            texts = [output.token_ids for output in llm.generate([PROMPT] * 2, [free, guided])]
        self.params = [
            replace(base, **changes)
            for base, text in zip((free, guided), texts, strict=True)
            for changes in settings(text).values()
        ]
        self.plain = self.generate("none", max_batch_size=1)

    def generate(self, proposer: str, draft: Any = None, **options: Any) -> list[Completion]:
        sampled = options.pop("sampled", {})
        params = [replace(one, **sampled) for one in self.params]
        with make_llm(self.model, proposer, draft, **options) as llm:
            outputs = llm.generate([PROMPT] * len(params), params, on_error="return")
        assert [output.error for output in outputs] == [None] * len(params)
        return [output.completions[0] for output in outputs]


@cache
def requests(architecture: str) -> Requests:
    return Requests(tiny_model(architecture))


def by_name(completions: list[Completion]) -> dict[str, list[int]]:
    labels = [f"{name} {kind}" for kind in ("free", "guided") for name in NAMES]
    return {label: c.token_ids for label, c in zip(labels, completions, strict=True)}


def test_each_setting_changes_the_text() -> None:
    found = by_name(requests("llama").plain)
    for kind in ("free", "guided"):
        for name in NAMES[1:]:
            base = "liked" if name.endswith("_penalty") else "nothing"
            assert found[f"{name} {kind}"] != found[f"{base} {kind}"], name


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize(
    ("architecture", "proposer"),
    [
        ("llama", "none"),
        ("llama", "ngram"),
        ("llama", "draft_model"),
        ("llama", "draft_model:validate"),
        ("llama", "chain:grammar_forced+ngram+draft_model"),
        ("qwen3_5", "chain:ngram+draft_model"),
    ],
)
def test_speculation_changes_nothing(architecture: str, proposer: str, batch_size: int) -> None:
    known = requests(architecture)
    draft = near_copy(architecture) if "draft_model" in proposer else None
    found = known.generate(proposer, draft, max_batch_size=batch_size)
    assert by_name(found) == by_name(known.plain)
    if draft is not None:
        assert sum(sum(c.stats.accepted) for c in found) > 60


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> HeadedTarget:
    """A target and an EAGLE-3 head that scores three quarters of its tokens."""
    return write_head(tmp_path_factory.mktemp("head"), "eagle3", VOCAB_SIZE)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mask", "validate"])
def test_a_head_changes_nothing(headed: HeadedTarget, policy: str) -> None:
    known = Requests(headed.target)
    for batch_size in (1, 5):
        found = known.generate(f"eagle3:{policy}", headed.draft, max_batch_size=batch_size)
        assert by_name(found) == by_name(known.plain)
        assert sum(sum(c.stats.drafted) for c in found) > 100


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["draft_model", "chain:ngram+draft_model:validate"])
def test_coupled_sampling_changes_nothing(proposer: str) -> None:
    """With one seed, and verified by coupling, the text is that of plain sampling."""
    known, sampled = requests("llama"), {"temperature": 0.8, "seed": 3, "top_k": 40}
    plain = known.generate("none", sampled=sampled, verifier="coupled", max_batch_size=1)
    found = known.generate(proposer, near_copy("llama"), sampled=sampled, verifier="coupled")
    assert by_name(found) == by_name(plain)


@pytest.mark.parametrize("policy", ["mask", "validate"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_as_its_own_drafter_is_taken_at_its_word(
    temperature: float, policy: str
) -> None:
    """The drafter's distribution is adjusted like the target's, so nothing is refused.

    Except the grammar's own refusals where the drafter does not look at the mask.
    """
    known = requests("llama")
    sampled = {"temperature": temperature, "seed": 5}
    found = known.generate(f"draft_model:{policy}", known.model, sampled=sampled)
    found = found if policy == "mask" else found[: len(NAMES)]
    for name, completion in zip(NAMES * 2, found, strict=False):
        stats = completion.stats
        assert stats.steps <= -(-len(completion.token_ids) // 5) + 1, name


def test_free_text_is_what_transformers_generates() -> None:
    """With the logits processors of its own for the settings that it has."""
    model = tiny_model("llama")
    with make_llm(model, "draft_model", near_copy("llama")) as llm:
        text = llm.generate(PROMPT, PLAIN)[0].token_ids
        prompt = torch.tensor([llm.encode(PROMPT)])
        words = [text[2:4], [text[5]]]
        bias = {text[0]: -3.0, text[1]: 0.5}
        theirs = model.generate(  # type: ignore[operator]
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=20,
            min_new_tokens=12,
            eos_token_id=text[4],
            pad_token_id=0,
            bad_words_ids=words,
            sequence_bias={(token,): value for token, value in bias.items()},
            repetition_penalty=1.3,
        )
        params = replace(
            PLAIN,
            min_tokens=12,
            stop_token_ids=[text[4]],
            bad_words=words,
            logit_bias=bias,
            repetition_penalty=1.3,
        )
        ours = llm.generate(PROMPT, params)[0]
    assert ours.token_ids == theirs[0, prompt.shape[1] :].tolist()
    assert ours.token_ids != text


def test_min_tokens_and_the_end() -> None:
    """A choice of two ends late enough or not; ``ignore_eos`` leaves the grammar its end."""
    grammar = GrammarSpec.regex("(ab)*")
    for ignore_eos in (False, True):
        params = SamplingParams(max_tokens=40, grammar=grammar, ignore_eos=ignore_eos)
        with make_llm("llama", "chain:grammar_forced+draft_model", near_copy("llama")) as llm:
            bias = {llm.vocabulary.stop_token_ids[0]: 1e6}
            soon = llm.generate("A", replace(params, logit_bias=bias))[0]
            late = llm.generate("A", replace(params, logit_bias=bias, min_tokens=7))[0]
        assert soon.text == ""
        assert late.finish_reason == "stop"
        assert len(late.token_ids) - 1 >= 7


def test_the_end_of_text_is_open_to_free_text_that_ignores_it() -> None:
    with make_llm("llama") as llm:
        eos = llm.vocabulary.stop_token_ids[0]
        params = SamplingParams(max_tokens=6, min_tokens=6, logit_bias={eos: 1e6})
        assert eos not in llm.generate("A", params)[0].token_ids
        ignoring = llm.generate("A", replace(params, ignore_eos=True))[0]
    assert ignoring.token_ids == [eos] * 6


def bad_spellings(llm: LLM, word: str) -> list[list[int]]:
    return [llm.tokenizer(text)["input_ids"] for text in (word, f" {word}")]


def test_a_bad_word_is_forbidden_at_the_start_and_behind_a_space() -> None:
    with make_llm("llama", "ngram") as llm:
        spelled = bad_spellings(llm, "name")
        assert spelled[0] != spelled[1]
        for tokens in spelled:
            bias = dict.fromkeys(tokens, 1e4)
            wanted = SamplingParams(max_tokens=8, logit_bias=bias)
            forbidden = replace(wanted, bad_words="name")
            listed = replace(wanted, bad_words=spelled)
            outputs = llm.generate(["A"] * 2, [forbidden, listed])
            assert outputs[0].token_ids == outputs[1].token_ids
            text = outputs[0].token_ids
            for word in spelled:
                assert word not in [text[i : i + len(word)] for i in range(len(text))]


ABC = GrammarSpec.regex("[abc]{1,3}")
NO_TOKEN = [
    ({"allowed_token_ids": [7], "bad_words": [[7]]}, "bad_words and allowed_token_ids forbid all$"),
    ({"grammar": GrammarSpec.choice(["a", "b"]), "min_tokens": 9}, ": min_tokens forbid all that"),
    ({"grammar": ABC, "bad_words": [[t] for t in range(390)]}, "position 0: bad_words forbid all"),
    ({"allowed_token_ids": [7], "logit_bias": {7: NO}, "seed": 1, "temperature": 1.0}, "bias and"),
]


@pytest.mark.parametrize(("params", "message"), NO_TOKEN)
@pytest.mark.parametrize("proposer", ["none", "chain:grammar_forced+draft_model"])
def test_bans_that_leave_no_token_end_their_own_request(
    proposer: str, params: dict[str, Any], message: str
) -> None:
    good = replace(PLAIN, max_tokens=6)
    with make_llm("llama", proposer, near_copy("llama")) as llm:
        alone = llm.generate("A", good, on_error="return")[0]
        outputs = llm.generate(["A"] * 3, [good, replace(PLAIN, **params), good], on_error="return")
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[0].token_ids == outputs[2].token_ids == alone.token_ids
    assert not isinstance(outputs[1].error, GrammarDeadEndError)
    with pytest.raises(NoTokenLeftError, match=message):
        raise outputs[1].error or AssertionError


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {VOCAB_SIZE: 1.0}},
        {"bad_words": ["fine", [3, VOCAB_SIZE]]},
        {"allowed_token_ids": [0, VOCAB_SIZE]},
    ],
)
def test_ids_outside_the_vocabulary(params: dict[str, Any]) -> None:
    with make_llm("llama") as llm:
        outputs = llm.generate(["A"] * 2, [replace(PLAIN, **params), PLAIN], on_error="return")
    assert outputs[1].error is None
    with pytest.raises(ConfigError, match=f"^{next(iter(params))}={VOCAB_SIZE}: ids must be below"):
        raise outputs[0].error or AssertionError


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {-1: 1.0}}, "^logit_bias=-1: must be at least 0"),
        ({"logit_bias": {1: float("inf")}}, r"^logit_bias\[1\]=inf: must be between"),
        ({"logit_bias": {1: float("nan")}}, r"^logit_bias\[1\]=nan: must be between"),
        ({"logit_bias": {1: "2"}}, r"^logit_bias\[1\]='2': must be a number"),
        ({"logit_bias": [1, 2]}, "^logit_bias=.*must map token ids"),
        ({"logit_bias": {"1": 2.0}}, "^logit_bias='1': must be an int"),
        ({"bad_words": [""]}, "^bad_words='': each must be a non-empty str"),
        ({"bad_words": [3]}, "^bad_words=3: each must be"),
        ({"bad_words": [[]]}, "^bad_words=.*: each must be"),
        ({"bad_words": [[1, -1]]}, "^bad_words=-1: must be at least 0"),
        ({"bad_words": 3}, "^bad_words=3: must be a list"),
        ({"allowed_token_ids": []}, "^allowed_token_ids=.*allow a token, or pass None"),
        ({"allowed_token_ids": [1.5]}, "^allowed_token_ids=1.5: must be an int"),
        ({"allowed_token_ids": ["a", 1]}, "^allowed_token_ids='a': must be an int"),
        ({"min_tokens": -1}, "^min_tokens=-1"),
        ({"min_tokens": 9, "max_tokens": 8}, "^min_tokens=9: must be at most max_tokens"),
        ({"repetition_penalty": 0.0}, "^repetition_penalty=0.0: must be between 0.01 and 100"),
        ({"frequency_penalty": 2.1}, "^frequency_penalty=2.1: must be between -2 and 2"),
        ({"presence_penalty": float("nan")}, "^presence_penalty=nan: must be between -2 and 2"),
    ],
)
def test_settings_out_of_range(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**params)


def test_the_record_stays_hashable() -> None:
    params = SamplingParams(
        logit_bias={9: 1, 3: NO}, bad_words=["a", [1, 2]], allowed_token_ids=[4, 2, 4]
    )
    assert params.logit_bias == ((3, NO), (9, 1.0))
    assert params.bad_words == ("a", (1, 2))
    assert params.allowed_token_ids == (2, 4)
    again = replace(params, n=1)
    assert (hash(again), again) == (hash(params), params)
