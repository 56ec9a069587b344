"""Which branches of a union may share a value, found in time linear in the branches.

Two branches share none of a type where they list different values of it, and no object where a key
that both require lists different values (a discriminator), or where one requires a key that the
other does not admit. What is left is for ``Disjointness`` to prove, pair by pair.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from guided_spec.grammar.schema.values import Demands, Disjointness, type_of
from guided_spec.grammar.steps import spend

_MOST_TAGS = 4  # keys that are tried as discriminators
_MOST_REQUIRED = 16  # keys of one branch that are looked up among the others' keys
_DEPTH = 4  # of unions inside each other


class _Branch(NamedTuple):
    """types: of its values. listed: the values by type, where they are the only ones."""

    demands: Demands
    types: frozenset[str]
    listed: dict[str, set[Hashable]]


def find_rivals(
    branches: Sequence[Any], context: Any, disjoint: Disjointness
) -> list[dict[str, frozenset[int]]]:
    """For each branch, by type, those that may share a value with it under ``context``.

    They are named by their indices, the branch itself among them. Perhaps too many, never too few.
    """
    allowed = disjoint.types(context)
    known = [_read(branch, allowed, disjoint) for branch in branches]
    found: list[dict[str, frozenset[int]]] = [{} for _ in branches]
    for kind in sorted(allowed):
        of_kind = [index for index, branch in enumerate(known) if kind in branch.types]
        if len(of_kind) > 1:
            listed = {i: known[i].listed[kind] for i in of_kind if kind in known[i].listed}
            groups = [_sharing(of_kind, listed)]
            if kind == "object":
                objects = {i: known[i].demands for i in of_kind}
                groups += [_sharing(of_kind, tag) for tag in _tags(objects, disjoint)]
                groups.append(_admitting(objects))
            for index in of_kind:
                found[index][kind] = frozenset.intersection(*(group[index] for group in groups))
    return found


def _read(branch: Any, allowed: frozenset[str], disjoint: Disjointness) -> _Branch:
    listed: dict[str, set[Hashable]] = {}
    values = _values(disjoint, [branch], _DEPTH)
    types = disjoint.types(branch) & allowed
    if values is not None:
        for kind in types:
            listed[kind] = {value for name, value in values if name == kind}
    return _Branch(disjoint.demands([branch]), types, listed)


def _values(
    disjoint: Disjointness, schemas: list[Any], depth: int
) -> set[tuple[str, Hashable]] | None:
    """The only values, with their types, of what is valid under all of ``schemas``.

    None where they are not listed, or hold lists or objects.
    """
    demands = disjoint.demands(schemas)
    if demands.values is not None:
        spend(len(demands.values))
        if any(isinstance(value, list | dict) for value in demands.values):
            return None
        return {(type_of(value), value) for value in demands.values}
    for options in demands.options if depth else ():
        parts = [_values(disjoint, [option], depth - 1) for option in options]
        if (joined := _union(parts)) is not None:
            return joined
    return None


def _union(parts: Iterable[set[Any] | None]) -> set[Any] | None:
    found: set[Any] = set()
    for part in parts:
        if part is None:
            return None
        found |= part
    return found


def _tags(
    objects: dict[int, Demands], disjoint: Disjointness
) -> list[dict[int, set[tuple[str, Hashable]]]]:
    """For the keys that most branches require, the values that each lists for it."""
    counts = Counter(name for demands in objects.values() for name in _required(demands, disjoint))
    tags = []
    for name, count in counts.most_common(_MOST_TAGS):
        if count < 2:
            break
        found = {
            index: values
            for index, demands in objects.items()
            if (values := _tag(disjoint, demands, name, _DEPTH)) is not None
        }
        if len(found) > 1:
            tags.append(found)
    return tags


def _required(demands: Demands, disjoint: Disjointness) -> set[str]:
    """Keys that may be discriminators: required, here or in the first branch of an own union."""
    names = set(demands.required)
    for options in demands.options:
        names |= disjoint.demands(options[:1]).required
    spend(1 + len(names))
    return names


def _tag(
    disjoint: Disjointness, demands: Demands, name: str, depth: int
) -> set[tuple[str, Hashable]] | None:
    """The values listed for a key that every object has; None where there is no such list."""
    parts = demands.parts.get(name)
    if name in demands.required and parts:
        values = _values(disjoint, parts, _DEPTH)
        if values is not None:
            return values
    for options in demands.options if depth else ():
        inner = [_tag(disjoint, disjoint.demands([o]), name, depth - 1) for o in options]
        if (joined := _union(inner)) is not None:
            return joined
    return None


def _sharing(indices: Sequence[int], listed: dict[int, set[Any]]) -> dict[int, frozenset[int]]:
    """For each index those with a value in common with it; who lists none may have any."""
    by_value: defaultdict[Any, set[int]] = defaultdict(set)
    for index, values in listed.items():
        for value in values:
            by_value[value].add(index)
    everyone = frozenset(indices)
    unlisted = everyone.difference(listed)
    found = dict.fromkeys(unlisted, everyone)
    for index, values in listed.items():
        spend(1 + len(values))
        found[index] = unlisted.union(*(by_value[value] for value in values))
    return found


def _admitting(objects: dict[int, Demands]) -> dict[int, frozenset[int]]:
    """For each index those that admit all keys which it requires, and the other way round."""
    by_name: defaultdict[str, set[int]] = defaultdict(set)
    unknown = {index for index, demands in objects.items() if demands.names is None}
    for index, demands in objects.items():
        for name in demands.names or ():
            by_name[name].add(index)
    admitting: dict[int, set[int]] = {}
    for index, demands in objects.items():
        fitting = set(objects)
        spend(1 + len(demands.required))
        for name in sorted(demands.required)[:_MOST_REQUIRED]:
            fitting &= by_name[name] | unknown
        admitting[index] = fitting
    return {
        index: frozenset(other for other in fitting if index in admitting[other])
        for index, fitting in admitting.items()
    }
