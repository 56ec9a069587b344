"""jsonschema's validators, with each keyword that they look at counted as steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jsonschema
from jsonschema_specifications import REGISTRY

from guided_spec.grammar.regex import spend_on_search
from guided_spec.grammar.schema.document import refers
from guided_spec.grammar.steps import is_limited, spend, spend_on_value

_OF_CALL, _OF_KEYWORD = 20, 8  # steps
_UNCOUNTED = 10**9  # steps of a part in a dialect of its own, whose validator counts nothing
_PATTERNS = frozenset({"patternProperties", "additionalProperties", "unevaluatedProperties"})

Check = Callable[[Any, Any, Any, Any], Iterator[Any] | None]


@cache
def counting(kind: Any) -> Any:
    """A validator class of jsonschema that counts its steps."""
    checks = {name: _counted(name, check) for name, check in kind.VALIDATORS.items()}
    extend: Any = jsonschema.validators.extend
    return extend(kind, validators=checks)


def is_valid(validator: Any, value: Any) -> bool:
    """Whether a validator of ``counting`` takes ``value``, formats aside."""
    spend(_OF_CALL)
    return bool(validator.is_valid(value))


class ValueCheck:
    """Holds values against the parts of one schema, as its draft has them.

    root: the whole schema, in which references are looked up.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        kind = jsonschema.validators.validator_for(root, default=jsonschema.Draft202012Validator)
        # A schema that names its dialect would be judged by that one's own validator.
        self._plain = root
        if isinstance(root, dict):
            self._plain = {key: part for key, part in root.items() if key != "$schema"}
        self._validator: Any = counting(kind)(self._plain, registry=REGISTRY)  # fetches nothing
        self._is_counted: bool | None = None

    def is_valid(self, value: Any, schema: Any) -> bool:
        """Whether jsonschema takes ``value`` under ``schema``, formats aside."""
        if is_limited() and not self._counts(schema):
            spend(_UNCOUNTED)
        schema = self._plain if schema is self._root else schema
        return is_valid(self._validator.evolve(schema=schema), value)

    def _counts(self, schema: Any) -> bool:
        """Whether all validators that ``schema`` leads to count their steps."""
        if self._is_counted is None:
            self._is_counted = not _names_dialect([self._plain])
        is_alone = schema is not self._root and not refers(schema)
        return self._is_counted or (is_alone and not _names_dialect([schema]))


def _names_dialect(parts: list[Any]) -> bool:
    while parts:
        part = parts.pop()
        spend(1)
        if isinstance(part, dict):
            if isinstance(part.get("$schema"), str):
                return True
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    return False


def _counted(name: str, check: Check) -> Check:
    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any] | None:
        if is_limited():
            _spend(name, value, instance, schema)
        return check(validator, value, instance, schema)

    return counted


def _spend(name: str, value: Any, instance: Any, schema: Any) -> None:
    spend(_OF_KEYWORD)
    if isinstance(instance, dict | list):
        spend_on_value(instance)  # which is written into the error
    if name in ("enum", "const"):
        spend_on_value(value)
    elif name == "uniqueItems" and isinstance(instance, list):
        spend(len(instance) ** 2)
    elif name == "pattern" and isinstance(instance, str):
        spend_on_search(value, instance)
    elif name in _PATTERNS and isinstance(instance, dict):
        for pattern in schema.get("patternProperties", ()):
            for key in instance:
                spend_on_search(pattern, key)
    elif isinstance(value, dict | list):
        spend(len(value))
