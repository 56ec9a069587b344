"""A JSON schema as a Lark grammar of llguidance whose objects take their keys in any order.

llguidance generates the keys of an object in the order of its schema. Its grammars may give a rule
64 bits as a parameter, though: here one bit for each key, set when it has been written. So the
grammar is as long as the schema, and no key comes twice. What holds no object with listed keys
stays JSON schema inside the grammar.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from guided_spec.grammar.backends.json_rules import (
    FIXED,
    IGNORED,
    SPACED,
    KeptError,
    Pair,
    Writer,
    all_of,
    declared_keys,
    has_keys,
    key_literal,
    other_pairs,
)
from guided_spec.grammar.backends.ordered_objects import OrderedObjects, holds_ordered_object
from guided_spec.grammar.schema.lowered import Unenforced, escape

_MOST_KEYS = 63  # of 64 bits; one more marks further keys
_ONCE = '%llguidance {"ignore_once": true}'


class AnyOrder(NamedTuple):
    """text: of the grammar; None where there is none. notes: whose keys stay in order."""

    text: str | None
    notes: tuple[Unenforced, ...]


def any_order_grammar(prepared: dict[str, Any], options: dict[str, Any]) -> AnyOrder:
    """The grammar of a schema that ``prepare_for_llguidance`` has made.

    options: how JSON is spelled, the ``x-guidance`` of llguidance. The texts are those of the
    schema there, with the keys of each object in any order, those without a name in the schema
    between them. Where both patterns and further keys are allowed, the latter hold no escapes.
    """
    spelling = FIXED
    if options["whitespace_flexible"]:
        spelling = SPACED if holds_ordered_object(prepared) else IGNORED
    writer = Writer(prepared, _Objects(), spelling, options)
    try:
        top = writer.rule(writer.parts.root, "")
    except (KeptError, RecursionError) as error:
        fix = "the keys of all objects stay in the schema's order"
        note = Unenforced("", "properties", str(error), fix, "note")
        return AnyOrder(None, (note,))
    once = [_ONCE] if spelling is IGNORED else []
    text = "\n".join([*once, f"start: {top}", *writer.rules, ""])
    return AnyOrder(text, tuple(writer.report.entries))


class _Objects:
    """Writes object rules. Their parameter holds a bit for each listed key, required ones first."""

    def __init__(self) -> None:
        self._in_order = OrderedObjects()

    def wants(self, node: Mapping[str, Any]) -> bool:
        """Whether there are keys to be listed."""
        listed = node.get("properties") or node.get("required")
        return bool(listed) or has_keys([node.get("const"), *node.get("enum", ())])

    def write(self, writer: Writer, node: dict[str, Any], pointer: str) -> str | None:
        """What matches the objects of ``node``, which has keywords of objects only; None: none."""
        required = dict.fromkeys(node.get("required", ()))
        is_open = bool(node.get("patternProperties"))
        is_open = is_open or node.get("additionalProperties", True) is not False
        declared = declared_keys(node)
        low = max(int(node.get("minProperties", 0)), len(required))
        reason = ""
        if "maxProperties" in node or (is_open and low > max(1, len(required))):
            reason = "keys are counted"
        elif len(declared) > _MOST_KEYS:
            reason = f"an object lists more than {_MOST_KEYS} keys"
        if reason and self._in_order.wants(node):
            writer.note_order(pointer, reason)
            return self._in_order.write(writer, node, pointer)
        if reason:
            return writer.keep_order(node, pointer, reason)
        pairs: list[Pair] = []
        for name in sorted(declared, key=lambda name: name not in required):
            value = writer.rule(declared[name], f"{pointer}/properties/{escape(name)}")
            if value is None and name in required:
                return None
            if value is not None:
                pairs.append(Pair(key_literal(name), value))
        others = other_pairs(writer, list(declared), node, pointer)
        return _rules(writer, pairs, len(required), others, low)


def _rules(
    writer: Writer, pairs: list[Pair], num_required: int, others: list[Pair], low: int
) -> str | None:
    """Write ``x``, a pair after a comma or the brace, and ``y``, what comes after a pair.

    low: how many keys there are at least.
    """
    _, colon, space, _ = spelling = writer.spelling
    if not others and low > len(pairs):
        return None
    if not pairs and not others:
        return f'"{{" {space}"}}"'
    x, y = writer.new_name("x"), writer.new_name("y")
    more = [
        f"{key} {colon} {value} {y}::set_bit({bit}) %if bit_clear({bit})"
        for bit, (key, value) in enumerate(pairs)
    ]
    # Whether there is any further key matters only where keys are counted.
    then = f"set_bit({len(pairs)})" if low > num_required else "_"
    more += [f"{key} {colon} {value} {y}::{then}" for key, value in others]
    ends = [f"is_ones([0:{num_required}])"] if num_required else []
    if low > num_required:
        ends.append(f"bit_count_ge([0:{len(pairs) + 1}], {low})")
    end = f" %if {all_of(ends)}" if ends else ""
    again = "" if others else f" %if not(is_ones([0:{len(pairs)}]))"
    writer.rules.append(f"{x}::_ : {' | '.join(more)}")
    writer.rules.append(f'{y}::_ : {space}"}}"{end} | {spelling.comma} {x}::_{again}')
    begin = f'"{{" {space}{x}::0x0'
    return begin if low else f'{begin} | "{{" {space}"}}"'
