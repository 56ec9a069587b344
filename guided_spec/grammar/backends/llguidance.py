r"""A second backend: grammars compiled by llguidance.

It compiles most grammars far faster than xgrammar and enforces some JSON schemas that xgrammar does
not. Filling one of its masks takes longer, most of all under a regex.

A schema is lowered first (see ``schema.lower``). llguidance refuses by itself most of what it
does not enforce. What it reads differently from the specification is rewritten here into something
narrower, or refused:

- a ``pattern`` is read as Python's ``re`` reads it, U+0000 and classes such as ``\d`` beyond ASCII
  left out; one that is anchored in the middle covers the whole string;
- an object with a ``patternProperties`` of such a class gets no keys besides those listed;
- objects of very many keys, and those whose keys are counted, are rules: see ``ordered_objects``;
- numbers are compared as floats, so large integers and decimal steps are refused.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.errors import (
    ConfigError,
    GrammarCompileError,
    GrammarStateError,
    UnsatisfiableGrammarError,
    UnsupportedSchemaError,
)
from guided_spec.grammar.backends.any_order import any_order_grammar
from guided_spec.grammar.backends.llguidance_schema import (
    MOST_ITEMS,
    narrower_scalars,
    prepare_for_llguidance,
    require_few_items,
)
from guided_spec.grammar.backends.ordered_objects import (
    LARGE,
    holds_ordered_object,
    ordered_object_rules,
)
from guided_spec.grammar.backends.tag import prepare_tag, with_tokens
from guided_spec.grammar.backends.tag_lark import tag_lark
from guided_spec.grammar.document import DocumentBackend, SpecDocument
from guided_spec.grammar.languages import to_whole
from guided_spec.grammar.protocol import Matcher, legal_row, require_first_token
from guided_spec.grammar.recipe import Recipe
from guided_spec.grammar.regex import to_fullmatch
from guided_spec.grammar.schema.lowered import Lowered, Unenforced, describe, narrowing
from guided_spec.grammar.schema.prepare import lower_checked
from guided_spec.grammar.schema.sharing import ALTERNATIVES, joins_itself, share_joined
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.steps import spend_on_value
from guided_spec.grammar.text.parts import TextParts
from guided_spec.grammar.text.unique_keys import MaybeUnique, with_key_rules, with_unique_keys
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.ops.mask_words import full_row, ids_of, row_of

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
# Sets of tokens whose masks are kept, the largest last; each gets what the ones before it leave.
# Values of XML-like formats end at "<": with its tokens apart, a row there takes 0.1 ms, not 1.4.
_PLAIN_LETTERS = r'[^<"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_PLAIN_LETTERS}{count}" for count in ("{1,10}", "{1,30}", "+")),
]
_NOT_UTF8 = b"\xff"
_LONGEST_REASON = 500
_ROWS_OF_A_TOKEN = 32
_TRIED_TOKENS = 4
# Of one row. llguidance's own 200,000 end a text where some dozens of patterns begin together, as
# in a list of alternatives; these take some 30 ms, once.
_LEXER_FUEL = 2_000_000
_FAR = 64  # bytes
_PREFIX = re.compile(r"^at \d+\(\d+\): |failed to compile JSON schema: ")
_EXCERPT = re.compile(r"\n\s+\d+ \| .*|\n?<(?:state|backtrace)>.*", re.DOTALL)
_LARK_PARTS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|(?P<token><[^<>\s"]+>)')


class LLGuidanceBackend(DocumentBackend[MaybeUnique["LLGuidanceGrammar"]]):
    """Compiles grammars with llguidance for one vocabulary; safe to use from several threads.

    Every finished text satisfies its grammar. The masks admit every split of a text into
    tokens, as xgrammar's do. Where llguidance is stricter than a schema asks for, drafts and target
    rows still come from one matcher, so speculative and plain decoding agree.

    Not compiled: ``ebnf``, which is xgrammar's own language, and structural tags that ``tag_lark``
    does not write. ``lark`` is llguidance's dialect and passes as it is, but may not name special
    tokens.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._library: Any = importlib.import_module("llguidance")
        self._tokenizer = self._library.LLTokenizer(
            _Tokens.from_vocabulary(vocabulary),
            n_vocab=vocabulary.vocab_size,
            eos_token=list(vocabulary.stop_token_ids),
        )

    def enforce(self, document: SpecDocument) -> MaybeUnique[LLGuidanceGrammar]:
        """As ``compile``, whatever ``unsupported`` is: what cannot be enforced is refused."""
        spec = document.spec
        if spec.kind == "structural_tag":
            return self._compile_tag(document)
        if not spec.is_json:
            return self._compile_in_order(document, {})
        prepared, grammar = self._compile_json(document)
        if spec.key_order == "any":
            grammar = self._in_any_order(spec, prepared, grammar)
        return with_unique_keys(grammar, prepared, self.vocabulary, document.lowered.items)

    def _compile_json(self, document: SpecDocument) -> _Compiled:
        """In the first form of the schema that llguidance takes."""
        refused: UnsupportedSchemaError | None = None
        for lowered in _forms(document.lowered):
            try:
                return self._compile_prepared(document, lowered)
            except UnsupportedSchemaError as error:
                refused = refused or error
        raise refused or AssertionError("a schema has a form")

    def _compile_prepared(self, document: SpecDocument, lowered: Lowered) -> _Compiled:
        prepared = prepare_for_llguidance(lowered)
        return _Compiled(prepared, self._compile_in_order(document, prepared))

    def rebuild(self, spec: GrammarSpec, recipe: Recipe) -> MaybeUnique[LLGuidanceGrammar]:
        """Compile once more what this backend has compiled for ``spec``, here or elsewhere."""
        tag = json.loads(spec.source) if spec.kind == "structural_tag" else None
        grammar = self._grammar(recipe.source, tag)
        _require_compiled(spec, grammar)
        return with_key_rules(grammar, recipe.keys, self.vocabulary, recipe.items)

    def _grammar(self, texts: LLGuidanceTexts, tag: Any = None) -> LLGuidanceGrammar:
        tokenizer = self._tokenizer if tag is None else self._tokenizer_of_tags
        source = LLGuidanceSource(
            self._library, tokenizer, texts.main, self.vocabulary, _LexerCapacity(), texts.named
        )
        style = None if texts.style is None else source._replace(text=texts.style)
        excluded = self.vocabulary.without_bytes - texts.named
        return LLGuidanceGrammar(source, style, excluded, texts.notes, texts.pattern, tag)

    @cached_property
    def _tokenizer_of_tags(self) -> Any:
        # Two threads may both make one; either will do.
        return self._tokenizer.with_slices(_SLICES)

    def _compile_tag(self, document: SpecDocument) -> LLGuidanceGrammar:
        """A tag without filters, and with whitespace as ``json_schema`` writes it."""
        tag, named = with_tokens(
            prepare_tag(document.value, prepare=_prepare_in_tag), self.vocabulary
        )
        spend_on_value(tag)
        text = f"{_OPTIONS}{tag_lark(tag, _FIXED)}"
        grammar = self._grammar(LLGuidanceTexts(text, named=named), tag=document.value)
        _require_compiled(document.spec, grammar)
        return grammar

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

    def entries(self, document: SpecDocument) -> Sequence[Unenforced]:
        """What of a JSON schema is not as it says: what others narrow too, and llguidance alone."""
        own = narrower_scalars(document.lowered) if document.spec.kind == "json_schema" else ()
        return (*super().entries(document), *own)

    def _compile_in_order(
        self, document: SpecDocument, prepared: dict[str, Any]
    ) -> LLGuidanceGrammar:
        spec = document.spec
        if spec.is_json and holds_ordered_object(prepared):
            with suppress(GrammarCompileError):
                grammar = self._grammar(_with_ordered_objects(prepared, spec))
                _require_compiled(spec, grammar)
                return grammar
        if spec.is_json:
            require_few_items(prepared)
        main = _to_lark(document, prepared, any_whitespace=spec.any_whitespace)
        is_free = spec.any_whitespace
        style = _to_lark(document, prepared, any_whitespace=False) if is_free else None
        grammar = self._grammar(LLGuidanceTexts(main, style, pattern=_pattern_of(document)))
        try:
            _require_compiled(spec, grammar)
        except UnsatisfiableGrammarError as error:
            lost = narrowing(document.lowered.entries) if spec.kind == "json_schema" else []
            if lost:  # there may be values, but none that is left
                raise UnsupportedSchemaError(describe(lost)) from error
            raise
        return grammar


