"""JSON values with their keys in the order in which a schema lists them."""

from __future__ import annotations

from typing import Any

__all__ = ["KeyOrder"]


class KeyOrder:
    """The lists of properties that one schema holds, wherever they stand."""

    def __init__(self, schema: Any) -> None:
        self._lists: list[list[str]] = []
        stack = [schema]
        while stack:
            node = stack.pop()
            if isinstance(node, dict):
                if isinstance(node.get("properties"), dict):
                    self._lists.append(list(node["properties"]))
                stack.extend(node.values())
            elif isinstance(node, list):
                stack.extend(node)

    def sort(self, value: Any) -> Any:
        """A copy, each object in the order of the list that has most of its keys.

        Keys that are not listed come last, in their own order.
        """
        if isinstance(value, list):
            return [self.sort(item) for item in value]
        if not isinstance(value, dict):
            return value
        keys = list(value)
        listed = max(self._lists, key=lambda names: len(value.keys() & set(names)), default=[])
        places = {name: place for place, name in enumerate(listed)}
        keys.sort(key=lambda name: places.get(name, len(places)))
        return {name: self.sort(value[name]) for name in keys}
