"""Texts and batches for any engine: the law of a seed, budgets, parameters, errors."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import pytest
import torch

from guided_spec.config import EngineConfig
from guided_spec.core import DecodeBatch, DraftInFlight, Proposer, TargetOutput
from guided_spec.errors import (
    BudgetTooSmallError,
    ConfigError,
    GrammarStateError,
    NoTokenLeftError,
    PromptError,
    UnsupportedSchemaError,
)
from guided_spec.grammar.completion.completion import EndingsCache
from guided_spec.grammar.protocol import legal_row
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.guide import Guide, GuidedText
from guided_spec.masks.constraint import Constraint
from guided_spec.proposers import build_proposer
from guided_spec.step import Committed, commit, speculative_step
from guided_spec.types import SamplingParams, Verifier
from tests.tiny_llm import VOCAB_SIZE, tiny_tokenizer
from tests.toys import CPU, ToyCompiled, text_rule, toy_context
from tests.toys import VOCABULARY as TOYS

CONFIG = EngineConfig(num_draft_tokens=3, max_forced_tokens=4, max_batch_size=3, verifier="coupled")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
JSON = GrammarSpec.json_schema(SCHEMA)


class HashTarget:
    """A model without weights: logits are a fixed function of the whole text."""

    def verify(self, batch: DecodeBatch, flight: DraftInFlight) -> TargetOutput:
        rows = []
        for context, drafted in zip(batch.contexts, flight.draft.token_ids.tolist(), strict=True):
            for length in range(len(drafted) + 1):
                key = zlib.crc32(repr([*context, *drafted[:length]]).encode())
                generator = torch.Generator().manual_seed(key)
                rows.append(torch.randn(VOCAB_SIZE, generator=generator) * 3)
        return TargetOutput(torch.stack(rows).view(len(batch), -1, VOCAB_SIZE))


@pytest.fixture(scope="module")
def guide() -> Iterator[Guide]:
    tokenizer = tiny_tokenizer()
    assert isinstance(tokenizer.eos_token_id, int)
    vocabulary = Vocabulary.from_tokenizer(tokenizer, VOCAB_SIZE, [tokenizer.eos_token_id])
    guide = Guide(vocabulary, tokenizer, CONFIG, device=CPU)
    yield guide
    guide.close()


def encode(text: str) -> list[int]:
    return list(tiny_tokenizer()(text, add_special_tokens=False)["input_ids"])


def proposer(guide: Guide, name: str) -> Proposer:
    context = toy_context(
        vocabulary=guide.vocabulary, encode=encode, tokenizer=tiny_tokenizer(), config=CONFIG
    )
    return build_proposer(name, context)


def finish(guide: Guide, texts: Sequence[GuidedText], name: str = "none") -> int:
    """Run all texts to their ends; returns the number of steps."""
    target, drafter, steps = HashTarget(), proposer(guide, name), 0
    while running := [text for text in texts if text.ended is None]:
        batch = guide.batch(running)
        step = speculative_step(target, drafter, batch)
        for text, row in zip(running, commit(batch, step.accepted), strict=True):
            text.append(row)
        steps += 1
    return steps


def write(guide: Guide, name: str, params: Sequence[SamplingParams]) -> list[list[int]]:
    prompt = encode("The name of the cat is Ada. ")
    texts = [guide.open(slot, prompt, one) for slot, one in enumerate(params)]
    finish(guide, texts, name)
    return [text.output_ids for text in texts]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_seed_gives_the_same_texts_with_any_proposer(guide: Guide, temperature: float) -> None:
    params = [
        SamplingParams(max_tokens=n, temperature=temperature, seed=n, grammar=grammar)
        for n, grammar in ((40, JSON), (30, JSON), (9, None))
    ]
    plain = write(guide, "none", params)
    for name in ("grammar_forced", "chain:grammar_forced+ngram"):
        assert write(guide, name, params) == plain
    for output, one in zip(plain[:2], params, strict=False):
        assert len(output) <= one.max_tokens
        jsonschema.validate(json.loads(guide.vocabulary.decode(output)), SCHEMA)


def test_parameters_decide(guide: Guide) -> None:
    word = encode("cat")[0]
    biased = SamplingParams(max_tokens=3, logit_bias={word: 1e6})
    banned = SamplingParams(max_tokens=3, logit_bias={word: 1e6}, bad_words="cat")
    long = SamplingParams(max_tokens=6, min_tokens=5, logit_bias={guide_end(guide): 1e6})
    first, second, third = write(guide, "ngram", [biased, banned, long])
    assert first == [word] * 3
    assert word not in second
    assert third[5:] == [guide_end(guide)]
    assert guide_end(guide) not in third[:5]


def guide_end(guide: Guide) -> int:
    return guide.vocabulary.stop_token_ids[0]


def test_a_request_without_any_token_left_fails_alone(guide: Guide) -> None:
    only = SamplingParams(grammar=GrammarSpec.choice(["yes"]), allowed_token_ids=encode("no"))
    texts = [guide.open(0, [1], only), guide.open(1, [1], SamplingParams(grammar=JSON))]
    finish(guide, texts)
    assert texts[0].ended == "error"
    assert isinstance(texts[0].error, NoTokenLeftError)
    assert texts[1].ended == "stop"


def test_what_ends_a_text(guide: Guide) -> None:
    end = guide_end(guide)
    text = guide.open(0, [5], SamplingParams(stop_token_ids=[7]))
    assert text.append(Committed([6, 7, 8], 2)) == [6, 7]
    assert text.ended == "stop"
    ignoring = guide.open(0, [5], SamplingParams(max_tokens=4, ignore_eos=True))
    assert ignoring.draft_limit == 3
    assert ignoring.append(Committed([end, 6], 1)) == [end, 6]
    assert ignoring.ended is None
    ignoring.append(Committed([6, 6], 1))
    assert ignoring.ended == "length"
    assert ignoring.output_ids == [end, 6, 6, 6]


def test_the_original_reads_a_text_before_it_has_ended(guide: Guide) -> None:
    specs = GrammarSpec.regex("[a-c]+"), GrammarSpec.regex("[A-C]+")
    params = [SamplingParams(grammar=spec, stop_token_ids=[7]) for spec in specs]
    text, other = (guide.open(slot, [5], each) for slot, each in enumerate(params))
    assert text.constraint is not None
    assert other.constraint is not None
    text.constraint.compiled = other.constraint.compiled
    text.constraint._original = other.constraint._original
    ids = tiny_tokenizer()("a", add_special_tokens=False)["input_ids"]
    assert text.constraint.commit_ahead(ids) == ids
    text.append(Committed(ids, 0))
    assert text.ended is None
    text.append(Committed([7], 0))
    assert text.ended == "error"
    assert isinstance(text.error, GrammarStateError)


def test_grammars_compile_ahead(guide: Guide) -> None:
    grammar = GrammarSpec.choice(["compiled", "ahead"])
    future = guide.prepare([1], SamplingParams(grammar=grammar))
    assert future is not None
    text = guide.open(0, [1], SamplingParams(grammar=grammar, complete=False))
    assert text.constraint is not None
    assert text.constraint.compiled is future.result(timeout=60)
    assert guide.prepare([1], SamplingParams()) is None


def test_a_seed_is_drawn_where_none_is_given(guide: Guide) -> None:
    assert guide.open(0, [1], SamplingParams(seed=3)).seed == 3
    assert guide.open(0, [1]).seed != guide.open(1, [1]).seed


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"slot": 3}, ConfigError, "slot=3: must be .* below max_batch_size=3"),
        ({"prompt_ids": []}, PromptError, "0 tokens"),
        ({"params": SamplingParams(bad_words=[[403]])}, ConfigError, "below .* 403"),
        ({"params": SamplingParams(stop_token_ids=[403])}, ConfigError, "below .* 403"),
        ({"params": SamplingParams(grammar=JSON, max_tokens=2)}, BudgetTooSmallError, "at least"),
        (
            {"params": SamplingParams(grammar=GrammarSpec.json_schema({"not": {"multipleOf": 2}}))},
            UnsupportedSchemaError,
            "positive spelling",
        ),
    ],
)
def test_what_cannot_be_opened(
    guide: Guide, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        guide.open(**{"slot": 0, "prompt_ids": [1], **changes})


def test_what_cannot_be_a_batch(guide: Guide) -> None:
    text = guide.open(0, [1])
    with pytest.raises(ConfigError, match="0 of them.*1 to 3"):
        guide.batch([])
    with pytest.raises(ConfigError, match="4 of them"):
        guide.batch([text] * 4)
    for slots in ([1, 0], [1, 1]):
        with pytest.raises(ConfigError, match="in the order of their slots"):
            guide.batch([guide.open(slot, [1]) for slot in slots])
    text.ended = "stop"
    with pytest.raises(ConfigError, match="slot 0.*has ended"):
        guide.batch([text])


def test_a_context_bounds_the_text() -> None:
    tokenizer = tiny_tokenizer()
    assert isinstance(tokenizer.eos_token_id, int)
    vocabulary = Vocabulary.from_tokenizer(tokenizer, VOCAB_SIZE, [tokenizer.eos_token_id])
    small = Guide(vocabulary, tokenizer, EngineConfig(max_model_len=4), device=CPU)
    text = small.open(0, [1, 2], SamplingParams(max_tokens=100))
    assert text.max_length == 4
    with pytest.raises(PromptError, match="fewer than max_model_len=4"):
        small.open(0, [1, 2, 3, 4])
    small.close()


def test_the_noise_of_a_draft_policy() -> None:
    """A coupled text is the same under each; a rejected draft must not foretell another one."""
    params = [SamplingParams(seed=3, draft_policy=policy) for policy in ("mask", "validate")]
    counts: dict[Verifier, int] = {"coupled": 1, "rejection": 2}
    for verifier, count in counts.items():
        guide = Guide(TOYS, None, EngineConfig(verifier=verifier), device=CPU)
        assert len({guide.open(0, [1], one).noise_key for one in params}) == count
        guide.close()


def test_a_text_that_fails_counts_what_its_budget_cut() -> None:
    """Its last tokens were committed in the step that failed, and no matcher had read them."""
    text = GuidedText.begin([0], SamplingParams(max_tokens=4), TOYS, max_length=9, seed=0)
    inner = ToyCompiled(text_rule([b"abc", b"abcdefgh", b"abdefgha"]))
    grammar = EndingsCache(TOYS).bound(inner, 4, is_required=True)
    text.constraint = constraint = Constraint(grammar, TOYS.stop_token_ids)
    fork = constraint.fork()
    for token in (0, 1, 2):
        assert legal_row(fork.text, TOYS.vocab_size).any()
        assert fork.text.accept_token(token)
    assert constraint.commit_ahead([0, 1, 2]) == [0, 1, 2]
    error = NoTokenLeftError("nothing may follow")
    text.end("error", error)
    assert text.error is error
    assert constraint.steered == [2]
