"""What the references of one schema lead to, in it and in the metaschemas; nothing is fetched."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple
from urllib.parse import unquote

from jsonschema_specifications import REGISTRY
from referencing import Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import (
    DRAFT3,
    DRAFT4,
    DRAFT6,
    DRAFT7,
    DRAFT201909,
    DRAFT202012,
)

from guided_spec.grammar.schema.dialect import draft_of, spell
from guided_spec.grammar.steps import spend, spend_on_value

# Steps of indexing a node of the document, and of one reference.
_OF_INDEXING, _OF_LOOK_UP = 8, 16
_SPECIFICATIONS: dict[int, Any] = {
    **{3: DRAFT3, 4: DRAFT4, 6: DRAFT6, 7: DRAFT7},
    **{2019: DRAFT201909, 2020: DRAFT202012},
}
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
"""The keywords that lead to another schema."""
_RECURSIVE = ""  # the name of the anchor that ``$recursiveRef`` looks for


def refers(schema: Any) -> bool:
    """Whether a reference stands anywhere in it."""
    stack = [schema]
    while stack:
        part = stack.pop()
        spend(1)
        if isinstance(part, dict):
            if not part.keys().isdisjoint(REFERENCES):
                return True
            stack += part.values()
        elif isinstance(part, list):
            stack += part
    return False


class Target(NamedTuple):
    """What a reference names. key: one for every target."""

    schema: Any
    key: str


class _Position(NamedTuple):
    """Where a schema stands. root: of the resource that it is a part of."""

    resolver: Any
    root: Any
    draft: int


class Document:
    """A root schema in which references are looked up, and what of others they lead to.

    Others are schemas in it that have a URI of their own, and the metaschemas, which refer to each
    other.
    has_parts: whether there are any: then a schema that was put together here refers to nothing.
    """

    def __init__(self, root: Any) -> None:
        spend_on_value(root, _OF_INDEXING)
        self.root = root
        self.draft = draft_of(root)
        self.has_parts = False
        self._places: dict[int, _Position] = {}  # of every schema, by its id
        self._targets: dict[tuple[int, str], Target | None] = {}  # by the id of a place
        # By the name of a dynamic anchor, the schemas that have it, by the id of their resource.
        self._dynamic: defaultdict[str, dict[int, Any]] = defaultdict(dict)
        self._repeated = set[str]()  # anchors that one resource has twice
        self._entered: defaultdict[int, set[int]] = defaultdict(set)  # resources, from which others
        resource = _SPECIFICATIONS[self.draft].create_resource(root)
        resolver: Any = REGISTRY.with_resource("", resource).crawl().resolver()
        self._start = _Position(resolver.in_subresource(resource), root, self.draft)
        self._index(resource, self._start)

    def spell(self, node: dict[str, Any], *, strict: bool = False) -> dict[str, Any]:
        """One of its schemas with the keywords of 2020-12, see ``dialect.spell``."""
        return spell(node, self._at(node).draft, strict=strict)

    def resolve(self, node: dict[str, Any], keyword: str = "$ref") -> Target | None:
        """The target of ``node[keyword]``, or None."""
        if self.has_parts and id(node) not in self._places:
            return None  # a schema put together here: nothing says what it is relative to
        at, reference = self._at(node), node[keyword]
        if not isinstance(reference, str):
            return None
        if (id(at), reference) not in self._targets:
            self._targets[id(at), reference] = self._look_up(at, reference)
        return self._targets[id(at), reference]

    def _look_up(self, at: _Position, reference: str) -> Target | None:
        spend(_OF_LOOK_UP)
        try:
            found = at.resolver.lookup(reference)
        except (Unresolvable, ValueError):
            return None
        schema = found.contents
        if isinstance(schema, dict) and id(schema) not in self._places:
            # It stands where no schema is expected, as OpenAPI's do.
            resource = _SPECIFICATIONS[at.draft].create_resource(schema)
            self._index(resource, at._replace(resolver=found.resolver))
        is_local = at.root is self.root and (reference == "#" or reference.startswith("#/"))
        return Target(schema, unquote(reference) if is_local else str(id(schema)))

    def resolve_dynamic(self, node: dict[str, Any]) -> Target | None:
        """The target of ``$dynamicRef`` or ``$recursiveRef`` where it can only be one.

        It is the anchor of the first resource with such an anchor on the way from the root (section
        8.2.3.2 of the core specification of draft 2020-12). Each way enters resources with the
        anchor from one without it, or starts in one: where it can only be one resource, it is that.
        """
        keyword = "$recursiveRef" if "$recursiveRef" in node else "$dynamicRef"
        target = self.resolve(node, keyword)
        name = _RECURSIVE if keyword == "$recursiveRef" else node[keyword].rpartition("#")[2]
        owners = self._dynamic[name]
        if name in self._repeated:
            return None
        if target is None or not any(target.schema is owner for owner in owners.values()):
            return target
        first = [owner for owner in owners if owner == id(self.root)]
        first += [o for o in owners if o not in first and self._entered[o] - owners.keys()]
        return Target(owners[first[0]], str(id(owners[first[0]]))) if len(first) == 1 else None

    def _at(self, node: dict[str, Any]) -> _Position:
        return self._places.get(id(node), self._start)

    def _index(self, root: Resource[Any], start: _Position) -> None:
        stack = [(root, start)]
        while stack:
            resource, at = stack.pop()
            node = resource.contents
            if not isinstance(node, dict) or id(node) in self._places:
                continue
            self._places[id(node)] = at
            self._note_anchors(node, at)
            for keyword in REFERENCES:
                if isinstance(node.get(keyword), str):
                    stack += self._referred(node[keyword], at)
            for part in resource.subresources():
                stack.append((part, self._below(part, at)))

    def _below(self, part: Resource[Any], at: _Position) -> _Position:
        """The place of a schema right below another."""
        if part.id() is None:
            return at
        resolver = at.resolver.in_subresource(part)
        self.has_parts = True
        spend(_OF_INDEXING)
        self._entered[id(part.contents)].add(id(at.root))
        return _Position(resolver, part.contents, draft_of(part.contents, at.draft))

    def _referred(self, reference: str, at: _Position) -> list[tuple[Resource[Any], _Position]]:
        """What a reference leads to where that is not known yet, with its resource."""
        if reference == "#" or reference.startswith("#/"):
            return []
        spend(_OF_LOOK_UP)
        try:
            found = at.resolver.lookup(reference)
            root = found.resolver.lookup("#").contents
        except (Unresolvable, TypeError, ValueError):
            return []
        if root is at.root:
            return []
        self._entered[id(root)].add(id(at.root))
        known = self._places.get(id(root))
        place = known or _Position(found.resolver, root, draft_of(root, self.draft))
        if known is None:
            self.has_parts = True
            spend_on_value(root, _OF_INDEXING)
        create = _SPECIFICATIONS[place.draft].create_resource
        place = place._replace(resolver=found.resolver)
        return [(create(part), place) for part in (root, found.contents)]

    def _note_anchors(self, node: dict[str, Any], at: _Position) -> None:
        names = [node["$dynamicAnchor"]] if isinstance(node.get("$dynamicAnchor"), str) else []
        names += [_RECURSIVE] if node.get("$recursiveAnchor") is True else []
        for name in names:
            owner = self._dynamic[name].setdefault(id(at.root), node)
            self._repeated |= {name} if owner is not node else set()
