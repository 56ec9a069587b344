"""Grammars with large counts: compiled by other compilers where vLLM's own give up."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import xgrammar
from transformers import AutoTokenizer

from guided_spec.grammar.backends.ebnf import regex_ebnf
from guided_spec.grammar.backends.xgrammar import CACHE_BUG
from guided_spec.integrations.vllm import counts as vllm_counts
from guided_spec.integrations.vllm.counts import Remembering, compile_again
from guided_spec.integrations.vllm.plugin import installed_version
from tests.integrations.vllm.fake import MODEL

LARGE = regex_ebnf("[a-z]{129}")
SMALL = regex_ebnf("[a-z]{3}")


class Backend:
    """As vLLM's: a compiler with xgrammar's caches, which fails where that of 0.2.8 does."""

    def __init__(self) -> None:
        tokenizer = AutoTokenizer.from_pretrained(str(MODEL))
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
        self.compiler: Any = xgrammar.GrammarCompiler(info)
        self.seen: list[Any] = []

    def compile_grammar(self, request_type: str, grammar_spec: str) -> Any:
        self.seen.append(self.compiler)
        if grammar_spec == LARGE and not isinstance(self.compiler, Remembering):
            raise RuntimeError(CACHE_BUG)  # later releases compile it
        return getattr(self.compiler, f"compile_{request_type}")(grammar_spec)


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The features that have done something; vLLM brings Prometheus's package."""
    found: list[str] = []
    monkeypatch.setattr(vllm_counts, "count", found.append)
    return found


def test_large_counts_are_compiled_without_the_cache(
    monkeypatch: pytest.MonkeyPatch, counted: list[str]
) -> None:
    backend = Backend()
    with pytest.raises(RuntimeError, match=CACHE_BUG):
        backend.compile_grammar("grammar", LARGE)
    monkeypatch.setattr(Backend, "compile_grammar", compile_again(Backend.compile_grammar))
    found = backend.compile_grammar("grammar", LARGE)
    assert backend.compile_grammar("grammar", LARGE) is found  # it is remembered
    matcher = xgrammar.GrammarMatcher(found)
    assert matcher.accept_string("a" * 129)
    assert not matcher.accept_string("a")
    used = len(backend.seen)
    assert isinstance(backend.seen[-1], Remembering)
    backend.compile_grammar("grammar", SMALL)
    assert backend.seen[used:] == [backend.compiler]
    assert counted == ["counts", "counts"]


def test_other_failures_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backend, "compile_grammar", compile_again(Backend.compile_grammar))
    backend = Backend()
    with pytest.raises(RuntimeError):
        backend.compile_grammar("grammar", "root ::= (")
    assert backend.seen == [backend.compiler]


@pytest.mark.skipif(installed_version() is None, reason="vLLM is not installed")
@pytest.mark.filterwarnings("ignore")  # vLLM's own
def test_vllms_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: Any = importlib.import_module("tests.integrations.vllm.parts")
    module: Any = importlib.import_module("vllm.v1.structured_output.backend_xgrammar")
    types: Any = importlib.import_module("vllm.v1.structured_output.backend_types")
    original = module.XgrammarBackend.compile_grammar
    config = parts.make_config()
    size = config.model_config.get_vocab_size()
    backend = module.XgrammarBackend(config, tokenizer=parts.tokenizer(), vocab_size=size)
    kind = types.StructuredOutputOptions
    schema = '{"type": "string", "pattern": "^[a-z]{200}$"}'
    with pytest.raises(RuntimeError, match=CACHE_BUG):
        original(backend, kind.JSON, schema)
    patched = compile_again(original)
    monkeypatch.setattr(module.XgrammarBackend, "compile_grammar", patched)
    for option, source in ((kind.JSON, schema), (kind.GRAMMAR, LARGE)):
        assert isinstance(backend.compile_grammar(option, source), module.XgrammarGrammar)
    assert isinstance(backend.compiler, xgrammar.GrammarCompiler)  # it stays vLLM's own
