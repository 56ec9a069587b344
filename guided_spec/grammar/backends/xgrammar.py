"""The default backend: grammars compiled by xgrammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import xgrammar
from numpy.typing import NDArray

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.backends.ebnf import any_order_ebnf, gbnf_ebnf, json_ebnf, regex_ebnf
from guided_spec.grammar.backends.tag import (
    bound_whitespace,
    prepare_tag,
    with_rules_for_text,
    with_tokens,
)
from guided_spec.grammar.document import DocumentBackend, SpecDocument
from guided_spec.grammar.languages import to_whole
from guided_spec.grammar.protocol import GrammarMatcher, require_first_token
from guided_spec.grammar.recipe import Recipe
from guided_spec.grammar.regex import to_fullmatch
from guided_spec.grammar.schema.lowered import Unenforced
from guided_spec.grammar.schema.prepare import require_enforced
from guided_spec.grammar.spec import GrammarKind, GrammarSpec
from guided_spec.grammar.steps import spend_on_value
from guided_spec.grammar.tables.token_table import UNBOUND
from guided_spec.grammar.text.parts import TextParts
from guided_spec.grammar.text.row_filter import Mark, Probe
from guided_spec.grammar.text.state import TextState
from guided_spec.grammar.text.unique_keys import MaybeUnique, with_key_rules, with_unique_keys
from guided_spec.grammar.vocabulary import SplitSurrogates, Vocabulary

# Of rules that several grammars have; whole ones are kept elsewhere. Host names and mail addresses
# take 40 MB each, and seconds to compile.
_CACHE_BYTES = 128 * 2**20
CACHE_BUG = "per_rule_fsm_hashes"
_SHORT_CALLS = frozenset(("accept_token", "fork", "is_completed", "is_terminated", "rollback"))
# Fields of a serialized ``TokenizerInfo``; quotes inside of tokens are escaped there.
_SORTED, _BEHIND = '"sorted_decoded_vocab":', '"trie_subtree_nodes_range":'
_SOURCE_PREFIX = re.compile(r"^(?:\[[\d:]+\] )?(?:\S+\.(?:cc|h|cpp):\d+: )?")


class _Compilers(NamedTuple):
    """One vocabulary's compilers, with xgrammar's caches and without."""

    cached: Any
    uncached: Any


class XGrammarText(NamedTuple):
    """One text that xgrammar compiles, with the options for its kind."""

    kind: GrammarKind
    text: str
    any_whitespace: bool = False
    root: str = "root"


class XGrammarSource(NamedTuple):
    """Everything that a grammar is compiled from.

    style: see ``CompiledGrammar.new_style_matcher``. notes: see ``XGrammarGrammar``. named: tokens
    without bytes that a tag names.
    """

    main: XGrammarText
    style: XGrammarText | None = None
    notes: tuple[Unenforced, ...] = ()
    named: frozenset[int] = frozenset()


class XGrammarBackend(DocumentBackend[MaybeUnique["XGrammarGrammar"]]):
    """Compiles grammars with xgrammar for one vocabulary; safe to use from several threads.

    compile_threads: native threads that one compile may use.

    Every finished text satisfies its grammar. JSON schemas are first rewritten into what xgrammar
    enforces (see ``schema`` for what that narrows), regexes into what it reads correctly; both
    also inside structural tags. EBNF and Lark are xgrammar's own dialects and pass as they are.
    """

    def __init__(self, vocabulary: Vocabulary, *, compile_threads: int = 2) -> None:
        self.vocabulary = vocabulary
        self._without_bytes = vocabulary.without_bytes
        self._compile_threads = compile_threads
        _hold_interpreter()
        self._tag_compiler = lru_cache(maxsize=8)(self._new_tag_compiler)
        self._compilers = self._new_compilers(list(vocabulary.token_bytes))

    def _new_compilers(self, data: list[bytes]) -> _Compilers:
        info = _with_prefixes(
            xgrammar.TokenizerInfo(
                data,
                xgrammar.VocabType.RAW,
                vocab_size=self.vocabulary.vocab_size,
                stop_token_ids=list(self.vocabulary.stop_token_ids),
            )
        )
        threads = self._compile_threads
        return _Compilers(
            xgrammar.GrammarCompiler(info, max_threads=threads, cache_limit_bytes=_CACHE_BYTES),
            xgrammar.GrammarCompiler(info, max_threads=threads, cache_enabled=False),
        )

    def enforce(self, document: SpecDocument) -> MaybeUnique[XGrammarGrammar]:
        """As ``compile``, whatever ``unsupported`` is: what cannot be enforced is refused."""
        spec, grammar = document.spec, self._compile_any(document)
        require_first_token(grammar, self.vocabulary.vocab_size, spec.kind)
        if not spec.is_json:
            return grammar
        prepared = require_enforced(document.examined)
        return with_unique_keys(grammar, prepared, self.vocabulary, document.lowered.items)

    def entries(self, document: SpecDocument) -> Sequence[Unenforced]:
        """What of a JSON schema is not as it says: what others narrow too, and xgrammar alone."""
        return document.examined.entries if document.spec.kind == "json_schema" else ()

    def _compile_any(self, document: SpecDocument) -> XGrammarGrammar:
        if document.spec.kind == "structural_tag":
            return self._compile_tag(document)
        if document.spec.key_order == "any":
            return self._compile_in_any_order(document)
        return self._compile_in_order(document)

    def _compile_in_order(self, document: SpecDocument) -> XGrammarGrammar:
        spec = document.spec
        main = XGrammarText(spec.kind, _source_of(document), spec.any_whitespace, spec.root)
        style = main._replace(any_whitespace=False) if spec.any_whitespace else None
        return self._build(XGrammarSource(main, style))

    def _compile_in_any_order(self, document: SpecDocument) -> XGrammarGrammar:
        """As grammars of its own where any object's keys can be freed."""
        spec, prepared = document.spec, require_enforced(document.examined)
        spaces = (True, False) if spec.any_whitespace else (False,)
        free = [any_order_ebnf(prepared, any_whitespace=space) for space in spaces]
        texts = [part.text for part in free if part.text is not None]
        if len(texts) < len(free):
            return replace(self._compile_in_order(document), notes=free[0].notes)
        main, *styles = [XGrammarText("ebnf", text) for text in texts]
        return self._build(XGrammarSource(main, styles[0] if styles else None, free[0].notes))

    def _compile_tag(self, document: SpecDocument) -> XGrammarGrammar:
        kind, prepared = document.spec.kind, prepare_tag(document.value)
        with _reported(kind):
            prepared = bound_whitespace(prepared)
        tag, named = with_tokens(prepared, self.vocabulary)
        tag = with_rules_for_text(tag)
        spend_on_value(tag)
        return self._build(XGrammarSource(XGrammarText(kind, json.dumps(tag)), named=named))

    def _build(self, source: XGrammarSource) -> XGrammarGrammar:
        compilers = self._tag_compiler(source.named) if source.named else self._compilers
        compiled = _compile(compilers, source.main)
        style = None if source.style is None else _compile(compilers, source.style)
        excluded, stops = self._without_bytes - source.named, self.vocabulary.stop_token_ids
        split = self.vocabulary.split_surrogates
        return XGrammarGrammar(compiled, style, excluded, source.notes, stops, source, split)

    def rebuild(self, spec: GrammarSpec, recipe: Recipe) -> MaybeUnique[XGrammarGrammar]:
        """Compile once more what this backend has compiled for ``spec``, here or elsewhere."""
        del spec
        built = self._build(recipe.source)
        return with_key_rules(built, recipe.keys, self.vocabulary, recipe.items)

    def _new_tag_compiler(self, named: frozenset[int]) -> _Compilers:
        """Compilers that know the tokens ``named``: xgrammar admits none without bytes.

        These bytes are no UTF-8: nothing but a token format, or free text by bytes, holds them.
        """
        data = list(self.vocabulary.token_bytes)
        for token_id in named:
            data[token_id] = b"\xff\xfe%d" % token_id
        # xgrammar 0.2.8 takes the masks of token formats from its rule cache for rules that differ.
        uncached = self._new_compilers(data).uncached
        return _Compilers(uncached, uncached)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class XGrammarGrammar:
    """A grammar compiled by xgrammar; immutable, shared by requests.

    notes: under ``key_order="any"``, the objects whose keys stay in the schema's order.
    stops: the tokens that end a text; empty for those that it was compiled with.
    source: what it was compiled from; None where somebody else has compiled it.
    """

    compiled: Any
    style: Any | None = None
    excluded: frozenset[int] = frozenset()
    notes: tuple[Unenforced, ...] = ()
    stops: tuple[int, ...] = ()
    source: XGrammarSource | None = None
    split: SplitSurrogates | None = None
    backend: ClassVar[str] = "xgrammar"

    @property
    def memory_size_bytes(self) -> int:
        """As xgrammar counts it, the style's included."""
        parts = (self.compiled, self.style)
        own: int = sum(part.memory_size_bytes for part in parts if part is not None)
        return own + (0 if self.source is None else len(self.source.main.text))

    def recipe(self) -> Recipe | None:
        """What ``XGrammarBackend.rebuild`` takes; None where it was compiled by somebody else."""
        return None if self.source is None else Recipe(self.backend, self.source)

    def new_parts(self) -> TextParts:
        """xgrammar's matcher, and a filter that keeps its texts UTF-8."""
        return self._parts(self.compiled)

    def new_matcher(self) -> TextState:
        """A text at the start of the grammar."""
        return TextState.begin(self.new_parts())

    def new_style_matcher(self) -> TextState | None:
        """A text whose whitespace is ``", "`` and ``": "``; None if it is fixed anyway."""
        return None if self.style is None else TextState.begin(self._parts(self.style))

    def _parts(self, compiled: Any) -> TextParts:
        own_stops = [*self.stops] or None

        def new_matcher() -> GrammarMatcher:
            made: GrammarMatcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=own_stops)
            return made

        has_split = self.split is not None and bool(self.split.leads)
        filters = (SurrogateFilter(self.split),) if self.split is not None and has_split else ()
        stops = frozenset(self.stops) or None
        return TextParts(new_matcher, self.excluded, stops=stops, filters=filters)


