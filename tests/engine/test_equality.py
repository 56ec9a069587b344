"""Greedy speculation writes the tokens that plain constrained decoding writes, one by one."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from guided_spec.engine.outputs import Completion
from guided_spec.evaluate.measurement import WorkItem, run_transformers
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.types import SamplingParams
from tests.cases import rotated
from tests.tiny_llm import STORIES, make_llm, near_copy, tiny_model

# architecture: (slots, prompt tokens of one prefill forward) to run with
SIZES: dict[str, tuple[tuple[int, int], ...]] = {
    "llama": ((1, 1024), (3, 7), (5, 16)),
    "qwen3": ((5, 16),),
    "mistral": ((1, 11), (3, 7)),
    "gemma3": ((3, 16),),
    "deepseek_v3": ((5, 7),),
    "qwen3_5": ((3, 7),),
}
PROPOSERS = (
    "none",
    "ngram",
    "grammar_forced",
    "draft_model",
    "suffix",
    "chain:grammar_forced+ngram",
    "chain:grammar_forced+suffix",
    "chain:grammar_forced+draft_model",
)
STORY_PAIR = {"model": str(STORIES / "target"), "draft": str(STORIES / "draft")}

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 200},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
REQUESTS: tuple[tuple[str, SamplingParams], ...] = (
    ("The name of the cat", SamplingParams(grammar=GrammarSpec.json_schema(SCHEMA))),
    ("A", SamplingParams(max_tokens=24)),
    (
        '{"name": "Ada", "age": 36, "kind": "cat", "tags": [true]} and once more: ',
        SamplingParams(grammar=GrammarSpec.json_schema(SCHEMA, any_whitespace=True)),
    ),
    ("call 123-abcd 123-abcd", SamplingParams(grammar=GrammarSpec.regex("[0-9]{3}-[a-z]{4,8}"))),
    (
        "cat or dog?",
        SamplingParams(grammar=GrammarSpec.choice(["a cat", "a dog", "a caterpillar"])),
    ),
    ("on and on and on and on and on", SamplingParams(max_tokens=17, ignore_eos=True)),
    (
        "the end",
        SamplingParams(max_tokens=9, grammar=GrammarSpec.json_schema(SCHEMA), complete=False),
    ),
)
PROMPTS = [prompt for prompt, _ in REQUESTS]
PARAMS = [
    params if params.max_tokens < 256 else SamplingParams(max_tokens=48, grammar=params.grammar)
    for _, params in REQUESTS
]


def generate(model: Any, proposer: str, draft: Any = None, **options: Any) -> list[Completion]:
    with make_llm(model, proposer, draft, **options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, on_error="return")
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return [output.completions[0] for output in outputs]


@cache
def plain(model: str) -> list[Completion]:
    """``none``, one request after another, whole prompts."""
    return generate(model, "none", max_batch_size=1)


def tokens(completions: list[Completion]) -> list[tuple[list[int], str, str]]:
    return [(c.token_ids, c.text, c.finish_reason) for c in completions]


def accepted(completions: list[Completion]) -> list[int]:
    return [sum(c.stats.accepted) for c in completions]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "proposer"), rotated([*SIZES], PROPOSERS, each=4))
def test_speculation_changes_nothing(architecture: str, proposer: str) -> None:
    """Seven requests in one, three or five slots: they queue, and slots are used again."""
    draft = near_copy(architecture) if "draft_model" in proposer else None
    expected = tokens(plain(architecture))
    assert any(reason == "stop" for *_, reason in expected)
    for batch_size, prefill_tokens in SIZES[architecture]:
        found = generate(
            architecture,
            proposer,
            draft,
            max_batch_size=batch_size,
            prefill_tokens=prefill_tokens,
        )
        assert tokens(found) == expected
        if draft is not None:
            assert sum(accepted(found)) > 20
            assert len(set(accepted(found))) > 2  # ragged: rows move on at their own pace


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["draft_model", "chain:grammar_forced+draft_model"])
@pytest.mark.parametrize(
    ("architecture", "draft"), [("llama", "qwen3"), ("mistral", "qwen3_5"), ("qwen3_5", "llama")]
)
def test_a_foreign_draft_changes_nothing(architecture: str, draft: str, proposer: str) -> None:
    """Another random model of the same vocabulary, which is mostly wrong; once a hybrid one."""
    model = tiny_model(draft, seed=3)
    found = generate(architecture, proposer, model, max_batch_size=3, prefill_tokens=5)
    assert tokens(found) == tokens(plain(architecture))
    assert all(sum(c.stats.drafted) > 0 for c in found)


@pytest.mark.slow
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 11])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_any_draft_length_changes_nothing(architecture: str, num_draft_tokens: int) -> None:
    found = generate(
        architecture,
        "chain:grammar_forced+draft_model",
        near_copy(architecture),
        num_draft_tokens=num_draft_tokens,
        max_batch_size=4,
    )
    assert tokens(found) == tokens(plain(architecture))


def test_a_chain_of_three_fits_its_masks() -> None:
    """Full forced stretches of two requests in one step, at different depths of the draft."""
    patterns = ("(?:xyxz){20}[a-c]", "[a-c](?:xyxz){20}")
    params = [SamplingParams(max_tokens=99, grammar=GrammarSpec.regex(p)) for p in patterns]
    prompts = ["xyxz" * 5, "no repeats"]
    with make_llm("llama", "none") as llm:
        expected = llm.generate(prompts, params, on_error="return")
    name = "chain:grammar_forced+ngram+draft_model"
    options: dict[str, Any] = {"max_forced_tokens": 16, "num_draft_tokens": 5}
    with make_llm("llama", name, near_copy("llama"), **options) as llm:
        llm.compile(GrammarSpec.regex(p) for p in patterns)  # so that both start together
        found = llm.generate(prompts, params, on_error="return")
    assert [output.error for output in found] == [None, None]
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]
    assert min(len(output.stats.drafted) for output in found) > 16


@pytest.mark.slow
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_stories(proposer: str) -> None:
    """Real weights that nobody here trained: peaked distributions, text outside the mask."""
    model, draft = STORY_PAIR["model"], STORY_PAIR["draft"]
    expected = plain(model)
    found = generate(model, proposer, draft, max_batch_size=3, prefill_tokens=9)
    assert tokens(found) == tokens(expected)
    if "draft_model" in proposer:
        assert sum(accepted(found)) > 20


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3_5"])
def test_plain_decoding_is_what_transformers_generates(architecture: str) -> None:
    """With xgrammar's own logits processor, which shares no code with the engine's loop."""
    items = [
        WorkItem(prompt, params.grammar)
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        if params.max_tokens == 48
    ]
    with make_llm(architecture, "none") as llm:
        cut = [None if item.grammar is None else False for item in items]
        params = [
            SamplingParams(max_tokens=48, grammar=item.grammar, complete=complete)
            for item, complete in zip(items, cut, strict=True)
        ]
        ours = llm.generate([item.prompt for item in items], params)
        prompts = [llm.encode(item.prompt) for item in items]
        theirs = run_transformers(llm.model, llm.vocabulary, prompts, items, max_tokens=48)
    assert [output.text for output in ours] == theirs.texts
    assert sum(len(output.token_ids) for output in ours) == theirs.tokens