class _Compiled(NamedTuple):
    """A grammar and the schema that it was made from."""

    prepared: dict[str, Any]
    grammar: LLGuidanceGrammar


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


@dataclass(eq=False)
class _LexerCapacity:
    """The remaining capacity of the lexer that the matchers of one grammar share.

    is_full: whether it has no capacity left; a new one has. is_suspect: whether it may have none,
    since bytes far ahead were looked at. looks_ahead: whether forced bytes are asked for: they may
    fill it at once.
    """

    is_full: bool = False
    is_suspect: bool = False
    looks_ahead: bool = True


class LLGuidanceSource(NamedTuple):
    """Everything that a matcher is made from.

    library: the module llguidance. tokenizer: its ``LLTokenizer`` of the vocabulary.
    text: a grammar in its Lark dialect. lexer: what is known of the one that matchers share.
    named: the added tokens that the grammar names.
    """

    library: Any
    tokenizer: Any
    text: str
    vocabulary: Vocabulary
    lexer: _LexerCapacity
    named: frozenset[int] = frozenset()

    def new(self) -> Any:
        """llguidance's own matcher, at the start; in its error state if the text is broken."""
        grammar = self.library.LLMatcher.grammar_from_lark(self.text)
        limits = self.library.LLParserLimits(
            max_items_in_row=MOST_ITEMS,
            step_max_items=_ROWS_OF_A_TOKEN * MOST_ITEMS,
            step_lexer_fuel=_LEXER_FUEL,
        )
        return self.library.LLMatcher(self.tokenizer, grammar, log_level=0, limits=limits)


