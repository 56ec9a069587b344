"""What references and their neighbours say of one value, as definitions of their own.

llguidance joins a reference with its neighbours by itself, each time anew: it refuses
definitions that refer to themselves so, and schemas that grow too large by it. A pattern of keys is
such a neighbour of the keys that are listed and match it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.languages import in_all, searched
from guided_spec.grammar.schema.joining import (
    any_of,
    holds,
    is_reference,
    merge,
    merge_parts,
    text_of,
)
from guided_spec.grammar.schema.lowered import all_parts, change_parts, escape, find
from guided_spec.grammar.steps import spend

_MOST = 4_096  # definitions that are made


Alternatives = Literal["together", "apart"]
ALTERNATIVES: tuple[Alternatives, ...] = ("together", "apart")
"""How alternatives are shared, the less costly way first."""


def share_joined(schema: Any, alternatives: Alternatives = "together") -> dict[str, Any] | None:
    """A lowered schema without references that have neighbours; a new value.

    alternatives: "apart" joins each alternative, too, with what holds for all of them. What cannot
    be joined stays as it is. None where there is nothing to join, or far too much.
    """
    if not isinstance(schema, dict) or "$defs" not in schema:
        return None
    sharing = _Sharing(schema, alternatives)
    shared = sharing.run()
    return shared if sharing.is_changed and len(sharing.names) <= _MOST else None


def joins_itself(schema: Any) -> bool:
    """Whether what a lowered schema joins with a reference leads back to the joined definition.

    llguidance refuses nearly all of these.
    """
    if not isinstance(schema, dict) or "$defs" not in schema:
        return False
    roots = {"#": schema} | {
        f"#/$defs/{escape(name)}": part for name, part in schema["$defs"].items()
    }
    targets: dict[str, set[str]] = {}
    joined: dict[str, set[str]] = {}
    for name, root in roots.items():
        nodes = [node for node in all_parts(root) if isinstance(node, dict)]
        targets[name] = {node["$ref"] for node in nodes if "$ref" in node}
        parts = [part for node in nodes for part in (*_beside_others(node), *_of_keys(node))]
        joined[name] = {part["$ref"] for part in parts if is_reference(part)}
    return any(
        name in _reached(reference, targets) for name, ones in joined.items() for reference in ones
    )


def _reached(reference: str, targets: Mapping[str, set[str]]) -> set[str]:
    found, waiting = {reference}, [reference]
    while waiting:
        more = targets.get(waiting.pop(), set()) - found
        found |= more
        waiting += more
    spend(len(found))
    return found


def _beside_others(node: dict[str, Any]) -> list[Any]:
    """What holds of a value besides others; empty where it is one part alone."""
    parts = [*node.get("allOf", ()), *([{"$ref": node["$ref"]}] if "$ref" in node else [])]
    return [] if len(parts) == 1 and len(node) == 1 else parts


def _of_keys(node: dict[str, Any]) -> Iterator[Any]:
    """What holds of listed keys besides others: they match patterns of keys."""
    for name, ones in _matched(node).items():
        if ones:
            yield node["properties"][name]
            yield from (node["patternProperties"][one] for one in ones)


def _matched(node: dict[str, Any]) -> dict[str, list[str]]:
    """The patterns of keys that each listed key matches."""
    patterns = node.get("patternProperties", {})
    return {n: [one for one in patterns if holds(one, n)] for n in node.get("properties", ())}


class _Sharing:
    """names: of the definitions that are made, by the texts of what they join.

    is_changed: whether anything is joined.
    """

    def __init__(self, root: dict[str, Any], alternatives: Alternatives) -> None:
        self.names: dict[str, str] = {}
        self._alternatives = alternatives
        self.is_changed = False
        self._root = root
        self._waiting: list[tuple[str, Any]] = []

    def run(self) -> dict[str, Any]:
        own = {key: value for key, value in self._root.items() if key != "$defs"}
        shared: Any = self._part(own)
        if isinstance(shared, bool):
            shared = {} if shared else {"enum": []}
        definitions = {name: self._part(part) for name, part in self._root["$defs"].items()}
        while self._waiting and len(self.names) <= _MOST:
            name, joined = self._waiting.pop()
            definitions[name] = self._part(joined)
        return {**shared, "$defs": definitions}

    def _part(self, node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        joined = self._joined(node)
        if joined is None and self._alternatives == "apart" and _has_options_beside(node):
            self.is_changed = True
            return any_of([self._part(one) for one in _apart(node)])
        if joined is None:
            apart = _with_patterns_apart(node)
            self.is_changed |= apart is not node
            return change_parts(apart, lambda part, _: self._part(part))
        self.is_changed = True
        if isinstance(joined, bool):
            return joined
        text = text_of(joined)
        if text not in self.names:
            name = f"joined{len(self.names)}"
            while name in self._root["$defs"]:
                name += "_"
            self.names[text] = name
            self._waiting.append((name, joined))
        return {"$ref": f"#/$defs/{self.names[text]}"}

    def _joined(self, node: dict[str, Any]) -> Any:
        """One schema for a reference and its neighbours; None where there are none, or no such."""
        if not any(map(is_reference, _beside_others(node))):
            return None
        return merge_parts(node, self._target)

    def _target(self, part: Any) -> Any:
        seen = set[str]()
        while is_reference(part) and part["$ref"] not in seen:
            seen.add(part["$ref"])
            part = find(self._root, part["$ref"])
        return part


def _has_options_beside(node: dict[str, Any]) -> bool:
    """Whether references are alternatives next to what holds for all of them."""
    if len(node) == 1 or "allOf" in node or "$ref" in node:
        return False
    return any(map(is_reference, node.get("anyOf", ())))


def _apart(node: dict[str, Any]) -> Iterator[Any]:
    """Each alternative of ``node`` with what holds for all of them."""
    rest = {key: value for key, value in node.items() if key != "anyOf"}
    for option in node["anyOf"]:
        both = None if is_reference(option) else merge(rest, option)
        yield {**rest, "allOf": [option]} if both is None else both


def _with_patterns_apart(node: dict[str, Any]) -> dict[str, Any]:
    """``node`` with patterns that match no listed key, whose schemas say what the patterns' did.

    As it is where none does, or a pattern would be too long.
    """
    listed, patterns = node.get("properties", {}), node.get("patternProperties", {})
    matched = _matched(node)
    if not any(matched.values()):
        return node
    try:
        left = _outside(node, set().union(*matched.values()))
    except (GrammarCompileError, RecursionError):
        return node
    joined = {}
    for name, part in listed.items():
        parts = {text_of(one): one for one in [part, *(patterns[one] for one in matched[name])]}
        joined[name] = part if len(parts) == 1 else {"allOf": [*parts.values()]}
    return {**node, "properties": joined, "patternProperties": left, "additionalProperties": False}


def _outside(node: dict[str, Any], matching: set[str]) -> dict[str, Any]:
    """By their patterns, the schemas of all keys of ``node`` that are not listed.

    matching: patterns that match listed keys. Raises GrammarCompileError where one is too long.
    """
    patterns, extra = node["patternProperties"], node.get("additionalProperties", True)
    own = f"^(?:{'|'.join(map(re.escape, node['properties']))})\\Z"
    apart = searched(own, is_in=False)
    left = {pattern: part for pattern, part in patterns.items() if pattern not in matching}
    for pattern in (one for one in patterns if one in matching):
        written = in_all([searched(pattern), apart])
        if written in left:
            raise GrammarCompileError("two patterns of the same keys")
        left |= {written: patterns[pattern]} if written is not None else {}
    # What is written may match fewer keys, which are not to become further ones.
    outside = [searched(one, is_in=False) for one in patterns]
    rest = None if extra is False else in_all([apart, *outside])
    return left if rest is None else {**left, rest: extra}
