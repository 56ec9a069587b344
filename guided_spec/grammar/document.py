"""A spec before a backend compiles it: parsed, measured, lowered and prepared, each once.

Also handles a schema that cannot be enforced in full, which is refused, narrowed or loosened.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from guided_spec.errors import GrammarCompileError, UnsupportedSchemaError
from guided_spec.grammar.demand import Demand
from guided_spec.grammar.protocol import CompiledGrammar, GrammarBackend
from guided_spec.grammar.recipe import Recipe
from guided_spec.grammar.regex import parse_regex
from guided_spec.grammar.schema.lower import lower
from guided_spec.grammar.schema.lowered import (
    Lowered,
    Unenforced,
    describe,
    escape,
    find,
    narrowing,
    unescape,
)
from guided_spec.grammar.schema.prepare import examine_schema, lower_checked, require_schema
from guided_spec.grammar.schema.rewrite import normalize
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.steps import spend, spend_on_text
from guided_spec.grammar.vocabulary import Vocabulary

_LOG = logging.getLogger(__name__)

LARGE_SOURCE = 16_384
LARGE_TEXT = 4_096
LARGE_LIST = 512
LARGE_BOUNDED_OBJECT = 24
LARGE_REPEATS = 256
LARGE_REPEATS_IN_ALL = 2_048
LARGE_EXPANSION = 10.0  # as a power of 2
_DIGITS = 19
ENDLESS = 10**18  # counts are not told apart beyond this

_Path = tuple["_Path", str | int] | None
_EXTENTS = ("nesting", "repetitions", "alternatives")

_SCHEMA_MAPS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
_DATA = frozenset({"const", "enum", "default", "examples"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems"})
_COUNTS_OF_KEYS = frozenset({"minProperties", "maxProperties"})
_BRANCHES = frozenset({"anyOf", "oneOf", "allOf"})
_NEUTRAL = frozenset({"$ref", "title", "description", "default", "examples", "$comment"})
_STRING = r'"(?:[^"\\\n]|\\.)*"|'
_TOKEN = r"\\.|\[\^?\]?|[].()|]|\{(\d*)(?:,(\d*))?\}"
_WIDE = frozenset({".", "]", *(f"\\{letter}" for letter in "dDwWsSpP")})
_IN_REGEX = re.compile(_TOKEN, re.DOTALL)
_IN_GRAMMAR = re.compile(_STRING + _TOKEN, re.DOTALL)


class Extent(NamedTuple):
    """The largest of one kind. place: a JSON pointer; None where the source is not JSON."""

    value: int = 0
    place: str | None = None


class GrammarSize(NamedTuple):
    """What of a grammar's source drives the cost of compiling it.

    nesting: JSON lists and objects, or parentheses, inside each other.
    repetitions: the largest count, of minLength to maxItems or ``{m,n}``. Counts of groups inside
        each other are multiplied.
    alternatives: the most members of one list or object, or the number of ``|`` in one regex or
        grammar, plus 1.
    characters: the largest single count that is about characters, not about items.
    counted: the different minLength and maxLength, added up.
    large: whether compiling it may take seconds, or more.
    """

    nesting: Extent
    repetitions: Extent
    alternatives: Extent
    characters: int
    counted: int
    large: bool


def measure_json(value: Any, length: int) -> GrammarSize:
    """The size of a grammar that is a JSON value, in linear time; length: of its source."""
    reader = _SizeReader(length)
    if isinstance(value, dict | list):
        reader.run(value)
    return reader.size()


def measure_text(source: str, *, is_regex: bool) -> GrammarSize:
    """The size of a regex, or of a grammar that holds some, in linear time."""
    found = _Scan(source, _IN_REGEX if is_regex else _IN_GRAMMAR)
    large = len(source) > LARGE_TEXT or found.repeated > LARGE_REPEATS
    large = large or found.alternatives > LARGE_LIST
    largest, alternatives = Extent(found.largest), Extent(found.alternatives)
    return GrammarSize(Extent(found.nesting), largest, alternatives, found.longest, 0, large=large)


class _SizeReader:
    """One pass over a JSON value, without recursion."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.largest: dict[str, tuple[int, _Path]] = dict.fromkeys(_EXTENTS, (0, None))
        self.characters = 0
        self.lengths = set[int]()
        self.counts: dict[str | int, int] = {}  # of each pattern and each count
        self.repeated = 0
        self.expansion = 0.0  # log2 of how often references can be written out
        self.has_reference = self.has_joined = self.has_bounded_object = False

    def run(self, root: Any) -> None:
        """Traverse depth first; ``is_data`` marks plain values, which are not schemas."""
        stack: list[tuple[Any, int, _Path, bool, bool]] = [(root, 1, None, False, False)]
        while stack:
            node, depth, path, is_data, is_map = stack.pop()
            spend(2 + len(node))
            self._more("nesting", depth, path)
            self._more("alternatives", len(node), path)
            if isinstance(node, list):
                for index, value in enumerate(node):
                    if isinstance(value, dict | list):
                        stack.append((value, depth + 1, (path, index), is_data, False))
                continue
            for key, value in node.items():
                if isinstance(value, dict | list):
                    data = is_data or (not is_map and key in _DATA)
                    maps = not is_map and key in _SCHEMA_MAPS
                    stack.append((value, depth + 1, (path, key), data, maps))
            self._keywords(node, path, is_data=is_data)

    def _keywords(self, node: dict[str, Any], path: _Path, *, is_data: bool) -> None:
        for key, value in node.items():
            match value:
                case bool():
                    pass
                case int() if key in _COUNTS:
                    self._count(value, (path, key), is_data=is_data)
                case int() if key in _COUNTS_OF_KEYS:
                    self.has_bounded_object = True
                case str() if key in ("pattern", "grammar"):
                    self._pattern(value, (path, key), is_data=is_data)
                case str() if key == "$ref":
                    self.has_reference = True
                case dict() if key == "patternProperties":
                    for pattern in value:
                        self._pattern(pattern, ((path, key), pattern), is_data=is_data)
                case list() if key in _BRANCHES:
                    self.expansion += math.log2(max(len(value), 1))
                    rest = node.keys() - {key} - _NEUTRAL
                    self.has_joined |= key == "allOf" or bool(rest)

    def _pattern(self, pattern: str, path: _Path, *, is_data: bool) -> None:
        found = _Scan(pattern, _IN_REGEX)
        self.counts[pattern] = found.repeated  # equal ones are compiled once
        self.repeated += found.repeated
        self.characters = max(self.characters, found.longest)
        if not is_data:
            self._more("repetitions", found.largest, path)
            self._more("alternatives", found.alternatives, path)
            self._more("nesting", found.nesting, path)

    def _count(self, value: int, path: tuple[_Path, str], *, is_data: bool) -> None:
        value = max(0, min(value, ENDLESS))
        if path[1] in ("minLength", "maxLength"):
            self.characters = max(self.characters, value)
            self.lengths.add(value)
        self.counts[value] = value
        self.repeated += value
        if not is_data:
            self._more("repetitions", value, path)

    def _more(self, extent: str, value: int, path: _Path) -> None:
        if value > self.largest[extent][0]:
            self.largest[extent] = (value, path)

    def size(self) -> GrammarSize:
        longest, _ = self.largest["alternatives"]
        large = (
            self.length > LARGE_SOURCE
            or longest > LARGE_LIST
            or sum(self.counts.values()) > LARGE_REPEATS
            or self.repeated > LARGE_REPEATS_IN_ALL
            or (self.has_bounded_object and longest > LARGE_BOUNDED_OBJECT)
            # Branches are written out together with what stands next to them, again at each level.
            or (self.has_reference and self.has_joined and self.expansion > LARGE_EXPANSION)
        )
        nesting, repetitions, alternatives = (_extent(*self.largest[name]) for name in _EXTENTS)
        counted = sum(self.lengths)
        return GrammarSize(
            nesting, repetitions, alternatives, self.characters, counted, large=large
        )