class LLGuidanceMatcher(Matcher):
    """A ``GrammarMatcher`` over llguidance's.

    llguidance ends in an error, and stays there, after a refused token and where a limit is hit.
    So a token is checked before it is consumed, stop tokens are kept away from it, and after an
    error a new one is made from ``token_ids``.
    """

    def __init__(self, source: LLGuidanceSource, matcher: Any) -> None:
        self._source = source
        self._matcher = matcher
        self._token_ids: list[int] = []
        self._has_ended = False

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False, and no change, where it is refused."""
        token_id = int(token_id)
        vocabulary = self._source.vocabulary
        if self._has_ended or not 0 <= token_id < vocabulary.vocab_size:
            return False
        if token_id in vocabulary.stop_token_ids:
            self._has_ended = bool(self._matcher.is_accepting())
            if not self._has_ended:
                return False
        elif not self._has_bytes(token_id) or not self._consume(token_id):
            return False
        self._token_ids.append(token_id)
        return True

    def takes(self, token_ids: Sequence[int]) -> bool:
        """In microseconds, a fraction of accepting a token that completes the text."""
        count: int = 0 if self._has_ended else self._matcher.validate_tokens(token_ids)
        return count == len(token_ids)

    def forced_bytes(self) -> bytes:
        """What must come next in every text, as far as that is known; does not move."""
        if self._has_ended or not self._source.lexer.looks_ahead:
            return b""
        forced: bytes = self._matcher.compute_ff_bytes()
        self._source.lexer.is_suspect |= len(forced) >= _FAR
        return forced

    def fill_next_token_bitmask(self, bitmask: Any, index: int = 0) -> bool:
        """Write row ``index``; returns whether it forbids anything. See ``GrammarMatcher``.

        All zero, a dead end, where llguidance gives up: no token of the vocabulary is legal, or the
        grammar is too complex here. Raises GrammarStateError on a terminated matcher.
        """
        row: NDArray[np.int32] = np.asarray(bitmask)[index]  # a view, also of a tensor
        self.native.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self.finish(row)
        return not np.array_equal(row, full_row(self._source.vocabulary.vocab_size))

    @property
    def native(self) -> Any:
        """llguidance's own. Raises GrammarStateError on a terminated matcher."""
        if self._has_ended:
            raise GrammarStateError("the text is complete: no token can follow")
        return self._matcher

    def finish(self, row: NDArray[np.int32]) -> None:
        """Correct a row, int32 [W], that ``native`` has filled."""
        if self._matcher.is_error():
            self._replay()  # a new lexer, too: the shared one may be full
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if self._matcher.is_error():
                self._replay()
                row[:] = 0  # llguidance would allow a stop token in the middle of the text
        if self._source.named and not self._matcher.is_accepting():
            # Where a named token may come, llguidance 1.9 allows stop tokens but the first one too.
            vocabulary = self._source.vocabulary
            row &= ~row_of(vocabulary.stop_token_ids, vocabulary.vocab_size)

    def fork(self) -> LLGuidanceMatcher:
        """An independent copy at the same position."""
        copy = LLGuidanceMatcher(self._source, self._matcher.deep_copy())
        copy._token_ids = self._token_ids.copy()
        copy._has_ended = self._has_ended
        return copy

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` accepted tokens. Raises ConfigError if there are fewer."""
        if not 0 <= num_tokens <= len(self._token_ids):
            fix = f"must be between 0 and {len(self._token_ids)}, the tokens accepted so far"
            raise ConfigError("num_tokens", num_tokens, fix)
        if num_tokens == 0:
            return
        del self._token_ids[-num_tokens:]
        surplus = num_tokens - self._has_ended
        self._has_ended = False
        if surplus and not self._matcher.rollback(surplus):
            self._replay()

    def is_terminated(self) -> bool:
        """Whether a stop token has been accepted."""
        return self._has_ended

    def _has_bytes(self, token_id: int) -> bool:
        source = self._source
        return bool(source.vocabulary.token_bytes[token_id]) or token_id in source.named

    def _consume(self, token_id: int) -> bool:
        lexer = self._source.lexer
        is_legal = self._matcher.validate_tokens([token_id]) == 1
        if is_legal and self._matcher.consume_token(token_id):
            return True
        if not is_legal and not lexer.is_suspect:
            return False
        lexer.is_suspect = False
        self._replay()  # with a new lexer
        if self._matcher.validate_tokens([token_id]) == 1:
            if self._matcher.consume_token(token_id):
                lexer.is_full, lexer.looks_ahead = True, False
                return True
            self._replay()
        return False

    def _replay(self) -> None:
        self._matcher = self._source.new()
        self._matcher.consume_tokens(self._token_ids)


class LLGuidanceTexts(NamedTuple):
    """What a grammar is compiled from: its own text and that of its style, in the Lark dialect.

    notes, pattern: see ``LLGuidanceGrammar``. named: see ``LLGuidanceSource``.
    """

    main: str
    style: str | None = None
    notes: tuple[Unenforced, ...] = ()
    pattern: str | None = None
    named: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class LLGuidanceGrammar:
    """A grammar compiled by llguidance; immutable, shared by requests.

    notes: under ``key_order="any"``, the objects whose keys stay in the schema's order; what is
    narrower in large objects. pattern: of a regex or a choice, as ``to_fullmatch`` writes it. tag:
    the structural tag, if it is one.
    """

    source: LLGuidanceSource
    style: LLGuidanceSource | None = None
    excluded: frozenset[int] = frozenset()
    notes: tuple[Unenforced, ...] = ()
    pattern: str | None = None
    tag: Any = None
    backend: ClassVar[str] = "llguidance"
    memory_size_bytes: ClassVar[int] = 0  # beyond its source; llguidance does not say

    def recipe(self) -> Recipe:
        """What ``LLGuidanceBackend.rebuild`` takes."""
        style = None if self.style is None else self.style.text
        named = self.source.named
        texts = LLGuidanceTexts(self.source.text, style, self.notes, self.pattern, named)
        return Recipe(self.backend, texts)

    def new_parts(self) -> TextParts:
        """A matcher of llguidance's, and what is known of its texts."""
        stops = frozenset(self.source.vocabulary.stop_token_ids)
        return TextParts(self.new_matcher, self.excluded, stops=stops)

    def new_matcher(self) -> LLGuidanceMatcher:
        """A matcher at the start of the grammar."""
        if self.source.lexer.is_full:
            self.source.lexer.is_full = False
            self.__dict__.pop("_compiled", None)
        return LLGuidanceMatcher(self.source, self._compiled.deep_copy())

    def new_style_matcher(self) -> LLGuidanceMatcher | None:
        """A matcher that fixes the whitespace to ``", "`` and ``": "``; None if it is fixed."""
        return None if self.style is None else LLGuidanceMatcher(self.style, self.style.new())

    @cached_property
    def _compiled(self) -> Any:
        """Copied for every matcher, never moved: copies share what its lexer has learnt."""
        return self.source.new()


def _forms(lowered: Lowered) -> Iterator[Lowered]:
    """The schema as it is, and with shared parts, which llguidance takes where it refuses that.

    That it refuses it takes up to two seconds to find out, so what is sure to be refused is last.
    """
    is_refused = joins_itself(lowered.schema)
    if not is_refused:
        yield lowered
    for alternatives in () if lowered.errors else ALTERNATIVES:
        shared = share_joined(lowered.schema, alternatives)
        if shared is not None:
            yield lowered._replace(schema=shared)
    if is_refused:
        yield lowered


def _prepare_in_tag(schema: Any) -> dict[str, Any]:
    """A schema of a tool or tag, in which no filter is."""
    return prepare_for_llguidance(lower_checked(schema, filtered=False))


def _require_compiled(spec: GrammarSpec, grammar: LLGuidanceGrammar) -> None:
    message = grammar._compiled.get_error()
    if message:
        reason = _reason(message)
        if "Unsatisfiable schema" in message:
            raise UnsatisfiableGrammarError(f"no value is valid under the JSON schema: {reason}")
        if spec.kind == "json_schema":
            raise UnsupportedSchemaError(f"llguidance does not enforce the JSON schema: {reason}")
        raise GrammarCompileError(f"the {spec.kind} does not compile: {reason}")
    require_first_token(grammar, grammar.source.vocabulary.vocab_size, spec.kind)
    _require_capacity(spec, grammar)


def _require_capacity(spec: GrammarSpec, grammar: LLGuidanceGrammar) -> None:
    """Raise where llguidance hits one of its limits within some tokens of a text."""
    vocabulary = grammar.source.vocabulary
    matcher = grammar.new_matcher()
    for _ in range(_TRIED_TOKENS):
        token_ids = ids_of(legal_row(matcher, vocabulary.vocab_size))
        token_id = next((int(i) for i in token_ids if i not in vocabulary.stop_token_ids), None)
        if token_id is None:
            return
        if not matcher.accept_token(token_id):
            reason = "llguidance hits a limit of its own within a few tokens; ask for less"
            if spec.kind == "json_schema":
                raise UnsupportedSchemaError(f"the JSON schema is too complex: {reason}")
            raise GrammarCompileError(f"the {spec.kind} is too complex: {reason}")


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
            spend_on_value(prepared)
            text = f"start: %json {json.dumps({**prepared, 'x-guidance': options})}"
        case "regex" | "choice":
            pattern = _pattern_of(document)
            text = f"start: /(?:{pattern})/" if pattern else 'start: ""'
        case "lark":
            _refuse_surrogates(spec.source)
            _refuse_token_names(spec.source)
            text = spec.source
        case _:
            fix = "use the backend xgrammar, which compiles it"
            raise GrammarCompileError(f"llguidance has no {spec.kind} of this dialect; {fix}")
    return _OPTIONS + text


def _with_ordered_objects(prepared: dict[str, Any], spec: GrammarSpec) -> LLGuidanceTexts:
    """The rules of a schema that holds large objects. Raises GrammarCompileError without any."""
    texts: list[str] = []
    notes: tuple[Unenforced, ...] = ()
    for option in (_FLEXIBLE, _FIXED) if spec.any_whitespace else (_FIXED,):
        rules = ordered_object_rules(prepared, option)
        if rules is None:
            raise GrammarCompileError("its large objects cannot be written as rules")
        require_few_items(prepared, LARGE if rules.is_whole else None)
        texts.append("\n".join([f"{_OPTIONS}start: {rules.top}", *rules.lines]))
        notes = rules.notes
    return LLGuidanceTexts(texts[0], texts[1] if len(texts) > 1 else None, notes)


def _pattern_of(document: SpecDocument) -> str | None:
    if document.spec.kind == "regex":
        return to_whole(document.spec.source)
    if document.spec.kind == "choice":
        return "|".join(to_fullmatch(re.escape(option)) for option in document.value)
    return None


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
