"""The choice of a grammar backend: one of the two, or for each schema the better one."""

from __future__ import annotations

import json
from functools import cached_property
from typing import get_args

from guided_spec.config import GrammarBackendName
from guided_spec.errors import ConfigError, UnsupportedSchemaError
from guided_spec.grammar.any_order_ebnf import any_order_notes
from guided_spec.grammar.llguidance import LLGuidanceBackend, LLGuidanceGrammar, is_installed
from guided_spec.grammar.protocol import CompiledGrammar, GrammarBackend
from guided_spec.grammar.schema_mode import compile_as_asked
from guided_spec.grammar.schema_prepare import examine_schema
from guided_spec.grammar.schema_report import is_narrowed
from guided_spec.grammar.size import is_large
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.grammar.xgrammar import XGrammarBackend, XGrammarGrammar

__all__ = ["AutoBackend", "BackendChoice", "build_backend"]


class AutoBackend:
    """Per JSON schema the backend that enforces all of it and rejects the least.

    That is xgrammar, whose masks cost less, for schemas that it takes as they are: objects without
    further keys, no large counts. It is llguidance for those that xgrammar would narrow or not
    enforce in full, and for large ones, which it compiles far faster. What llguidance refuses too
    goes to xgrammar, narrowed, or is refused. All other kinds of grammar are xgrammar's. Under
    ``key_order="any"`` xgrammar gets only what holds no object of more than 8 keys.

    The attribute ``backend`` of a compiled grammar names the one that took it. Without the package
    llguidance this is ``XGrammarBackend``.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._first = XGrammarBackend(vocabulary)

    def compile(self, spec: GrammarSpec) -> XGrammarGrammar | LLGuidanceGrammar:
        """Compile ``spec``; raises as ``GrammarBackend.compile`` does.

        An UnsupportedSchemaError gives the reasons of both, where both were asked.
        """
        return compile_as_asked(spec, self._compile)

    def _compile(self, spec: GrammarSpec) -> XGrammarGrammar | LLGuidanceGrammar:
        if spec.kind != "json_schema" or not is_installed() or _is_for_xgrammar(spec):
            return self._first.compile(spec)
        try:
            return self._second.compile(spec)
        except UnsupportedSchemaError as error:
            refused = error
        try:
            return self._first.compile(spec)
        except UnsupportedSchemaError as error:
            if not _is_xgrammars_alone(spec):
                raise
            raise UnsupportedSchemaError(f"{error}\n{refused}") from error

    @cached_property
    def _second(self) -> LLGuidanceBackend:
        # Made when it is first needed. Two threads may both make one; either will do.
        return LLGuidanceBackend(self.vocabulary)


def _is_for_xgrammar(spec: GrammarSpec) -> bool:
    """Whether xgrammar takes the schema as it is, and soon. True for a broken one as well."""
    try:
        schema = json.loads(spec.source)
    except (ValueError, RecursionError):
        return True
    if is_large(spec):
        return False
    prepared = examine_schema(schema)
    if is_narrowed(prepared.unenforced):
        return False
    return spec.key_order == "schema" or not any_order_notes(prepared.schema)


def _is_xgrammars_alone(spec: GrammarSpec) -> bool:
    """Whether xgrammar refuses the schema for reasons of its own, not of any backend."""
    entries = examine_schema(json.loads(spec.source)).unenforced
    return all(entry.by_backend for entry in entries if entry.level == "error")


class BackendChoice:
    """The backend that a spec names, and for specs that name none the one called ``name``.

    Another one is made when a spec asks for it. Raises ConfigError as ``build_backend`` does.
    """

    def __init__(self, name: str, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._name = name
        self._made = {name: _make(name, vocabulary)}

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile ``spec``; raises as ``GrammarBackend.compile`` does.

        Raises ConfigError for a backend that is not installed.
        """
        name = spec.backend or self._name
        backend = self._made.get(name)
        if backend is None:
            try:
                backend = _make(name, self.vocabulary)
            except ConfigError as error:
                raise ConfigError("backend", name, error.fix) from None
            self._made[name] = backend  # two threads may both make one; either will do
        return backend.compile(spec)


def build_backend(name: str, vocabulary: Vocabulary) -> GrammarBackend:
    """The backend of this name for one vocabulary, with its default settings.

    name: "auto", "xgrammar" or "llguidance", for specs that name no ``backend`` themselves. Raises
    ConfigError for any other, and for "llguidance" where that package is not installed.
    """
    return BackendChoice(name, vocabulary)


def _make(name: str, vocabulary: Vocabulary) -> GrammarBackend:
    match name:
        case "auto":
            return AutoBackend(vocabulary)
        case "xgrammar":
            return XGrammarBackend(vocabulary)
        case "llguidance":
            return LLGuidanceBackend(vocabulary)
    names = ", ".join(get_args(GrammarBackendName))
    raise ConfigError("grammar_backend", name, f"must be one of {names}")
