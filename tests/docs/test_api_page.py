"""docs/api.md has every public name and method, and the errors; docstrings have the rest."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import pytest

import guided_spec
from guided_spec import (
    LLM,
    ChatCompletion,
    ChatOutput,
    ChoiceOutput,
    Chunk,
    Completion,
    EngineConfig,
    GrammarSpec,
    RequestOutput,
    RequestStats,
    SamplingParams,
    TokenLogprobs,
    ToolCall,
    TopLogprob,
    errors,
)
from guided_spec.engine.chat import ChatOptions
from guided_spec.engine.options import Options
from guided_spec.grammar.limits import GrammarLimits
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text()
RECORDS: tuple[Any, ...] = (
    *(ChatCompletion, ChatOutput, ChoiceOutput, Chunk, Completion, RequestOutput, RequestStats),
    *(TokenLogprobs, ToolCall, TopLogprob),
)


def test_it_has_every_public_name() -> None:
    missing = [name for name in guided_spec.__all__ if not re.search(rf"\b{name}\b", PAGE)]
    assert not missing, "not in docs/api.md"


def test_it_draws_the_error_tree() -> None:
    tree = (errors.__doc__ or "").split("\n\n", 1)[1].strip()
    assert tree in PAGE


@pytest.mark.parametrize("record", [SamplingParams, EngineConfig, GrammarLimits])
def test_every_option_is_described(record: Any) -> None:
    described, names = inspect.getdoc(record) or "", [f.name for f in dataclasses.fields(record)]
    assert [
        name for name in names if not re.search(rf"^ *{name}\b|, {name}\b", described, re.M)
    ] == []


@pytest.mark.parametrize("kind", [LLM, GrammarSpec])
def test_it_has_every_method_and_the_reference_describes_it(kind: type) -> None:
    methods = [(n, m) for n, m in inspect.getmembers(kind, inspect.isroutine) if n[0] != "_"]
    assert len(methods) > 5
    assert [name for name, _ in methods if not re.search(rf"[`.]{name}[`(]", PAGE)] == []
    assert [name for name, method in methods if not method.__doc__] == []


@pytest.mark.parametrize("record", RECORDS)
def test_every_field_and_property_of_what_comes_back_is_described(record: Any) -> None:
    described = inspect.getdoc(record) or ""
    names = [name for name in inspect.get_annotations(record) if name[0] != "_"]
    assert [name for name in names if not re.search(rf"\b{name}\b", described)] == []
    properties = inspect.getmembers(record, lambda member: isinstance(member, property))
    assert [name for name, member in properties if not member.__doc__] == []


def test_pages_have_every_option_of_loading_and_of_chat() -> None:
    assert [name for name in Options.LOAD_KINDS if f"`{name}`" not in PAGE] == []
    chat = (ROOT / "docs" / "chat_and_tools.md").read_text()
    assert [n for n in ChatOptions.__annotations__ if not re.search(rf"\b{n}\b", chat)] == []
