"""The way of a grammar, from what a user asks for to what makes matchers."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

from guided_spec.config import EngineConfig
from guided_spec.errors import GrammarError
from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.backends.registry import BackendFactory, import_path
from guided_spec.grammar.compiler import GrammarCompileQueue
from guided_spec.grammar.completion.completion import EndingsCache
from guided_spec.grammar.completion.spelling import Spelling
from guided_spec.grammar.document import DocumentCompiler, SpecDocument, as_document_compiler
from guided_spec.grammar.isolation import RuleReader, Workers
from guided_spec.grammar.limits import GrammarLimits, TableLimits, check_limits
from guided_spec.grammar.markers import AfterGrammar, Markers
from guided_spec.grammar.protocol import CompiledGrammar, GrammarBackend
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.tables.table import proven_table
from guided_spec.grammar.tables.tabled import TableMaker, table_bytes
from guided_spec.grammar.tables.token_table import TokenTable
from guided_spec.grammar.vocabulary import Vocabulary

__all__ = ["GrammarPipeline", "RequestGrammars"]

_LONGEST_MESSAGE = 2_000  # characters


class GrammarPipeline(DocumentCompiler[CompiledGrammar]):
    """Any backend, and what stands around it; safe to use from several threads.

    limits: what one grammar may cost; None for any. What can be seen in its source is checked at
        once. A grammar that is large at sight is first compiled by a worker process under the
        limits of time and memory, and here only if that succeeded: the same work a second time,
        since a compiled grammar can cost far more to hand over than to compile (454 MB of text for
        3 MB of grammar). Without POSIX there is no worker, and only the source is checked.
    markers: for specs with a ``start``: these are compiled without it, and bind behind the marker.
    endings: prepared where grammars are compiled, not while others wait; of many grammars, from
        what a worker reads of their rules.
    tables: whether grammars get tables: "auto" in a worker once they are asked for again and again,
        "always" here, at once; None for none.
    make: what builds the backend in a worker, a function or class that can be imported; None
        takes the backend's class.
    name: of the registered backend that compiles specs which name none; None where ``make`` builds
        whatever that is. A worker knows registered backends by their import path. One that has
        none, such as a class in a notebook, compiles here alone: then only the source is checked.
    """

    def __init__(  # noqa: PLR0913 - the parts around a backend
        self,
        backend: GrammarBackend,
        limits: GrammarLimits | None = None,
        *,
        markers: Markers | None = None,
        endings: EndingsCache | None = None,
        tables: Literal["auto", "always"] | None = None,
        make: BackendFactory | None = None,
        name: str | None = None,
    ) -> None:
        self.vocabulary: Vocabulary = backend.vocabulary
        self.limits = limits
        self.markers = markers
        self._backend = as_document_compiler(backend)
        self._endings = endings
        self._name = name
        self._workers = Workers(type(backend) if make is None else make, self.vocabulary)
        self._reader: RuleReader | None = None
        if endings is not None and self._has_worker_of(name):
            own = limits or GrammarLimits()
            self._reader = RuleReader(self._workers, own, endings.read_here)
        self._tables: TableMaker | None = None
        if tables is not None:
            make_table = self._table_here if tables == "always" else self._table_elsewhere
            self._tables = TableMaker(make_table, tables)

    def compile_document(self, document: SpecDocument) -> CompiledGrammar:
        """Compile its spec.

        Raises what the backend raises, and GrammarCompileError for a grammar beyond the limits, and
        for a marker that is not known or that the vocabulary cannot write.
        """
        start = None if self.markers is None else document.spec.start
        if start is not None:
            document = document.without_start()
        try:
            self._keep_limits(document)
            marker = None if self.markers is None or start is None else self.markers.find(start)
            compiled = self._backend.compile_document(document)
        except GrammarError as error:
            _shorten(error)
            raise
        if self._tables is not None:
            compiled = self._tables.attach(document.spec, compiled)
        if marker is not None and start is not None:
            compiled = AfterGrammar(compiled, marker, start.reasoning_budget)
        if self._endings is not None:
            self._endings.of(compiled, None if self._reader is None else self._reader.read)
        return compiled

    def close(self) -> None:
        """End the workers, also those at work; large grammars then fail. May be called again."""
        if self._tables is not None:
            self._tables.close()
        self._workers.close()

    def _keep_limits(self, document: SpecDocument) -> None:
        if self.limits is None:
            return
        size = check_limits(document, self.limits)
        if size.large and self._has_worker(document.spec):
            self._workers.try_out(replace(document.spec, start=None), self.limits)

    def _has_worker(self, spec: GrammarSpec) -> bool:
        return self._has_worker_of(spec.backend or self._name)

    @staticmethod
    def _has_worker_of(name: str | None) -> bool:
        return os.name == "posix" and (name is None or import_path(name) is not None)

    def _table_here(self, spec: GrammarSpec, part: CompiledGrammar) -> TokenTable:
        del spec
        return proven_table(part, self._spelling, TableLimits())

    def _table_elsewhere(self, spec: GrammarSpec, part: CompiledGrammar) -> TokenTable:
        if not self._has_worker(spec):
            return self._table_here(spec, part)
        limits = self.limits or GrammarLimits()
        return self._workers.make_table(replace(spec, start=None), limits, TableLimits())

    @cached_property
    def _spelling(self) -> Spelling:
        return Spelling(self.vocabulary) if self._endings is None else self._endings.spelling


class RequestGrammars(NamedTuple):
    """The three parts that every request's grammar meets, in this order.

    markers: bind a spec behind its prompt, where it begins after a marker.
    queue: compiles it in threads, within limits, and keeps it.
    endings: how its texts end, to end one within its budget; None ends none.
    """

    markers: Markers
    queue: GrammarCompileQueue
    endings: EndingsCache | None

    @classmethod
    def build(cls, config: EngineConfig, vocabulary: Vocabulary, tokenizer: Any) -> RequestGrammars:
        """As ``config`` says: its ``grammar_*`` fields and ``compile_threads``.

        Raises ConfigError for a backend that is not registered, not installed, or cannot be made.
        """
        name = config.grammar_backend
        markers = Markers.from_tokenizer(vocabulary, tokenizer)
        endings = EndingsCache(vocabulary)
        pipeline = GrammarPipeline(
            BackendChoice(name, vocabulary),
            config.grammar_limits or GrammarLimits(),
            markers=markers,
            endings=endings,
            tables=None if config.grammar_tables == "off" else config.grammar_tables,
            # Where no other process can import it, that one is for specs which name another.
            make=partial(BackendChoice, name if import_path(name) else "auto"),
            name=name,
        )
        queue = GrammarCompileQueue(
            pipeline,
            max_workers=config.compile_threads,
            cache_bytes=config.grammar_cache_bytes,
            size_of_more=lambda grammar: endings.size_of(grammar) + table_bytes(grammar),
            close_backend=pipeline.close,
        )
        return cls(markers, queue, endings)


def _shorten(error: GrammarError) -> None:
    """Messages quote the source, which may be a megabyte."""
    message = str(error)
    if len(message) > _LONGEST_MESSAGE:
        half = _LONGEST_MESSAGE // 2
        error.args = (f"{message[:half]} […] {message[-half:]}",)
