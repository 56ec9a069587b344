"""Grammars as vLLM gets them from ``LLM(engine="vllm")``: rewritten here, as text for xgrammar.

vLLM's own ways into its grammar backend leave keywords of a schema out, and fix the whitespace for
all requests. As EBNF, or as a structural tag, what was made of a spec arrives as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import xgrammar

from guided_spec.config import EngineConfig
from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.backends.ebnf import any_order_ebnf, json_ebnf, regex_ebnf, schema_ebnf
from guided_spec.grammar.backends.tag import bound_whitespace, prepare_tag
from guided_spec.grammar.backends.xgrammar import XGrammarBackend, XGrammarGrammar, XGrammarSource
from guided_spec.grammar.completion.completion import EndingsCache
from guided_spec.grammar.completion.endings import NEVER
from guided_spec.grammar.document import DocumentBackend, SpecDocument
from guided_spec.grammar.languages import to_whole
from guided_spec.grammar.limits import GrammarLimits
from guided_spec.grammar.pipeline import GrammarCompileQueue, GrammarPipeline, RequestGrammars
from guided_spec.grammar.protocol import CompiledGrammar, GrammarMatcher
from guided_spec.grammar.recipe import Recipe
from guided_spec.grammar.schema.prepare import require_enforced
from guided_spec.grammar.spec import GrammarSpec, Start
from guided_spec.grammar.steps import StepsSpentError, limit_steps
from guided_spec.grammar.text.markers import BYTES, Markers
from guided_spec.grammar.text.parts import TextParts, new_parts
from guided_spec.grammar.text.unique_keys import UniqueKeysGrammar, with_key_rules, with_unique_keys
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.integrations.vllm.backend import VllmGrammars, ending_with

# Literals, character classes and comments are kept as they are.
_ROOT = re.compile(r'"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|\#[^\n]*|(?<![\w.-])(root)(?![\w.-])')


class GrammarText(NamedTuple):
    """What vLLM gets. kind: the field of its StructuredOutputsParams that ``source`` goes into."""

    kind: Literal["grammar", "structural_tag"]
    source: str

    @property
    def spec(self) -> GrammarSpec:
        """The text as a ``GrammarSpec`` of this package."""
        kind: Literal["ebnf", "structural_tag"]
        kind = "ebnf" if self.kind == "grammar" else "structural_tag"
        return GrammarSpec(kind, self.source)


def written(document: SpecDocument) -> GrammarText:
    """The grammar of a document in full. Raises what compiling it raises."""
    try:
        if document.spec.kind == "structural_tag":
            tag = bound_whitespace(prepare_tag(document.value))
            return GrammarText("structural_tag", json.dumps(tag))
        return GrammarText("grammar", _ebnf(document))
    except (RuntimeError, ValueError, RecursionError) as error:
        reason = f"the {document.spec.kind} does not compile: {error}"
        raise GrammarCompileError(reason) from error


def _ebnf(document: SpecDocument) -> str:
    spec = document.spec
    match spec.kind:
        case "regex":
            return regex_ebnf(to_whole(spec.source))
        case "choice":
            options = [json.dumps(option, ensure_ascii=False) for option in document.value]
            return f"root ::= {' | '.join(options)}\n"
        case "ebnf":
            # vLLM begins with the rule ``root``. A rule above it: the mask is too strict for a
            # root that refers to itself.
            text = _ROOT.sub(lambda found: "root_within" if found[1] else found[0], spec.source)
            root = "root_within" if spec.root == "root" else spec.root
            return f"{text}\nroot ::= {root}\n"
        case "lark":
            return str(xgrammar.Grammar.from_lark(spec.source))
    prepared = require_enforced(document.examined)
    if spec.key_order == "any":
        free = any_order_ebnf(prepared, any_whitespace=spec.any_whitespace)
        if free.text is not None:
            return free.text
    return schema_ebnf(prepared, any_whitespace=spec.any_whitespace)


def _written_again(spec: GrammarSpec, source: XGrammarSource) -> GrammarText | None:
    """The grammar in full, of what it was compiled from; None where that needs the document."""
    kind, text, any_whitespace, _ = source.main
    if spec.kind == "regex":
        return GrammarText("grammar", regex_ebnf(text))
    if not spec.is_json:
        return None
    if kind == "ebnf":  # its keys come in any order
        return GrammarText("grammar", text)
    return GrammarText("grammar", json_ebnf(text, any_whitespace=any_whitespace))


def grammar_after(marker: str, text: GrammarText) -> GrammarText:
    """``text`` as a grammar that binds after the first ``marker``; before it the text is free."""
    content: dict[str, Any] = {"type": "grammar", "grammar": text.source}
    if text.kind == "structural_tag":
        content = json.loads(text.source)["format"]
    free = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": marker}
    tag = {"type": "sequence", "elements": [free, content]}
    return GrammarText("structural_tag", json.dumps({"type": "structural_tag", "format": tag}))


@dataclass(frozen=True, eq=False)  # without slots, which would prevent weak references
class HandedGrammar:
    """A grammar as vLLM enforces it, and the text that vLLM gets; shared by requests.

    inner: compiled by vLLM's own backend. Where keys of an object are free, it refuses one that
        stands twice, which vLLM's masks do not.
    least: tokens of its shortest text, with the one that ends it; 0 where that is not known.
    """

    inner: CompiledGrammar
    text: GrammarText
    least: int = 0

    @property
    def excluded(self) -> frozenset[int]:
        """Tokens that the inner grammar excludes."""
        return self.inner.excluded

    @property
    def memory_size_bytes(self) -> int:
        """Bytes of the inner grammar and of the text for vLLM."""
        return self.inner.memory_size_bytes + len(self.text.source)

    def ending_with(self, stops: frozenset[int]) -> HandedGrammar:
        """This grammar with other tokens that end a text; itself for none."""
        inner = self.inner
        if not stops:
            return self
        if isinstance(inner, UniqueKeysGrammar):
            return replace(self, inner=replace(inner, inner=ending_with(inner.inner, stops)))
        return replace(self, inner=ending_with(inner, stops))

    def new_parts(self) -> TextParts:
        """Those of the inner grammar."""
        return new_parts(self.inner)

    def new_matcher(self) -> GrammarMatcher:
        """A matcher at the start of the grammar."""
        return self.inner.new_matcher()

    def new_style_matcher(self) -> GrammarMatcher | None:
        """None: nothing is drafted with it here."""
        return None


class HandingBackend(DocumentBackend[HandedGrammar]):
    """Rewrites grammars as the backend of this package does, and compiles them as vLLM does.

    grammars: vLLM's. vocabulary: of the texts. markers: for specs that bind after one.

    vLLM fills its masks itself: what a filter would have to enforce is refused.
    """

    is_filtered: ClassVar[bool] = False

    def __init__(self, grammars: VllmGrammars, vocabulary: Vocabulary, markers: Markers) -> None:
        self.vocabulary = vocabulary
        self._grammars = grammars
        self._markers = markers
        self._endings = EndingsCache(grammars.vocabulary)

    def compile_document(self, document: SpecDocument) -> HandedGrammar:
        """Compile a document, whose spec may have a start."""
        start, spec = document.spec.start, replace(document.spec, start=None)
        marker = None if start is None else self._spell(start)
        whole = super().compile_document(SpecDocument(spec, document.demand, is_filtered=False))
        if marker is None:
            return whole
        text = grammar_after(marker, whole.text)
        return HandedGrammar(self._compile(text), text)

    def enforce(self, document: SpecDocument) -> HandedGrammar:
        """Compile a document in full, whatever ``unsupported`` is: it is enforced or refused."""
        text = written(document)
        compiled = self._compile(text)
        least = self._least(compiled)
        if not document.spec.is_json:
            return HandedGrammar(compiled, text, least)
        prepared = require_enforced(document.examined)
        return HandedGrammar(with_unique_keys(compiled, prepared, self.vocabulary), text, least)

    def rebuild(self, spec: GrammarSpec, recipe: Recipe) -> HandedGrammar | None:
        """The grammar that a worker has written for a JSON schema or regex.

        None where that relies on a filter: it has to be compiled, or refused, here.
        """
        text = None if recipe.items else _written_again(spec, recipe.source)
        if text is None:
            return None
        if spec.start is not None:
            text = grammar_after(self._spell(spec.start), text)
            return HandedGrammar(self._compile(text), text)
        compiled = self._compile(text)
        grammar = with_key_rules(compiled, recipe.keys, self.vocabulary)
        return HandedGrammar(grammar, text, self._least(compiled))

    def _least(self, compiled: XGrammarGrammar) -> int:
        try:
            with limit_steps(GrammarLimits().steps):
                endings = self._endings.of(compiled)
        except StepsSpentError:
            return 0
        if not endings.is_exact:  # its costs are searched for, and say little
            return 0
        least = endings.cost(endings.start)
        return least if least < NEVER else 0

    def _compile(self, text: GrammarText) -> XGrammarGrammar:
        try:
            return self._grammars.compile(text.spec)
        except Exception as error:  # vLLM's backend raises xgrammar's own and others
            raise GrammarCompileError(f"vLLM does not compile the grammar: {error}") from error

    def _spell(self, start: Start) -> str:
        """The marker as a text: vLLM knows its tokens without bytes by their names."""
        names = {token: name.encode() for name, token in self.vocabulary.added_tokens}
        symbols: Sequence[int] = self._markers.find(start).symbols
        parts = [bytes([one]) if one < BYTES else names.get(one - BYTES, b"") for one in symbols]
        return b"".join(parts).decode("utf-8", errors="replace")


def grammars_for_vllm(
    config: EngineConfig, vocabulary: Vocabulary, tokenizer: Any, grammars: VllmGrammars
) -> RequestGrammars:
    """What every request's grammar meets before vLLM gets it: rewriting, limits, a cache.

    A large grammar is first compiled under its limits by a process of its own: vLLM has none.
    """
    markers = Markers.from_tokenizer(vocabulary, tokenizer)
    backend = HandingBackend(grammars, vocabulary, markers)
    limits = config.grammar_limits or GrammarLimits()
    pipeline = GrammarPipeline(backend, limits, make=XGrammarBackend)
    queue = GrammarCompileQueue(
        pipeline,
        max_workers=config.compile_threads,
        cache_bytes=config.grammar_cache_bytes,
        close_backend=pipeline.close,
    )
    return RequestGrammars(markers, queue, None)