def _extent(value: int, path: _Path) -> Extent:
    tokens: list[str] = []
    while path is not None:
        path, key = path
        tokens.append(escape(str(key)))
    return Extent(value, "".join(f"/{token}" for token in reversed(tokens)))


class _Scan:
    """One pass over a regex or grammar, right or not; keeps no more than its open groups.

    repeated: its character classes, each as often as it is repeated. largest, longest: of the
    counts, with those inside each other multiplied, and each by itself.
    """

    def __init__(self, text: str, tokens: re.Pattern[str]) -> None:
        self.groups = [0]  # what each open group repeats
        self.closed = -1  # where the last class or group ended
        self.inner = 0  # what that one repeats
        self.nesting = self.largest = self.longest = 0
        self.alternatives = 1
        in_class = False
        spend(len(text))
        for match in tokens.finditer(text):
            token = match.group()
            if in_class and token != "]":
                continue
            in_class = token[0] == "["
            if token == "(":
                self.groups.append(0)
                self.nesting = max(self.nesting, len(self.groups) - 1)
            elif token == ")" and len(self.groups) > 1:
                self._close(match.end(), self.groups.pop())
            elif token == "|":
                self.alternatives += 1
            elif token in _WIDE:
                self._close(match.end(), 1)
            elif token[0] == "{":
                self._repeat(match)
        self.repeated = sum(self.groups)

    def _close(self, end: int, inner: int) -> None:
        self.closed, self.inner = end, inner
        self.groups[-1] = min(self.groups[-1] + inner, ENDLESS)

    def _repeat(self, match: re.Match[str]) -> None:
        numbers = [number for number in match.groups() if number]
        upper = max((int(n) if len(n) < _DIGITS else ENDLESS for n in numbers), default=1)
        before = self.inner if self.closed == match.start() else 0
        count = min(upper * max(before, 1), ENDLESS)
        self.groups[-1] = min(self.groups[-1] - before + count, ENDLESS)
        self.largest = max(self.largest, count)
        self.longest = max(self.longest, upper)


