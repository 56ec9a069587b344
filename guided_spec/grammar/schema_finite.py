"""Whether a prepared schema has any value at all that ends."""

from __future__ import annotations

from typing import Any

__all__ = ["has_finite_value"]


def has_finite_value(schema: Any, definitions: dict[str, Any]) -> bool:
    """False for a schema that requires itself, such as a list node that must have a next one.

    ``schema`` and ``definitions`` are of the prepared form; references name a definition.
    """
    finite: set[str] = set()
    while True:
        more = {name for name, part in definitions.items() if _ends(part, finite)}
        if more == finite:
            return _ends(schema, finite)
        finite = more


def _ends(schema: Any, finite: set[str]) -> bool:
    if not isinstance(schema, dict):
        return schema is not False
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2] in finite
    if "anyOf" in schema:
        return any(_ends(part, finite) for part in schema["anyOf"])
    properties, prefix = schema.get("properties", {}), schema.get("prefixItems", [])
    low = schema.get("minItems", 0)
    needed = [properties[name] for name in schema.get("required", ()) if name in properties]
    needed += prefix[:low]
    needed += [schema.get("items", True)] if low > len(prefix) else []
    return all(_ends(part, finite) for part in needed)