class SurrogateFilter(NamedTuple):
    """Keeps two tokens from writing the encoding of a surrogate between them, see ``RowFilter``.

    xgrammar's classes and strings hold surrogates, and UTF-8 has none. Its state says whether the
    last token may begin one. split: the tokens that do.
    """

    split: SplitSurrogates

    @property
    def wakes(self) -> frozenset[int]:
        """The tokens that may begin a surrogate."""
        return self.split.leads

    def start(self, length: int) -> Mark:
        """Nothing has begun."""
        return Mark(length, state=False)

    def admits(self, mark: Mark, token_id: int, text: Probe) -> bool:
        """Whether the token goes on with no surrogate."""
        del text
        return not mark.state or self._allows(token_id)

    def after(self, mark: Mark, text: Probe) -> Mark:
        """The mark after the last token."""
        length = len(text.token_ids)
        if text.token_ids[-1] in self.split.leads:
            return Mark(length, state=True, until=length)
        return Mark(length, state=False) if mark.state else mark

    def restrict(self, mark: Mark, row: NDArray[np.int32], text: Probe) -> bool:
        """Clear the tokens that would go on with a surrogate."""
        del mark, text
        others = self.split.others
        before = row[: len(others)].copy()
        row[: len(others)] &= others
        return not np.array_equal(row[: len(others)], before)

    def tokens_left(self, mark: Mark, length: int) -> int:
        """Any number: tables hold no surrogates."""
        del mark, length
        return UNBOUND

    def fork(self) -> SurrogateFilter:
        """Itself: it remembers nothing."""
        return self

    def takes(self, mark: Mark, token_ids: Sequence[int]) -> bool:
        """Whether none of the tokens goes on with a surrogate."""
        has_begun = mark.state
        for token_id in token_ids:
            if has_begun and not self._allows(token_id):
                return False
            has_begun = token_id in self.split.leads
        return True

    def interchangeable(self, mark: Mark, row: NDArray[np.int32]) -> NDArray[np.int32]:
        """All of them."""
        del mark
        return row

    def _allows(self, token_id: int) -> bool:
        word = token_id >> 5
        others = self.split.others
        return 0 <= word < len(others) and bool(others[word] >> (token_id & 31) & 1)


