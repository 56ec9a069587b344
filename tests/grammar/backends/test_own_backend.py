"""A user's own backend in one batch with xgrammar and llguidance, on every way there is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch

from guided_spec.config import EngineConfig
from guided_spec.core import DecodeBatch, DraftInFlight, TargetOutput
from guided_spec.engine.outputs import RequestOutput
from guided_spec.errors import BudgetTooSmallError, ConfigError, GrammarCompileError
from guided_spec.grammar.backends.registry import GRAMMAR_BACKENDS, register_grammar_backend
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.guide import Guide
from guided_spec.integrations.transformers.processor import GrammarLogitsProcessor
from guided_spec.proposers import build_proposer
from guided_spec.step import commit, speculative_step
from guided_spec.types import DraftPolicy, SamplingParams
from tests.grammar.backends.own_backends import Listed
from tests.tiny_llm import VOCAB_SIZE, make_llm, near_copy, tiny_model, tiny_tokenizer
from tests.toys import CPU, toy_context

pytest.importorskip("llguidance")

COLOURS = ["red", "reddish brown", "green", "grey"]
OPEN = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
SPECS: list[GrammarSpec | None] = []
"""What one batch holds; filled by ``_registry``, which registers the name first."""


@pytest.fixture(autouse=True, scope="module")
def _registry() -> Iterator[None]:
    register_grammar_backend("listed", Listed)
    own = GrammarSpec.choice(COLOURS).with_backend("listed")
    json_ = GrammarSpec.json_schema(OPEN, additional_properties="schema")
    SPECS[:] = [
        own,
        json_.with_backend("xgrammar"),
        json_.with_backend("llguidance"),
        None,
        own.after("e", reasoning_budget=5),
        GrammarSpec.choice(COLOURS).with_backend("xgrammar"),
    ]
    yield
    del GRAMMAR_BACKENDS["listed"]


def params(temperature: float, policy: DraftPolicy | None = None) -> list[SamplingParams]:
    return [
        SamplingParams(
            max_tokens=30, temperature=temperature, seed=seed, grammar=spec, draft_policy=policy
        )
        for seed, spec in enumerate(SPECS)
    ]


def generate(
    proposer: str, wanted: Sequence[SamplingParams], **options: Any
) -> list[RequestOutput]:
    draft = near_copy("llama") if "draft_model" in proposer else None
    options = {"max_batch_size": len(wanted), **options}
    with make_llm("llama", proposer, draft, **options) as llm:
        prompts = ["The colour of the cat"] * len(wanted)
        return llm.generate(prompts, list(wanted), on_error="return")


def check_texts(outputs: Sequence[RequestOutput]) -> None:
    assert [output.error for output in outputs] == [None] * len(SPECS)
    own, closed, open_, _, after, other = (output.text for output in outputs)
    assert own in COLOURS
    assert other in COLOURS
    assert after.partition("e")[2] in COLOURS
    assert closed in ('{"a": true}', '{"a": false}')  # xgrammar closes what llguidance leaves open
    jsonschema.validate(json.loads(open_), OPEN)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("proposer", "policy"),
    [
        ("chain:grammar_forced+ngram", None),
        ("draft_model", "mask"),
        ("draft_model", "validate"),
        ("chain:grammar_forced+draft_model", "mask"),
    ],
)
def test_three_backends_in_one_batch(proposer: str, policy: DraftPolicy | None) -> None:
    plain = generate("none", params(0.0), max_batch_size=1)
    check_texts(plain)
    drafted = generate(proposer, params(0.0, policy))
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    steps = [sum(output.stats.steps for output in outputs) for outputs in (drafted, plain)]
    assert steps[0] < steps[1]
    check_texts(generate(proposer, params(1.5, policy)))


def test_the_same_seed_gives_the_same_text_with_any_proposer() -> None:
    plain = generate("none", params(1.0), verifier="coupled", max_batch_size=2)
    check_texts(plain)
    for proposer in ("chain:grammar_forced+ngram", "draft_model:validate"):
        drafted = generate(proposer, params(1.0), verifier="coupled")
        assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]


def test_it_can_be_the_engines_own() -> None:
    words = GrammarSpec.choice(COLOURS)
    wanted = [SamplingParams(grammar=words), *params(0.0)[:3]]
    wanted.append(SamplingParams(grammar=GrammarSpec.regex("a")))
    outputs = generate("grammar_forced", wanted, grammar_backend="listed")
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[0].text in COLOURS
    assert [output.error for output in outputs[:4]] == [None] * 4
    assert isinstance(outputs[4].error, GrammarCompileError)
    assert str(outputs[4].error) == "listed compiles choice, not regex"


def test_a_name_that_is_gone_fails_its_request() -> None:
    with make_llm("llama") as llm:
        gone = GrammarSpec("choice", '["a"]', backend="gone")
        outputs = llm.generate(
            ["A"] * 2, [SamplingParams(grammar=gone), params(0.0)[0]], on_error="return"
        )
    assert isinstance(outputs[0].error, ConfigError)
    assert "backend='gone': must be one of auto, listed, llgui" in str(outputs[0].error)
    assert outputs[1].text in COLOURS


@pytest.mark.slow
def test_its_texts_end_within_their_budget() -> None:
    """The end is searched for with the matcher itself: nothing else is asked of a backend."""
    spec = GrammarSpec.choice(["x" * 8, "yz" * 20]).with_backend("listed")
    tokens = len(tiny_tokenizer()("x" * 8)["input_ids"]) + 1
    for proposer in ("none", "chain:grammar_forced+ngram"):
        budgets = [SamplingParams(max_tokens=n, grammar=spec, complete=True) for n in range(1, 30)]
        with make_llm("llama", proposer) as llm:
            outputs = llm.generate(["y"] * len(budgets), budgets, on_error="return")
        for limit, output in zip(range(1, 30), outputs, strict=True):
            if output.error is not None:
                assert isinstance(output.error, BudgetTooSmallError)
                assert limit < tokens
            else:
                assert output.is_complete
                assert output.text in ("x" * 8, "yz" * 20)
                assert len(output.token_ids) <= limit
        assert sum(output.error is None for output in outputs) == 30 - tokens


class EvenTarget:
    """A model to which all tokens are alike."""

    def verify(self, batch: DecodeBatch, flight: DraftInFlight) -> TargetOutput:
        width = flight.draft.token_ids.shape[1] + 1
        return TargetOutput(torch.zeros(len(batch), width, VOCAB_SIZE))


def test_with_the_guide_of_another_engine() -> None:
    tokenizer = tiny_tokenizer()
    vocabulary = Vocabulary.from_tokenizer(tokenizer, VOCAB_SIZE, [tokenizer.eos_token_id])
    config = EngineConfig(max_batch_size=len(SPECS), grammar_backend="listed")
    guide = Guide(vocabulary, tokenizer, config, device=CPU)
    proposer = build_proposer("ngram", toy_context(vocabulary=vocabulary, config=config))
    wanted = [replace(one, max_tokens=20) for one in params(1.0) if one.grammar is not None]
    wanted[0] = replace(wanted[0], grammar=GrammarSpec.choice(COLOURS))
    texts = [guide.open(slot, [1, 2], one) for slot, one in enumerate(wanted)]
    while running := [text for text in texts if text.ended is None]:
        batch = guide.batch(running)
        step = speculative_step(EvenTarget(), proposer, batch)
        for text, row in zip(running, commit(batch, step.accepted), strict=True):
            text.append(row)
    guide.close()
    assert [text.error for text in texts] == [None] * len(wanted)
    assert vocabulary.decode(texts[0].output_ids) in COLOURS


def test_in_the_loop_of_transformers() -> None:
    tokenizer = tiny_tokenizer()
    prompts = tokenizer(["The cat", "The dog"], return_tensors="pt")
    specs = [GrammarSpec.choice(COLOURS), GrammarSpec.json_schema(OPEN).with_backend("xgrammar")]
    processor = GrammarLogitsProcessor(specs, tokenizer, backend="listed")
    model: Any = tiny_model("llama")
    found = model.generate(
        **prompts, max_new_tokens=30, do_sample=False, logits_processor=[processor], pad_token_id=0
    )
    width = prompts["input_ids"].shape[1]
    texts = tokenizer.batch_decode(found[:, width:], skip_special_tokens=True)
    assert texts[0] in COLOURS
    assert texts[1] in ('{"a": true}', '{"a": false}')
