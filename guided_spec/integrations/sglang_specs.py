"""What SGLang's requests ask for, as grammar specs."""

from __future__ import annotations

import json
from typing import Any

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.spec import GrammarSpec

__all__ = ["ANY_JSON", "spec_of"]

ANY_JSON = "$$ANY$$"  # how SGLang writes "any JSON value"


def spec_of(key_type: str, key_string: str, *, any_whitespace: bool) -> GrammarSpec:
    """The spec of one of SGLang's grammar keys.

    key_type: "json", "regex", "ebnf" or "structural_tag". any_whitespace: for "json" alone.

    Raises GrammarCompileError for a tag that is no JSON, and for another type.
    """
    match key_type:
        case "json" if key_string == ANY_JSON:
            return GrammarSpec.json_schema("true", any_whitespace=any_whitespace)
        case "json":
            return GrammarSpec.json_schema(key_string, any_whitespace=any_whitespace)
        case "regex":
            return GrammarSpec.regex(key_string)
        case "ebnf":
            return GrammarSpec.ebnf(key_string)
        case "structural_tag":
            return GrammarSpec.structural_tag(_tag(key_string))
    raise GrammarCompileError(f"no grammar of the kind {key_type!r} is known")


def _tag(text: str) -> Any:
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarCompileError(f"the structural_tag is not JSON: {error}") from error
    if isinstance(tag, dict) and tag.get("structures") is not None:
        return _from_structures(tag)
    return _without_null_schemas(tag)


def _from_structures(tag: dict[str, Any]) -> dict[str, Any]:
    """The older form, ``{"structures": [...], "triggers": [...]}``, in today's words."""
    tags = [
        {
            "type": "tag",
            "begin": structure["begin"],
            "content": {"type": "json_schema", "json_schema": structure.get("schema") or {}},
            "end": structure["end"],
        }
        for structure in tag["structures"]
    ]
    return {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": tag["triggers"],
            "tags": tags,
            "at_least_one": bool(tag.get("at_least_one")),
        },
    }


def _without_null_schemas(node: Any) -> Any:
    """Tool calls without parameters come with a schema of null, which means any value."""
    if isinstance(node, list):
        return [_without_null_schemas(part) for part in node]
    if not isinstance(node, dict):
        return node
    kept = {key: _without_null_schemas(value) for key, value in node.items()}
    if kept.get("type") in ("json_schema", "qwen_xml_parameter") and "json_schema" in kept:
        kept["json_schema"] = {} if kept["json_schema"] is None else kept["json_schema"]
    return kept
