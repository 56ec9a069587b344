"""A JSON schema as rules of llguidance's Lark dialect, where some of its objects need such rules.

What holds no such object stays JSON schema inside the grammar. How the objects are written is for
``ObjectRules`` to say; the arrays and alternatives around them are written here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

from guided_spec.grammar.regex import readable, spend_on_search
from guided_spec.grammar.schema.joining import merge
from guided_spec.grammar.schema.lowered import Report, all_parts, escape, unescape
from guided_spec.grammar.schema.values import constant, keep_valid, values_within
from guided_spec.grammar.steps import spend, spend_on_value

_DEEPEST = 16
_MOST_BRANCHES = 128
_MOST_LOOKED_AT = 20_000
_OF_NODE = 4  # steps
_PREFIX = "#/$defs/"
_KINDS = ("null", "boolean", "number", "string", "array", "object")
_OF_OBJECTS = frozenset(
    {"properties", "required", "additionalProperties", "patternProperties"}
    | {"minProperties", "maxProperties"}
)
_OF_ARRAYS = frozenset({"items", "prefixItems", "minItems", "maxItems"})
_MOST_RULES = 4_000
LONGEST = 2**24  # characters of a grammar
STRING = r'/"([^"\\\x00-\x1f\x7f]|\\[nrbtf"\\])*"/'
PLAIN = r'/"[^"\\\x00-\x1f\x7f]*"/'
"""Terminals of a JSON string, and of one without escapes."""


class KeptError(Exception):
    """Why a schema has no such grammar at all."""


class Spelling(NamedTuple):
    """How the rules spell JSON.

    comma, colon: between items, and after a key. space: after an opening bracket and before a
    closing one. rules: of the grammar that these need.
    """

    comma: str
    colon: str
    space: str = ""
    rules: tuple[str, ...] = ()


IGNORED = Spelling('","', '":"', rules=("%ignore /[\\x20\\x0A\\x0D\\x09]+/",))
"""Whitespace between all terminals."""
FIXED = Spelling('", "', '": "')
SPACED = Spelling(
    'ws "," ws', 'ws ":" ws', "ws ", rules=("WS: /[\\x20\\x0A\\x0D\\x09]+/", "ws: WS?")
)
"""Whitespace where JSON has it, so that a key may be written as several terminals."""


class ObjectRules(Protocol):
    """How objects are written."""

    def wants(self, node: Mapping[str, Any]) -> bool:
        """Whether the objects of this one schema, those below it aside, need rules."""
        ...

    def write(self, writer: Writer, node: dict[str, Any], pointer: str) -> str | None:
        """What matches the objects of ``node``, which has keywords of objects only; None: none."""
        ...


class Parts:
    """The schemas of one document, whose references all name one of its definitions.

    root: without ``$defs``. by_name: its definitions. definitions: these by their reference.
    """

    def __init__(self, schema: dict[str, Any], objects: ObjectRules) -> None:
        self.by_name: dict[str, Any] = schema.get("$defs", {})
        self._wants = objects.wants
        self.root: Any = {key: value for key, value in schema.items() if key != "$defs"}
        self.definitions: dict[str, Any] = {
            _PREFIX + escape(name): part for name, part in self.by_name.items()
        }
        self.definitions["#"] = self.root
        self._ruled: set[str] = set()
        self._num_looked_at = 0
        users: dict[str, list[str]] = {}
        self._direct = {name: _direct(part) for name, part in self.definitions.items()}
        for name, references in self._direct.items():
            for reference in references:
                users.setdefault(reference, []).append(name)
        waiting = [name for name, part in self.definitions.items() if self.needs_rules(part)]
        while waiting:
            name = waiting.pop()
            if name not in self._ruled:
                self._ruled.add(name)
                waiting += users.get(name, ())

    def needs_rules(self, schema: Any) -> bool:
        """Whether some object in a value of ``schema`` needs rules."""
        return any(self._wants(node) or node.get("$ref") in self._ruled for node in _nodes(schema))

    def references(self, schema: Any) -> dict[str, Any]:
        """What ``schema`` refers to, and all that this does in turn."""
        found: dict[str, Any] = {}
        waiting = _direct(schema)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found[name] = self.definitions.get(name, False)
                waiting += self._direct.get(name, ())
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
            if self.needs_rules(option):
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
        if both is None and not self.needs_rules(one) and not self.needs_rules(other):
            return {"allOf": [one, other]}
        return both

    def _dereference(self, node: Any) -> Any:
        """What ``node`` refers to, if it is nothing but a reference."""
        for _ in range(_DEEPEST):
            if not isinstance(node, dict) or node.keys() != {"$ref"}:
                break
            node = self.definitions.get(node["$ref"], False)
        return node


def has_keys(value: Any) -> bool:
    """Whether a JSON value holds an object with any key."""
    spend_on_value(value)
    return any(isinstance(part, dict) and part for part in values_within(value))


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Those of a schema and all below it that may say something."""
    return (node for node in all_parts(schema) if isinstance(node, dict))


