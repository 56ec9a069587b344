"""JSON schemas as llguidance enforces them.

llguidance refuses by itself most of what it does not enforce. What it reads differently from the
specification is rewritten here into something narrower, or refused.
"""

from __future__ import annotations

import itertools
import math
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from guided_spec.errors import GrammarCompileError, UnsupportedSchemaError
from guided_spec.grammar.backends.listed_items import with_listed_items
from guided_spec.grammar.formats import FORMATS
from guided_spec.grammar.regex import RE_PARSER, to_search
from guided_spec.grammar.schema.joining import merge
from guided_spec.grammar.schema.keys import crowded, every_part
from guided_spec.grammar.schema.lowered import (
    HOLDS_PARTS,
    Lowered,
    Unenforced,
    all_parts,
    change_parts,
    escape,
    unescape,
)
from guided_spec.grammar.schema.values import inner_bounds, keep_valid, values_within
from guided_spec.grammar.steps import spend, spend_on_value

MOST_ITEMS = 2**14
"""Of one row of llguidance's parser: ways in which the text may go on at one place."""

_ITEMS_OF_A_KEY = 4
_MOST_OPTIONAL = (
    1_000  # keys of one object: rows take 5 ms of CPU with 800, four times as long with 1,600
)
_KEPT = HOLDS_PARTS | frozenset(
    {"type", "enum", "const", "$ref", "required", "minProperties"}
    | {"maxProperties", "minItems", "maxItems", "pattern", "minLength", "maxLength"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
# Next to an ``enum``, as jsonschema judges them: neither a format nor a pattern is among them.
_JUDGED = frozenset({"type", "items", "minItems", "maxItems", "required"})
_MOST_BRANCHES = 1_024
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_DECIMALS = 15  # of a bound
_UPPER, _LOWER = ("maximum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum")
_LARGEST = 2**53
_MAX_DEPTH = 128
_OF_SCHEMA = 16  # steps of one schema
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


def prepare_for_llguidance(lowered: Lowered) -> dict[str, Any]:
    """A schema as llguidance enforces it; a new value.

    Raises UnsupportedSchemaError where some of it would go unenforced. llguidance itself may refuse
    more.
    """
    for entry in lowered.errors:
        raise _refusal(entry.pointer, entry.keyword, f"{entry.reason}; {entry.fix}")
    if isinstance(lowered.schema, bool):
        return {} if lowered.schema else {"enum": []}
    prepared: dict[str, Any] = _rewrite(lowered.schema, "", 0)
    if "$defs" in lowered.schema:
        prepared["$defs"] = {
            name: _rewrite(part, f"/$defs/{escape(name)}", 1)
            for name, part in lowered.schema["$defs"].items()
        }
    return prepared


def require_few_items(prepared: dict[str, Any], most_keys: int | None = None) -> None:
    """Raise UnsupportedSchemaError where a row of llguidance's parser would get too many items.

    most_keys: of one object; those of larger ones are not llguidance's to write, nor is what counts
    keys. None: all are.
    """
    if most_keys is None:
        _require_few_keys(prepared)
    _Rows(prepared, most_keys or _MOST_OPTIONAL).require_few_items()


def _require_few_keys(prepared: dict[str, Any]) -> None:
    for part in every_part(prepared):
        words = part if isinstance(part, dict) else {}
        if words.get("minProperties", 0) > max(1, len(words.get("required", ()))):
            raise _refusal("", "minProperties", "keys may repeat; list them under required")
    if reason := crowded(prepared, _MOST_OPTIONAL):
        reason += ", and what it is part of cannot be written as rules"
        fix = "list them under required, or group them in objects"
        raise _refusal("", "properties", f"{reason}; {fix}")


def narrower_scalars(lowered: Lowered) -> list[Unenforced]:
    """Notes where strings may be free, of which no control character is escaped, and on numbers."""
    notes: dict[str, Unenforced] = {}
    for part in every_part(lowered.schema):
        words = part if isinstance(part, dict) else {}
        is_listed = "enum" in words or "const" in words
        if part is True or (isinstance(part, dict) and not is_listed and _may_be_string(part)):
            reason = "strings hold no control characters but \\b, \\t, \\n, \\f and \\r"
            fix = "choose the backend xgrammar, where it takes the schema"
            notes.setdefault("type", Unenforced("", "type", reason, fix, "note"))
        bound = next((name for name in _NUMBERS[:4] if name in words), None)
        if bound is not None and "number" in words.get("type", "number"):
            reason = "numbers between bounds have no exponent, and at strict ones 15 decimals"
            fix = "leave the bounds out"
            notes.setdefault("number", Unenforced("", bound, reason, fix, "note"))
        if wide := _widest(words):
            reason, fix = "no numbers beyond 2**53 are written", "leave the bound out"
            notes.setdefault("wide", Unenforced("", wide[0], reason, fix, "note"))
    return [*notes.values()]


def _may_be_string(schema: dict[str, Any]) -> bool:
    combined = schema.keys() & {"$ref", "anyOf", "allOf"}
    return "string" in schema.get("type", "object" if combined else "string")


def _rewrite(schema: Any, pointer: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise _refusal(pointer, "", "it is nested too deeply")
    if not isinstance(schema, dict):
        return schema
    spend(_OF_SCHEMA + len(schema))
    schema = _with_exact_bounds(schema)
    _check_numbers(schema, pointer)
    schema = with_listed_items(_with_valid_values(_with_few_branches(schema)))
    kept = {keyword: value for keyword, value in schema.items() if keyword in _KEPT}
    if "patternProperties" in schema:
        kept["patternProperties"] = {}  # to come, at its place: the order matters to llguidance
    result = change_parts(
        kept,
        lambda part, path: _rewrite(part, f"{pointer}/{path}", depth + 1),
    )
    if schema.get("patternProperties"):
        _rewrite_patterns(schema, result, pointer, depth + 1)
    if schema.get("minProperties", 0) <= len(schema.get("required", ())):
        result.pop("minProperties", None)
    texts = [schema["pattern"]] if "pattern" in schema else []
    texts += [FORMATS[schema["format"]]] if schema.get("format") in FORMATS else []
    if len(texts) > 1:  # both
        result["allOf"] = [*result.get("allOf", []), {"pattern": _search(texts[1])}]
    if texts:
        result["pattern"] = _search(texts[0])
    return result


def _with_few_branches(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` with neighbours in ``allOf`` that are alternatives joined into one list of them.

    llguidance writes out every combination together with what else is in ``allOf``. Most cannot be:
    a ``oneOf`` of four keys has 4 of 256. Here these go before there is anything large in them.
    """
    joined: list[Any] = []
    for part in schema.get("allOf", ()):
        options = _combined(joined[-1], part) if joined else None
        if options is None:
            joined.append(part)
        else:
            joined[-1] = {"anyOf": options}
    return {**schema, "allOf": joined} if joined else schema


def _combined(one: Any, other: Any) -> list[Any] | None:
    """The alternatives of both; None where these are no two lists of some that are plain."""
    if not all(isinstance(part, dict) and part.keys() == {"anyOf"} for part in (one, other)):
        return None
    pairs = itertools.product(one["anyOf"], other["anyOf"])
    if len(one["anyOf"]) * len(other["anyOf"]) > _MOST_BRANCHES:
        return None
    spend_on_value([one, other])  # compared
    merged = [merge(left, right) for left, right in pairs]
    if None in merged:
        return None
    found = [option for option in merged if option is not False]
    return found if len(found) <= max(len(one["anyOf"]), len(other["anyOf"])) else None


def _with_valid_values(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` with an ``enum`` of lists and objects judged here: there each takes its time."""
    rest = {keyword: value for keyword, value in schema.items() if keyword != "enum"}
    values = schema.get("enum", ())
    if not rest.keys() <= _JUDGED or not any(isinstance(value, list | dict) for value in values):
        return schema
    kept = keep_valid(values, rest)
    return schema if kept is None else {"enum": kept}


class _Key(NamedTuple):
    """A pattern of keys. exact: whether what it does not match, ``re`` does not match either."""

    pattern: str
    exact: bool
    before_newline: bool


def _rewrite_patterns(
    schema: dict[str, Any], result: dict[str, Any], pointer: str, depth: int
) -> None:
    keys = {pattern: _key(pattern) for pattern in schema["patternProperties"]}
    names = [*schema.get("properties", ()), *schema.get("required", ())]
    is_open = schema.get("additionalProperties", True) is not False
    exact = all(key.exact for key in keys.values())
    if not exact and (len(keys) > 1 or not all(map(str.isascii, names))):
        reason = "a class such as \\w is ASCII here, beside other keys; write it out, as in [a-z]"
        raise _refusal(pointer, "patternProperties", reason)
    path = f"{pointer}/patternProperties"
    written = {
        keys[pattern].pattern: _rewrite(part, f"{path}/{pattern}", depth)
        for pattern, part in schema["patternProperties"].items()
    }
    if is_open and exact:
        for pattern, key in keys.items():
            if key.before_newline:  # Python's $ matches there too
                written[_search(f"{pattern[:-1]}\n\\Z")] = False
    elif is_open:
        result["additionalProperties"] = False
    result["patternProperties"] = written


def _key(pattern: str) -> _Key:
    spend(len(pattern))
    parsed = RE_PARSER.parse(pattern)
    ends = len(parsed) > 0 and str(parsed[-1][1]) == "AT_END"
    return _Key(_search(pattern), not _categories(parsed), ends)


def _categories(items: Any) -> bool:
    """Whether a class such as ``\\w`` stands in the pattern, save where it is negated."""
    for op, value in items:
        name = str(op)
        if name == "IN":
            negated = str(value[0][0]) == "NEGATE"
            kinds = [str(member) for kind, member in value if str(kind) == "CATEGORY"]
            if any(("_NOT_" in kind) == negated for kind in kinds):
                return True
        elif name == "SUBPATTERN":
            if _categories(value[3]):
                return True
        elif name in ("MAX_REPEAT", "MIN_REPEAT"):
            if _categories(value[2]):
                return True
        elif name == "BRANCH" and any(map(_categories, value[1])):
            return True
    return False


def _with_exact_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` with bounds that are right for a number as it is read.

    Bounds beyond the exact numbers often mean no limit.
    """
    bounds = {name: schema[name] for name in _NUMBERS[:4] if name in schema}
    if not bounds:
        return schema
    wide = {name: int(math.copysign(_LARGEST, schema[name])) for name in _widest(schema)}
    schema, bounds = {**schema, **wide}, {**bounds, **wide}
    if "number" not in schema.get("type", "number"):
        return schema
    others = {name: value for name, value in schema.items() if name not in bounds}
    return {**others, **inner_bounds(bounds, _DECIMALS)}


def _widest(schema: dict[str, Any]) -> list[str]:
    """Its bounds beyond the numbers that are exact."""
    above = [name for name in _UPPER if schema.get(name, 0) > _LARGEST]
    return above + [name for name in _LOWER if schema.get(name, 0) < -_LARGEST]


def _check_numbers(schema: dict[str, Any], pointer: str) -> None:
    values = [schema[name] for name in _NUMBERS if name in schema]
    values += [schema.get("const"), schema.get("enum")]
    spend_on_value(values)
    if any(isinstance(v, int | float) and abs(v) > _LARGEST for v in values_within(values)):
        raise _refusal(pointer, "", "a number beyond 2**53 is rounded; write it as a string")
    if any(isinstance(v, str) and _CONTROL.search(v) for v in values_within(values[-2:])):
        raise _refusal(pointer, "enum", "a control character in a string; leave the value out")
    divisor = Fraction(str(schema.get("multipleOf", 1))).denominator
    if divisor & (divisor - 1):
        reason = "a step that no float holds exactly; count in whole steps"
        raise _refusal(pointer, "multipleOf", reason)


@lru_cache(maxsize=1024)
def _search(pattern: str) -> str:
    """A pattern for the whole string such that ``re.search(pattern, string)`` succeeds."""
    try:
        return f"^(?:{to_search(pattern)})$"
    except GrammarCompileError as error:
        reason = f"the JSON schema cannot be enforced in full: {error}"
        raise UnsupportedSchemaError(reason) from error


def _refusal(pointer: str, keyword: str, reason: str) -> UnsupportedSchemaError:
    where = f"{pointer or '/'}: {keyword}: " if keyword else f"{pointer or '/'}: "
    return UnsupportedSchemaError(f"llguidance cannot enforce the JSON schema: {where}{reason}")


class _Rows:
    """How many items the rows of llguidance's parser get, of one prepared schema."""

    def __init__(self, prepared: dict[str, Any], most_keys: int) -> None:
        self._most_keys = most_keys
        self._schemas = [prepared, *prepared.get("$defs", {}).values()]
        self._prepared = prepared
        self._known: dict[int, int] = {}  # by the id of a schema; 0 while it is looked at

    def require_few_items(self) -> None:
        """Raise UnsupportedSchemaError where a row would get more than ``MOST_ITEMS``."""
        most = max(self._items(part) for root in self._schemas for part in all_parts(root))
        if most > MOST_ITEMS:
            reason = f"{most:,} keys and branches can follow at one place, {MOST_ITEMS:,} at most"
            fix = "list fewer optional properties, or fewer branches with keys"
            raise _refusal("", "properties", f"{reason}; {fix}")

    def _items(self, node: Any) -> int:
        if not isinstance(node, dict):
            return 1
        if id(node) in self._known:
            return self._known[id(node)]
        spend(_OF_SCHEMA)
        self._known[id(node)] = 0
        items = self._keys(node)
        if "$ref" in node:
            items += self._items(self._target(node["$ref"]))
        items += sum(self._items(part) for part in node.get("anyOf", ()))
        items += sum(self._items(part) for part in node.get("allOf", ()))
        self._known[id(node)] = items
        return items

    def _target(self, reference: str) -> Any:
        if reference == "#":
            return self._prepared
        return self._prepared.get("$defs", {}).get(unescape(reference.removeprefix("#/$defs/")))

    def _keys(self, node: dict[str, Any]) -> int:
        """Of the keys one of which comes first: those up to the first that is required."""
        names, required = node.get("properties", ()), set(node.get("required", ()))
        first = next((at for at, name in enumerate(names) if name in required), len(names))
        return 1 + _ITEMS_OF_A_KEY * min(first, self._most_keys)
