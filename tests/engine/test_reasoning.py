"""Constraints behind a marker, through the whole engine."""

from __future__ import annotations

import copy
import json
import re
from functools import cache

import jsonschema
import pytest

from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Completion
from guided_spec.errors import GrammarCompileError
from guided_spec.evaluate.measurement import is_valid
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.types import SamplingParams
from tests.tiny_llm import make_llm, near_copy, tiny_tokenizer

PATTERN = "[a-z]{2,6}-[0-9]{3}"
CODE = GrammarSpec.regex(PATTERN)
SCHEMA = GrammarSpec.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    },
    any_whitespace=True,
)
PROMPTS = ("The name of the cat", "call 123-abcd call 123-abcd")
LENGTH = 32
PROPOSERS = (
    "ngram",
    "draft_model:validate",
    "chain:grammar_forced+ngram",
    "chain:grammar_forced+draft_model",
)


@cache
def free_text(prompt: str) -> str:
    """What the model writes without a grammar, however long."""
    with make_llm("llama") as llm:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        return llm.generate(prompt, params)[0].text


def markers(prompt: str) -> list[str]:
    """Markers that the model comes by itself to write: at the start, later, and of any length."""
    text = free_text(prompt)
    assert len(text) > 12
    return [text[:1], text[3:5], text[6:10]]


@cache
def requests() -> list[tuple[str, GrammarSpec | None]]:
    found: list[tuple[str, GrammarSpec | None]] = []
    for prompt in PROMPTS:
        early, *later = markers(prompt)
        specs = [CODE, None, CODE.after("so: ", reasoning_budget=3), CODE.after(early)]
        specs += [SCHEMA.after("<think>", reasoning_budget=5), *map(CODE.after, later)]
        found += [(prompt, spec) for spec in specs]
    return found


@cache
def run(proposer: str, temperature: float = 0.0) -> list[Completion]:
    draft = near_copy("llama") if "draft_model" in proposer else None
    prompts = [prompt for prompt, _ in requests()]
    params = [
        SamplingParams(max_tokens=LENGTH, grammar=spec, temperature=temperature, seed=seed)
        for seed, (_, spec) in enumerate(requests())
    ]
    with make_llm("llama", proposer, draft, max_batch_size=6) as llm:
        outputs = llm.generate(prompts, params, on_error="return")
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.completions[0] for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_speculation_changes_nothing(proposer: str) -> None:
    """Free, constrained and started requests in one batch; policies that draft past the marker."""
    found, expected = run(proposer), run("none")
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [c.finish_reason for c in found] == [c.finish_reason for c in expected]
    if "draft_model" in proposer:
        assert sum(sum(c.stats.accepted) for c in found) > 20


@pytest.mark.parametrize(
    ("proposer", "temperature"),
    [("none", 0.0), (PROPOSERS[-1], 1.0), ("draft_model:validate", 1.0)],
)
def test_the_text_behind_the_marker_is_valid(proposer: str, temperature: float) -> None:
    ended = 0
    for (_, spec), completion in zip(requests(), run(proposer, temperature), strict=True):
        if spec is None or completion.finish_reason == "length":
            continue
        ended += 1
        assert is_valid(completion.text, spec), (spec, completion.text)
        if spec.start is not None:
            assert isinstance(spec.start.marker, str)
            assert spec.start.marker in completion.text
    assert ended >= 4


def test_the_text_before_the_marker_is_free() -> None:
    """What the model writes without a grammar, unless a token that runs past the marker differs."""
    same = 0
    for (prompt, spec), completion in zip(requests(), run("none"), strict=True):
        if spec is None or spec.start is None:
            continue
        assert isinstance(spec.start.marker, str)
        before, marker, _ = completion.text.partition(spec.start.marker)
        assert marker or completion.finish_reason == "length"
        same += len(before) > 2 and free_text(prompt).startswith(before)
    assert same >= 4


def one(
    llm: LLM,
    prompt: object,
    spec: GrammarSpec,
    max_tokens: int = 48,
    complete: bool | None = None,  # noqa: FBT001  # as SamplingParams has it
) -> Completion:
    params = SamplingParams(max_tokens=max_tokens, grammar=spec, complete=complete)
    return llm.generate(prompt, params, on_error="return")[0].completions[0]  # type: ignore[arg-type]