def _direct(schema: Any) -> list[str]:
    """The references in a schema, those in what they lead to aside, each once."""
    return [*dict.fromkeys(node["$ref"] for node in _nodes(schema) if "$ref" in node)]


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
        kept = [v for v in kept if not isinstance(v, str) or matches(pattern, v)]
    plain = [value for value in kept if not has_keys(value)]
    parts = [constant(value) for value in kept if has_keys(value)]
    return [*parts, *([{"enum": plain}] if plain else [])]


def matches(pattern: str, text: str) -> bool:
    """Whether a pattern as llguidance gets it, anchored at both ends, matches ``text``."""
    own = readable(pattern)
    spend_on_search(own, text)
    return re.fullmatch(own, text) is not None


class Writer:
    """One pass over one prepared schema.

    options: how JSON is spelled in what stays JSON schema, the ``x-guidance`` of llguidance.
    prefix: of the names of all rules. rules: lines of the grammar.
    """

    def __init__(
        self,
        prepared: dict[str, Any],
        objects: ObjectRules,
        spelling: Spelling,
        options: dict[str, Any],
        prefix: str = "",
    ) -> None:
        self.parts = Parts(prepared, objects)
        self.spelling, self.prefix = spelling, prefix
        self.rules: list[str] = [*spelling.rules]
        self.report = Report()
        self._objects, self._options = objects, options
        self._count = 0
        self._names: dict[str, str | None] = {}
        self._definitions: dict[str, str] = {}
        self._length = 0  # of what stays JSON schema

    def new_name(self, kind: str) -> str:
        """A name that no rule has; of a terminal where ``kind`` is in capitals."""
        self._count += 1
        prefix = self.prefix.upper() if kind.isupper() else self.prefix
        return f"{prefix}{kind}{self._count}"

    def rule(self, node: Any, pointer: str) -> str | None:
        """The name of the rule for the values of ``node``; None where it has none."""
        spend_on_value(node, _OF_NODE)
        key = json.dumps(node)
        if key not in self._names:
            if len(self._names) >= _MOST_RULES:
                raise KeptError("it has too many different parts")
            name = f"{self.prefix}v{len(self._names)}"
            self._names[key] = name
            body = self._body(node, pointer)
            if body is None:
                self._names[key] = None
            else:
                self.rules.append(f"{name}: {body}")
        return self._names[key]

    def note_order(self, pointer: str, reason: str) -> None:
        """Add that an object's keys stay in order."""
        fix = "the keys of these objects stay in the schema's order"
        self.report.note(pointer, "properties", reason, fix)

    def keep_order(self, node: dict[str, Any], pointer: str, reason: str) -> str:
        """``node`` as it stands, with a note."""
        self.note_order(pointer, reason)
        return self.as_schema(node)

    def _body(self, node: Any, pointer: str) -> str | None:
        if node is False:
            return None
        branches = self.parts.branches(node)
        if branches == []:  # llguidance would refuse all of the grammar
            return None
        if not self.parts.needs_rules(node):
            return self.as_schema({} if node is True else node)
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
            ("object", _OF_OBJECTS, partial(self._objects.write, self)),
            ("array", _OF_ARRAYS, self._array),
        ):
            own = {key: value for key, value in node.items() if key in keywords}
            if kind in kinds and self.parts.needs_rules(own):
                kinds.remove(kind)
                body = write({"type": kind, **own}, pointer)
                options += [] if body is None else [body]
            if kind not in kinds:
                rest = {key: value for key, value in rest.items() if key not in keywords}
        if kinds:
            options.append(self.as_schema({**rest, "type": kinds}))
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
            return f'"[" {self.spelling.space}"]"'
        space = self.spelling.space
        inside = f"{body} {space}" if low else f"({body} {space})?"
        return f'"[" {space}{inside}"]"'

    def _items(self, first: list[str], item: str | None, low: int, most: float) -> str:
        """All items of an array that has any: those listed, then ``item`` again and again."""
        comma = self.spelling.comma
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

    def as_schema(self, node: dict[str, Any]) -> str:
        """``node`` as llguidance reads it, with the definitions that it refers to."""
        inside = self.parts.references(node)
        if inside.pop("#", None) is not None and node is not self.parts.root:
            raise KeptError("part of a schema that refers to the whole cannot be joined into one")
        spend_on_value(node)
        spend(len(inside))
        text = json.dumps({**node, "x-guidance": self._options})
        if inside:
            definitions = ", ".join(self._definition(name, part) for name, part in inside.items())
            text = f'{text[:-1]}, "$defs": {{{definitions}}}}}'
        self._length += len(text)
        if self._length > LONGEST:
            raise KeptError("written as rules, it is too long")
        return f"%json {text}"

    def _definition(self, name: str, part: Any) -> str:
        """A member of ``$defs``; hundreds of parts may need the same ones."""
        if name not in self._definitions:
            spend_on_value(part)
            written = f"{json.dumps(unescape(name.removeprefix(_PREFIX)))}: {json.dumps(part)}"
            self._definitions[name] = written
        return self._definitions[name]


