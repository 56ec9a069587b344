"""What a grammar and its table may cost, and the check of what can be seen in its source."""

from __future__ import annotations

from dataclasses import dataclass, fields

from guided_spec.errors import ConfigError, GrammarCompileError
from guided_spec.grammar.document import ENDLESS, Extent, GrammarSize, SpecDocument
from guided_spec.grammar.spec import GrammarSpec

__all__ = ["GrammarLimits", "NoTableError", "TableLimits", "check_limits"]

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

    The last two bind for grammars that are large at first sight, see ``GrammarPipeline``. Raises
    ConfigError for a limit that is not positive.
    """

    source_bytes: int = 2**20
    nesting: int = 256
    repetitions: int = 2**31 - 1
    alternatives: int = 10_000
    compile_seconds: float = 30.0
    compile_bytes: int = 2 * 2**30

    def __post_init__(self) -> None:
        _require_positive(self)


class NoTableError(Exception):
    """Why a grammar has no table. Never leaves the package."""


@dataclass(frozen=True, slots=True)
class TableLimits:
    """What one table may cost. A grammar that goes beyond it stays with its matchers.

    states: of the automaton over bytes, 32,767 at most. Of a grammar that has more, such as one of
        JSON values inside each other, the table holds so many, those with the fewest open rules
        first; a text that leaves them goes on with a matcher.
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
    for field in fields(limits):
        value = getattr(limits, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(field.name, value, "must be a positive number")


def check_limits(document: SpecDocument, limits: GrammarLimits) -> GrammarSize:
    """The size of a document, in time linear in its source and without building anything.

    Raises GrammarCompileError naming the limit, what was found, where, and what to do. A broken
    source passes: what is wrong with it is the compiler's to say.
    """
    spec = document.spec
    # A character is at least one byte: what is far too long is not encoded first.
    length = len(spec.source)
    if length <= limits.source_bytes:
        length = len(spec.source.encode("utf-8", "surrogatepass"))
    if length > limits.source_bytes:
        raise _refuse(spec, "source_bytes", Extent(length), limits.source_bytes, "shorten it")
    size = document.size
    for name, fix in _FIXES.items():
        extent: Extent = getattr(size, name)
        limit: int = getattr(limits, name)
        if extent.value > limit:
            raise _refuse(spec, name, extent, limit, fix)
    return size


def _refuse(
    spec: GrammarSpec, name: str, found: Extent, limit: int, fix: str
) -> GrammarCompileError:
    value = f"over {limit}" if found.value >= ENDLESS else found.value
    place = "" if found.place is None else f" at {found.place[:_SHOWN] or '/'}"
    return GrammarCompileError(
        f"the {spec.kind} is beyond the limit {name}={limit}: {value}{place}; {fix}"
    )
