"""Arrays of unique items in a lowered schema: where they are, and whether they can be kept so.

A filter keeps items unique (``grammar.text.unique_items``). It knows a place in a text by the keys
and indices that lead there, not by the branch of an ``anyOf`` that the text is in: what one branch
asks for holds for the others, too, and a note says so. The filter never lets a text come to where
only equal items are left. It looks no further than the next item, so where several are asked for,
the schema itself has to show that there are enough different ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from guided_spec.grammar.recipe import ItemRule, ItemRules
from guided_spec.grammar.schema.joining import merge
from guided_spec.grammar.schema.lowered import Unenforced, all_parts, change_parts, unescape
from guided_spec.grammar.schema.unique.amounts import Amounts, listed_in, of_index, text_of_item
from guided_spec.grammar.schema.values import values_within
from guided_spec.grammar.steps import spend, spend_on_value

_MOST_PLACES = 4_096
_OF_PLACE = 16  # steps
_DEPTH = 12
_MOST_BRANCHES = 256
_COMBINED = frozenset({"allOf", "anyOf", "$ref"})
_OF_STRINGS = frozenset({"pattern", "maxLength", "format"})
_COUNTS = frozenset({"minProperties", "maxProperties"})
_PARTED = frozenset({"anyOf", "$ref"})
_SIDES = (
    frozenset({"minimum", "exclusiveMinimum"}),
    frozenset({"maximum", "exclusiveMaximum"}),
)
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_LONGEST_NUMBER = 12  # characters


class UniqueItems(NamedTuple):
    """Of a lowered schema.

    rules: what a filter needs to know; None where no items have to be unique. entries: what of
    ``uniqueItems`` cannot be kept, and where it holds for more arrays.
    """

    rules: ItemRules | None = None
    entries: tuple[Unenforced, ...] = ()


def unique_items(schema: Any) -> UniqueItems:
    """What ``uniqueItems`` asks for anywhere in a lowered schema."""
    definitions = schema.get("$defs", {}) if isinstance(schema, dict) else {}
    roots = [schema, *definitions.values()]
    if not any(_is_unique(part) for root in roots for part in all_parts(root)):
        return UniqueItems()
    found = _Positions(schema)
    return UniqueItems(found.rules(), tuple(found.entries()))


def _is_unique(node: Any) -> bool:
    return isinstance(node, dict) and node.get("uniqueItems") is True


class _Position(NamedTuple):
    """bases: schemas of the values here. nodes: these and all that apply to the same value."""

    bases: list[dict[str, Any]]
    nodes: list[dict[str, Any]]

    @property
    def is_unique(self) -> bool:
        return any(map(_is_unique, self.nodes))


class _Positions:
    """The places of one schema, as an automaton over keys and indices."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._definitions: dict[str, Any] = root.get("$defs", {})
        self._places: list[_Position] = []
        self._rules: list[ItemRule] = []
        self._known: dict[frozenset[int], int] = {}
        self._is_full = False
        self._parts: dict[tuple[int, str | int], Any] = {}  # kept: their ids tell them apart
        self._position([root])
        for place in self._places:  # which grows
            self._rules.append(self._rule(place))

    def rules(self) -> ItemRules:
        """Of the places that lead to an array of unique items, or are inside of one."""
        kept = {0, *self._leading}
        for at in self._leading:
            kept |= self._below(at) if self._rules[at].is_unique else set()
        number = {old: new for new, old in enumerate(sorted(kept), 1)}
        number |= {old: 0 for old in range(len(self._rules)) if old not in number} | {-1: 0}

        def renumbered(rule: ItemRule) -> ItemRule:
            keys = {key: number[to] for key, to in rule.keys.items()}
            prefix = tuple(number[to] for to in rule.prefix)
            other, items = number[rule.other], number[rule.items]
            return rule._replace(keys=keys, other=other, prefix=prefix, items=items)

        anything = ItemRule(is_free=True, has_free_strings=True)
        return (anything, *(renumbered(self._rules[old]) for old in sorted(kept)))

    def entries(self) -> Iterator[Unenforced]:
        """Errors and notes; their pointers are of the lowered schema."""
        if self._is_full:
            reason, fix = "there are too many places where it may apply", "split the schema"
            yield Unenforced("", "uniqueItems", reason, fix, by_backend=False)
            return
        inside: set[int] = set()
        for at in self._leading:
            place = self._places[at]
            if place.is_unique:
                pointer = self._pointer(place)
                yield from _entries_of(self._reasons(at), pointer)
                if not all(self._asks(base, 0) for base in place.bases):
                    reason, fix = "it holds for all alternatives here", "set it in all of them"
                    yield Unenforced(pointer, "uniqueItems", reason, fix, "note", by_backend=False)
                for below in self._below(at):
                    if below not in inside:
                        inside.add(below)
                        yield from _entries_of(_long_numbers(self._places[below]), pointer)
            elif any(map(_repeats, place.nodes)):
                reason = "a value listed beside it has an array with equal items"
                yield from _entries_of([(reason, "leave the value out")], self._pointer(place))

    def _pointer(self, place: _Position) -> str:
        nodes = [*filter(_is_unique, place.nodes), *place.nodes]
        return self._pointers.get(id(nodes[0]), "")

    @cached_property
    def _pointers(self) -> dict[int, str]:
        found: dict[int, str] = {}

        def visit(node: Any, pointer: str) -> Any:
            if isinstance(node, dict):
                found.setdefault(id(node), pointer)
                change_parts(node, lambda part, path: visit(part, f"{pointer}/{path}"))
            return node

        visit(self._root, "")
        for name, part in self._definitions.items():
            visit(part, f"/$defs/{name}")
        return found

    @cached_property
    def _leading(self) -> list[int]:
        """The places from which an array of unique items can be reached."""
        above: dict[int, set[int]] = {}
        for at in range(len(self._rules)):
            for to in self._targets(at):
                above.setdefault(to, set()).add(at)
        found = {at for at, rule in enumerate(self._rules) if rule.is_unique}
        waiting = [*found]
        while waiting:
            more = above.get(waiting.pop(), set()) - found
            found |= more
            waiting += more
        return sorted(found)

    def _below(self, at: int) -> set[int]:
        found, waiting = {at}, [at]
        while waiting:
            more = set(self._targets(waiting.pop())) - found
            found |= more
            waiting += more
        return found

    def _targets(self, at: int) -> list[int]:
        rule = self._rules[at]
        every = [*rule.keys.values(), rule.other, *rule.prefix, rule.items]
        return [to for to in every if to >= 0]

    def _position(self, bases: Sequence[Any]) -> int:
        """The number of the place of values under any of these schemas; -1 where all are plain."""
        plain = [base for base in bases if isinstance(base, dict)]
        nodes = self._closure(plain)
        spend(_OF_PLACE + len(nodes))
        if not nodes:
            return -1
        key = frozenset(map(id, plain))
        if key not in self._known:
            if len(self._places) >= _MOST_PLACES:
                self._is_full = True
                return -1
            self._known[key] = len(self._places)
            self._places.append(_Position(plain, nodes))
        return self._known[key]

    def _closure(self, bases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        waiting: list[Any] = [*reversed(bases)]
        while waiting:
            node = waiting.pop()
            if isinstance(node, dict) and id(node) not in found:
                found[id(node)] = node
                waiting += [*node.get("allOf", ()), *node.get("anyOf", ())]
                waiting += [self._target(node)] if "$ref" in node else []
        return [*found.values()]

    def _target(self, node: dict[str, Any]) -> Any:
        if node["$ref"] == "#":
            return self._root
        return self._definitions.get(unescape(node["$ref"].removeprefix("#/$defs/")))

    def _rule(self, place: _Position) -> ItemRule:
        nodes = place.nodes
        names = dict.fromkeys(name for node in nodes for name in node.get("properties", ()))
        listed = [value for node in nodes for value in listed_in(node) or ()]
        names |= dict.fromkeys(key for value in listed if isinstance(value, dict) for key in value)
        spend(len(names) * len(nodes))
        keys = {
            name.encode("utf-8", "surrogatepass"): self._position(
                [part for node in nodes for part in (*_of_key(node, name), self._part(node, name))]
            )
            for name in names
        }
        other = self._position([part for node in nodes for part in _of_key(node, None)])
        lengths = [len(node.get("prefixItems", ())) for node in nodes]
        lengths += [len(value) for value in listed if isinstance(value, list)]
        prefix = tuple(
            self._position([one(node, at) for node in nodes for one in (of_index, self._part)])
            for at in range(max(lengths, default=0))
        )
        items = self._position([node["items"] for node in nodes if "items" in node])
        # A text may be in any of the branches that lead here: each has to be free.
        is_free = all(_is_free(self._closure([base])) for base in place.bases)
        free_strings = _has_free_strings(nodes)
        return ItemRule(place.is_unique, is_free, free_strings, keys, other, prefix, items)

    def _part(self, node: dict[str, Any], at: str | int) -> Any:
        """The schema of what the listed values of a node hold at a key or index; None for none."""
        if listed_in(node) is None:
            return None
        if (id(node), at) not in self._parts:
            found = [*_values_at(listed_in(node) or (), at)]
            self._parts[id(node), at] = {"enum": found} if found else None
        return self._parts[id(node), at]

    def _asks(self, node: Any, depth: int) -> bool:
        """Whether an array has unique items wherever ``node`` holds, as far as that is seen."""
        if not isinstance(node, dict) or not node or _is_unique(node) or not _may_be_array(node):
            return True
        if depth > _DEPTH:
            return False
        values = listed_in(node)
        if values is not None:
            return not any(_has_equal(value) for value in values)
        if "$ref" in node and self._asks(self._target(node), depth + 1):
            return True
        if any(self._asks(part, depth + 1) for part in node.get("allOf", ())):
            return True
        options = node.get("anyOf", ())
        return bool(options) and all(self._asks(part, depth + 1) for part in options)

    def _reasons(self, at: int) -> Iterator[tuple[str, str]]:
        """Why the items of an array here cannot be kept unique, and what to do."""
        place = self._places[at]
        if any(map(_repeats, place.nodes)):
            yield "an array listed here has equal items", "leave it out"
        amounts = Amounts(self._target)
        for base in place.bases:
            branches = self._branches(base, 0)
            if branches is None and self._asks_for_several(place.nodes):
                yield (
                    "minItems asks for several items of joined schemas",
                    "write them as one schema",
                )
                return
            for node in branches or ():
                length = max(int(node.get("minItems", 0)), len(node.get("prefixItems", ())))
                if _may_be_array(node) and length >= 2 and listed_in(node) is None:
                    for reason in amounts.lacking(node, length):
                        yield reason, "allow more values for each item, or set minItems to 1"

    def _asks_for_several(self, nodes: Sequence[dict[str, Any]]) -> bool:
        arrays = [node for node in nodes if _may_be_array(node)]
        lengths = [int(node.get("minItems", 0)) for node in arrays]
        return max([*lengths, *(len(node.get("prefixItems", ())) for node in arrays)]) >= 2

    def _branches(self, node: Any, depth: int) -> list[dict[str, Any]] | None:
        """Schemas without references and combinators, of which any holds where ``node`` does.

        None where these are many, or not plain to see.
        """
        if not isinstance(node, dict):
            return [] if node is False else [{}]
        spend(_OF_PLACE)
        if depth > _DEPTH:
            return None
        found: list[Any] = [{name: part for name, part in node.items() if name not in _COMBINED}]
        target = [self._target(node)] if "$ref" in node else []
        groups = [[part] for part in (*node.get("allOf", ()), *target)]
        for options in [*groups, *([node["anyOf"]] if "anyOf" in node else [])]:
            inner = [self._branches(option, depth + 1) for option in options]
            if (
                None in inner
                or len(found) * sum(len(part or ()) for part in inner) > _MOST_BRANCHES
            ):
                return None
            flat = [branch for part in inner for branch in part or ()]
            joined = [merge(one, other) for one in found for other in flat]
            if None in joined:
                return None
            found = [branch for branch in joined if isinstance(branch, dict)]
        return found


def _entries_of(reasons: Any, pointer: str) -> Iterator[Unenforced]:
    for reason, fix in reasons:
        yield Unenforced(pointer, "uniqueItems", reason, fix, by_backend=False)


def _of_key(node: dict[str, Any], name: str | None) -> Iterator[Any]:
    """The schemas that may hold for a key; None is any that is not listed."""
    listed = node.get("properties", {})
    if name in listed:
        yield listed[name]
    elif "additionalProperties" in node:
        yield node["additionalProperties"]
    yield from node.get("patternProperties", {}).values()


def _values_at(values: Sequence[Any], at: str | int) -> Iterator[Any]:
    """What these values hold at a key or index."""
    if isinstance(at, str):
        return (value[at] for value in values if isinstance(value, dict) and at in value)
    return (value[at] for value in values if isinstance(value, list) and at < len(value))


def _may_be_array(node: dict[str, Any]) -> bool:
    values = listed_in(node)
    if values is not None:
        return any(isinstance(value, list) for value in values)
    return "array" in node.get("type", "array")


def _has_free_strings(nodes: Sequence[dict[str, Any]]) -> bool:
    """Whether a string that has begun can always go on to infinitely many."""
    for node in nodes:
        values = listed_in(node)
        if values is not None and any(isinstance(value, str) for value in values):
            return False
        if "string" in node.get("type", "string") and not _OF_STRINGS.isdisjoint(node):
            return False
    return True


def _is_free(nodes: Sequence[dict[str, Any]]) -> bool:
    """Whether there surely are infinitely many values."""
    if any("allOf" in node or (node.keys() & _PARTED and len(node) > 1) for node in nodes):
        return False
    has_free_strings = _has_free_strings(nodes)
    return any(_is_endless(node, has_free_strings=has_free_strings) for node in nodes)


def _is_endless(node: dict[str, Any], *, has_free_strings: bool) -> bool:
    if not node:
        return True
    types = node.get("type", ())
    if types == "object" and _COUNTS.isdisjoint(node) and listed_in(node) is None:
        listed = node.get("properties", {})
        is_open = not listed and "patternProperties" not in node
        is_open = is_open and node.get("additionalProperties", True) in (True, {})
        return is_open or {"type": "string"} in listed.values()
    if "string" in types and has_free_strings:
        return listed_in(node) is None
    has_low, has_high = (not bounds.isdisjoint(node) for bounds in _SIDES)
    is_bounded = (has_low and has_high) or "multipleOf" in node
    return ("integer" in types or "number" in types) and not is_bounded and listed_in(node) is None


def _repeats(node: dict[str, Any]) -> bool:
    values = listed_in(node)
    return values is not None and any(map(_has_equal, values))


def _has_equal(value: Any) -> bool:
    """Whether an array in a value has equal items."""
    spend_on_value(value)
    return any(
        isinstance(part, list) and len(set(map(text_of_item, part))) < len(part)
        for part in values_within(value)
    )


def _long_numbers(place: _Position) -> Iterator[tuple[str, str]]:
    """Of what is inside of an array of unique items: its numbers have few digits."""
    for node in place.nodes:
        numbers = [node[name] for name in _BOUNDS if name in node]
        numbers += [part for value in listed_in(node) or () for part in values_within(value)]
        for number in numbers:
            if isinstance(number, float) and not _is_short(number):
                reason = f"{number!r} has too many digits for items that are compared"
                yield reason, f"use at most {_LONGEST_NUMBER} characters"


def _is_short(number: float) -> bool:
    return len(repr(number)) <= _LONGEST_NUMBER and "e" not in repr(number)