def _hold_interpreter() -> None:
    """Let short calls of matchers keep the interpreter.

    A step makes hundreds of them, of a microsecond each. Behind each one another thread, such as
    one that compiles, could take the interpreter, and the engine's would have to be woken again.
    """
    with suppress(AttributeError):  # a release that binds in another way is slower, not wrong
        core: Any = xgrammar.base
        for method in core._core.GrammarMatcher.__tvm_ffi_type_info__.methods:
            if method.name in _SHORT_CALLS:
                method.func.release_gil = False


def _with_prefixes(info: Any) -> Any:
    """The same tokens, with correct ranges of the tokens that begin with each.

    After a refused token, a mask leaves out those that xgrammar takes to begin with it. xgrammar
    0.2.8 takes all that follow it in sorted order while they contain it anywhere: masks lacked
    ``rror`` after the ``e`` of ``error`` where there is a token ``ror``.
    """
    head, found, tail = info.serialize_json().partition(_BEHIND)
    if not found:  # a release that keeps something else
        return info
    listed = head[head.index(_SORTED) + len(_SORTED) : -1]
    behind = _after_prefixed([text for _, text in json.loads(listed)])
    mended = head + found + json.dumps(behind) + tail[tail.index("]") + 1 :]
    return xgrammar.TokenizerInfo.deserialize_json(mended)


