"""Calls whose marks are added tokens end within their budgets, as those of plain text do."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest

from guided_spec.errors import BudgetTooSmallError
from guided_spec.grammar.completion.completion import CompletingGrammar, EndingsCache
from guided_spec.grammar.completion.spelling import mark_of
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.tools.format import ToolRules, read_tools
from guided_spec.grammar.tools.formats import TOOL_FORMATS
from guided_spec.grammar.tools.reasoning import Reasoning
from tests.grammar.tools.test_tool_formats import (
    BACKENDS,
    CALLS,
    EOS,
    LIGHTS,
    Side,
    side,
    spell,
    vocabulary,
)


@cache
def endings(kind: str) -> EndingsCache:
    return EndingsCache(vocabulary(kind))


def with_reasoning(name: str, kind: str) -> Side:
    known = TOOL_FORMATS[name]
    content = Reasoning("<think>", "</think>").before(known.content(ToolRules(read_tools(LIGHTS))))
    tag = GrammarSpec.structural_tag({"type": "structural_tag", "format": content})
    plain = side(name, kind, LIGHTS, "auto")
    return plain._replace(compiled=BACKENDS[kind].compile(tag))


def finish(found: Side, kind: str, begun: list[int], budget: int, seed: int) -> list[int] | None:
    """The text after some tokens and random ones; None where the budget leaves no room for them."""
    grammar = endings(kind).bound(found.compiled, budget, is_required=False)
    assert isinstance(grammar, CompletingGrammar)
    assert grammar.endings.is_exact
    matcher, dice = grammar.new_matcher(), random.Random(seed)
    row = np.zeros((1, -(-vocabulary(kind).vocab_size // 32)), dtype=np.int32)
    token_ids = list[int]()
    while True:
        matcher.fill_next_token_bitmask(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: vocabulary(kind).vocab_size]
        legal = [int(t) for t in np.flatnonzero(bits) if t not in found.compiled.excluded]
        token = begun[len(token_ids)] if len(token_ids) < len(begun) else dice.choice(legal)
        if token not in legal:
            return None
        assert matcher.accept_token(token)
        if token == EOS:
            return token_ids
        token_ids.append(token)
        assert len(token_ids) < budget


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["tokens", "some", "think"])
@pytest.mark.parametrize(
    "name", ["hermes", "qwen3_coder", "deepseek_v4", "mistral_v13", "glm_4_5", "kimi_k2"]
)
def test_a_call_is_whole_within_its_budget(name: str, kind: str) -> None:
    arguments = '{"on": true, "room": "the hall"}'
    text = CALLS[name].replace("%", arguments)
    cut = text[: text.index("hall")]
    for found in (side(name, kind, LIGHTS, "auto"), with_reasoning(name, kind)):
        for seed in range(3):
            budget = len(spell(text, kind)) + 5 * seed
            token_ids = finish(found, kind, spell(cut, kind), budget, seed)
            assert token_ids is not None
            calls = found.read(token_ids).calls
            assert calls
            for call in calls:
                jsonschema.validate(call.arguments, dict(found.tools[0].parameters))


@pytest.mark.parametrize("kind", ["tokens", "some", "think"])
@pytest.mark.parametrize("name", CALLS)
def test_any_text_ends_within_its_budget(name: str, kind: str) -> None:
    choices: tuple[Any, ...] = ("auto", "required", "light")
    for choice in choices:
        found = side(name, kind, LIGHTS, choice)
        shortest = endings(kind).of(found.compiled)
        least = shortest.cost(shortest.start)
        for seed in range(6):
            token_ids = finish(found, kind, [], least + 7 * seed, seed)
            assert token_ids is not None
            assert choice == "auto" or found.read(token_ids).calls
        with pytest.raises(BudgetTooSmallError):
            endings(kind).bound(found.compiled, least - 1, is_required=True)


def test_no_mark_begins_another() -> None:
    marks = [mark_of(token_id) for token_id in (1, 10, 100, 151657, 151658, 16)]
    assert not any(a != b and b.startswith(a) for a in marks for b in marks)