def _any_of(options: list[str]) -> str | None:
    return " | ".join(dict.fromkeys(options)) or None


class Pair(NamedTuple):
    """key, value: what a rule calls them."""

    key: str
    value: str


def declared_keys(node: Mapping[str, Any]) -> dict[str, Any]:
    """By the name of each key that is listed or required, all that its value must be."""
    listed = node.get("properties", {})
    patterns = node.get("patternProperties", {})
    extra = node.get("additionalProperties", True)
    declared = {}
    for name in [*listed, *(name for name in node.get("required", ()) if name not in listed)]:
        parts = [part for pattern, part in patterns.items() if matches(pattern, name)]
        parts += [listed[name]] if name in listed else [] if parts else [extra]
        declared[name] = parts[0] if len(parts) == 1 else {"allOf": parts}
    return declared


def other_pairs(
    writer: Writer, names: list[str], node: Mapping[str, Any], pointer: str
) -> list[Pair]:
    """The keys of ``node`` that are not among ``names``, which may come again and again."""
    patterns = node.get("patternProperties", {})
    pairs = []
    for pattern, part in patterns.items():
        value = writer.rule(part, f"{pointer}/patternProperties/{escape(pattern)}")
        if value is None:
            continue
        if any(matches(pattern, name) for name in names):
            text = f"{PLAIN} & ({_quoted(pattern)})"
            pairs.append(Pair(terminal(writer, text, map(key_literal, names)), value))
        else:
            name = writer.rule({"type": "string", "pattern": pattern}, pointer)
            pairs += [] if name is None else [Pair(name, value)]
    value = writer.rule(node.get("additionalProperties", True), f"{pointer}/additionalProperties")
    if value is not None:
        # What a string without escapes decodes to is what it is.
        taken = [*map(key_literal, names), *map(_quoted, patterns)]
        pairs.append(Pair(terminal(writer, PLAIN if patterns else STRING, taken), value))
    return pairs


def terminal(writer: Writer, text: str, taken: Iterable[str]) -> str:
    """The name of a terminal for keys as ``text`` has them, but for those ``taken``."""
    name = writer.new_name("K")
    options = " | ".join(taken)
    without = f" & ~({options})" if options else ""
    writer.rules.append(f"{name}: {text}{without}")
    return name


def all_of(conditions: list[str]) -> str:
    """One condition of a rule for several."""
    return conditions[0] if len(conditions) == 1 else f"and({', '.join(conditions)})"


def _quoted(pattern: str) -> str:
    """A pattern of keys as part of a terminal."""
    return f'"\\"" /(?:{pattern[1:-1]})/ "\\""'


def key_literal(name: str) -> str:
    """A literal of Lark and EBNF of a key as JSON has it, quotes and escapes included."""
    return as_literal(json.dumps(name, ensure_ascii=False))


def as_literal(text: str) -> str:
    """A literal of Lark and EBNF."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