def _after_prefixed(texts: Sequence[str]) -> list[int]:
    """For each of sorted texts, the index after the last one that begins with it."""
    behind, begun = [len(texts)] * len(texts), list[int]()
    for at, text in enumerate(texts):
        while begun and not text.startswith(texts[begun[-1]]):
            behind[begun.pop()] = at
        begun.append(at)
    return behind


@contextmanager
def _reported(kind: GrammarKind) -> Iterator[None]:
    """What xgrammar raises, as GrammarCompileError."""
    try:
        yield
    except (RuntimeError, ValueError, RecursionError) as error:
        reason = _SOURCE_PREFIX.sub("", str(error)).strip() or "the backend gave no reason"
        named = "grammar" if kind == "ebnf" else kind  # it may be a file of GBNF
        raise GrammarCompileError(f"the {named} does not compile: {reason}") from error


def _compile(compilers: _Compilers, text: XGrammarText) -> Any:
    with _reported(text.kind):
        try:
            return _run(compilers.cached, text)
        except RuntimeError as error:
            if CACHE_BUG not in str(error):
                raise
            # Repeats beyond 128 fail in xgrammar 0.2.8 when its rule cache is on.
            return _run(compilers.uncached, text)


def _run(compiler: Any, text: XGrammarText) -> Any:
    source = text.text
    match text.kind:
        case "json_schema" if '"pattern":' in source:
            # With patterns as this package has written them.
            return compiler.compile_grammar(json_ebnf(source, any_whitespace=text.any_whitespace))
        case "json_schema" | "json_object":
            return compiler.compile_json_schema(
                source, any_whitespace=text.any_whitespace, strict_mode=False
            )
        case "regex":
            return compiler.compile_grammar(regex_ebnf(source))
        case "choice":
            return compiler.compile_regex(source)
        case "ebnf":
            # A rule above the root: the mask is too strict for a root that refers to itself.
            above = f"{text.root}_above"
            whole = f"{gbnf_ebnf(source)}\n{above} ::= {text.root}\n"
            return compiler.compile_grammar(whole, root_rule_name=above)
        case "lark":
            return compiler.compile_lark(source)
        case "structural_tag":
            return compiler.compile_structural_tag(source)


def require_parsed(document: SpecDocument) -> None:
    """Parse a grammar of xgrammar's own kinds, EBNF or Lark, without a vocabulary.

    Raises GrammarCompileError where xgrammar does not read it.
    """
    spec = document.spec
    with _reported(spec.kind):
        if spec.kind == "lark":
            xgrammar.Grammar.from_lark(spec.source)
        else:
            xgrammar.Grammar.from_ebnf(gbnf_ebnf(spec.source), root_rule_name=spec.root)


def _source_of(document: SpecDocument) -> str:
    """The source to hand to xgrammar."""
    match document.spec.kind:
        case "json_schema" | "json_object":
            prepared = require_enforced(document.examined)
            spend_on_value(prepared)
            return json.dumps(prepared)
        case "regex":
            return to_whole(document.spec.source)
        case "choice":
            return "|".join(to_fullmatch(re.escape(option)) for option in document.value)
    return document.spec.source
