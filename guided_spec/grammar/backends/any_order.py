"""A JSON schema as a Lark grammar of llguidance whose objects take their keys in any order.

llguidance generates the keys of an object in the order of its schema. Its grammars may give a rule
64 bits as a parameter, though: here one bit for each key, set when it has been written. So the
grammar is as long as the schema, and no key comes twice. What holds no object with listed keys
stays JSON schema inside the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from guided_spec.grammar.regex import readable, spend_on_search
from guided_spec.grammar.schema.joining import merge
from guided_spec.grammar.schema.lowered import Report, Unenforced, all_parts, escape, unescape
from guided_spec.grammar.schema.values import constant, keep_valid, values_within
from guided_spec.grammar.steps import spend, spend_on_value

_DEEPEST = 16
_MOST_BRANCHES = 128
_MOST_LOOKED_AT = 20_000
_OF_NODE = 4  # steps
_PREFIX = "#/$defs/"


class _Parts:
    """The schemas of one document, whose references all name one of its definitions.

    root: without ``$defs``. definitions: by their reference.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        self.root: Any = {key: value for key, value in schema.items() if key != "$defs"}
        self.definitions: dict[str, Any] = {
            _PREFIX + escape(name): part for name, part in schema.get("$defs", {}).items()
        }
        self.definitions["#"] = self.root
        self._ordered: set[str] = set()
        self._num_looked_at = 0
        users: dict[str, list[str]] = {}
        for name, part in self.definitions.items():
            for node in _nodes(part):
                users.setdefault(node.get("$ref", ""), []).append(name)
        waiting = [name for name, part in self.definitions.items() if self.is_ordered(part)]
        while waiting:
            name = waiting.pop()
            if name not in self._ordered:
                self._ordered.add(name)
                waiting += users.get(name, ())

    def is_ordered(self, schema: Any) -> bool:
        """Whether some object in a value of ``schema`` has keys that it lists."""
        return any(
            node.get("properties")
            or node.get("required")
            or node.get("$ref") in self._ordered
            or _has_keys([node.get("const"), *node.get("enum", ())])
            for node in _nodes(schema)
        )

    def references(self, schema: Any) -> dict[str, Any]:
        """What ``schema`` refers to, and all that this does in turn."""
        found: dict[str, Any] = {}
        waiting = [schema]
        while waiting:
            for node in _nodes(waiting.pop()):
                name = node.get("$ref")
                if name is not None and name not in found:
                    found[name] = self.definitions.get(name, False)
                    waiting.append(found[name])
        return found

    def branches(self, node: Any, depth: int = 0) -> list[Any] | None:
        """Schemas that combine nothing, of which any admits a value; None where there are no such.

        Each is a lone reference, or holds no ``$ref`` and no combinator, unless no keys are listed
        in it.
        """
        if node is False:
            return []
        if not isinstance(node, dict):
            return [{}]
        self._num_looked_at += 1
        spend(_OF_NODE)
        if depth > _DEEPEST or self._num_looked_at > _MOST_LOOKED_AT:
            return None
        if node.keys() == {"$ref"}:
            return [node]
        for keyword in ("allOf", "$ref", "anyOf"):
            if keyword in node:
                rest = {key: value for key, value in node.items() if key != keyword}
                value = node[keyword]
                parts = value if keyword == "allOf" else [{keyword: value}]
                if keyword == "anyOf" and not rest:
                    return self._alternatives(value, depth)
                return self._joined([rest, *parts] if rest else parts, depth)
        return _one_by_one(node) if _holds_values(node) else [node]

    def _alternatives(self, options: list[Any], depth: int) -> list[Any] | None:
        found: list[Any] = []
        for option in options:
            parts: list[Any] | None = [option] if option is not False else []
            if self.is_ordered(option):
                parts = self.branches(option, depth + 1)
            if parts is None or len(found) + len(parts) > _MOST_BRANCHES:
                return None
            found += parts
        return found

    def _joined(self, parts: list[Any], depth: int) -> list[Any] | None:
        """Every branch of one part with every branch of the others."""
        found: list[Any] = [{}]
        for part in parts:
            options = self.branches(self._dereference(part), depth + 1)
            if options is None or len(found) * len(options) > _MOST_BRANCHES:
                return None
            options = [self._dereference(option) for option in options]
            joined = [self._both(one, option) for one in found for option in options]
            if None in joined:
                return None
            found = [node for node in joined if node is not False]
        return self._alternatives(found, depth)

    def _both(self, one: dict[str, Any], other: Any) -> Any:
        """One schema for both; None where that is not plain to see."""
        if other is False:
            return False
        if _holds_values(one) and _holds_values(other):
            return _common_values(one, other)
        if "items" in one and "items" in other and "prefixItems" not in {**one, **other}:
            one = {**one, "items": {"allOf": [one["items"], other["items"]]}}
            other = {key: value for key, value in other.items() if key != "items"}
        both = _simplified(merge(one, other))
        if both is None and not self.is_ordered(one) and not self.is_ordered(other):
            return {"allOf": [one, other]}
        return both

    def _dereference(self, node: Any) -> Any:
        """What ``node`` refers to, if it is nothing but a reference."""
        for _ in range(_DEEPEST):
            if not isinstance(node, dict) or node.keys() != {"$ref"}:
                break
            node = self.definitions.get(node["$ref"], False)
        return node


