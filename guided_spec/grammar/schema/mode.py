"""What happens to a schema that cannot be enforced in full: refused, narrowed, or loosened."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from guided_spec.errors import GrammarCompileError, UnsupportedSchemaError
from guided_spec.grammar.document import SpecDocument
from guided_spec.grammar.schema.lower import lower
from guided_spec.grammar.schema.report import Unenforced, describe, unescape
from guided_spec.grammar.schema.rewrite import find_unenforced

__all__ = ["compile_as_asked", "loosen", "narrow"]

_ROUNDS = 50
_SCHEMAS_OF_A_TAG = ("json_schema", "schema")
Compiled = TypeVar("Compiled")


class Loosened(NamedTuple):
    """A schema that is enforced in full, and what of the original it lacks."""

    schema: Any
    dropped: tuple[Unenforced, ...]


def compile_as_asked(
    document: SpecDocument, compile_: Callable[[SpecDocument], Compiled]
) -> Compiled:
    """A document by ``compile_``, which raises UnsupportedSchemaError for what it cannot enforce.

    Then ``spec.unsupported`` decides: "error" lets that through, "rewrite" compiles what ``narrow``
    makes of every schema in it, "warn" what ``loosen`` does, with a UserWarning that names each
    keyword dropped.
    """
    spec = document.spec
    if spec.start is not None:
        raise GrammarCompileError(
            "the spec has a start: compile it with a GrammarPipeline that has markers"
        )
    try:
        return compile_(document)
    except UnsupportedSchemaError:
        if spec.unsupported == "error":
            raise
    dropped: list[Unenforced] = []

    def settle(schema: Any) -> Any:
        if spec.unsupported == "rewrite":
            return narrow(schema)
        loosened = loosen(schema)
        dropped.extend(loosened.dropped)
        return loosened.schema

    is_schema = spec.kind == "json_schema"
    settled = settle(document.value) if is_schema else _in_tag(document.value, settle)
    strict = replace(spec, source=json.dumps(settled, ensure_ascii=False), unsupported="error")
    compiled = compile_(SpecDocument(strict))
    if dropped:
        lines = [f"{entry.pointer or '/'}: {entry.keyword}: {entry.reason}" for entry in dropped]
        text = f"the text may break the JSON schema at {'; '.join(lines)}"
        warnings.warn(text, UserWarning, stacklevel=4)
    return compiled


def narrow(schema: Any) -> Any:
    """A schema that admits less instead of what cannot be enforced, however little is left.

    An array of unique items gets one at most, a branch that cannot be told from another falls
    away. Raises UnsupportedSchemaError where nothing of the kind helps.
    """
    lowered = lower(schema, harder=True)
    errors = [entry for entry in lowered.entries if entry.level == "error"]
    if errors:
        raise UnsupportedSchemaError(describe(errors))
    return lowered.schema


def loosen(schema: Any) -> Loosened:
    """A schema without the keywords that xgrammar cannot enforce: it admits more."""
    lowered = lower(schema)
    dropped = [entry for entry in lowered.entries if entry.level == "error"]
    loose = copy.deepcopy(lowered.schema)
    for _ in range(_ROUNDS):
        errors = [entry for entry in find_unenforced(loose, "schema") if entry.level == "error"]
        if not errors:
            break
        for entry in errors:
            loose = _without(loose, entry)
            dropped.append(entry)
    return Loosened(loose, tuple(dict.fromkeys(dropped)))


def _without(schema: Any, entry: Unenforced) -> Any:
    """``schema`` changed in place: the keyword is gone, or all of the subschema that holds it."""
    node, parent, key = schema, None, ""
    for token in entry.pointer.split("/")[1:]:
        token = unescape(token)
        parent, key = node, token
        if isinstance(node, list) and token.isdecimal() and int(token) < len(node):
            node = node[int(token)]
        elif isinstance(node, dict) and token in node:
            node = node[token]
        else:
            return {}
    if isinstance(node, dict) and entry.keyword in node:
        del node[entry.keyword]
        return schema
    if parent is None:
        return {}
    parent[int(key) if isinstance(parent, list) else key] = {}
    return schema


def _in_tag(node: Any, settle: Callable[[Any], Any]) -> Any:
    if isinstance(node, list):
        return [_in_tag(part, settle) for part in node]
    if not isinstance(node, dict):
        return node
    return {
        key: settle(value)
        if key in _SCHEMAS_OF_A_TAG and isinstance(value, dict | bool)
        else _in_tag(value, settle)
        for key, value in node.items()
    }
