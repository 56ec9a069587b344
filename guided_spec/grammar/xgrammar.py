"""The default backend: grammars compiled by xgrammar."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import xgrammar

from guided_spec.errors import GrammarCompileError, UnsatisfiableGrammarError
from guided_spec.grammar.protocol import GrammarMatcher
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary

__all__ = ["XGrammarBackend", "XGrammarGrammar"]


class XGrammarBackend:
    """Compiles grammars with xgrammar for one vocabulary; thread-safe.

    compile_threads: native threads that one compile may use.
    """

    def __init__(self, vocabulary: Vocabulary, *, compile_threads: int = 2) -> None:
        self.vocabulary = vocabulary
        tokenizer_info = xgrammar.TokenizerInfo(
            list(vocabulary.token_bytes),
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.vocab_size,
            stop_token_ids=list(vocabulary.stop_token_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(tokenizer_info, max_threads=compile_threads)

    def compile(self, spec: GrammarSpec) -> XGrammarGrammar:
        """Compile ``spec``. Raises the errors named in ``GrammarBackend.compile``."""
        try:
            compiled = self._compile(spec)
        except (RuntimeError, UnicodeEncodeError) as error:
            raise GrammarCompileError(f"{spec.kind}: {error}") from error
        bitmask = np.zeros((1, -(-self.vocabulary.vocab_size // 32)), dtype=np.int32)
        xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(bitmask)
        if not bitmask.any():
            raise UnsatisfiableGrammarError(f"{spec.kind}: no text can match it")
        return XGrammarGrammar(self, spec, compiled)

    def _compile(self, spec: GrammarSpec) -> Any:
        compiler = self._compiler
        match spec.kind:
            case "json_schema":
                return compiler.compile_json_schema(
                    spec.source, any_whitespace=spec.any_whitespace, strict_mode=True
                )
            case "json_object":
                return compiler.compile_json_schema(
                    '{"type":"object"}', any_whitespace=spec.any_whitespace, strict_mode=False
                )
            case "regex":
                return compiler.compile_regex(spec.source)
            case "choice":
                options = [json.dumps(option) for option in json.loads(spec.source)]
                return compiler.compile_grammar("root ::= " + " | ".join(options))
            case "ebnf":
                return compiler.compile_grammar(spec.source, root_rule_name=spec.root)
            case "lark":
                return compiler.compile_lark(spec.source)
            case "structural_tag":
                return compiler.compile_structural_tag(spec.source)


class XGrammarGrammar:
    """A grammar compiled by xgrammar; shared by requests."""

    def __init__(self, backend: XGrammarBackend, spec: GrammarSpec, compiled: Any) -> None:
        self._compiled = compiled

    def new_matcher(self) -> GrammarMatcher:
        """A matcher at the start of the grammar."""
        return xgrammar.GrammarMatcher(self._compiled)

    def new_style_matcher(self) -> GrammarMatcher | None:
        return None