_TEXTS = ("regex", "ebnf", "lark")
_ANY_OBJECT = {"type": "object"}


class SpecDocument:
    """A spec and its stages of preparation. The result of a stage must not be changed.

    demand: the waiters for its grammar; None for a caller that always waits. is_dear: whether
    preparing it took more steps than this process may spend on it. num_steps: how many it took.
    is_filtered: whether filters enforce what a grammar cannot, such as ``uniqueItems``.

    Each stage is computed on first use. Used by one thread.
    """

    def __init__(
        self, spec: GrammarSpec, demand: Demand | None = None, *, is_filtered: bool = True
    ) -> None:
        self.spec = spec
        self.is_filtered = is_filtered
        self.demand = demand
        self.is_dear = False
        self.num_steps = 0

    @property
    def value(self) -> Any:
        """The JSON value that the source is. Raises GrammarCompileError where it is none."""
        value = self._parsed
        if isinstance(value, Exception):
            error = GrammarCompileError(f"the {self.spec.kind} is not JSON: {value}")
            raise error from value
        return value

    @cached_property
    def size(self) -> GrammarSize:
        """What of the source drives the cost of compiling it. Broken ones are measured too."""
        if self.spec.kind in _TEXTS:
            return measure_text(self.spec.source, is_regex=self.spec.kind == "regex")
        if isinstance(self._parsed, RecursionError):
            return GrammarSize(Extent(ENDLESS), Extent(), Extent(), 0, 0, large=True)
        return measure_json(self._parsed, len(self.spec.source))

    @property
    def is_large(self) -> bool:
        """Whether compiling it may take seconds or more; microseconds for an ordinary one."""
        return self.is_dear or len(self.spec.source) > LARGE_SOURCE or self.size.large

    def require_readable(self) -> None:
        """Raise GrammarCompileError for what is broken whatever the vocabulary is.

        That is JSON, a JSON schema or a regex that cannot be read.
        """
        if self.spec.kind == "regex":
            parse_regex(self.spec.source)
        elif self.spec.kind == "json_schema":
            require_schema(self.value)

    def require_no_start(self) -> None:
        """Raise GrammarCompileError for a grammar that starts after a marker."""
        if self.spec.start is not None:
            raise GrammarCompileError(
                "the spec has a start: compile it with a GrammarPipeline that has markers"
            )

    def without_start(self) -> SpecDocument:
        """The one that binds at once; what is read of this one is read of that."""
        other = copy.copy(self)
        other.spec = replace(self.spec, start=None)
        return other

    @cached_property
    def lowered(self) -> Lowered:
        """The JSON schema, checked, in the keywords that all backends share.

        Raises GrammarCompileError where it is broken.
        """
        if self.spec.kind == "json_object":
            return Lowered(_ANY_OBJECT, ())
        additional, strict = self.spec.additional_properties, self.spec.strict
        return lower_checked(self.value, additional, filtered=self.is_filtered, strict=strict)

    @cached_property
    def examined(self) -> Lowered:
        """The lowered schema rewritten for xgrammar, and what that could not keep."""
        return examine_schema(self.lowered)

    @cached_property
    def _parsed(self) -> Any:
        """The parsed value, or the error of parsing it."""
        spend_on_text(self.spec.source)
        try:
            return json.loads(self.spec.source)
        except (ValueError, RecursionError) as error:
            return error


