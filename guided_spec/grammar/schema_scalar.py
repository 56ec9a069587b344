"""String and number schemas in the backend's subset."""

from __future__ import annotations

import importlib
import math
from fractions import Fraction
from typing import Any

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.regex import to_fullmatch
from guided_spec.grammar.schema_formats import FORMATS, fits_length, format_within
from guided_spec.grammar.schema_report import Report

__all__ = ["is_anchored", "rewrite_number", "rewrite_string"]

_parser: Any = importlib.import_module("re._parser")
_MAX_VALUES = 1000
_MAX_LENGTH = 2**31 - 2  # beyond, the backend's own limits end
_INT64 = 2**63 - 1


def rewrite_string(words: dict[str, Any], pointer: str, report: Report) -> Any:
    """A string schema with at most one of pattern and format. False: no string is left."""
    low, high = int(words.get("minLength", 0)), words.get("maxLength")
    if high is not None and high < low:
        return False
    pattern = words.get("pattern")
    limited = low > 0 or high is not None
    if "format" in words:
        pattern = _of_format(words, pointer, report)
    if pattern is None:
        # minLength and maxLength let raw control characters into the string: a pattern does not.
        return (
            {"type": "string", "pattern": _of_length(low, high)} if limited else {"type": "string"}
        )
    if limited and not fits_length(pattern, low, high):
        keyword = "minLength" if high is None else "maxLength"
        fix = "put the length into the pattern, such as [a-z]{1,8}"
        report.error(pointer, keyword, "the backend ignores it beside pattern", fix)
    try:
        written = to_fullmatch(pattern, place="json_string")
    except GrammarCompileError as error:
        report.error(pointer, "pattern", str(error), "use a simpler pattern")
        return {"type": "string"}
    if not is_anchored(pattern):
        report.note(pointer, "pattern", "it covers the whole string", "anchor it with ^ and $")
    return {"type": "string", "pattern": written}


def is_anchored(pattern: str) -> bool:
    """Whether ``pattern`` says itself where the string begins and ends."""
    parsed = _parser.parse(pattern)
    ends = ("AT_END", "AT_END_STRING")
    return (
        len(parsed) > 1
        and str(parsed[0][1]).startswith("AT_BEGINNING")
        and str(parsed[-1][1]) in ends
    )


def _of_format(words: dict[str, Any], pointer: str, report: Report) -> str | None:
    """The pattern of a string's ``format`` within its length, or its own one where it has that."""
    name, pattern = words["format"], words.get("pattern")
    if name not in FORMATS:
        reason = "an annotation, which the backend does not check here"
        report.note(pointer, "format", reason, "use pattern to have it enforced")
    elif pattern is not None:
        fix = "leave one of the two out, or leave the backend to 'auto'"
        report.error(pointer, "format", "the backend does not check it beside pattern", fix)
    else:
        pattern = format_within(name, int(words.get("minLength", 0)), words.get("maxLength"))
        if pattern is None:
            fix = "leave out minLength and maxLength, or leave the backend to 'auto'"
            report.error(pointer, "format", "the backend cannot keep it to this length", fix)
        elif pattern != FORMATS[name]:
            report.note(pointer, "format", "only short strings of the format", "drop maxLength")
    return pattern


def _of_length(low: int, high: Any) -> str:
    upper = "" if high is None else min(int(high), _MAX_LENGTH)
    plain = to_fullmatch(r'[^"\\\x00-\x1f]', place="json_string")
    escapes = "|".join(
        to_fullmatch(char, place="json_string") for char in ('"', r"\\", r"\n", r"\t")
    )
    return f"(?:{plain}|{escapes}){{{low},{upper}}}"


def rewrite_number(kind: str, words: dict[str, Any], pointer: str, report: Report) -> Any:
    """A number or integer schema. False: no number is left."""
    step = words.get("multipleOf")
    if kind == "number":
        if step is not None:
            fix = "list the values with enum, or use an integer type"
            report.error(pointer, "multipleOf", "the backend ignores it for numbers", fix)
        bounds = {k: v for k, v in words.items() if k != "multipleOf"}
        return {"type": kind, **bounds} if _has_number(bounds) else False
    return _rewrite_integer(words, pointer, report)


def _has_number(bounds: dict[str, Any]) -> bool:
    low = max(bounds.get("minimum", -math.inf), bounds.get("exclusiveMinimum", -math.inf))
    high = min(bounds.get("maximum", math.inf), bounds.get("exclusiveMaximum", math.inf))
    strict = low == bounds.get("exclusiveMinimum") or high == bounds.get("exclusiveMaximum")
    return bool(low < high or (low == high and not strict))


def _rewrite_integer(words: dict[str, Any], pointer: str, report: Report) -> Any:
    lows = [math.ceil(words[k]) for k in ("minimum",) if k in words]
    lows += [math.floor(words[k]) + 1 for k in ("exclusiveMinimum",) if k in words]
    highs = [math.floor(words[k]) for k in ("maximum",) if k in words]
    highs += [math.ceil(words[k]) - 1 for k in ("exclusiveMaximum",) if k in words]
    low, high = max(lows, default=None), min(highs, default=None)
    if low is not None and high is not None and low > high:
        return False
    for keyword, bound in (("minimum", low), ("maximum", high)):
        if bound is not None and abs(bound) > _INT64:
            report.error(pointer, keyword, "beyond 64 bits", "use a bound below 2**63")
            return {"type": "integer"}
    step = Fraction(str(words.get("multipleOf", 1))).numerator  # k * p/q is whole: a multiple of p
    schema: dict[str, Any] = {"type": "integer"}
    if step != 1:
        return _multiples(schema, step, (low, high), pointer, report)
    if low is not None:
        schema["minimum"] = low
    if high is not None:
        schema["maximum"] = high
    return schema


def _multiples(
    schema: dict[str, Any],
    step: int,
    bounds: tuple[int | None, int | None],
    pointer: str,
    report: Report,
) -> Any:
    low, high = bounds
    if low is None and high is None and step <= 1024:
        return {**schema, "multipleOf": step}
    if low is not None and high is not None and (high - low) // step < _MAX_VALUES:
        values = list(range(-(-low // step) * step, high + 1, step))
        return {"enum": values} if values else False
    fix = f"give minimum and maximum with at most {_MAX_VALUES} multiples between"
    report.error(pointer, "multipleOf", "the backend does not enforce it over this range", fix)
    return schema