def _has_keys(value: Any) -> bool:
    """Whether a JSON value holds an object with any key."""
    spend_on_value(value)
    return any(isinstance(part, dict) and part for part in values_within(value))


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Those of a schema and all below it that may say something."""
    return (node for node in all_parts(schema) if isinstance(node, dict))


def _holds_values(node: dict[str, Any]) -> bool:
    return "const" in node or "enum" in node


def _values_of(node: dict[str, Any]) -> list[Any]:
    if "const" not in node:
        return list(node["enum"])
    texts = [json.dumps(value, sort_keys=True) for value in node.get("enum", [node["const"]])]
    return [node["const"]] if json.dumps(node["const"], sort_keys=True) in texts else []


def _among_values(node: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key not in ("const", "enum")}


def _common_values(one: dict[str, Any], other: dict[str, Any]) -> Any:
    """A schema for the values that both list."""
    texts = {json.dumps(value, sort_keys=True) for value in _values_of(other)}
    spend_on_value([one, other])
    values = [v for v in _values_of(one) if json.dumps(v, sort_keys=True) in texts]
    rest = merge(_among_values(one), _among_values(other))
    if rest is None or rest is False or not values:
        return None if rest is None else False
    return _simplified({**rest, "enum": values})


def _simplified(node: Any) -> Any:
    """``node``, or False where it lists values and admits none of them."""
    values = None
    if isinstance(node, dict) and _holds_values(node):
        values = _one_by_one(node)
    if values is None or len(values) > 1:
        return node
    return values[0] if values else False


def _one_by_one(node: dict[str, Any]) -> list[Any] | None:
    """The values that ``node`` lists and admits: those with keys as schemas of their own."""
    rest = _among_values(node)
    pattern = rest.pop("pattern", None)
    # Elsewhere patterns are not spelled as Python has them either.
    kept = None if '"pattern' in json.dumps(rest) else keep_valid(_values_of(node), rest)
    if kept is None:
        return None
    if pattern is not None:
        kept = [v for v in kept if not isinstance(v, str) or _matches(pattern, v)]
    plain = [value for value in kept if not _has_keys(value)]
    parts = [constant(value) for value in kept if _has_keys(value)]
    return [*parts, *([{"enum": plain}] if plain else [])]


def _matches(pattern: str, text: str) -> bool:
    """Whether a pattern as llguidance gets it, anchored at both ends, matches ``text``."""
    own = readable(pattern)
    spend_on_search(own, text)
    return re.fullmatch(own, text) is not None


_MOST_KEYS = 63  # of 64 bits; one more marks further keys
_STRING = r'/"([^"\\\x00-\x1f\x7f]|\\[nrbtf"\\])*"/'
_PLAIN = r'/"[^"\\\x00-\x1f\x7f]*"/'


class _Pair(NamedTuple):
    """key, value: what a rule calls them."""

    key: str
    value: str


class _Objects:
    """Writes object rules. Their parameter holds a bit for each listed key, required ones first."""

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer
        self._count = 0

    def write(self, node: dict[str, Any], pointer: str) -> str | None:
        """What matches the objects of ``node``, which has keywords of objects only; None: none."""
        required = dict.fromkeys(node.get("required", ()))
        patterns = node.get("patternProperties", {})
        extra = node.get("additionalProperties", True)
        declared = _declared(node, extra)
        is_open = bool(patterns) or extra is not False
        if len(declared) > _MOST_KEYS:
            reason = f"an object lists more than {_MOST_KEYS} keys"
            return self._writer.keep_order(node, pointer, reason)
        low = max(int(node.get("minProperties", 0)), len(required))
        if "maxProperties" in node or (is_open and low > max(1, len(required))):
            return self._writer.keep_order(node, pointer, "keys are counted")
        pairs: list[_Pair] = []
        for name in sorted(declared, key=lambda name: name not in required):
            value = self._writer.rule(declared[name], f"{pointer}/properties/{escape(name)}")
            if value is None and name in required:
                return None
            if value is not None:
                pairs.append(_Pair(key_literal(name), value))
        others = self._others(list(declared), patterns, extra, pointer)
        return self._rules(pairs, len(required), others, low)

    def _others(
        self, names: list[str], patterns: dict[str, Any], extra: Any, pointer: str
    ) -> list[_Pair]:
        """The keys that are not listed, which may come again and again."""
        pairs = []
        for pattern, part in patterns.items():
            value = self._writer.rule(part, f"{pointer}/patternProperties/{escape(pattern)}")
            if value is None:
                continue
            if any(_matches(pattern, name) for name in names):
                key = self._terminal(f"{_PLAIN} & ({_quoted(pattern)})", map(key_literal, names))
                pairs.append(_Pair(key, value))
            else:
                name = self._writer.rule({"type": "string", "pattern": pattern}, pointer)
                pairs += [] if name is None else [_Pair(name, value)]
        value = self._writer.rule(extra, f"{pointer}/additionalProperties")
        if value is not None:
            # What a string without escapes decodes to is what it is.
            taken = [*map(key_literal, names), *map(_quoted, patterns)]
            key = self._terminal(_PLAIN if patterns else _STRING, taken)
            pairs.append(_Pair(key, value))
        return pairs

    def _terminal(self, text: str, taken: Iterable[str]) -> str:
        """The name of a terminal for keys as ``text`` has them, but for those ``taken``."""
        self._count += 1
        options = " | ".join(taken)
        without = f" & ~({options})" if options else ""
        self._writer.rules.append(f"K{self._count}: {text}{without}")
        return f"K{self._count}"

    def _rules(
        self, pairs: list[_Pair], num_required: int, others: list[_Pair], low: int
    ) -> str | None:
        """Write ``x``, a pair after a comma or the brace, and ``y``, what comes after a pair.

        low: how many keys there are at least.
        """
        if not others and low > len(pairs):
            return None
        if not pairs and not others:
            return '"{" "}"'
        self._count += 1
        x, y = f"x{self._count}", f"y{self._count}"
        colon = self._writer.colon
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
        end = f" %if {_all(ends)}" if ends else ""
        again = "" if others else f" %if not(is_ones([0:{len(pairs)}]))"
        self._writer.rules.append(f"{x}::_ : {' | '.join(more)}")
        self._writer.rules.append(f'{y}::_ : "}}"{end} | {self._writer.comma} {x}::_{again}')
        begin = f'"{{" {x}::0x0'
        return begin if low else f'{begin} | "{{" "}}"'


def _declared(node: dict[str, Any], extra: Any) -> dict[str, Any]:
    """By the name of each key that is listed, all that its value must be."""
    listed = node.get("properties", {})
    patterns = node.get("patternProperties", {})
    declared = {}
    for name in [*listed, *(name for name in node.get("required", ()) if name not in listed)]:
        parts = [part for pattern, part in patterns.items() if _matches(pattern, name)]
        parts += [listed[name]] if name in listed else [] if parts else [extra]
        declared[name] = parts[0] if len(parts) == 1 else {"allOf": parts}
    return declared


def _all(conditions: list[str]) -> str:
    return conditions[0] if len(conditions) == 1 else f"and({', '.join(conditions)})"


def _quoted(pattern: str) -> str:
    """A pattern of keys as part of a terminal."""
    return f'"\\"" /(?:{pattern[1:-1]})/ "\\""'


def key_literal(name: str) -> str:
    """A literal of Lark and EBNF of a key as JSON has it, quotes and escapes included."""
    text = json.dumps(json.dumps(name, ensure_ascii=False), ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")


_KINDS = ("null", "boolean", "number", "string", "array", "object")
_OF_OBJECTS = frozenset(
    {"properties", "required", "additionalProperties", "patternProperties"}
    | {"minProperties", "maxProperties"}
)
_OF_ARRAYS = frozenset({"items", "prefixItems", "minItems", "maxItems"})
_MOST_RULES = 4_000
_IGNORED = '%llguidance {"ignore_once": true}\n%ignore /[\\x20\\x0A\\x0D\\x09]+/\n'


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
    writer = _Writer(_Parts(prepared), options)
    try:
        top = writer.rule(writer.parts.root, "")
    except (_KeptError, RecursionError) as error:
        fix = "the keys of all objects stay in the schema's order"
        note = Unenforced("", "properties", str(error), fix, "note")
        return AnyOrder(None, (note,))
    ignored = _IGNORED if options["whitespace_flexible"] else ""
    text = "\n".join([f"{ignored}start: {top}", *writer.rules, ""])
    return AnyOrder(text, tuple(writer.report.entries))


class _KeptError(Exception):
    """Why a schema has no such grammar at all."""


class _Writer:
    """One pass over one schema. rules: lines of the grammar. comma, colon: as Lark literals."""

    def __init__(self, parts: _Parts, options: dict[str, Any]) -> None:
        self.parts = parts
        self.rules: list[str] = []
        self.report = Report()
        self._options = options
        self.comma = json.dumps(options["item_separator"])
        self.colon = json.dumps(options["key_separator"])
        self._objects = _Objects(self)
        self._names: dict[str, str | None] = {}

    def rule(self, node: Any, pointer: str) -> str | None:
        """The name of the rule for the values of ``node``; None where it has none."""
        spend_on_value(node, _OF_NODE)
        key = json.dumps(node)
        if key not in self._names:
            if len(self._names) >= _MOST_RULES:
                raise _KeptError("it has too many different parts")
            name = f"v{len(self._names)}"
            self._names[key] = name
            body = self._body(node, pointer)
            if body is None:
                self._names[key] = None
            else:
                self.rules.append(f"{name}: {body}")
        return self._names[key]

    def keep_order(self, node: dict[str, Any], pointer: str, reason: str) -> str:
        """``node`` as it stands, with a note."""
        fix = "the keys of these objects stay in the schema's order"
        self.report.note(pointer, "properties", reason, fix)
        return self._as_schema(node)

    def _body(self, node: Any, pointer: str) -> str | None:
        if node is False:
            return None
        branches = self.parts.branches(node)
        if branches == []:  # llguidance would refuse all of the grammar
            return None
        if not self.parts.is_ordered(node):
            return self._as_schema({} if node is True else node)
        if branches is None:
            return self.keep_order(node, pointer, "its parts cannot be joined into one")
        if len(branches) != 1 or branches[0] != node:
            options = [self.rule(branch, pointer) for branch in branches]
            return _any_of([option for option in options if option is not None])
        if "$ref" in node:
            return self.rule(self.parts.definitions[node["$ref"]], node["$ref"][1:])
        return self._typed(node, pointer)

    def _typed(self, node: dict[str, Any], pointer: str) -> str | None:
        kinds = node.get("type", _KINDS)
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        options: list[str] = []
        rest = node
        for kind, keywords, write in (
            ("object", _OF_OBJECTS, self._objects.write),
            ("array", _OF_ARRAYS, self._array),
        ):
            own = {key: value for key, value in node.items() if key in keywords}
            if kind in kinds and self.parts.is_ordered(own):
                kinds.remove(kind)
                body = write({"type": kind, **own}, pointer)
                options += [] if body is None else [body]
            if kind not in kinds:
                rest = {key: value for key, value in rest.items() if key not in keywords}
        if kinds:
            options.append(self._as_schema({**rest, "type": kinds}))
        return _any_of(options)

    def _array(self, node: dict[str, Any], pointer: str) -> str | None:
        low = int(node.get("minItems", 0))
        high = None if "maxItems" not in node else int(node["maxItems"])
        prefix = node.get("prefixItems", [])[:high]
        first: list[str] = []
        item = None
        for index, part in enumerate(prefix):
            name = self.rule(part, f"{pointer}/prefixItems/{index}")
            if name is None:
                break
            first.append(name)
        else:
            item = self.rule(node.get("items", True), f"{pointer}/items")
        most = len(first) if item is None else float("inf") if high is None else high
        if most < low:
            return None
        body = self._items(first, item, low, most)
        if not body:
            return '"[" "]"'
        return f'"[" {body} "]"' if low else f'"[" ({body})? "]"'

    def _items(self, first: list[str], item: str | None, low: int, most: float) -> str:
        """All items of an array that has any: those listed, then ``item`` again and again."""
        comma = self.comma
        listed = len(first)
        rest = ""
        if item is not None and most > max(listed, 1):
            done = max(listed, 1)
            upper = "" if most == float("inf") else int(most) - done
            rest = f" ({comma} {item}){{{max(low - done, 0)},{upper}}}"
        if not listed:
            return f"{item}{rest}" if item is not None and most > 0 else ""
        for index in range(listed - 1, 0, -1):
            inner = f"{comma} {first[index]}{rest}"
            rest = f" {inner}" if index < low else f" ({inner})?"
        return f"{first[0]}{rest}"

    def _as_schema(self, node: dict[str, Any]) -> str:
        """``node`` as llguidance reads it, with the definitions that it refers to."""
        inside = self.parts.references(node)
        spend_on_value([node, list(inside.values())])
        if inside.pop("#", None) is not None and node is not self.parts.root:
            raise _KeptError("part of a schema that refers to the whole cannot be joined into one")
        schema: dict[str, Any] = {**node, "x-guidance": self._options}
        if inside:
            schema["$defs"] = {
                unescape(name.removeprefix(_PREFIX)): part for name, part in inside.items()
            }
        return f"%json {json.dumps(schema)}"


def _any_of(options: list[str]) -> str | None:
    return " | ".join(dict.fromkeys(options)) or None
