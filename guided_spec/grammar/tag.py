"""Structural tags with the schemas and regexes in them prepared as those of their own kinds are."""

from __future__ import annotations

from typing import Any

from guided_spec.errors import UnsupportedSchemaError
from guided_spec.grammar.regex import to_fullmatch
from guided_spec.grammar.schema_prepare import prepare_schema

__all__ = ["prepare_tag"]


def prepare_tag(tag: Any) -> Any:
    """The tag as the backend enforces it. Raises GrammarCompileError and what is below it."""
    if isinstance(tag, list):
        return [prepare_tag(part) for part in tag]
    if not isinstance(tag, dict):
        return tag
    prepared = {}
    for key, value in tag.items():
        if key in ("json_schema", "schema") and isinstance(value, dict | bool):
            prepared[key] = prepare_schema(value)
            _check_options(tag)
        elif key == "pattern" and tag.get("type") == "regex" and isinstance(value, str):
            prepared[key] = to_fullmatch(value)
        else:
            prepared[key] = prepare_tag(value)
    return prepared


def _check_options(content: dict[str, Any]) -> None:
    reason = None
    if content.get("any_order"):
        reason = "any_order: xgrammar then checks neither required keys nor repeated ones"
    elif content.get("excludes") and _bounds_a_length(content):
        reason = "excludes: xgrammar then drops minLength and maxLength"
    if reason is not None:
        raise UnsupportedSchemaError(
            f"the structural_tag cannot be enforced in full: {reason}; leave it out"
        )


def _bounds_a_length(node: Any) -> bool:
    if isinstance(node, list):
        return any(map(_bounds_a_length, node))
    if not isinstance(node, dict):
        return False
    return not {"minLength", "maxLength"}.isdisjoint(node) or _bounds_a_length([*node.values()])
