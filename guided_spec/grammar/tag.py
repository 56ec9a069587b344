"""Structural tags with the schemas and regexes in them prepared as those of their own kinds are."""

from __future__ import annotations

from typing import Any

from guided_spec.errors import UnsupportedSchemaError
from guided_spec.grammar.regex import to_fullmatch
from guided_spec.grammar.schema_ebnf import schema_ebnf
from guided_spec.grammar.schema_prepare import prepare_schema

__all__ = ["bound_whitespace", "prepare_tag"]

_PLAIN = {"type", "json_schema", "style"}


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


def bound_whitespace(tag: Any) -> Any:
    """The prepared tag with JSON written as ``json_schema`` writes it: ``", "`` and ``": "``.

    xgrammar has no such option inside a tag, so plain JSON becomes the grammar of its schema.
    Content with options of its own, and XML, get one whitespace character in a row at most. Raises
    RuntimeError and ValueError for a schema that xgrammar does not take.
    """
    if isinstance(tag, list):
        return [bound_whitespace(part) for part in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") == "qwen_xml_parameter":  # an old spelling, without the option
        tag = {**tag, "type": "json_schema", "style": "qwen_xml"}
    if tag.get("type") != "json_schema" or not isinstance(tag.get("json_schema"), dict | bool):
        return {key: bound_whitespace(value) for key, value in tag.items()}
    is_plain = tag.get("style", "json") == "json" and tag.keys() <= _PLAIN
    if not is_plain:
        return {"max_whitespace_cnt": 1, **tag}
    return {"type": "grammar", "grammar": schema_ebnf(tag["json_schema"], any_whitespace=False)}


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
