"""Object schemas in the backend's subset."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.other_keys import other_keys
from guided_spec.grammar.regex import to_fullmatch
from guided_spec.grammar.schema_report import Report, escape
from guided_spec.grammar.schema_scalar import is_anchored

__all__ = ["rewrite_object"]

Rewrite = Callable[[Any, str], Any]


def rewrite_object(words: dict[str, Any], pointer: str, report: Report, rewrite: Rewrite) -> Any:
    """An object schema; closed when it lists properties, free otherwise. False: none can exist."""
    declared = dict(words.get("properties", {}))
    patterns = dict(words.get("patternProperties", {}))
    required = list(words.get("required", ()))
    extra = words.get("additionalProperties", True)
    for name in required:
        if name not in declared and not any(re.search(p, name) for p in patterns):
            declared[name] = extra
    _check_patterns(declared, patterns, required, pointer, report)
    others: Any = False
    if extra is not False and (declared or patterns):
        # An extra key could spell a declared one with an escape, such as "\u0061" for "a".
        is_open = "additionalProperties" in words and not patterns
        others = rewrite(extra, "additionalProperties") if is_open else False
        reason = "no keys are generated besides those listed"
        if others is not False:
            reason = "further keys come last, without escapes, and unlike long lists of keys"
        report.note(pointer, "additionalProperties", reason, "list the keys under properties")
        extra = False
    properties = {
        name: rewrite(part, f"properties/{escape(name)}") for name, part in declared.items()
    }
    if any(properties.get(name) is False for name in required):
        return False
    properties = {name: part for name, part in properties.items() if part is not False}
    schema: dict[str, Any] = {"type": "object"}
    if properties:
        schema["properties"] = properties
    if required:
        schema["required"] = required
    keys = _rewrite_patterns(patterns, pointer, report, rewrite)
    if others is not False:
        keys = {other_keys(declared): others}
    if keys:
        schema["patternProperties"] = keys
    schema["additionalProperties"] = (
        extra if extra is False else rewrite(extra, "additionalProperties")
    )
    return _add_counts(schema, words, pointer, report)


def _check_patterns(
    declared: dict[str, Any],
    patterns: dict[str, Any],
    required: list[str],
    pointer: str,
    report: Report,
) -> None:
    if len(patterns) > 1:
        reason = "a key may match several patterns, and the backend applies only one"
        report.error(pointer, "patternProperties", reason, "join them into one pattern")
    for pattern in patterns:
        for name in [*declared, *required]:
            if re.search(pattern, name):
                reason = f"{pattern!r} matches the property {name!r} too"
                fix = "narrow the pattern"
                report.error(pointer, "patternProperties", reason, fix)
                return


def _rewrite_patterns(
    patterns: dict[str, Any], pointer: str, report: Report, rewrite: Rewrite
) -> dict[str, Any]:
    keys = {}
    for pattern, part in patterns.items():
        value = rewrite(part, f"patternProperties/{escape(pattern)}")
        try:
            written = to_fullmatch(pattern, place="json_string")
        except GrammarCompileError as error:
            report.error(pointer, "patternProperties", str(error), "use a simpler pattern")
            continue
        if not is_anchored(pattern):
            reason = f"{pattern!r} covers the whole key"
            report.note(pointer, "patternProperties", reason, "anchor it with ^ and $")
        if value is not False:
            keys[written] = value
    return keys


def _add_counts(schema: dict[str, Any], words: dict[str, Any], pointer: str, report: Report) -> Any:
    low, high = int(words.get("minProperties", 0)), words.get("maxProperties")
    properties = schema.get("properties", {})
    if high is not None and (high < low or high < len(schema.get("required", ()))):
        return False
    fixed = "patternProperties" not in schema and schema["additionalProperties"] is False
    if fixed and low > len(properties):
        return False
    if low > 1 and not fixed and low > len(schema.get("required", ())):
        reason = "a key written twice would count twice"
        report.error(pointer, "minProperties", reason, "list the keys under properties")
    if low > len(schema.get("required", ())):
        schema["minProperties"] = low
    if high is not None and not (fixed and high >= len(properties)):
        schema["maxProperties"] = int(high)
    return schema
