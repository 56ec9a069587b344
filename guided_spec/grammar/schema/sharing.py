"""What references and their neighbours say of one value, as definitions of their own.

llguidance joins a reference with its neighbours by itself, each time anew: it refuses
definitions that refer to themselves so, and schemas that grow too large by it.
"""

from __future__ import annotations

from typing import Any

from guided_spec.grammar.schema.joining import is_reference, merge_parts, text_of
from guided_spec.grammar.schema.lowered import change_parts, find

_MOST = 4_096  # definitions that are made


def share_joined(schema: Any) -> dict[str, Any] | None:
    """A lowered schema without references that have neighbours; a new value.

    What cannot be joined stays as it is. None where there is nothing to join, or far too much.
    """
    if not isinstance(schema, dict) or "$defs" not in schema:
        return None
    sharing = _Sharing(schema)
    shared = sharing.run()
    return shared if sharing.names and len(sharing.names) <= _MOST else None


class _Sharing:
    """names: of the definitions that are made, by the texts of what they join."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.names: dict[str, str] = {}
        self._root = root
        self._waiting: list[tuple[str, Any]] = []

    def run(self) -> dict[str, Any]:
        own = {key: value for key, value in self._root.items() if key != "$defs"}
        shared: dict[str, Any] = self._part(own)
        definitions = {name: self._part(part) for name, part in self._root["$defs"].items()}
        while self._waiting and len(self.names) <= _MOST:
            name, joined = self._waiting.pop()
            definitions[name] = self._part(joined)
        return {**shared, "$defs": definitions}

    def _part(self, node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        joined = self._joined(node)
        if joined is None:
            return change_parts(node, lambda part, _: self._part(part))
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
        parts = [*node.get("allOf", ()), *([{"$ref": node["$ref"]}] if "$ref" in node else [])]
        is_alone = len(parts) == 1 and len(node) == 1
        if is_alone or not any(map(is_reference, parts)):
            return None
        return merge_parts(node, self._target)

    def _target(self, part: Any) -> Any:
        seen = set[str]()
        while is_reference(part) and part["$ref"] not in seen:
            seen.add(part["$ref"])
            part = find(self._root, part["$ref"])
        return part
