"""The keys that an object of a prepared schema does not list: how many, and as a pattern."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from guided_spec.grammar.characters import JSON_PLAIN
from guided_spec.grammar.regex import RE_PARSER, readable, to_fullmatch
from guided_spec.grammar.schema.lowered import all_parts
from guided_spec.grammar.steps import spend

_MOST_NODES = 64  # xgrammar 0.2.8 compiles each in some 30 ms, with a vocabulary of 150,000 tokens


def other_keys(names: Iterable[str]) -> str:
    """A pattern for the inside of a JSON string: the keys, without escapes, unlike ``names``.

    As there are no escapes, none can spell one of ``names``. Where these have many letters, keys
    that begin as one of them does are left out as well.
    """
    plain = {name for name in names if _is_plain(name)}  # others are spelled with escapes only
    length = min(max(map(len, plain), default=0), _MOST_NODES)
    while length > 1 and len(_beginnings(plain, length)) > _MOST_NODES:
        length -= 1
    nodes = {*_beginnings(plain, length), *(name for name in plain if len(name) <= length)}
    closed = {name[:length] for name in plain if len(name) > length}
    leaving = "|".join(_leaving(node, nodes | closed) for node in sorted(nodes - closed))
    # The empty one among them is a key too.
    inside = "".join(f"|{re.escape(node)}" for node in sorted(nodes - closed - plain))
    return to_fullmatch(f"(?:{leaving}).*{inside}", context="json_plain")


def _beginnings(names: Iterable[str], length: int) -> set[str]:
    """Those of up to ``length`` letters, but for whole names; the empty one is always there."""
    names = list(names)
    spend(1 + len(names) * length // 4)
    return {"", *(name[:end] for name in names for end in range(min(len(name), length + 1)))}


def _leaving(node: str, nodes: set[str]) -> str:
    """``node`` and one letter more, by which it is no node."""
    spend(1 + len(nodes) // 8)
    following = sorted(other[-1] for other in nodes if other and other[:-1] == node)
    return re.escape(node) + (f"[^{''.join(map(re.escape, following))}]" if following else ".")


def _is_plain(name: str) -> bool:
    return all(any(low <= ord(char) <= high for low, high in JSON_PLAIN) for char in name)


_OWN = frozenset({"type", "properties", "additionalProperties", "patternProperties", "items"})
_COMBINED = frozenset({"$ref", "anyOf", "allOf"})
_SETS = (["IN"], ["ANY"], ["LITERAL"], ["NOT_LITERAL"])
_PRINTABLE = 0x20


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
    spend(1)
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


class FreeKeys(NamedTuple):
    """are_there: whether an object may have keys that are not listed.

    run_out: whether an object's text may come to where only keys are left that it has already.
    """

    are_there: bool
    run_out: bool


def free_keys(schema: Any) -> FreeKeys:
    """About a schema that ``prepare_schema`` or ``prepare_for_llguidance`` has made.

    Says yes where this cannot be seen from the schema.
    """
    definitions = _definitions(schema)
    nodes = [node for node in every_part(schema) if _takes_free_keys(node)]
    return FreeKeys(bool(nodes), any(runs_out(node, definitions) for node in nodes))


def required_keys(schema: Any) -> tuple[str, ...]:
    """The keys that some object of such a schema must have, each once."""
    parts = (part for part in every_part(schema) if isinstance(part, dict))
    return tuple(dict.fromkeys(key for part in parts for key in part.get("required", ())))


def crowded(schema: Any, most: int) -> str | None:
    """That an object in a schema lists more than ``most`` optional keys; None where none does."""
    for part in every_part(schema):
        names = part.get("properties", ()) if isinstance(part, dict) else ()
        if len(names) > most and len(names) - len(part.get("required", ())) > most:
            listed = f"an object lists {len(names):,} keys, such as {next(iter(names))!r}"
            return f"{listed}: more than {most:,} of them are optional"
    return None


def every_part(schema: Any) -> Iterator[Any]:
    """A schema with ``$defs``, and all below it."""
    return chain.from_iterable(map(all_parts, [schema, *_definitions(schema).values()]))


def _definitions(schema: Any) -> dict[str, Any]:
    return schema.get("$defs", {}) if isinstance(schema, dict) else {}


def _takes_free_keys(node: Any) -> bool:
    """Whether an object under this one schema, those below it aside, may have free keys."""
    if not isinstance(node, dict):
        return node is not False
    if "enum" in node or "const" in node:
        return False
    if _OWN.isdisjoint(node) and not _COMBINED.isdisjoint(node):
        return False  # the parts say it
    types = node.get("type", ("object", "array"))
    if "object" in types and (
        node.get("additionalProperties", True) is not False or node.get("patternProperties")
    ):
        return True
    return "array" in types and "items" not in node  # any values


def runs_out(node: Any, definitions: dict[str, Any]) -> bool:
    """Whether some beginning of a key has an end, but not infinitely many.

    definitions: by name.
    """
    patterns = node.get("patternProperties", {}) if isinstance(node, dict) else {}
    is_void = {key: not has_finite_value(part, definitions) for key, part in patterns.items()}
    if patterns and node.get("additionalProperties", True) is not False:
        # Any key but those that can have no value; some are under a pattern, others are not.
        return not all(_is_loose(_parse(key)) for key in patterns if is_void[key])
    found = [key for key in patterns if not is_void[key]]
    if found and found == [other_keys(node.get("properties", ()))]:
        return False
    return not all(_is_endless(_parse(key)) for key in found)


def _parse(pattern: str) -> Any:
    """A pattern that covers the whole key, as ``to_fullmatch`` writes it, anchored or not."""
    spend(len(pattern))
    return _flat(RE_PARSER.parse(readable(pattern)))


def _is_endless(nodes: list[Any]) -> bool:
    """Whether what has begun to match can go on to infinitely many texts: a loop comes last."""
    if not nodes:
        return False
    op, value = nodes[-1]
    match op:
        case "MAX_REPEAT":
            return value[1] is RE_PARSER.MAXREPEAT and _is_written(value[2])
        case "BRANCH":
            return all(_is_endless(_flat(option)) for option in value[1])
    return False


def _is_written(items: Any) -> bool:
    """Whether JSON can hold it as it is: not every backend writes the escapes that it needs."""
    return all(_holds_plain(op, value) for op, value in _flat(items))


def _holds_plain(op: str, value: Any) -> bool:
    match op:
        case "LITERAL":
            return bool(value >= _PRINTABLE)
        case "RANGE":
            return bool(value[1] >= _PRINTABLE)
        case "IN":
            return any(_holds_plain(str(kind), part) for kind, part in value)
        case "BRANCH":
            return any(map(_is_written, value[1]))
    return op == "MAX_REPEAT" and _is_written(value[2])


def _is_loose(nodes: list[Any]) -> bool:
    """Whether it is a plain text, then loops over single characters, then a plain text.

    What does not match such patterns can then go on to infinitely many other texts, too: of what
    the loops match, every part is matched as well; if they left out only finitely many texts, each
    of these would be part of one that they match.
    """
    loops = [at for at, (op, _) in enumerate(nodes) if op != "LITERAL"]
    return all(map(_is_loop, nodes[loops[0] : loops[-1] + 1])) if loops else True


def _is_loop(node: Any) -> bool:
    op, value = node
    if op != "MAX_REPEAT" or value[0] > 0 or value[1] is not RE_PARSER.MAXREPEAT:
        return False
    return [name for name, _ in _flat(value[2])] in _SETS


def _flat(items: Any) -> list[Any]:
    """The parts of a sequence, those of groups in line with it."""
    found: list[Any] = []
    for op, value in items:
        found += _flat(value[3]) if str(op) == "SUBPATTERN" else [(str(op), value)]
    return found
