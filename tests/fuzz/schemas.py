"""JSON schemas to draw: valid ones of any keywords, and JSON that only looks like one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jsonschema
from hypothesis import strategies as st

_NAMES = st.sampled_from(["a", "b", "é", "", "a/b", "~", 'q"', "\0", "\\", "\n", "$ref", "a b"])
_NUMBERS = st.one_of(
    st.integers(-5, 5),
    st.sampled_from([0.5, -0.0, 1e-7, 1e300, 2**53, 2**53 + 1, -(2**63), 2**64, 0.1, 1e16, 3.0]),
)
_SIZES = st.sampled_from([0, 0, 1, 1, 2, 3, 2.0, 300, 2**31, 2**70])
_TEXTS = st.sampled_from(
    ["", "a", "ab", "é", "\U0001f600", '"', "\\", "\n", "\0", "2020-02-30", "/"]
)
_PATTERNS = st.sampled_from(
    ["", "^", "$", "a", "^a*$", "^[ab]{1,3}$", "^.$", "a|b", "^a|b$", r"^\d+$", r"\w", r"^\S*$"]
    + [
        "^[^a]$",
        "^(?:a|b)+$",
        "^é?$",
        "^\n$",
        "^a$b",
        "(?i)a",
        "(",
        r"\p{L}",
        "^(a*)*$",
        "^[\\d-]$",
    ]
    + [r"^\\$", '^"$', "^[\U0001f600-\U0001f64f]$", "^(?!a)", r"\bx", "^$", r"^[^\x00-\x1f]*$"]
)
_TYPES = st.sampled_from(
    ["null", "boolean", "integer", "number", "string", "array", "object"]
) | st.lists(
    st.sampled_from(["null", "integer", "number", "string", "array", "object"]),
    min_size=1,
    max_size=3,
    unique=True,
)
_FORMATS = st.sampled_from(
    ["date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "uri", "regex"]
    + ["json-pointer", "duration", "uri-template", "unknown", "idn-hostname", "iri-reference"]
)
_REFERENCES = st.sampled_from(
    ["#", "#/$defs/a", "#/$defs/b", "#/properties/a", "#/items", "#a", "#/$defs/missing", "b.json"]
    + ["http://localhost:1/x", "#/%24defs/a", "#/$defs/a/items", "#/anyOf/0", "#/prefixItems/1"]
)


def values() -> st.SearchStrategy[Any]:
    """Small JSON values of every type."""
    scalars = st.none() | st.booleans() | _NUMBERS | _TEXTS
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
        max_leaves=5,
    )


def adversarial() -> st.SearchStrategy[Any]:
    """Schemas of every keyword next to any other one, with references and definitions."""
    # Few keywords at a time: together most of them admit nothing.
    leaves = st.booleans() | st.dictionaries(st.none(), st.none(), max_size=0) | _some(_plain(), 3)
    inner = st.recursive(
        leaves, lambda part: _some({**_plain(), **_nesting(part)}, 4), max_leaves=7
    )
    drafts = st.sampled_from(
        [
            "https://json-schema.org/draft/2020-12/schema",
            "http://json-schema.org/draft-07/schema#",
            "http://json-schema.org/draft-04/schema#",
            "https://json-schema.org/draft/2019-09/schema",
        ]
    )
    definitions = st.fixed_dictionaries({"a": inner}, optional={"b": inner})
    return st.one_of(
        inner,
        st.builds(_with, inner, st.fixed_dictionaries({"$defs": definitions})),
        st.builds(
            _with,
            inner,
            st.fixed_dictionaries({"$schema": drafts}, optional={"$defs": definitions}),
        ),
    )


def _with(schema: Any, more: dict[str, Any]) -> Any:
    return {**schema, **more} if isinstance(schema, dict) else schema


def _some(keywords: dict[str, st.SearchStrategy[Any]], most: int) -> st.SearchStrategy[Any]:
    names = st.lists(st.sampled_from(sorted(keywords)), min_size=1, max_size=most, unique=True)
    return names.flatmap(
        lambda chosen: st.fixed_dictionaries({name: keywords[name] for name in chosen})
    )


def _plain() -> dict[str, st.SearchStrategy[Any]]:
    names = st.lists(_NAMES, max_size=3, unique=True)
    return {
        "type": _TYPES,
        "enum": st.lists(values(), max_size=4),
        "const": values(),
        "pattern": _PATTERNS,
        "format": _FORMATS,
        "$ref": _REFERENCES,
        "required": names,
        "dependentRequired": st.dictionaries(_NAMES, names, max_size=2),
        "uniqueItems": st.booleans(),
        "multipleOf": st.sampled_from([1, 2, 0.5, 3, 0.1, 1e-9, 2**60, 7.5]),
        **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _SIZES),
        **dict.fromkeys(("minProperties", "maxProperties", "minContains", "maxContains"), _SIZES),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBERS),
    }


def _nesting(part: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    branches = st.lists(part, min_size=1, max_size=3)
    named = st.dictionaries(_NAMES, part, max_size=3)
    return {
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), branches),
        **dict.fromkeys(("not", "if", "then", "else", "items", "contains"), part),
        **dict.fromkeys(("additionalProperties", "propertyNames"), part),
        **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), part),
        **dict.fromkeys(("properties", "dependentSchemas", "definitions", "$defs"), named),
        "patternProperties": st.dictionaries(_PATTERNS, part, max_size=2),
    }


def of_metaschema() -> st.SearchStrategy[Any]:
    """What the metaschema of draft 7 admits, two levels deep; it says so in ``$schema``."""
    meta = jsonschema.Draft7Validator.META_SCHEMA
    return _of(meta, meta, 2).map(lambda schema: _with(schema, {"$schema": meta["$schema"]}))


def _of(node: Any, meta: Any, levels: int) -> st.SearchStrategy[Any]:
    """Values of one schema inside the metaschema, which has few keywords itself."""
    match node:
        case True:
            return values()
        case {"$ref": "#"}:
            return _of(meta, meta, levels - 1) if levels else st.sampled_from(_LEAVES)
        case {"$ref": reference}:
            return _of(meta["definitions"][reference.rpartition("/")[2]], meta, levels)
        case {"allOf": parts}:
            return _of(parts[0], meta, levels)
        case {"anyOf": options}:
            return st.one_of([_of(option, meta, levels) for option in options])
        case {"enum": options}:
            return st.sampled_from(options)
        case {"type": "array", "items": items}:
            return st.lists(_of(items, meta, levels), min_size=1, max_size=3, unique_by=repr)
        case {"type": "object", "additionalProperties": part}:
            names = _PATTERNS if "propertyNames" in node else _NAMES
            return st.dictionaries(names, _of(part, meta, levels), max_size=2)
        case {"properties": properties}:
            parts = {name: _of(part, meta, levels) for name, part in properties.items()}
            return st.booleans() | _some(parts, 3)
    return _SCALARS[node["type"]](node)


_LEAVES = [True, False, {}, {"type": "integer"}, {"enum": ["a", 1]}, {"pattern": "^a+$"}]
_SCALARS: dict[str, Callable[[Any], st.SearchStrategy[Any]]] = {
    "boolean": lambda _: st.booleans(),
    "integer": lambda _: _SIZES,
    "number": lambda node: _NUMBERS.filter(lambda n: n > node.get("exclusiveMinimum", -math.inf)),
    "string": lambda node: _PATTERNS if node.get("format") == "regex" else _FORMATS | _REFERENCES,
}
