"""Sets of characters, as classes of Python's regular expressions name them."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from itertools import groupby, permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.steps import spend

Ranges = tuple[tuple[int, int], ...]
"""Inclusive, ascending, and neither touching nor overlapping."""

_LAST = 0x10FFFF
# Without U+0000, which the backend cannot hold, and surrogates, which UTF-8 cannot.
ANY_CHARACTER: Ranges = ((1, 0xD7FF), (0xE000, _LAST))
# What may stand unescaped between the quotes of a JSON string.
JSON_PLAIN: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, _LAST))

ESCAPED: Ranges = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
"""What may not."""

_ASCII: dict[str, Ranges] = {
    "digit": ((48, 57),),
    "space": ((9, 13), (32, 32)),
    "word": ((48, 57), (65, 90), (95, 95), (97, 122)),
}
_UNICODE = {"digit": r"\d", "space": r"\s", "word": r"\w"}


def normalize(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sort, and join what touches."""
    joined: list[tuple[int, int]] = []
    ranges = sorted(ranges)
    spend(1 + len(ranges) // 8)
    for low, high in ranges:
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return tuple(joined)


def complement(ranges: Ranges) -> Ranges:
    """Every code point that is not in ``ranges``."""
    gaps = []
    start = 0
    spend(1 + len(ranges) // 8)
    for low, high in ranges:
        if start < low:
            gaps.append((start, low - 1))
        start = high + 1
    if start <= _LAST:
        gaps.append((start, _LAST))
    return tuple(gaps)


def intersect(one: Ranges, other: Ranges) -> Ranges:
    """The code points in both."""
    return complement(normalize((*complement(one), *complement(other))))


@cache
def category(kind: str, *, ascii_only: bool) -> Ranges:
    """The characters of ``\\d`` ("digit"), ``\\s`` ("space") or ``\\w`` ("word")."""
    if ascii_only:
        return _ASCII[kind]
    codes = np.arange(_LAST + 1, dtype="<u4")
    text = codes.tobytes().decode("utf-32-le", "surrogatepass")
    runs = re.finditer(f"{_UNICODE[kind]}+", text)
    return tuple((run.start(), run.end() - 1) for run in runs)


# As ECMAScript spells them after \\p, which knows no other case and no spaces.
_CATEGORIES = {
    "Cased_Letter": "LC",
    **{"Letter": "L", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Titlecase_Letter": "Lt"},
    **{"Modifier_Letter": "Lm", "Other_Letter": "Lo", "Mark": "M", "Combining_Mark": "M"},
    **{"Nonspacing_Mark": "Mn", "Spacing_Mark": "Mc", "Enclosing_Mark": "Me", "Number": "N"},
    **{"Decimal_Number": "Nd", "digit": "Nd", "Letter_Number": "Nl", "Other_Number": "No"},
    **{"Punctuation": "P", "punct": "P", "Connector_Punctuation": "Pc", "Dash_Punctuation": "Pd"},
    **{"Open_Punctuation": "Ps", "Close_Punctuation": "Pe", "Initial_Punctuation": "Pi"},
    **{"Final_Punctuation": "Pf", "Other_Punctuation": "Po", "Symbol": "S", "Math_Symbol": "Sm"},
    **{"Currency_Symbol": "Sc", "Modifier_Symbol": "Sk", "Other_Symbol": "So", "Separator": "Z"},
    **{"Space_Separator": "Zs", "Line_Separator": "Zl", "Paragraph_Separator": "Zp"},
    **{"Other": "C", "Control": "Cc", "cntrl": "Cc", "Format": "Cf", "Surrogate": "Cs"},
    **{"Private_Use": "Co", "Unassigned": "Cn"},
}
_CASED_LETTERS = ("Lu", "Ll", "Lt")


def general_category(name: str) -> Ranges | None:
    """The characters of ``\\p{name}``, by its short or long name; None for other names.

    As the ``unicodedata`` of this Python has them, surrogates included.
    """
    if name in ("Any", "ASCII", "Assigned"):
        whole = {"Any": ((0, _LAST),), "ASCII": ((0, 127),)}
        return whole.get(name) or complement(_by_category()["Cn"])
    short = _CATEGORIES.get(name, name)
    if short not in {*_CATEGORIES.values(), "LC"}:
        return None
    parts = _CASED_LETTERS if short == "LC" else (short,)
    found = (ranges for kind, ranges in _by_category().items() if kind.startswith(parts))
    return normalize(pair for ranges in found for pair in ranges)


@cache
def _by_category() -> dict[str, Ranges]:
    found = defaultdict[str, list[tuple[int, int]]](list)
    codes = range(_LAST + 1)
    for kind, run in groupby(codes, key=lambda code: unicodedata.category(chr(code))):
        members = [*run]
        found[kind].append((members[0], members[-1]))
    return {kind: tuple(ranges) for kind, ranges in found.items()}


_NEWLINE: Ranges = ((10, 10),)


def set_of(op: str, value: Any, flags: int, *, whole: bool = False) -> Ranges:
    """The characters of a literal or class of a parsed regex.

    whole: as for ``any_case``, and with characters of ``\\d``, ``\\w``, ``\\s`` that are not ASCII.
    """
    if op in ("LITERAL", "NOT_LITERAL"):
        negated = op == "NOT_LITERAL"
        ranges: Ranges = ((value, value),)
        if flags & re.IGNORECASE:
            ranges = any_case(ranges, flags, whole=whole or negated)
        return complement(ranges) if negated else ranges
    if op == "ANY":
        return ((0, _LAST),) if flags & re.DOTALL else complement(_NEWLINE)
    negated = str(value[0][0]) == "NEGATE"
    exact = negated or bool(flags & re.ASCII)
    named, found = list[tuple[int, int]](), list[tuple[int, int]]()
    for kind, member in value[1:] if negated else value:
        match str(kind):
            case "LITERAL":
                named.append((member, member))
            case "RANGE":
                named.append(member)
            case _:
                found.extend(_category(str(member), flags, exact=exact, whole=whole))
    if flags & re.IGNORECASE:
        named = [*any_case(normalize(named), flags, whole=whole or negated)]
    all_named = normalize([*named, *found])
    return complement(all_named) if negated else all_named


def any_case(ranges: Ranges, flags: int, *, whole: bool = False) -> Ranges:
    """The characters and those that ``re`` takes for the same under ``(?i)``.

    flags: under ``re.ASCII`` only ASCII letters have two cases. whole: with the dotted capital and
    the dotless small i of Turkish, which other dialects do not take for an i.
    """
    spend(64)
    pairs = _ASCII_CASES if flags & re.ASCII else _cases()
    starts = np.array([low for low, _ in ranges])
    ends = np.array([high for _, high in ranges])
    at = np.searchsorted(starts, pairs[:, 0], side="right") - 1
    found = pairs[(at >= 0) & (pairs[:, 0] <= ends[at]), 1].tolist() if ranges else []
    more = [code for code in found if whole or code not in _TURKISH]
    return normalize([*ranges, *((code, code) for code in more)])


_TURKISH = frozenset({0x130, 0x131})
_ASCII_CASES = np.array([(c, c ^ 32) for c in range(128) if chr(c).isalpha()])


# Where letters have cases, to save looking at the others.
_CASED = ((0, 0x3000), (0xA640, 0xAC00), (0xFB00, 0x16F00), (0x1D400, 0x1E944))


@cache
def _cases() -> NDArray[np.int64]:
    """[n, 2] pairs of characters that are the same under ``(?i)``."""
    same = defaultdict[str, list[int]](list)
    for code in (code for first, end in _CASED for code in range(first, end)):
        lower, upper = chr(code).lower(), chr(code).upper()
        if lower != upper:
            back = upper.lower()
            same[back if len(upper) == len(back) == 1 else lower].append(code)
    return np.array([pair for codes in same.values() for pair in permutations(codes, 2)])


def _category(name: str, flags: int, *, exact: bool, whole: bool = False) -> Ranges:
    ascii_only = bool(flags & re.ASCII)
    kind = name.rsplit("_", 1)[-1].lower()  # CATEGORY_NOT_DIGIT: digit
    if whole:
        ranges = category(kind, ascii_only=ascii_only)
        return complement(ranges) if "_NOT_" in name else ranges
    if "_NOT_" in name:
        # Inside [^...] this set is taken away again: it must then be too wide, never too narrow.
        return complement(category(kind, ascii_only=ascii_only or exact))
    return category(kind, ascii_only=ascii_only or not exact)


def code_points(items: Any) -> Ranges:
    """All characters that literals and classes of a parsed regex stand for."""
    found: list[tuple[int, int]] = []
    for op, value in items:
        match str(op):
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                found += set_of(str(op), value, re.DOTALL)
            case "SUBPATTERN":
                found += code_points(value[3])
            case "BRANCH":
                found += [pair for option in value[1] for pair in code_points(option)]
            case "MAX_REPEAT" | "MIN_REPEAT":
                found += code_points(value[2])
    return normalize(found)
