"""Drafts 4 to 2020-12 of JSON schema, one schema at a time in the spelling of the last one."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple
from urllib.parse import unquote

import jsonschema
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import (
    DRAFT3,
    DRAFT4,
    DRAFT6,
    DRAFT7,
    DRAFT201909,
    DRAFT202012,
)

from guided_spec.grammar.steps import spend, spend_on_value

# Steps of reading one schema, of indexing a node of the document, and of one reference.
_OF_SPELLING, _OF_INDEXING, _OF_LOOK_UP = 8, 8, 16

_DRAFTS: dict[Any, int] = {
    jsonschema.Draft3Validator: 3,
    jsonschema.Draft4Validator: 4,
    jsonschema.Draft6Validator: 6,
    jsonschema.Draft7Validator: 7,
    jsonschema.Draft201909Validator: 2019,
    jsonschema.Draft202012Validator: 2020,
}
_SPECIFICATIONS: dict[int, Any] = {
    **{3: DRAFT3, 4: DRAFT4, 6: DRAFT6, 7: DRAFT7},
    **{2019: DRAFT201909, 2020: DRAFT202012},
}
# Keywords by the first draft that knows them; older ones ignore them.
_SINCE = {
    **dict.fromkeys(("const", "contains", "propertyNames"), 6),
    **dict.fromkeys(("if", "then", "else"), 7),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "minContains", "maxContains"), 2019),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), 2019),
    "prefixItems": 2020,
}
_UNTIL = {"dependencies": 7}


def draft_of(schema: Any) -> int:
    """The draft that ``$schema`` names, 2020 where it names none that is known."""
    default = jsonschema.Draft202012Validator
    return _DRAFTS.get(jsonschema.validators.validator_for(schema, default=default), 2020)


def spell(node: dict[str, Any], draft: int, *, strict: bool = False) -> dict[str, Any]:
    """One schema with the keywords of draft 2020-12; its subschemas stay as they are.

    Keywords that ``draft`` does not know are kept, for their author meant them; ``strict`` leaves
    them out, which is what the specification says.
    """
    spend(_OF_SPELLING + len(node))
    if draft <= 7 and "$ref" in node:
        return {"$ref": node["$ref"]}
    words = dict(node)
    if strict:
        for name in node:
            if not _SINCE.get(name, 0) <= draft <= _UNTIL.get(name, draft):
                del words[name]
    if draft < 6:
        _bound(words, "minimum", "exclusiveMinimum")
        _bound(words, "maximum", "exclusiveMaximum")
    if draft < 2020 and isinstance(words.get("items"), list):
        words["prefixItems"] = words.pop("items")
        words.update({"items": words["additionalItems"]} if "additionalItems" in words else {})
    words.pop("additionalItems", None)
    if "dependencies" in words:
        _split_dependencies(words)
    return words


def _bound(words: dict[str, Any], inclusive: str, exclusive: str) -> None:
    """Draft 4: ``exclusiveMinimum`` is true or false."""
    if isinstance(words.get(exclusive), bool) and words.pop(exclusive) and inclusive in words:
        words[exclusive] = words.pop(inclusive)


def _split_dependencies(words: dict[str, Any]) -> None:
    names = dict(words.get("dependentRequired", {}))
    schemas = dict(words.get("dependentSchemas", {}))
    for name, value in words.pop("dependencies").items():
        if isinstance(value, list | str):
            names[name] = [value] if isinstance(value, str) else value
        else:
            schemas[name] = value
    words.update({"dependentRequired": names} if names else {})
    words.update({"dependentSchemas": schemas} if schemas else {})


class Target(NamedTuple):
    """What a reference names. key: one for every target."""

    schema: Any
    key: str


class Document:
    """A root schema in which references are looked up; nothing is fetched.

    has_parts: whether schemas in it have URIs of their own, to which references are relative.
    """

    def __init__(self, root: Any) -> None:
        spend_on_value(root, _OF_INDEXING)
        self.root = root
        self.draft = draft_of(root)
        self.has_parts = False
        self._resolvers: dict[int, Any] = {}  # of every schema, by its id
        self._anchors = Counter[str]()  # of $dynamicRef by name, those of $recursiveRef as ""
        resource = _SPECIFICATIONS[self.draft].create_resource(root)
        self._resolver: Any = Registry[Any]().with_resource("", resource).crawl().resolver()
        self._resolver = self._resolver.in_subresource(resource)
        self._index(resource)

    def resolve(self, node: dict[str, Any], keyword: str = "$ref") -> Target | None:
        """The target of ``node[keyword]``, or None."""
        if self.has_parts and id(node) not in self._resolvers:
            return None  # a schema put together here: nothing says what it is relative to
        reference = node[keyword]
        spend(_OF_LOOK_UP)
        try:
            found = self._resolvers.get(id(node), self._resolver).lookup(reference).contents
        except (Unresolvable, TypeError, ValueError):
            return None
        is_local = not self.has_parts and (reference == "#" or reference.startswith("#/"))
        return Target(found, unquote(reference) if is_local else str(id(found)))

    def resolve_dynamic(self, node: dict[str, Any]) -> Target | None:
        """The target of ``$dynamicRef`` or ``$recursiveRef`` where it can only be one."""
        if "$recursiveRef" in node:
            return None if self._anchors[""] else self.resolve(node, "$recursiveRef")
        anchor = node["$dynamicRef"].rpartition("#")[2]
        return None if self._anchors[anchor] > 1 else self.resolve(node, "$dynamicRef")

    def _index(self, root: Resource[Any]) -> None:
        stack = [(root, self._resolver)]
        while stack:
            resource, resolver = stack.pop()
            node = resource.contents
            if not isinstance(node, dict):
                continue
            self._resolvers[id(node)] = resolver
            self._anchors.update([str(node["$dynamicAnchor"])] if "$dynamicAnchor" in node else ())
            self._anchors.update([""] if node.get("$recursiveAnchor") is True else ())
            for part in resource.subresources():
                self.has_parts |= part.id() is not None
                stack.append((part, resolver.in_subresource(part)))
