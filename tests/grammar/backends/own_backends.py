"""Grammar backends as a user writes them: one that works, and what may be wrong with one."""

from __future__ import annotations

import json
from typing import Any

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from tests.toys import ToyCompiled, ToyMatcher, text_rule


class Listed:
    """One of a few texts, by a matcher that asserts that it is used as the protocol says."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.specs: list[GrammarSpec] = []

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        self.specs.append(spec)
        if spec.kind != "choice":
            raise GrammarCompileError(f"listed compiles choice, not {spec.kind}")
        texts = [text.encode() for text in json.loads(spec.source)]
        return ToyCompiled(text_rule(texts, self.vocabulary), self.vocabulary)


class Handing:
    """Hands every grammar on to xgrammar, whatever backend it names."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._other = XGrammarBackend(vocabulary)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        assert spec.backend is None
        return self._other.compile(spec)


class Broken:
    """A ``Listed`` whose matchers are of the class that ``change`` makes of theirs."""

    def __init__(self, vocabulary: Vocabulary, change: Any) -> None:
        self.vocabulary = vocabulary
        self._change = change

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        compiled = Listed(self.vocabulary).compile(spec)
        assert isinstance(compiled, ToyCompiled)
        return _Changed(compiled, self._change)


class _Changed(ToyCompiled):
    def __init__(self, compiled: ToyCompiled, change: Any) -> None:
        super().__init__(compiled.rule, compiled.vocabulary)
        self.change = change

    def new_matcher(self) -> ToyMatcher:
        matcher: ToyMatcher = self.change(ToyMatcher)(self)
        return matcher


def faulty(method: str, length: int, fault: Any) -> Any:
    """A change: from ``length`` tokens on a method does ``fault(matcher)`` in place of its work."""

    def change(base: type[ToyMatcher]) -> type[ToyMatcher]:
        own = getattr(base, method)

        def changed(self: ToyMatcher, *arguments: Any) -> Any:
            return own(self, *arguments) if len(self.tokens) < length else fault(self)

        def fork(self: ToyMatcher) -> ToyMatcher:
            return type(self)(self.compiled, self.tokens)

        return type("Faulty", (base,), {"fork": fork, method: changed})

    return change
