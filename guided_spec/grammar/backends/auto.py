"""The choice of a grammar backend: one by its name, or for each schema the better of two."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

from guided_spec.errors import ConfigError, GrammarCompileError, UnsupportedSchemaError
from guided_spec.grammar.backends.ebnf import any_order_notes
from guided_spec.grammar.backends.guarded import GuardedBackend
from guided_spec.grammar.backends.llguidance import LLGuidanceBackend, LLGuidanceGrammar
from guided_spec.grammar.backends.ordered_objects import holds_ordered_object
from guided_spec.grammar.backends.registry import (
    GRAMMAR_BACKENDS,
    BackendFactory,
    find_grammar_backend,
)
from guided_spec.grammar.backends.xgrammar import XGrammarBackend, XGrammarGrammar
from guided_spec.grammar.document import (
    LARGE_SOURCE,
    DocumentBackend,
    DocumentCompiler,
    SpecDocument,
)
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.recipe import Recipe
from guided_spec.grammar.schema.lowered import is_narrowed
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.steps import spend_on_value
from guided_spec.grammar.text.unique_keys import MaybeUnique
from guided_spec.grammar.vocabulary import Vocabulary

_MOST_CHARACTERS = 128  # that xgrammar 0.2.8 counts without looking at the whole vocabulary
# Characters that lengths count, times tokens of the vocabulary: xgrammar looks at all tokens after
# every character that it counts, which takes 21 ms of 150,000 tokens, so that this is 0.2 s.
# llguidance compiles for 2 ms, for masks of 0.04 to 0.3 ms where xgrammar's take 0.03.
_MOST_COUNTED = 1_400_000
# Of a regex, those of groups inside each other multiplied. xgrammar writes each repeat out: beyond
# 32 it compiles for 0.3 to 12 s with 150,000 tokens, for masks of 0.01 ms. llguidance compiles for
# milliseconds, for masks of 0.1 to 1.3 ms.
_MOST_REPEATS = 32

_Compiled = MaybeUnique[XGrammarGrammar] | MaybeUnique[LLGuidanceGrammar]


class AutoBackend(DocumentBackend[_Compiled]):
    """Per JSON schema the backend that enforces all of it and rejects the least.

    That is xgrammar, whose masks cost less, for schemas that it takes as they are: objects without
    further keys, no large counts. It is llguidance for those that xgrammar would narrow or not
    enforce in full, for large ones, which it compiles far faster, for strings whose lengths are
    counted so far that xgrammar compiles for more than 0.2 s (9 characters with 150,000 tokens, 44
    with 32,000), and for patterns that count beyond 128 characters, where each of xgrammar's rows
    costs tens of milliseconds. What llguidance refuses too goes to xgrammar, narrowed, or is
    refused. So it is with regexes that repeat anything more than 32 times, and with structural tags
    that count so far or that xgrammar refuses, if llguidance can write them; all other kinds of
    grammar are xgrammar's. Under
    ``key_order="any"`` xgrammar gets only what holds no object of more than 8 keys.

    The attribute ``backend`` of a compiled grammar names the one that took it.

    compile_threads: as for ``XGrammarBackend``.
    """

    def __init__(self, vocabulary: Vocabulary, *, compile_threads: int = 2) -> None:
        self.vocabulary = vocabulary
        self._first = XGrammarBackend(vocabulary, compile_threads=compile_threads)

    def enforce(self, document: SpecDocument) -> _Compiled:
        """As ``compile``, whatever ``unsupported`` is: what cannot be enforced is refused.

        An UnsupportedSchemaError gives the reasons of both, where both were asked.
        """
        spec = document.spec
        if spec.kind == "regex" and document.size.repetitions.value > _MOST_REPEATS:
            with suppress(GrammarCompileError):
                return self._second.enforce(document)
        if spec.kind == "structural_tag":
            return self._enforce_tag(document)
        if spec.kind != "json_schema" or self._is_for_xgrammar(document):
            return self._first.enforce(document)
        try:
            return self._second.enforce(document)
        except UnsupportedSchemaError as error:
            refused = error
        try:
            return self._first.enforce(document)
        except UnsupportedSchemaError as error:
            if not _is_xgrammars_alone(document):
                raise
            raise UnsupportedSchemaError(f"{error}\n{refused}") from error

    def _enforce_tag(self, document: SpecDocument) -> _Compiled:
        """llguidance's where it counts or xgrammar refuses, as far as that can write the tag."""
        refused: UnsupportedSchemaError | None = None
        if not self._counts_far(document):
            try:
                return self._first.enforce(document)
            except UnsupportedSchemaError as error:
                refused = error
        with suppress(GrammarCompileError):
            return self._second.enforce(document)
        if refused is not None:
            raise refused
        return self._first.enforce(document)

    def rebuild(self, spec: GrammarSpec, recipe: Recipe) -> _Compiled:
        """Compile once more what one of the two has compiled for ``spec``, here or elsewhere."""
        if recipe.backend == XGrammarGrammar.backend:
            return self._first.rebuild(spec, recipe)
        return self._second.rebuild(spec, recipe)

    def _is_for_xgrammar(self, document: SpecDocument) -> bool:
        """Whether xgrammar takes the schema as it is, and soon."""
        if document.size.large or self._counts_far(document):
            return False
        prepared = document.examined
        spend_on_value(prepared.schema)
        # One that is large once it is written out is large too.
        if is_narrowed(prepared.entries) or len(json.dumps(prepared.schema)) > LARGE_SOURCE:
            return False
        if holds_ordered_object(prepared.schema):  # of 300 optional keys, rows take it 3 ms
            return False
        return document.spec.key_order == "schema" or not any_order_notes(prepared.schema)

    def _counts_far(self, document: SpecDocument) -> bool:
        """Whether xgrammar counts for long, in each row or when it compiles."""
        size = document.size
        if size.characters > _MOST_CHARACTERS:
            return True
        return size.counted * self.vocabulary.vocab_size > _MOST_COUNTED

    @cached_property
    def _second(self) -> LLGuidanceBackend:
        # Made when it is first needed. Two threads may both make one; either will do.
        return LLGuidanceBackend(self.vocabulary)


