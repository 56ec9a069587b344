"""What the backend cannot enforce in a JSON schema, found before anything is generated.

xgrammar reads one keyword of a schema and drops its neighbours, mostly without a word. Here a
schema is lowered (see ``lower``) and rewritten, where that is surely right, into the subset
that it enforces in full, and every keyword that stays outside is reported. The rewritten schema
admits no text that the original does not; it may admit fewer, and then says so in a note:

- an object that lists ``properties`` or ``patternProperties`` gets no further keys, unless it asks
  for them, has no patterns and no ``maxProperties``: then they come last, see ``other_keys``;
- an array that lists ``prefixItems`` gets no further items, unless ``minItems`` asks for some;
- a ``pattern`` covers the whole string, one of keys the whole key;
- constraints without a ``type`` mean the type that they constrain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cached_property
from typing import Any

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.formats import FORMATS, format_within
from guided_spec.grammar.regex import fits_length, to_fullmatch, to_search
from guided_spec.grammar.schema.counting import ValueCheck
from guided_spec.grammar.schema.joining import any_of, conflict, holds, merge, text_of
from guided_spec.grammar.schema.keys import has_finite_value, other_keys
from guided_spec.grammar.schema.lower import lower
from guided_spec.grammar.schema.lowered import (
    AdditionalProperties,
    Lowered,
    Report,
    Unenforced,
    escape,
    find,
)
from guided_spec.grammar.schema.values import (
    constant,
    inner_bounds,
    keep_valid,
    values_within,
)
from guided_spec.grammar.steps import spend, spend_on_value

_MAX_VALUES = 1000
_OF_SCHEMA = 12  # steps of one schema
_MAX_LENGTH = 2**31 - 2  # beyond, the backend's own limits end
_LEAST_INT, _MOST_INT = -(2**63), 2**63 - 1
_DECIMALS = 6  # of the backend's numbers
_EXACT, _STRICT = 2**53, 2**32  # up to here floats hold whole numbers, and six decimals


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
        written = to_fullmatch(pattern, context="json_string")
    except GrammarCompileError as error:
        report.error(pointer, "pattern", str(error), "use a simpler pattern")
        return {"type": "string"}
    if not is_anchored(pattern):
        report.note(pointer, "pattern", "it covers the whole string", "anchor it with ^ and $")
    return {"type": "string", "pattern": written}


def is_anchored(pattern: str) -> bool:
    """Whether ``pattern`` says itself where the string begins and ends, in all its alternatives."""
    try:
        return to_search(pattern) == to_fullmatch(pattern)
    except GrammarCompileError:
        return False


def _of_format(words: dict[str, Any], pointer: str, report: Report) -> str | None:
    """The pattern of a string's ``format`` within its length, or its own one where it has that.

    Lowering has left no other format than those that have a pattern.
    """
    name, pattern = words["format"], words.get("pattern")
    if pattern is not None:
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
    character = to_fullmatch("(?s:.)", context="json_string")
    return f"(?:{character}){{{low},{upper}}}"


def rewrite_number(kind: str, words: dict[str, Any], pointer: str, report: Report) -> Any:
    """A number or integer schema. False: no number is left."""
    step = words.get("multipleOf")
    if kind == "number":
        if step is not None:
            fix = "list the values with enum, or use an integer type"
            report.error(pointer, "multipleOf", "the backend ignores it for numbers", fix)
        bounds = _exact_bounds({k: v for k, v in words.items() if k != "multipleOf"})
        if math.inf in bounds.values() or -math.inf in bounds.values():
            return False
        if bounds:
            reason = "numbers have six decimals at most, and no exponent"
            fix = "choose the backend llguidance for more decimals"
            report.note(pointer, next(iter(bounds)), reason, fix)
        return {"type": kind, **bounds} if _has_number(bounds) else False
    return _rewrite_integer(words, pointer, report)


def _exact_bounds(bounds: dict[str, Any]) -> dict[str, Any]:
    """Bounds next to which no number of six decimals is read as another one."""
    most = {name: _STRICT if name.startswith("exclusive") else _EXACT for name in bounds}
    exact = {name: bound for name, bound in bounds.items() if abs(bound) <= most[name]}
    others = {name: bound for name, bound in bounds.items() if name not in exact}
    for name, bound in inner_bounds(others, _DECIMALS).items():
        tighter = max if name == "minimum" else min
        exact[name] = tighter(exact.get(name, bound), bound)
    return exact


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
    if (low or 0) > _MOST_INT or (high or 0) < _LEAST_INT:
        keyword = "minimum" if (low or 0) > _MOST_INT else "maximum"
        report.error(pointer, keyword, "beyond 64 bits", "use a bound below 2**63")
        return {"type": "integer"}
    low, high = _within(low, pointer, "minimum", report), _within(high, pointer, "maximum", report)
    step = Fraction(str(words.get("multipleOf", 1))).numerator  # k * p/q is whole: a multiple of p
    schema: dict[str, Any] = {"type": "integer"}
    if step != 1:
        return _multiples(schema, step, (low, high), pointer, report)
    if low is not None:
        schema["minimum"] = low
    if high is not None:
        schema["maximum"] = high
    return schema


def _within(bound: int | None, pointer: str, keyword: str, report: Report) -> int | None:
    """A bound that the backend can hold, with a note where it admits less."""
    if bound is None or _LEAST_INT <= bound <= _MOST_INT:
        return bound
    reason = "numbers beyond 64 bits with a sign are left out"
    report.note(pointer, keyword, reason, "use a bound from -2**63 to 2**63 - 1")
    return max(_LEAST_INT, min(bound, _MOST_INT))


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
        spend((high - low) // step // 8)
        values = list(range(-(-low // step) * step, high + 1, step))
        return {"enum": values} if values else False
    fix = f"give minimum and maximum with at most {_MAX_VALUES} multiples between"
    report.error(pointer, "multipleOf", "the backend does not enforce it over this range", fix)
    return schema


Rewrite = Callable[[Any, str], Any]


def rewrite_object(words: dict[str, Any], pointer: str, report: Report, rewrite: Rewrite) -> Any:
    """An object schema; closed when it lists properties, free otherwise. False: none can exist."""
    declared = dict(words.get("properties", {}))
    patterns = dict(words.get("patternProperties", {}))
    required = list(words.get("required", ()))
    extra = words.get("additionalProperties", True)
    for name in required:
        if name not in declared and not any(holds(p, name) for p in patterns):
            declared[name] = extra
    _check_patterns(declared, patterns, required, pointer, report)
    others: Any = False
    if extra is not False and (declared or patterns):
        # An extra key could spell a declared one with an escape, such as "\u0061" for "a".
        is_open = "additionalProperties" in words and not patterns
        others = rewrite(extra, "additionalProperties") if is_open else False
        reason = "no keys are generated besides those listed"
        if others is not False:
            reason = "further keys come last, without escapes, and unlike long lists of keys"
        report.note(pointer, "additionalProperties", reason, "list the keys under properties")
        extra = False
    properties = {
        name: rewrite(part, f"properties/{escape(name)}") for name, part in declared.items()
    }
    if any(properties.get(name) is False for name in required):
        return False
    properties = {name: part for name, part in properties.items() if part is not False}
    schema: dict[str, Any] = {"type": "object"}
    if properties:
        schema["properties"] = properties
    if required:
        schema["required"] = required
    keys = _rewrite_patterns(patterns, pointer, report, rewrite)
    if others is not False:
        keys = {other_keys(declared): others}
    if keys:
        schema["patternProperties"] = keys
    schema["additionalProperties"] = (
        extra if extra is False else rewrite(extra, "additionalProperties")
    )
    return _add_counts(schema, words, pointer, report)


def _check_patterns(
    declared: dict[str, Any],
    patterns: dict[str, Any],
    required: list[str],
    pointer: str,
    report: Report,
) -> None:
    if len(patterns) > 1:
        reason = "a key may match several patterns, and the backend applies only one"
        report.error(pointer, "patternProperties", reason, "join them into one pattern")
    for pattern in patterns:
        for name in [*declared, *required]:
            if holds(pattern, name):
                reason = f"{pattern!r} matches the property {name!r} too"
                fix = "narrow the pattern"
                report.error(pointer, "patternProperties", reason, fix)
                return


def _rewrite_patterns(
    patterns: dict[str, Any], pointer: str, report: Report, rewrite: Rewrite
) -> dict[str, Any]:
    keys = {}
    for pattern, part in patterns.items():
        value = rewrite(part, f"patternProperties/{escape(pattern)}")
        try:
            written = to_fullmatch(pattern, context="json_plain")
            is_plain = written == to_fullmatch(pattern, context="json_string")
        except GrammarCompileError as error:
            report.error(pointer, "patternProperties", str(error), "use a simpler pattern")
            continue
        if not is_plain:
            reason = "its keys hold no quotes, backslashes and control characters"
            report.note(pointer, "patternProperties", reason, "leave them out of the pattern")
        if not is_anchored(pattern):
            reason = f"{pattern!r} covers the whole key"
            report.note(pointer, "patternProperties", reason, "anchor it with ^ and $")
        if value is not False:
            keys[written] = value
    return keys


def _add_counts(schema: dict[str, Any], words: dict[str, Any], pointer: str, report: Report) -> Any:
    low, high = int(words.get("minProperties", 0)), words.get("maxProperties")
    properties = schema.get("properties", {})
    if high is not None and (high < low or high < len(schema.get("required", ()))):
        return False
    fixed = "patternProperties" not in schema and schema["additionalProperties"] is False
    if fixed and low > len(properties):
        return False
    if low > 1 and not fixed and low > len(schema.get("required", ())):
        reason = "a key written twice would count twice"
        report.error(pointer, "minProperties", reason, "list the keys under properties")
    if low > len(schema.get("required", ())):
        schema["minProperties"] = low
    if high is not None and not (fixed and high >= len(properties)):
        schema["maxProperties"] = int(high)
    return schema


"""Rewrites a subschema, given its path below the current one."""

_BY_TYPE = {
    "object": """properties required additionalProperties patternProperties
        minProperties maxProperties""",
    "array": "items prefixItems minItems maxItems",
    "string": "minLength maxLength pattern format",
    "number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
}
_TYPE_OF = {keyword: kind for kind, words in _BY_TYPE.items() for keyword in words.split()}
_KEPT = frozenset(
    {"type", "enum", "const", "$ref", "anyOf", "allOf", "format", "multipleOf"}
    | {"properties", "required", "additionalProperties", "patternProperties"}
    | {"minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems"}
    | {"minLength", "maxLength", "pattern"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
)
_MAX_DEPTH = 64
_MANY_JOINS = 10  # levels of schemas in each other, from which on joined ones are written once


def _rewrite_typed(own: dict[str, Any], pointer: str, report: Report, rewrite: Rewrite) -> Any:
    """One schema without combinators; several types become an anyOf of single ones."""
    types = own.get("type")
    if types is None:
        types = sorted({_TYPE_OF[keyword] for keyword in own})
        if not types:
            return {}
        if len(types) > 1:
            report.error(pointer, "type", "constraints of several types and no type", "add type")
            return {}
        fix = "add type to say so"
        report.note(pointer, "type", f"taken for {types[0]!r}, as the constraints are", fix)
    types = [types] if isinstance(types, str) else list(types)
    if "number" in types and "integer" in types:
        types.remove("integer")
    parts = []
    for kind in types:
        words = {k: v for k, v in own.items() if _TYPE_OF.get(k) == _group(kind)}
        part = _rewrite_one(kind, words, pointer, report, rewrite)
        if part is not False:
            parts.append(part)
    if not parts:
        return False
    return parts[0] if len(parts) == 1 else {"anyOf": parts}


def _group(kind: str) -> str:
    return "number" if kind == "integer" else kind


def _rewrite_one(
    kind: str, words: dict[str, Any], pointer: str, report: Report, rewrite: Rewrite
) -> Any:
    if kind == "object":
        return rewrite_object(words, pointer, report, rewrite)
    if kind == "array":
        return _rewrite_array(words, pointer, report, rewrite)
    if kind == "string":
        return rewrite_string(words, pointer, report)
    if kind in ("integer", "number"):
        return rewrite_number(kind, words, pointer, report)
    return {"type": kind}


def _rewrite_array(words: dict[str, Any], pointer: str, report: Report, rewrite: Rewrite) -> Any:
    low, high = int(words.get("minItems", 0)), words.get("maxItems")
    prefix = words.get("prefixItems", [])
    items = words.get("items", True)
    if high is not None and high <= len(prefix):
        prefix, items = prefix[: int(high)], False
    elif prefix and items is not False and low <= len(prefix):
        report.note(pointer, "prefixItems", "no items follow the listed ones", "add items: false")
        items = False
    first = [rewrite(part, f"prefixItems/{index}") for index, part in enumerate(prefix)]
    if False in first:
        first, items = first[: first.index(False)], False
    rest = items if items is False else rewrite(items, "items")
    return _array(first, rest, low, high)


def _array(first: list[Any], rest: Any, low: int, high: Any) -> Any:
    if (rest is False and low > len(first)) or (high is not None and low > high):
        return False
    schema: dict[str, Any] = {"type": "array", "items": rest}
    if first:
        schema["prefixItems"] = first
    if low:
        schema["minItems"] = low
    if high is not None and rest is not False:
        schema["maxItems"] = int(high)
    return schema


def find_unenforced(schema: Any, additional: AdditionalProperties = "closed") -> list[Unenforced]:
    """Every keyword of ``schema`` that generated text might break, and notes on what is narrowed.

    Does not change ``schema``, which must be valid under its metaschema. Entries of level
    ``"error"`` can be broken by the text; those of level ``"note"`` cannot.
    """
    return list(normalize(lower(schema, additional=additional)).entries)


def normalize(lowered: Lowered) -> Lowered:
    """A schema rewritten for the backend, with what could not be kept. A new value each time."""
    empty: frozenset[str] = frozenset()
    while True:
        rewriting = _Rewriting(lowered.schema, empty)
        rewriting.report.include(entry._replace(by_backend=False) for entry in lowered.entries)
        found = rewriting.run()
        if rewriting.empty == empty:
            return found
        empty = rewriting.empty  # something refers to them


class _Rewriting:
    """One pass over one schema.

    empty: texts of joined schemas that have no value; ``run`` adds those that it finds.
    """

    def __init__(self, root: Any, empty: frozenset[str]) -> None:
        self.root = root
        self.empty = empty
        self._is_far = False  # in what is written once
        self._waiting: list[tuple[str, Any, str]] = []  # joined: text, schema, pointer
        self.report = Report()
        self.names: dict[str, str] = {}  # reference, or text of a schema -> name under $defs
        self.definitions: dict[str, Any] = {}

    @cached_property
    def _check(self) -> ValueCheck:
        """Of listed values; made once, since it looks through the whole schema."""
        return ValueCheck(self.root)

    def run(self) -> Lowered:
        schema = self.rewrite(self.root, "", 0)
        self._is_far = True
        while self._waiting:
            text, joined, pointer = self._waiting.pop()
            self.definitions[self.names[text]] = self.rewrite(joined, pointer, 0)
            if self.definitions[self.names[text]] is False:
                self.empty |= {text}
        if not has_finite_value(schema, self.definitions):
            schema = False
        if self.definitions:
            # Every target is copied under $defs, the root too: xgrammar's mask is too strict for a
            # root rule that refers to itself.
            used = {name: part for name, part in self.definitions.items() if part is not False}
            schema = {**schema, "$defs": used} if isinstance(schema, dict) else schema
        return Lowered(schema, tuple(self.report.entries))

    def rewrite(self, schema: Any, pointer: str, depth: int) -> Any:
        """The subset's spelling of one subschema."""
        if depth > _MAX_DEPTH:
            self.report.error(pointer, "", "it is nested too deeply", "flatten the schema")
            return {}
        if not isinstance(schema, dict):
            return {} if schema is True else schema
        spend(_OF_SCHEMA + len(schema) + len(schema.get("properties", ())))
        own = {key: value for key, value in schema.items() if key in _KEPT}
        return self._dispatch(own, pointer, depth + 1)

    def _joined(self, schema: Any, pointer: str, depth: int) -> Any:
        """The spelling of what several schemas say of one value.

        Schemas that refer to themselves beside others join the same ones again and again. Far
        inside, each is written once, and referred to.
        """
        is_far = self._is_far or depth >= _MANY_JOINS
        if not is_far or not isinstance(schema, dict):
            return self.rewrite(schema, pointer, depth)
        text = text_of(schema)
        if text in self.empty:
            return False
        if text not in self.names:
            self.names[text] = f"r{len(self.names)}"
            self._waiting.append((text, schema, pointer))
        return self._referring(text)

    def _referring(self, key: str) -> Any:
        """To a definition, by its key in ``names``; False where it has no value."""
        name = self.names[key]
        return False if self.definitions.get(name) is False else {"$ref": f"#/$defs/{name}"}

    def _dispatch(self, own: dict[str, Any], pointer: str, depth: int) -> Any:
        if "allOf" in own:
            return self._all_of(own, pointer, depth)
        if "$ref" in own:
            return self._reference(own, pointer, depth)
        if "const" in own or "enum" in own:
            return self._values(own, pointer)
        if "anyOf" in own:
            return self._alternatives(own, pointer, depth)
        return _rewrite_typed(
            own,
            pointer,
            self.report,
            lambda part, path: self.rewrite(part, f"{pointer}/{path}", depth),
        )

    def _all_of(self, own: dict[str, Any], pointer: str, depth: int) -> Any:
        joined: Any = {k: v for k, v in own.items() if k != "allOf"}
        for part in own["allOf"]:
            target = self._dereference(part) if len(own) > 1 or len(own["allOf"]) > 1 else part
            merged = merge(joined, target)
            if merged is None:
                keyword, fix = conflict(joined, target), "write them as one schema"
                reason = "two schemas with it apply to the same value, and cannot be joined"
                self.report.error(pointer, keyword, reason, fix)
                return {}
            joined = merged
        return self._joined(joined, pointer, depth)

    def _reference(self, own: dict[str, Any], pointer: str, depth: int) -> Any:
        reference = own["$ref"]
        if len(own) > 1:
            rest = {k: v for k, v in own.items() if k != "$ref"}
            merged = merge(self._dereference({"$ref": reference}), rest)
            if merged is None:
                fix = "write the referenced schema out, with these keywords in it"
                names = ", ".join(rest)
                self.report.error(pointer, "$ref", f"the backend ignores {names} beside it", fix)
                return {}
            return self._joined(merged, pointer, depth)
        target = self._resolve(reference)
        if target is None:
            reason = f"{reference!r} is not found in the schema, and nothing is fetched"
            self.report.error(pointer, "$ref", reason, "move the target under $defs")
            return {}
        if reference not in self.names:
            self.names[reference] = f"r{len(self.names)}"
            self.definitions[self.names[reference]] = self.rewrite(target, reference[1:], 0)
        return self._referring(reference)

    def _values(self, own: dict[str, Any], pointer: str) -> Any:
        keyword = "const" if "const" in own else "enum"
        rest = {k: v for k, v in own.items() if k != keyword}
        values = [own["const"]] if keyword == "const" else own["enum"]
        kept = keep_valid(values, rest, self._check) if rest else values
        spend_on_value(values)
        if kept is None:
            reason = f"the backend ignores {', '.join(rest)} beside it"
            self.report.error(pointer, keyword, reason, "list only the values that fit")
            return {}
        if any(isinstance(v, int) and abs(v) > 2**53 for v in values_within(kept)):
            reason = "an integer beyond 2**53 is written as a rounded number"
            self.report.error(pointer, keyword, reason, "write it as a string")
        # xgrammar writes arrays and objects of an enum without any space.
        plain = [value for value in kept if not isinstance(value, dict | list)]
        parts = [constant(value) for value in kept if isinstance(value, dict | list)]
        parts += [{"enum": plain}] if plain else []
        return any_of(parts)

    def _alternatives(self, own: dict[str, Any], pointer: str, depth: int) -> Any:
        rest = {k: v for k, v in own.items() if k != "anyOf"}
        branches = []
        for branch in own["anyOf"]:
            joined = merge(rest, self._dereference(branch)) if rest else branch
            if joined is None:
                reason = f"the backend ignores {', '.join(rest)} beside it"
                fix = "move these keywords into every branch"
                self.report.error(pointer, "anyOf", reason, fix)
                return {}
            branches.append(joined)
        parts = [
            (self._joined if rest else self.rewrite)(branch, f"{pointer}/anyOf/{index}", depth)
            for index, branch in enumerate(branches)
        ]
        parts = [part for part in parts if part is not False]
        if len(parts) < 2:
            return parts[0] if parts else False
        return {"anyOf": parts}

    def _dereference(self, schema: Any) -> Any:
        """What ``schema`` refers to, if it is nothing but a reference."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            if len(schema.keys() & _KEPT) > 1:
                break
            target = self._resolve(schema["$ref"])
            if target is None:
                break
            schema = target
        return schema

    def _resolve(self, reference: str) -> Any:
        """The target of a reference as ``lower`` writes them; None where there is none."""
        try:
            return find(self.root, reference)
        except LookupError:
            return None