_ROUNDS = 50
_SCHEMAS_OF_A_TAG = ("json_schema", "schema")
Compiled = TypeVar("Compiled", covariant=True)


class DocumentCompiler(ABC, Generic[Compiled]):
    """A backend, or a choice of several, that compiles a document read before."""

    vocabulary: Vocabulary

    def compile(self, spec: GrammarSpec) -> Compiled:
        """Compile ``spec``; may take seconds and cannot be interrupted.

        Raises GrammarCompileError (broken, or a kind that others compile), UnsupportedSchemaError
        (valid, but not enforceable in full) or UnsatisfiableGrammarError (nothing matches).
        """
        return self.compile_document(SpecDocument(spec))

    @abstractmethod
    def compile_document(self, document: SpecDocument) -> Compiled:
        """Compile a spec whose document was read before; raises as ``compile`` does."""

    def rebuild(self, spec: GrammarSpec, recipe: Recipe) -> Compiled | None:
        """Compile once more what was compiled for ``spec`` elsewhere, without reading its source.

        None where this needs the document. Raises GrammarCompileError where it does not compile.
        """
        del spec, recipe
        return None


class _SpecBackend(DocumentCompiler[CompiledGrammar]):
    """One that takes specs alone, and reads them itself."""

    def __init__(self, backend: GrammarBackend) -> None:
        self.vocabulary = backend.vocabulary
        self._backend = backend

    def compile_document(self, document: SpecDocument) -> CompiledGrammar:
        return self._backend.compile(document.spec)


def as_document_compiler(backend: GrammarBackend) -> DocumentCompiler[CompiledGrammar]:
    """The backend itself where it takes documents, else one around it."""
    return backend if isinstance(backend, DocumentCompiler) else _SpecBackend(backend)