def _is_xgrammars_alone(document: SpecDocument) -> bool:
    """Whether xgrammar refuses the schema for reasons of its own, not of any backend."""
    return all(entry.by_backend for entry in document.examined.errors)


class BackendChoice(DocumentCompiler[CompiledGrammar]):
    """The backend that a spec names, and for specs that name none the one called ``name``.

    name: "auto", "xgrammar", "llguidance" or a registered one, made with its default settings.
    Another one is made when a spec asks for it, or when its name was registered again.

    Raises ConfigError for any other name, for "llguidance" where that package is not installed, and
    for a backend that cannot be made.
    """

    def __init__(self, name: str, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._name = name
        self._made = {name: self._make("grammar_backend", name)}

    def compile_document(self, document: SpecDocument) -> CompiledGrammar:
        """As ``compile``.

        Raises ConfigError for a backend that is not registered, not installed, or cannot be made.
        """
        return self._backend_of(document.spec).compile_document(document)

    def rebuild(self, spec: GrammarSpec, recipe: Recipe) -> CompiledGrammar | None:
        """As the backend of ``spec`` does."""
        return self._backend_of(spec).rebuild(spec, recipe)

    def _backend_of(self, spec: GrammarSpec) -> DocumentCompiler[CompiledGrammar]:
        name = spec.backend or self._name
        made = self._made.get(name)
        if made is None or made.entry != GRAMMAR_BACKENDS.get(name, made.entry):
            try:
                made = self._make("backend", name)
            except ConfigError as error:
                if error.argument != "grammar_backend":
                    raise
                raise ConfigError("backend", name, error.fix) from error.__cause__
            self._made[name] = made  # two threads may both make one; either will do
        return made.backend

    def _make(self, argument: str, name: str) -> _Made:
        entry = GRAMMAR_BACKENDS.get(name)
        factory = find_grammar_backend(argument, name)
        if factory in (AutoBackend, LLGuidanceBackend, XGrammarBackend):
            return _Made(entry, factory(self.vocabulary))
        return _Made(entry, GuardedBackend(name, factory, self.vocabulary))


class _Made(NamedTuple):
    """A backend, and what the registry held when it was made: None for an entry point's."""

    entry: str | BackendFactory | None
    backend: DocumentCompiler[CompiledGrammar]
