"""A second backend: grammars compiled by llguidance.

It compiles most grammars far faster than xgrammar and enforces some JSON schemas that xgrammar does
not. Filling one of its masks takes longer, most of all under a regex.
"""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from guided_spec.errors import (
    GrammarCompileError,
    UnsatisfiableGrammarError,
    UnsupportedSchemaError,
)
from guided_spec.grammar.any_order import any_order_grammar
from guided_spec.grammar.document import SpecDocument
from guided_spec.grammar.llguidance_matcher import LLGuidanceMatcher, LLGuidanceSource
from guided_spec.grammar.llguidance_schema import prepare_for_llguidance
from guided_spec.grammar.regex import to_fullmatch
from guided_spec.grammar.schema_mode import compile_as_asked
from guided_spec.grammar.schema_report import Unenforced, describe, narrowing
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.unique_keys import MaybeUnique, with_unique_keys
from guided_spec.grammar.vocabulary import Vocabulary

__all__ = ["LLGuidanceBackend", "LLGuidanceGrammar"]

# Without it forced bytes may be written in one way only, by a tokenizer that is not at hand here.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
# No \\u escapes: an extra key could spell a declared one with them, "\\u0061" for "a".
_ESCAPES = 'nrbtf\\"'
_FIXED = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": _ESCAPES,
}
_FLEXIBLE = {**_FIXED, "whitespace_flexible": True, "item_separator": ",", "key_separator": ":"}
_NOT_UTF8 = b"\xff"
_LONGEST_REASON = 500
_PREFIX = re.compile(r"^at \d+\(\d+\): |failed to compile JSON schema: ")
_EXCERPT = re.compile(r"\n\s+\d+ \| .*|\n?<(?:state|backtrace)>.*", re.DOTALL)
_LARK_PARTS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|(?P<token><[^<>\s"]+>)')


class LLGuidanceBackend:
    """Compiles grammars with llguidance for one vocabulary; safe to use from several threads.

    Every finished text satisfies its grammar. The masks admit every way to split a text into
    tokens, as xgrammar's do. Where llguidance is stricter than a schema asks for, drafts and target
    rows still come from one matcher, so speculative and plain decoding agree.

    Not compiled: ``ebnf`` and ``structural_tag``, which are xgrammar's own languages. ``lark`` is
    llguidance's dialect and passes as it is, but may not name special tokens.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._library: Any = importlib.import_module("llguidance")
        self._tokenizer = self._library.LLTokenizer(
            _Tokens.from_vocabulary(vocabulary),
            n_vocab=vocabulary.vocab_size,
            eos_token=list(vocabulary.stop_token_ids),
        )

    def compile(self, spec: GrammarSpec) -> MaybeUnique[LLGuidanceGrammar]:
        """Compile ``spec``; milliseconds for most.

        Raises GrammarCompileError (broken, or a kind that only xgrammar compiles),
        UnsupportedSchemaError (valid, but not enforceable in full) or UnsatisfiableGrammarError
        (nothing matches).
        """
        return self.compile_document(SpecDocument(spec))

    def compile_document(self, document: SpecDocument) -> MaybeUnique[LLGuidanceGrammar]:
        """As ``compile``."""
        return compile_as_asked(document, self.enforce)

    def enforce(self, document: SpecDocument) -> MaybeUnique[LLGuidanceGrammar]:
        """As ``compile``, whatever ``unsupported`` is: what cannot be enforced is refused."""
        spec = document.spec
        prepared = prepare_for_llguidance(document.lowered) if spec.is_json else {}
        grammar = self._compile_in_order(document, prepared)
        if spec.key_order == "any":
            grammar = self._in_any_order(spec, prepared, grammar)
        if not spec.is_json:
            return grammar
        return with_unique_keys(grammar, prepared, self.vocabulary)

    def _in_any_order(
        self, spec: GrammarSpec, prepared: dict[str, Any], in_order: LLGuidanceGrammar
    ) -> LLGuidanceGrammar:
        """The same texts with free keys; ``in_order``, with a note, where that does not compile.

        What llguidance refuses, and what nothing matches, has come to light before.
        """
        options = (_FLEXIBLE, _FIXED) if spec.any_whitespace else (_FIXED,)
        free = [any_order_grammar(prepared, option) for option in options]
        notes = free[0].notes
        if all(part.text is not None for part in free):
            sources = [in_order.source._replace(text=f"{_OPTIONS}{part.text}") for part in free]
            style = sources[1] if spec.any_whitespace else None
            grammar = replace(in_order, source=sources[0], style=style, notes=notes)
            message = grammar._compiled.get_error()
            if not message:
                return grammar
            fix = "the keys of all objects stay in the schema's order"
            notes = (Unenforced("", "properties", _reason(message), fix, "note"),)
        return replace(in_order, notes=notes)

    def _compile_in_order(
        self, document: SpecDocument, prepared: dict[str, Any]
    ) -> LLGuidanceGrammar:
        spec = document.spec
        main = _to_lark(document, prepared, any_whitespace=spec.any_whitespace)
        is_free = spec.any_whitespace
        style = _to_lark(document, prepared, any_whitespace=False) if is_free else None
        source = LLGuidanceSource(self._library, self._tokenizer, main, self.vocabulary)
        grammar = LLGuidanceGrammar(
            source,
            None if style is None else source._replace(text=style),
            self._without_bytes,
        )
        try:
            _require_compiled(spec, source, grammar)
        except UnsatisfiableGrammarError as error:
            lost = narrowing(document.lowered.entries) if spec.kind == "json_schema" else []
            if lost:  # there may be values, but none that is left
                raise UnsupportedSchemaError(describe(lost)) from error
            raise
        return grammar

    @cached_property
    def _without_bytes(self) -> frozenset[int]:
        empty = {i for i, data in enumerate(self.vocabulary.token_bytes) if not data}
        return frozenset(empty.difference(self.vocabulary.stop_token_ids))


class _Tokens(NamedTuple):
    """What llguidance asks of a tokenizer; it is never called, since nothing is forced."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: None = None
    is_tokenizer_wrapper: bool = True

    @classmethod
    def from_vocabulary(cls, vocabulary: Vocabulary) -> _Tokens:
        # A first byte 0xFF means a special token to llguidance; it is part of no UTF-8 text.
        data = [b"" if b.startswith(_NOT_UTF8) else b for b in vocabulary.token_bytes]
        stop = vocabulary.stop_token_ids
        return cls(data, list(stop), stop[0])

    def __call__(self, text: object) -> list[int]:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class LLGuidanceGrammar:
    """A grammar compiled by llguidance; immutable, shared by requests.

    notes: under ``key_order="any"``, the objects whose keys stay in the schema's order.
    """

    source: LLGuidanceSource
    style: LLGuidanceSource | None = None
    excluded: frozenset[int] = frozenset()
    notes: tuple[Unenforced, ...] = ()
    backend: ClassVar[str] = "llguidance"

    def new_matcher(self) -> LLGuidanceMatcher:
        """A matcher at the start of the grammar."""
        return LLGuidanceMatcher(self.source, self._compiled.deep_copy())

    def new_style_matcher(self) -> LLGuidanceMatcher | None:
        """A matcher that fixes the whitespace to ``", "`` and ``": "``; None if it is fixed."""
        return None if self.style is None else LLGuidanceMatcher(self.style, self.style.new())

    @cached_property
    def _compiled(self) -> Any:
        """Copied for every matcher, never moved: copies share what its lexer has learnt."""
        return self.source.new()


def _require_compiled(
    spec: GrammarSpec, source: LLGuidanceSource, grammar: LLGuidanceGrammar
) -> None:
    message = grammar._compiled.get_error()
    if message:
        reason = _reason(message)
        if "Unsatisfiable schema" in message:
            raise UnsatisfiableGrammarError(f"no value is valid under the JSON schema: {reason}")
        if spec.kind == "json_schema":
            raise UnsupportedSchemaError(f"llguidance does not enforce the JSON schema: {reason}")
        raise GrammarCompileError(f"the {spec.kind} does not compile: {reason}")
    bitmask = np.zeros((1, -(-source.vocabulary.vocab_size // 32)), dtype=np.int32)
    grammar.new_matcher().fill_next_token_bitmask(bitmask)
    if not bitmask.any():
        raise UnsatisfiableGrammarError(f"no text of this vocabulary matches the {spec.kind}")


def _reason(message: str) -> str:
    reason = _EXCERPT.sub("", _PREFIX.sub("", message)).strip() or "llguidance gave no reason"
    return reason[:_LONGEST_REASON]


def _to_lark(document: SpecDocument, prepared: dict[str, Any], *, any_whitespace: bool) -> str:
    """The spec as a grammar in llguidance's Lark dialect, which every kind can be written in.

    prepared: the schema of a JSON kind.
    """
    spec = document.spec
    match spec.kind:
        case "json_schema" | "json_object":
            options = _FLEXIBLE if any_whitespace else _FIXED
            text = f"start: %json {json.dumps({**prepared, 'x-guidance': options})}"
        case "regex":
            text = _regex_rule(to_fullmatch(spec.source))
        case "choice":
            options_ = "|".join(to_fullmatch(re.escape(option)) for option in document.value)
            text = _regex_rule(options_)
        case "lark":
            _refuse_surrogates(spec.source)
            _refuse_token_names(spec.source)
            text = spec.source
        case _:
            fix = "use the backend xgrammar, which compiles it"
            raise GrammarCompileError(f"llguidance has no {spec.kind} of this dialect; {fix}")
    return _OPTIONS + text


def _regex_rule(pattern: str) -> str:
    return f"start: /(?:{pattern})/" if pattern else 'start: ""'


def _refuse_surrogates(source: str) -> None:
    try:
        source.encode()
    except UnicodeEncodeError as error:
        raise GrammarCompileError(f"the lark grammar does not compile: {error}") from error


def _refuse_token_names(source: str) -> None:
    for part in _LARK_PARTS.finditer(source):
        if part["token"]:
            reason = f"the lark grammar names the token {part['token']}"
            raise GrammarCompileError(f"{reason}, which constrained text cannot hold")
