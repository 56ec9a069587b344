"""Any JSON schema of drafts 4 to 2020-12, in fewer keywords: those that grammars can be made of.

The result admits no value that the schema does not. It has no ``$schema``, ``$id``, ``not``,
``oneOf``, ``if``, ``dependent…``, ``contains``, ``propertyNames``, ``unevaluated…``, no format
without a pattern of its own, and refers to nothing but ``#/$defs/...``. Where it admits fewer
values, a note says so; where a keyword has no such spelling, an error does.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from guided_spec.grammar.schema.dialect import NEWEST, for_python, with_draft
from guided_spec.grammar.schema.joining import any_of, join_all
from guided_spec.grammar.schema.key_patterns import NOTHING
from guided_spec.grammar.schema.lowered import (
    AdditionalProperties,
    Lowered,
    Unenforced,
    close_objects,
)
from guided_spec.grammar.schema.lowering import TOO_LONG, Applicator, At, Lowering
from guided_spec.grammar.schema.rivals import find_rivals
from guided_spec.grammar.schema.unique.positions import unique_items
from guided_spec.grammar.schema.values import unique_arrays
from guided_spec.grammar.steps import spend

_CAUSES = frozenset(
    {"not", "if", "oneOf", "dependentRequired", "dependentSchemas", "dependencies", "contains"}
    | {"propertyNames", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"}
    | {"$id", "id", "$anchor", "$dynamicAnchor", "additionalItems", "format"}
    | {"minProperties", "maxProperties", "uniqueItems", "nullable"}
)
_FEW = 4  # values, of which a grammar lists all arrays
_PLACES = 4  # where the first item that is asked for may stand
_MOST_SUBSETS = 70
_DEPTH = 16
_MOST_BESIDE = 4  # parts of an allOf that are looked at together
_FEWER_WAYS = (4, 2, 1)  # to write out what is excluded, where all of them are far too long
_MOST_DEPENDENT = 4  # schemas that depend on keys: each doubles the alternatives of an object
_BRANCHING = frozenset({"anyOf", "oneOf", "if", "dependentSchemas", "not"})


def _without(node: dict[str, Any], *keywords: str) -> dict[str, Any]:
    """What else ``node`` says; definitions, which may be large, say nothing by themselves."""
    left_out = {*keywords, "$defs", "definitions"}
    return {name: value for name, value in node.items() if name not in left_out}


def _dynamic(lowering: Lowering, node: Any, words: dict[str, Any], at: At) -> list[Any]:
    target = lowering.document.resolve_dynamic(node)
    if target is None:
        keyword = "$dynamicRef" if "$dynamicRef" in words else "$recursiveRef"
        reason = "what it refers to depends on where it is reached from"
        lowering.report.error(at.pointer, keyword, reason, "use $ref")
        return []
    return [lowering.refer(target, at)]


def _all_of(lowering: Lowering, node: Any, words: dict[str, Any], at: At) -> list[Any]:
    parts = words["allOf"]
    found = []
    for index, part in enumerate(parts):
        others = [*parts[:index], *parts[index + 1 :]] if len(parts) <= _MOST_BESIDE else []
        inner = at.among({"allOf": [_without(node, "allOf"), *others]})
        found.append(lowering.positive(part, inner.below("allOf", index)))
    return found


def _any_of(lowering: Lowering, node: Any, words: dict[str, Any], at: At) -> list[Any]:
    rest = at.context(_without(node, "anyOf"))
    parts = [
        lowering.positive(part, at.among(_without(node, "anyOf")).below("anyOf", index))
        for index, part in enumerate(words["anyOf"])
        if not lowering.disjoint.apart(part, rest)
    ]
    return [any_of(parts)]


def _one_of(lowering: Lowering, node: Any, words: dict[str, Any], at: At) -> list[Any]:
    """Each branch with the negations of the others, save those that it excludes anyway."""
    inner = at.among(_without(node, "oneOf"))
    rest = at.context(_without(node, "oneOf"))
    apart = lowering.disjoint.apart
    branches = words["oneOf"]
    rivals = find_rivals(branches, rest, lowering.disjoint)
    possible = {index for index, branch in enumerate(branches) if not apart(branch, rest)}
    chosen = []
    for index in sorted(possible):
        branch = branches[index]
        parts = [lowering.positive(branch, inner.below("oneOf", index))]
        here = at._replace(types=at.types & lowering.disjoint.types(branch))
        others = frozenset[int]().union(*(rivals[index].get(kind, ()) for kind in here.types))
        for other in sorted(others & possible - {index}):
            types = {kind for kind in here.types if other in rivals[index].get(kind, ())}
            spend(1)
            if types:
                types &= lowering.disjoint.shared_types(branch, branches[other], rest)
            if types:
                parts.append(
                    lowering.exclude(branches[other], branch, "oneOf", here, frozenset(types))
                )
                # What no value is left of needs to be excluded of no other.
                here = here._replace(types=here.types & lowering.disjoint.types(parts[-1]))
        chosen.append(join_all(parts))
    return [any_of(chosen)]


def _not(lowering: Lowering, node: Any, words: dict[str, Any], at: At) -> list[Any]:
    rest = _without(node, "not")
    if lowering.disjoint.apart(words["not"], rest):
        return []
    return [lowering.exclude(words["not"], rest, "not", at)]


def _if(lowering: Lowering, node: Any, words: dict[str, Any], at: At) -> list[Any]:
    if "then" not in words and "else" not in words:
        return []
    rest = _without(node, "if", "then", "else")
    condition, then, otherwise = words["if"], words.get("then", True), words.get("else", True)
    options = []
    if then is not False and not lowering.disjoint.apart(condition, rest):
        parts = [lowering.positive(condition, at.below("if"))]
        options.append(join_all([*parts, lowering.positive(then, at.below("then"))]))
    if otherwise is not False:
        without = lowering.exclude(condition, rest, "if", at)
        options.append(join_all([without, lowering.positive(otherwise, at.below("else"))]))
    return [any_of(options)]


def _dependent_required(_lowering: Lowering, node: Any, words: dict[str, Any], at: At) -> list[Any]:
    required = set(node.get("required", ()))
    parts: list[Any] = []
    for name, names in words["dependentRequired"].items():
        if "object" in at.types and not required.issuperset(names):
            without = [] if name in required else [{"properties": {name: False}}]
            parts.append(any_of([*without, {"required": list(names)}]))
    return parts


def _dependent_schemas(lowering: Lowering, node: Any, words: dict[str, Any], at: At) -> list[Any]:
    required = set(node.get("required", ()))
    parts: list[Any] = []
    for name, schema in words["dependentSchemas"].items():
        if "object" in at.types:
            if isinstance(schema, dict) and "$ref" not in schema:
                # The key is there, which may be what keeps the branches of a oneOf apart.
                schema = {**schema, "required": [*schema.get("required", ()), name]}
            needed = lowering.positive(schema, at.below("dependentSchemas", name))
            without = [] if name in required else [{"properties": {name: False}}]
            bare = _without_key(needed, name)
            if without and len(parts) >= _MOST_DEPENDENT and bare is not None:
                reason = f"what it says holds whether or not {name!r} is there"
                fix = "write fewer of them"
                lowering.report.note(at.pointer, "dependentSchemas", reason, fix)
                without, needed = [], bare
            parts.append(any_of([*without, needed]))
    return parts


def _without_key(needed: Any, name: str) -> Any:
    """What ``needed`` says of other keys, if that leaves objects without any; else None."""
    if not isinstance(needed, dict) or not needed.keys() <= {"type", "properties", "required"}:
        return None
    if "object" not in needed.get("type", "object") or needed.get("required", [name]) != [name]:
        return None
    properties = needed.get("properties", {})
    return None if False in properties.values() else {"properties": properties}


def _contains(lowering: Lowering, _node: Any, words: dict[str, Any], at: At) -> list[Any]:
    """The items asked for are adjacent, after at most three others."""
    low, high = int(words.get("minContains", 1)), words.get("maxContains", math.inf)
    if "array" not in at.types or (low == 0 and high == math.inf):
        return []
    if low > high:
        return [_none_of("array", at)]
    wanted = lowering.positive(words["contains"], at.inside("contains"))
    other: Any = True
    if high != math.inf:
        inside = at.inside()
        other = lowering.exclude(words["contains"], words.get("items", True), "contains", inside)
    before: Any = True if high == math.inf else other
    if low == 1 and high == math.inf and lowering.has_unique_items:
        # Whichever is the first that is asked for: behind an equal one it could not come.
        apart = lowering.complement(words["contains"], at.inside("contains"))
        before = True if apart is None else apart
    exact = low == high == 0 or wanted is True
    if not exact:
        reason = f"the items asked for stand together, behind {_PLACES - 1} others at most"
        lowering.report.note(at.pointer, "contains", reason, "say with prefixItems where it stands")
    counts = [low] if high == math.inf else sorted({low, int(min(high, low + _PLACES))})
    options: list[Any] = [{"type": sorted(at.types - {"array"})}] if at.types - {"array"} else []
    spend(_PLACES * sum(counts))
    for count, place in itertools.product(counts, range(_PLACES)):
        first = [before] * place + [wanted] * count
        option: dict[str, Any] = {"type": "array", "minItems": len(first)}
        options.append(
            option
            | ({"prefixItems": first} if first else {})
            | ({} if other is True else {"items": other})
        )
    return [any_of(options)]


def _none_of(kind: str, at: At) -> Any:
    """A schema without any value of this type."""
    rest = sorted(at.types - {kind})
    return {"type": rest} if rest else False


def _names(lowering: Lowering, _node: Any, words: dict[str, Any], at: At) -> list[Any]:
    """``propertyNames`` as the patterns or the list of the keys."""
    names = lowering.dereference(words["propertyNames"])
    if "object" not in at.types or names is True or names == {}:
        return []
    if names is False:
        return [{"maxProperties": 0}]
    names = lowering.positive(names, At(f"{at.pointer}/propertyNames", frozenset({"string"})))
    if names is True or names == {}:  # as a format that is an annotation is
        return []
    listed = _listed(names)
    if listed is not None:
        return [{"properties": dict.fromkeys(listed, True), "additionalProperties": False}]
    pattern = lowering.names_pattern(words, at)
    if pattern == NOTHING:
        return [{"maxProperties": 0}]
    if pattern is not None:
        if lowering.split_keys(words, at) is not None:
            return []
        if words.get("patternProperties", {}).keys() - {pattern}:
            reason = "keys would have to match it and a pattern of patternProperties"
            fix = "write one pattern for both under patternProperties, and leave propertyNames out"
            lowering.report.error(at.pointer, "propertyNames", reason, fix)
            return []
        if "properties" not in words and "patternProperties" not in words:
            value = words.get("additionalProperties", True)
            value = lowering.positive(value, at.inside("additionalProperties"))
            return [{"patternProperties": {pattern: value}, "additionalProperties": False}]
        return [{"patternProperties": {pattern: True}, "additionalProperties": False}]
    reason = "only names that make a pattern of moderate size are enforced"
    fix = "list the names under properties"
    lowering.report.error(at.pointer, "propertyNames", reason, fix)
    return []


def _listed(names: Any) -> list[str] | None:
    if names is False:
        return []
    if isinstance(names, dict) and names.keys() <= {"enum", "const", "type"}:
        values = [names["const"]] if "const" in names else names.get("enum")
        return None if values is None else [value for value in values if isinstance(value, str)]
    return None


def _counts(lowering: Lowering, _node: Any, words: dict[str, Any], at: At) -> list[Any]:
    """``minProperties`` and ``maxProperties`` together, as choices of the keys listed."""
    low, high = int(words.get("minProperties", 0)), words.get("maxProperties", math.inf)
    required = list(words.get("required", ()))
    listed = {name: part for name, part in words.get("properties", {}).items() if part is not False}
    optional = [name for name in listed if name not in required]
    if "object" not in at.types or (low <= len(required) and high == math.inf):
        return []
    if high < len(required):
        return [_none_of("object", at)]
    has_patterns = "patternProperties" in words
    is_closed = words.get("additionalProperties", True) is False and not has_patterns
    if is_closed and low > len({*listed, *required}):
        return [_none_of("object", at)]
    if not optional or has_patterns or not _are_few(optional, low, high, required):
        counts = {"minProperties": low} if low > len(required) else {}
        return [counts | ({"maxProperties": int(high)} if high < math.inf else {})]
    parts: list[Any] = []
    if low > len(required):
        parts += _at_least(lowering, words, optional, low - len(required), at)
    if high < math.inf:
        names = [*listed, *required]
        parts += _at_most(lowering, words, (names, optional), int(high) - len(required), at)
    return parts


def _are_few(optional: list[str], low: int, high: float, required: list[str]) -> bool:
    """Whether the choices of keys that make up the counts are written one by one."""
    least, most = max(low - len(required), 0), high - len(required)
    ways = [math.comb(len(optional), int(count)) for count in (least, most) if count < math.inf]
    return least <= len(optional) and max(ways) <= _MOST_SUBSETS


def _at_least(
    lowering: Lowering, words: dict[str, Any], optional: list[str], more: int, at: At
) -> list[Any]:
    spend(math.comb(len(optional), more) * more)
    if words.get("additionalProperties", True) is not False:
        reason = "the keys that are counted are those listed"
        lowering.report.note(at.pointer, "minProperties", reason, "list them under required")
    chosen = itertools.combinations(optional, more)
    return [any_of([{"required": list(names)} for names in chosen])]


def _at_most(
    lowering: Lowering,
    words: dict[str, Any],
    names: tuple[list[str], list[str]],
    most: int,
    at: At,
) -> list[Any]:
    """names: all that are known, and the optional ones among them."""
    known, optional = names
    parts: list[Any] = []
    if words.get("additionalProperties", True) is not False:
        reason = "no keys are generated besides those listed"
        lowering.report.note(at.pointer, "maxProperties", reason, "list the keys")
        parts.append({"properties": dict.fromkeys(known, True), "additionalProperties": False})
    if most < len(optional):
        spend(math.comb(len(optional), most) * len(optional))
        options = [
            {"properties": {name: False for name in optional if name not in kept}}
            for kept in itertools.combinations(optional, most)
        ]
        parts.append(any_of(options))
    return parts


def _unique(lowering: Lowering, _node: Any, words: dict[str, Any], at: At) -> list[Any]:
    """``uniqueItems``, for a filter to enforce; every array of very few different values."""
    low, high = int(words.get("minItems", 0)), words.get("maxItems", math.inf)
    if words["uniqueItems"] is not True or "array" not in at.types or high <= 1:
        return []
    values = None if "prefixItems" in words else _finite(lowering, words.get("items", True))
    if values is not None and len(values) < low:
        return [_none_of("array", at)]
    if lowering.filtered and (values is None or len(values) > _FEW):
        return [{"uniqueItems": True}]
    if values is not None:
        longest = int(min(high, len(values)))
        arrays = unique_arrays(values, low, longest)
        reached = len(arrays[-1]) if arrays else -1
        if reached >= min(2, longest):
            if reached < longest:
                reason = f"an array gets {reached} items at most"
                lowering.report.note(at.pointer, "uniqueItems", reason, "allow fewer values")
            other = sorted(at.types - {"array"})
            return [any_of([*([{"type": other}] if other else []), {"enum": arrays}])]
    if lowering.harder and low <= 1:
        reason = "an array gets one item at most"
        lowering.report.note(at.pointer, "uniqueItems", reason, "set maxItems to 1")
        return [{"maxItems": 1}]
    reason = "whether items repeat is beyond a grammar, unless few values are allowed"
    fix = "list the values of items with enum (up to 20), or set maxItems to 1"
    lowering.report.error(at.pointer, "uniqueItems", reason, fix)
    return []


def _finite(lowering: Lowering, schema: Any) -> list[Any] | None:
    schema = lowering.dereference(schema)
    if not isinstance(schema, dict):
        return None
    words = lowering.document.spell(schema)
    if words.keys() & {"$ref", "allOf", "anyOf", "oneOf", "not", "if"}:
        return None
    values = [words["const"]] if "const" in words else words.get("enum")
    spend(len(values or ()))
    if values is None and words.get("type") == "boolean":
        values = [False, True]
    if values is None or any(isinstance(value, dict | list | float) for value in values):
        return None
    kept = {json.dumps(v): v for v in values if lowering.disjoint.is_valid(v, schema)}
    return [*kept.values()]


class _Keys(NamedTuple):
    """Names and patterns that are evaluated."""

    names: list[str]
    patterns: list[str]


def _unevaluated_properties(
    lowering: Lowering, node: Any, words: dict[str, Any], at: At
) -> list[Any]:
    """Closed around the keys that surely are evaluated."""
    if "object" not in at.types:
        return []
    if words["unevaluatedProperties"] is True:
        return [{"additionalProperties": True}]
    seen = _evaluated(lowering, node)
    if seen is None:
        return []
    rest = lowering.positive(words["unevaluatedProperties"], at.inside("unevaluatedProperties"))
    if _may_evaluate_more(lowering, node, _BRANCHING):
        reason = "keys that only a branch evaluates count as unevaluated"
        fix = "list all keys under properties"
        lowering.report.note(at.pointer, "unevaluatedProperties", reason, fix)
    properties, patterns = seen
    schema: dict[str, Any] = {"additionalProperties": rest}
    schema |= {"properties": dict.fromkeys(properties, True)} if properties else {}
    schema |= {"patternProperties": dict.fromkeys(patterns, True)} if patterns else {}
    return [schema]


def _evaluated(lowering: Lowering, node: Any) -> _Keys | None:
    """The keys and patterns of ``node`` and what always holds with it; None for all keys."""
    names: dict[str, None] = {}
    patterns: dict[str, None] = {}
    for depth, words in _holding(lowering, node):
        if "additionalProperties" in words or (depth and "unevaluatedProperties" in words):
            return None
        spend(len(names) + len(words.get("properties", ())))
        names |= dict.fromkeys(words.get("properties", ()))
        patterns |= dict.fromkeys(words.get("patternProperties", ()))
    return _Keys([*names], [*patterns])


def _unevaluated_items(lowering: Lowering, node: Any, words: dict[str, Any], at: At) -> list[Any]:
    if "array" not in at.types or words["unevaluatedItems"] is True:
        return []
    count = _evaluated_items(lowering, node)
    if count is None:
        return []
    rest = lowering.positive(words["unevaluatedItems"], at.inside("unevaluatedItems"))
    if _may_evaluate_more(lowering, node, _BRANCHING | {"contains"}):
        reason = "items that only a branch evaluates count as unevaluated"
        fix = "list all items under prefixItems"
        lowering.report.note(at.pointer, "unevaluatedItems", reason, fix)
    prefix = {"prefixItems": [True] * count} if count else {}
    return [{**prefix, "items": rest}]


def _evaluated_items(lowering: Lowering, node: Any) -> int | None:
    """How many items are evaluated; None for all."""
    most = 0
    for depth, words in _holding(lowering, node):
        if "items" in words or (depth and "unevaluatedItems" in words):
            return None
        most = max(most, len(words.get("prefixItems", ())))
    return most


def _holding(lowering: Lowering, node: Any, depth: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """The keywords of ``node`` and of what holds wherever it does, and how deep each is."""
    if not isinstance(node, dict) or depth > _DEPTH:
        return
    words = lowering.document.spell(node)
    yield depth, words
    document = lowering.document
    targets = [document.resolve(node)] if "$ref" in words else []
    if "$dynamicRef" in words or "$recursiveRef" in words:
        targets.append(document.resolve_dynamic(node))
    for part in [*words.get("allOf", ()), *(target.schema for target in targets if target)]:
        yield from _holding(lowering, part, depth + 1)


def _may_evaluate_more(lowering: Lowering, node: Any, keywords: frozenset[str]) -> bool:
    """Whether something that holds only at times could evaluate more."""
    return any(not keywords.isdisjoint(words) for _, words in _holding(lowering, node))


_APPLICATORS: dict[str, Applicator] = {
    "$dynamicRef": _dynamic,
    "$recursiveRef": _dynamic,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
    "contains": _contains,
    "propertyNames": _names,
    "minProperties": _counts,
    "maxProperties": lambda lowering, node, words, at: (
        [] if "minProperties" in words else _counts(lowering, node, words, at)
    ),
    "uniqueItems": _unique,
    "unevaluatedProperties": _unevaluated_properties,
    "unevaluatedItems": _unevaluated_items,
}
"""How each keyword is lowered."""


def lower(
    schema: Any,
    *,
    harder: bool = False,
    filtered: bool = True,
    additional: AdditionalProperties = "schema",
) -> Lowered:
    """``schema``, which must be valid under its metaschema, in fewer keywords.

    harder: admits less, however little is left, where there would be an error otherwise.
    filtered: leaves ``uniqueItems`` to the filter of ``text.unique_items``, where that can.
    additional: "closed" closes objects, see ``closed``.
    """
    schema = for_python(schema, is_plain=True)
    lowered = Lowered(schema, ())
    dated = with_draft(schema)
    if needs_lowering(dated):
        closed = additional == "closed"
        settings = {"harder": harder, "filtered": filtered, "closed": closed}
        for ways in (None, *_FEWER_WAYS):
            lowered = Lowering(dated, _APPLICATORS, **settings, most_ways=ways).run()
            if all(entry.reason != TOO_LONG for entry in lowered.entries):
                break
    if dated is not schema:
        reason = f"it can only be of an older draft, and is read as {dated['$schema']}"
        note = Unenforced("", "$schema", reason, "name its draft", "note", by_backend=False)
        lowered = lowered._replace(entries=(*lowered.entries, note))
    if additional == "closed":
        lowered = lowered._replace(**close_objects(lowered.schema)._asdict())
    if not filtered:
        return lowered
    items = unique_items(lowered.schema)
    return lowered._replace(entries=(*lowered.entries, *items.entries), items=items.rules)


def needs_lowering(schema: Any) -> bool:
    """Whether ``schema`` holds more than the backends' own preparations know."""
    if isinstance(schema, dict) and schema.get("$schema", NEWEST) != NEWEST:
        return True
    stack = [schema]
    while stack:
        node = stack.pop()
        spend(1)
        if isinstance(node, list):
            stack.extend(node)
        elif isinstance(node, dict):
            if not _CAUSES.isdisjoint(node) or isinstance(node.get("items"), list):
                return True
            patterns = node.get("patternProperties")
            if isinstance(patterns, dict) and len(patterns) > 1:
                return True
            if "$ref" in node and not _is_local(node["$ref"]):
                return True
            stack.extend(node.values())
    return False


def _is_local(reference: Any) -> bool:
    text = str(reference)
    return text == "#" or (text.startswith("#/$defs/") and text.count("/") == 2 and "%" not in text)
