"""What one grammar, and one table of it, may cost."""

from __future__ import annotations

from dataclasses import dataclass, fields

from guided_spec.errors import ConfigError, GrammarCompileError
from guided_spec.grammar.document import ENDLESS, Extent, GrammarSize, SpecDocument
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.kinds import require_field_kinds

_FIXES = {
    "nesting": "flatten it",
    "repetitions": "ask for fewer, or leave the count out",
    "alternatives": "list fewer, or describe them with a pattern",
}

_MOST_STATES = 2**15 - 1  # a state is an int16
_SHOWN = 200  # characters of a JSON pointer


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What one grammar may cost. Beyond it, its own request fails with a GrammarCompileError.

    source_bytes: of the source, in UTF-8.
    nesting: JSON lists and objects, or parentheses, inside each other.
    repetitions: one count: minLength, maxLength, minItems, maxItems or ``{m,n}``; those of nested
        groups multiply. What a count costs does not grow steadily with it, so that this only keeps
        out what no text can reach; time and memory are bounded by the other limits.
    alternatives: members of one list or object (enum, anyOf, properties, choice), or alternatives
        of one regex or grammar.
    compile_seconds: wall-clock time of one compile.
    compile_bytes: memory of one compile, beyond what the process takes before it.
    text_seconds: CPU time that the mask rows of one text may take in all; those that take less
        than 0.02 s do not count. The request fails with a GrammarTooSlowError.
    steps: of preparing one grammar in this process, each half a microsecond of Python. Beyond it a
        worker process prepares the grammar; where there is none, it is refused.

    Time and memory are limited in a worker, which compiles grammars that are large at first sight
    and those that take more steps, see ``GrammarPipeline``. Raises ConfigError for a limit that is
    not positive.
    """

    source_bytes: int = 2**20
    nesting: int = 256
    repetitions: int = 2**31 - 1
    alternatives: int = 10_000
    compile_seconds: float = 30.0
    compile_bytes: int = 2 * 2**30
    text_seconds: float = 5.0
    steps: int = 80_000

    def __post_init__(self) -> None:
        _require_positive(self)


class NoTableError(Exception):
    """Why a grammar has no table. Never leaves the package."""


@dataclass(frozen=True, slots=True)
class TableLimits:
    """What one table may cost. A grammar beyond it keeps its matchers.

    states: of the automaton over bytes, 32,767 at most. Of a grammar that has more, such as one of
        JSON values inside each other, the table holds so many, those with the fewest open rules
        first; a text that leaves them continues with a matcher.
    seconds: of a core, to make it and to compare it with a matcher. bytes: of the finished table.

    Raises ConfigError for a limit that is not positive, or too many states.
    """

    states: int = 8192
    seconds: float = 30.0
    bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        _require_positive(self)
        if self.states > _MOST_STATES:
            raise ConfigError("states", self.states, f"must be at most {_MOST_STATES}")


def _require_positive(limits: GrammarLimits | TableLimits) -> None:
    require_field_kinds(limits)
    for field in fields(limits):
        value = getattr(limits, field.name)
        if not value > 0:
            raise ConfigError(field.name, value, "must be a positive number")


def check_limits(document: SpecDocument, limits: GrammarLimits) -> GrammarSize:
    """The size of a document, in time linear in its source and without building anything.

    Raises GrammarCompileError naming the limit, what was found, where, and what to do. A broken
    source passes: what is wrong with it is the compiler's to say.
    """
    check_source(document.spec, limits)
    size = document.size
    for name, fix in _FIXES.items():
        extent: Extent = getattr(size, name)
        limit: int = getattr(limits, name)
        if extent.value > limit:
            raise _refuse(document.spec, name, extent, limit, fix)
    return size


def check_source(spec: GrammarSpec, limits: GrammarLimits) -> None:
    """Raise GrammarCompileError for a source that is too long, in time linear in the limit."""
    # A character is at least one byte: what is far too long is not encoded first.
    length = len(spec.source)
    if length <= limits.source_bytes:
        length = len(spec.source.encode("utf-8", "surrogatepass"))
    if length > limits.source_bytes:
        raise _refuse(spec, "source_bytes", Extent(length), limits.source_bytes, "shorten it")


def _refuse(
    spec: GrammarSpec, name: str, found: Extent, limit: int, fix: str
) -> GrammarCompileError:
    value = f"over {limit}" if found.value >= ENDLESS else found.value
    place = "" if found.place is None else f" at {found.place[:_SHOWN] or '/'}"
    return GrammarCompileError(
        f"the {spec.kind} is beyond the limit {name}={limit}: {value}{place}; {fix}"
    )
