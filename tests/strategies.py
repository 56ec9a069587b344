"""Grammars to draw: schemas that can be enforced in full, and regular expressions."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st

_NAMES = st.sampled_from(["a", "b", "name", "é", 'q"', "x/y", "~", ""])
_PATTERNS = st.sampled_from(
    ["^[a-z]{1,4}$", "^[0-9]{2}-[0-9]{2}$", "ab?c", r"^\w+$", r"^[^a]{1,3}$", r'^"\\$', "^(x|yy)*$"]
)


def json_values() -> st.SearchStrategy[Any]:
    """Small JSON values."""
    scalars = st.none() | st.booleans() | st.integers(-99, 99) | st.text('ab"\\é\n', max_size=4)
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_NAMES, inner, max_size=2),
        max_leaves=4,
    )


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """JSON schemas that the backend enforces in full, each with at least one valid value."""
    leaves = _scalars() | st.lists(json_values(), min_size=1, max_size=3).map(lambda v: {"enum": v})
    return st.recursive(leaves, _containers, max_leaves=5).flatmap(_with_definitions)


def _scalars() -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": "string"}]),
        _bounded("integer", st.integers(-200, 200)),
        _bounded("number", st.integers(-200, 200) | st.sampled_from([0.5, -1.25, 3.75])),
        _PATTERNS.map(lambda pattern: {"type": "string", "pattern": pattern}),
        st.tuples(st.integers(0, 3), st.integers(3, 6)).map(
            lambda n: {"type": "string", "minLength": n[0], "maxLength": n[1]}
        ),
        st.sampled_from(["date", "uuid", "ipv4", "time"]).map(
            lambda name: {"type": "string", "format": name}
        ),
        json_values().map(lambda value: {"const": value, "description": "one value"}),
        st.just({"type": ["integer", "null"], "minimum": 3, "title": "nullable"}),
    )


def _bounded(kind: str, bounds: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def build(pair: tuple[Any, Any]) -> dict[str, Any]:
        low, high = sorted(pair)
        return {"type": kind, "minimum": low, "maximum": high + 1}

    return st.tuples(bounds, bounds).map(build) | bounds.map(
        lambda low: {"type": kind, "exclusiveMinimum": low}
    )


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.dictionaries(_NAMES, inner, min_size=1, max_size=3).flatmap(_object),
        inner.map(lambda item: {"type": "array", "items": item, "minItems": 1, "maxItems": 3}),
        st.lists(inner, min_size=1, max_size=2).map(
            lambda items: {"type": "array", "prefixItems": items, "minItems": len(items)}
        ),
        inner.map(lambda value: {"type": "object", "additionalProperties": value}),
        inner.map(
            lambda value: {"patternProperties": {"^k[0-9]$": value}, "additionalProperties": False}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
        inner.map(lambda schema: {"allOf": [schema]}),
    )


def _object(properties: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.lists(st.sampled_from(sorted(properties)), unique=True).map(
        lambda required: {"type": "object", "properties": properties, "required": required}
    )


def _with_definitions(schema: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    referring = {
        "type": "object",
        "properties": {"v": {"$ref": "#/$defs/part"}, "next": {"$ref": "#"}},
        "required": ["v"],
        "$defs": {"part": schema},
    }
    return st.sampled_from([schema, referring])


def regexes() -> st.SearchStrategy[str]:
    """Regular expressions in Python's syntax, without what no automaton can do."""
    characters = st.sampled_from(
        [*"abxyz019 -_", r"\.", r"\[", r"\\", r"\n", r"\x41", "é", "你", "🎉", '"', r"\^"]
    )
    classes = st.sampled_from(
        [".", r"\d", r"\w", r"\s", r"\D", r"\S", "[a-f]", "[^a-f]", r"[^\s,]", "[]^-]", r"[\w.-]"]
    )
    patterns = st.recursive(characters | classes, _compounds, max_leaves=6).flatmap(_anchored)
    return patterns.filter(_is_pattern)  # a group's name may have been drawn twice


def regexes_of_two_letters() -> st.SearchStrategy[str]:
    """Regular expressions over a and b, whose parts match much alike in many ways."""

    def compounds(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        repeats = st.sampled_from(
            ["*", "+", "?", "{2}", "{0,2}", "{1,2}", "{1,3}", "{2,}", "{1,129}", "{2,200}"]
        )
        options = st.lists(inner | st.just(""), min_size=2, max_size=3, unique=True)
        return st.one_of(
            st.lists(inner, min_size=2, max_size=3).map("".join),
            options.map(lambda parts: f"(?:{'|'.join(parts)})"),
            st.tuples(inner, repeats).map(lambda two: f"(?:{two[0]}){two[1]}"),
        )

    return st.recursive(st.sampled_from(["a", "b", "[ab]"]), compounds, max_leaves=8)


def _is_pattern(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _compounds(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeats = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "??", "{0,2}?"])
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, repeats).map(lambda two: f"({two[0]}){two[1]}"),
        inner.map(lambda one: f"(?P<named>{one})" if "(?P" not in one else one),
        inner.map(lambda one: f"(?s:{one})"),
    )


def _anchored(pattern: str) -> st.SearchStrategy[str]:
    return st.sampled_from([pattern, f"^(?:{pattern})$", rf"\A(?:{pattern})\Z", f"(^{pattern}$)"])
