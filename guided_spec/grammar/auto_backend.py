"""The choice of a grammar backend: one of the two, or both, each for what it enforces."""

from __future__ import annotations

from functools import cached_property
from typing import get_args

from guided_spec.config import GrammarBackendName
from guided_spec.errors import ConfigError, UnsupportedSchemaError
from guided_spec.grammar.llguidance import LLGuidanceBackend, LLGuidanceGrammar, is_installed
from guided_spec.grammar.protocol import GrammarBackend
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.grammar.xgrammar import XGrammarBackend, XGrammarGrammar

__all__ = ["AutoBackend", "build_backend"]


class AutoBackend:
    """xgrammar first; llguidance for the JSON schemas that xgrammar does not enforce in full.

    The attribute ``backend`` of a compiled grammar names the one that took it. They narrow a schema
    differently: xgrammar's objects get no keys besides the listed ones, llguidance's stay open
    unless ``additionalProperties`` is false. Without the package llguidance this is
    ``XGrammarBackend``.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._first = XGrammarBackend(vocabulary)

    def compile(self, spec: GrammarSpec) -> XGrammarGrammar | LLGuidanceGrammar:
        """Compile ``spec``; raises as ``GrammarBackend.compile`` does.

        An UnsupportedSchemaError gives the reasons of both, where both were asked.
        """
        try:
            return self._first.compile(spec)
        except UnsupportedSchemaError as error:
            if not is_installed():
                raise
            refused = error
        try:
            return self._second.compile(spec)
        except UnsupportedSchemaError as error:
            raise UnsupportedSchemaError(f"{refused}\n{error}") from error

    @cached_property
    def _second(self) -> LLGuidanceBackend:
        # Made when it is first needed. Two threads may both make one; either will do.
        return LLGuidanceBackend(self.vocabulary)


def build_backend(name: str, vocabulary: Vocabulary) -> GrammarBackend:
    """The backend of this name for one vocabulary, with its default settings.

    name: "auto", "xgrammar" or "llguidance". Raises ConfigError for any other, and for "llguidance"
    where that package is not installed.
    """
    match name:
        case "auto":
            return AutoBackend(vocabulary)
        case "xgrammar":
            return XGrammarBackend(vocabulary)
        case "llguidance":
            return LLGuidanceBackend(vocabulary)
    names = ", ".join(get_args(GrammarBackendName))
    raise ConfigError("grammar_backend", name, f"must be one of {names}")