def test_budgets_and_lengths() -> None:
    """A budget writes the marker; without one the length ends the text, never end-of-text."""
    with make_llm("llama", "chain:grammar_forced+ngram") as llm:
        never = CODE.after("\u4f60\u4f60\u4f60\u4f60")
        for length in (1, 5, 40):
            completion = one(llm, "A", never, length, complete=False)
            assert completion.finish_reason == "length"
            assert len(completion.token_ids) == length
            assert not set(completion.token_ids) & set(llm.vocabulary.stop_token_ids)
        for budget in (0, 3, 9):
            completion = one(llm, "A", CODE.after("<think>", reasoning_budget=budget))
            assert completion.finish_reason == "stop"
            before, _, behind = completion.text.partition("<think>")
            assert re.fullmatch(PATTERN, behind)
            (added,) = llm.encode("<think>")
            assert completion.token_ids.index(added) == budget
            assert free_text("A").startswith(before)


def test_a_prompt_that_ends_with_the_marker_binds_at_once() -> None:
    with make_llm("llama", "ngram") as llm:
        for prompt in ("A <think>\n\n", "A <think>", llm.encode("A <think> \n")):
            assert re.fullmatch(PATTERN, one(llm, prompt, CODE.after("<think>")).text)
        opened = one(llm, "A <think> b", CODE.after("<think>", reasoning_budget=2))
        assert re.fullmatch(f"(?s).*<think>{PATTERN}", opened.text)


def test_a_chat_template_names_the_marker_and_may_close_it() -> None:
    own = copy.deepcopy(tiny_tokenizer())  # the other one is shared
    own.chat_template = (
        "{{ messages[0]['content'] }}{{ 'A</think>\n\n' if messages|length > 1 else '</seed' }}"
    )
    chat = [{"role": "user", "content": "A"}]
    with make_llm("llama", "ngram", tokenizer=own) as llm:
        spec = CODE.after(reasoning_budget=4)
        assert re.fullmatch(PATTERN, one(llm, [*chat, *chat], spec).text)
        opened = one(llm, chat, spec).text
        assert re.fullmatch(f"(?s).*</think>{PATTERN}", opened)


def test_markers_that_do_not_exist_fail_their_own_request() -> None:
    with make_llm("llama") as llm:
        params = [SamplingParams(grammar=s) for s in (CODE.after(), CODE.after("<eos>"), CODE)]
        outputs = llm.generate(["A"] * 3, params, on_error="return")
    assert [type(output.error) for output in outputs] == [
        GrammarCompileError,
        GrammarCompileError,
        type(None),
    ]


def test_tool_calls_behind_reasoning() -> None:
    """Free reasoning, then calls whose arguments match; the trigger spans tokens of a draft."""
    parameters = json.loads(SCHEMA.source)
    tools = [{"type": "function", "function": {"name": "note", "parameters": parameters}}]
    spec = GrammarSpec.tools(tools, "required", parallel_tool_calls=False)
    spec = spec.after("</r>", reasoning_budget=4)
    texts = []
    for proposer in ("none", "chain:grammar_forced+ngram", "draft_model:validate"):
        draft = near_copy("llama") if "draft_model" in proposer else None
        with make_llm("llama", proposer, draft) as llm:
            params = [
                SamplingParams(max_tokens=150, grammar=spec, temperature=t, seed=seed)
                for t, seed in ((0.0, 0), (1.0, 1), (1.0, 2))
            ]
            outputs = llm.generate([PROMPTS[0]] * 3, params, on_error="return")
        texts.append(outputs[0].text)
        for output in outputs:
            assert output.error is None
            _, _, behind = output.text.partition("</r>")
            if output.finish_reason == "stop":
                inner = behind.removeprefix("<tool_call>").removesuffix("</tool_call>")
                jsonschema.validate(json.loads(inner)["arguments"], parameters)
            assert behind.startswith('<tool_call>\n{"name": "note", "arguments": {')
    assert len(set(texts)) == 1