class DocumentBackend(DocumentCompiler[Compiled]):
    """A backend of this package: ``unsupported`` decides about what it cannot enforce."""

    is_filtered: ClassVar[bool] = True  # see ``SpecDocument``; in structural tags nothing is

    def compile_document(self, document: SpecDocument) -> Compiled:
        """As ``compile``.

        What cannot be enforced ``spec.unsupported`` decides about: "error" refuses it, "rewrite"
        compiles what ``narrow`` makes of every schema in the document, "warn" what ``loosen`` does,
        with a UserWarning that names each keyword dropped.
        """
        spec = document.spec
        document.require_no_start()
        try:
            compiled = self.enforce(document)
        except UnsupportedSchemaError:
            if spec.unsupported == "error":
                raise
        else:
            _log_notes(self.entries(document))
            return compiled
        dropped: list[Unenforced] = []
        is_schema = spec.kind == "json_schema"
        filtered = is_schema and self.is_filtered

        def change(schema: Any) -> Any:
            if spec.unsupported == "rewrite":
                return narrow(schema, filtered=filtered)
            loosened = loosen(schema, filtered=filtered)
            dropped.extend(loosened.entries)
            return loosened.schema

        changed = change(document.value) if is_schema else _in_tag(document.value, change)
        strict = replace(spec, source=json.dumps(changed, ensure_ascii=False), unsupported="error")
        compiled = self.enforce(SpecDocument(strict, is_filtered=self.is_filtered))
        if dropped:
            lines = [
                f"{entry.pointer or '/'}: {entry.keyword}: {entry.reason}" for entry in dropped
            ]
            text = f"the text may break the JSON schema at {'; '.join(lines)}"
            warnings.warn(text, UserWarning, stacklevel=3)
        return compiled

    def entries(self, document: SpecDocument) -> Sequence[Unenforced]:
        """What of a JSON schema that compiled is not as it says; empty for other kinds."""
        return document.lowered.entries if document.spec.kind == "json_schema" else ()

    @abstractmethod
    def enforce(self, document: SpecDocument) -> Compiled:
        """As ``compile``, whatever ``unsupported`` is: what cannot be enforced is refused."""


def _log_notes(entries: Sequence[Unenforced]) -> None:
    for entry in narrowing(entries):
        where = entry.pointer or "/"
        _LOG.info("JSON schema: %s: %s: %s; %s", where, entry.keyword, entry.reason, entry.fix)


def narrow(schema: Any, *, filtered: bool = True) -> Any:
    """A schema that admits less instead of what cannot be enforced, however little is left.

    A branch that cannot be distinguished from another is dropped, and without filters an array of
    unique items gets one at most. Raises UnsupportedSchemaError where nothing of the kind helps.
    """
    lowered = lower(schema, harder=True, filtered=filtered)
    if lowered.errors:
        raise UnsupportedSchemaError(describe(lowered.errors))
    return lowered.schema


def loosen(schema: Any, *, filtered: bool = True) -> Lowered:
    """A schema without the keywords that xgrammar cannot enforce, and these: it admits more."""
    lowered = lower(schema, filtered=filtered)
    dropped = lowered.errors
    loose = copy.deepcopy(lowered.schema)
    for _ in range(_ROUNDS):
        errors = normalize(lower(loose, filtered=filtered)).errors
        if not errors:
            break
        for entry in errors:
            loose = _without(loose, entry)
        dropped += errors
    return Lowered(loose, tuple(dict.fromkeys(dropped)))


def _without(schema: Any, entry: Unenforced) -> Any:
    """``schema`` changed in place: the keyword is gone, or all of the subschema that holds it."""
    above, _, key = entry.pointer.rpartition("/")
    try:
        node, parent = find(schema, entry.pointer), find(schema, above)
    except LookupError:
        return {}
    for keyword in (entry.keyword, "allOf"):  # of whose parts one may hold the keyword
        if isinstance(node, dict) and keyword in node:
            del node[keyword]
            return schema
    if not entry.pointer:
        return {}
    parent[int(key) if isinstance(parent, list) else unescape(key)] = {}
    return schema


def _in_tag(node: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(node, list):
        return [_in_tag(part, change) for part in node]
    if not isinstance(node, dict):
        return node
    return {
        key: change(value)
        if key in _SCHEMAS_OF_A_TAG and isinstance(value, dict | bool)
        else _in_tag(value, change)
        for key, value in node.items()
    }
