"""Any JSON schema of drafts 4 to 2020-12, in fewer keywords: those that grammars can be made of.

The result admits no value that the schema does not. It has no ``$schema``, ``$id``, ``not``,
``oneOf``, ``if``, ``dependent…``, ``contains``, ``propertyNames``, ``unevaluated…``, no format
without a pattern of its own, and refers to nothing but ``#/$defs/...``. Where it admits fewer
values, a note says so; where a keyword has no such spelling, an error does.
"""

from __future__ import annotations

from typing import Any

from guided_spec.grammar.schema_apply import APPLICATORS
from guided_spec.grammar.schema_closed import AdditionalProperties, close_objects
from guided_spec.grammar.schema_lowering import Lowered, Lowering, Rules
from guided_spec.grammar.schema_negate import negate
from guided_spec.grammar.schema_special import SPECIAL

__all__ = ["lower", "needs_lowering"]

_CAUSES = frozenset(
    {"not", "if", "oneOf", "dependentRequired", "dependentSchemas", "dependencies", "contains"}
    | {"propertyNames", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"}
    | {"$id", "id", "$anchor", "$dynamicAnchor", "additionalItems", "format"}
    | {"minProperties", "maxProperties", "uniqueItems"}
)
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_RULES = Rules({**APPLICATORS, **SPECIAL}, negate)


def lower(
    schema: Any, *, harder: bool = False, additional: AdditionalProperties = "schema"
) -> Lowered:
    """``schema``, which must be valid under its metaschema, in fewer keywords.

    harder: admits less, however little is left, where there would be an error otherwise.
    additional: "closed" closes objects, see ``schema_closed``.
    """
    lowered = Lowered(schema, ())
    if needs_lowering(schema):
        lowered = Lowering(schema, _RULES, harder=harder).run()
    if additional == "closed":
        return lowered._replace(schema=close_objects(lowered.schema).schema)
    return lowered


def needs_lowering(schema: Any) -> bool:
    """Whether ``schema`` holds more than the backends' own preparations know."""
    if isinstance(schema, dict) and schema.get("$schema", _DRAFT) != _DRAFT:
        return True
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack.extend(node)
        elif isinstance(node, dict):
            if not _CAUSES.isdisjoint(node) or isinstance(node.get("items"), list):
                return True
            if "$ref" in node and not _is_local(node["$ref"]):
                return True
            stack.extend(node.values())
    return False


def _is_local(reference: Any) -> bool:
    text = str(reference)
    return text == "#" or (text.startswith("#/$defs/") and text.count("/") == 2 and "%" not in text)
