"""Misspelt keywords: almost one of JSON Schema, so that they say nothing and are meant to."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from guided_spec.errors import ConfigError
from guided_spec.grammar.schema.dialect import subschemas
from guided_spec.grammar.schema.lowered import Unenforced, escape
from guided_spec.kinds import SHORT, slips_of

_LOG = logging.getLogger(__name__)

_CONSTRAINTS = (
    *("type", "enum", "const", "properties", "required", "additionalProperties"),
    *("patternProperties", "propertyNames", "minProperties", "maxProperties"),
    *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
    *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "uniqueItems"),
    *("minItems", "maxItems", "minContains", "maxContains"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minLength", "maxLength", "pattern", "format"),
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$defs", "definitions"),
)
# Of any draft, of OpenAPI, and what generators write: none of them is a mistake.
_OTHERS = (
    *("$id", "id", "$schema", "$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor"),
    *("$recursiveRef", "$vocabulary", "$comment", "title", "description", "default", "examples"),
    *("example", "deprecated", "readOnly", "writeOnly", "nullable", "discriminator", "xml"),
    *("externalDocs", "contentEncoding", "contentMediaType", "contentSchema", "divisibleBy"),
    *("disallow", "extends", "optional", "formatMinimum", "formatMaximum", "order", "media"),
    *("defaultSnippets", "enumNames", "enumDescriptions", "markdownDescription", "propertyOrder"),
    *("patternErrorMessage", "errorMessage", "typeof", "instanceof", "tsType", "name", "strict"),
)
_KNOWN = frozenset({*_CONSTRAINTS, *_OTHERS})
_SPELLED = {known.lower().removeprefix("$"): known for known in reversed(_CONSTRAINTS)}
_MOST_SCHEMAS, _MOST_UNKNOWN = 4_096, 1_024  # of one document that are looked at


def misspelt(schema: Any) -> Iterator[Unenforced]:
    """Keywords that JSON Schema does not have and that are like one it has, of level "warning"."""
    waiting: list[tuple[Any, tuple[str | int, ...]]] = [(schema, ())]
    unknown = set[str]()
    for _ in range(_MOST_SCHEMAS):
        if not waiting:
            return
        node, path = waiting.pop()
        if not isinstance(node, dict):
            continue
        for keyword in (name for name in node if name not in _KNOWN):
            unknown.add(keyword)
            if len(unknown) > _MOST_UNKNOWN:
                return
            meant = _meant(str(keyword))
            if meant is not None:
                reason = f"it is no keyword of JSON Schema and says nothing; {meant!r} is one"
                fix = f"write {meant!r}, or 'x-{keyword}' for a note of your own"
                pointer = "".join(f"/{escape(str(token))}" for token in path)
                yield Unenforced(pointer, keyword, reason, fix, "warning", by_backend=False)
        waiting += [(part, (*path, *tokens)) for tokens, part in subschemas(node)]


@lru_cache(maxsize=1024)
def _meant(given: str) -> str | None:
    """The keyword that this one is most like; None where it is like none, or meant for others."""
    if given.startswith(("x-", "x_", "_")) or not 3 <= len(given) <= 24:
        return None
    plain = "".join(letter for letter in given if letter not in "$-_")
    near = {known: far for known in _SPELLED if (far := slips_of(plain, known)) is not None}
    for known in sorted(near, key=near.__getitem__):
        # "note" is no "not", but another word.
        if len(known) >= SHORT or len(plain) <= len(known) or plain == known + "s":
            return _SPELLED[known]
    return None


def require_spelled(argument: str, schema: Any, *, strict: bool) -> None:
    """Look for misspelt keywords: the log names each once, and ``strict`` raises ConfigError.

    argument: what the schema came in.
    """
    for entry in misspelt(schema):
        reason = f"at {entry.pointer or '/'!r}: {entry.reason}; {entry.fix}"
        if strict:
            raise ConfigError(argument, entry.keyword, reason)
        _warn_of(argument, entry.keyword, reason)


@lru_cache(maxsize=1024)
def _warn_of(argument: str, keyword: str, reason: str) -> None:
    _LOG.warning("%s: %r: %s", argument, keyword, reason)
