"""The public face: every name in ``__all__`` exists, is sorted, and is typed where it is lazy."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import guided_spec
from guided_spec import errors

PACKAGE = Path(guided_spec.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
PROMISED = {
    *("LLM", "SamplingParams", "GrammarSpec", "EngineConfig"),
    *("RequestOutput", "Completion", "ChoiceOutput", "Chunk", "RequestStats", "RoutedExperts"),
    *("TokenLogprobs", "TopLogprob", "ChatOutput", "ChatCompletion", "ToolCall"),
    *("Draft", "Accepted", "Noise", "rejection_sample"),
    *("PROPOSERS", "register_proposer", "Proposer", "ProposerContext", "from_propose"),
    *("DecodeBatch", "Lookahead", "speculative_step", "commit"),
    *("generate", "GrammarLogitsProcessor"),
    *("GRAMMAR_BACKENDS", "register_grammar_backend", "check_grammar_backend"),
    *("GrammarBackend", "CompiledGrammar", "GrammarMatcher", "Vocabulary"),
    *errors.__all__,
}


def sort_key(name: str) -> tuple[int, list[str | int]]:
    """As ruff's RUF022: constants, then classes, then functions; numbers by their value."""
    kind = 0 if name.isupper() else 1 if name[:1].isupper() else 2
    pieces = re.split(r"(\d+)", name)
    return kind, [int(piece) if piece.isdigit() else piece for piece in pieces]


def test_all_is_complete_and_sorted() -> None:
    assert set(guided_spec.__all__) == PROMISED
    assert guided_spec.__all__ == sorted(guided_spec.__all__, key=sort_key)


def test_every_name_resolves_to_its_own_object() -> None:
    for name in sorted(PROMISED):
        value = getattr(guided_spec, name)
        assert getattr(value, "__name__", name) == name
        assert name in dir(guided_spec)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(seen) == set(guided_spec.__all__)
    for name, module in seen.items():
        assert module is not None
        assert getattr(guided_spec, name) is getattr(importlib.import_module(module), name)


def test_every_error_is_exported() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.GuidedSpecError)
    }
    assert defined == set(errors.__all__)
    assert all(name in (errors.__doc__ or "") for name in defined)


def test_version_is_the_installed_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", guided_spec.__version__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'guided_spec' has no attribute 'nothing'"):
        _ = guided_spec.nothing


def test_import_alone_is_light() -> None:
    code = "import sys, guided_spec; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_every_module_says_what_it_is() -> None:
    silent = [p for p in MODULES if not ast.get_docstring(ast.parse(p.read_text("utf-8")))]
    assert silent == []
