"""A schema in fewer keywords, what of it is lost, and objects that are closed around their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from typing import Any, Literal, NamedTuple

from guided_spec.grammar.recipe import ItemRules
from guided_spec.grammar.steps import spend

_SHOWN = 5
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
# Steps of copying one schema, and of what it declares.
_OF_COPY, _OF_DECLARING = 3, 8


class Unenforced(NamedTuple):
    """One keyword of a schema that the backend does not enforce as written.

    pointer: JSON pointer of the schema that holds it; "" is the root.
    level: "error": generated text might break it. "note": it cannot, but less text is generated
        than the schema allows, or a ``format`` that is only an annotation is left unchecked.
        "warning": it is no keyword, and looks like a misspelt one.
    by_backend: whether it is this backend that cannot; else it is so for all.
    """

    pointer: str
    keyword: str
    reason: str
    fix: str
    level: Literal["error", "note", "warning"] = "error"
    by_backend: bool = True


class Lowered(NamedTuple):
    """A schema in fewer keywords, and what could not be kept as it is.

    items: for the filter that keeps items unique; None where none have to be, or nothing filters.
    open_at: see ``ClosedSchema``.
    """

    schema: Any
    entries: tuple[Unenforced, ...]
    items: ItemRules | None = None
    open_at: tuple[str, ...] = ()

    @property
    def errors(self) -> list[Unenforced]:
        """What generated text might break."""
        return [entry for entry in self.entries if entry.level == "error"]


class Report:
    """Collects entries during one traversal, each once."""

    def __init__(self) -> None:
        self._found: dict[Unenforced, None] = {}

    @property
    def entries(self) -> list[Unenforced]:
        """In the order in which they came."""
        return list(self._found)

    def include(self, entries: Iterable[Unenforced]) -> None:
        """Add what is known before."""
        for entry in entries:
            self._add(entry)

    def error(self, pointer: str, keyword: str, reason: str, fix: str) -> None:
        """Add a keyword that generated text might break."""
        self._add(Unenforced(pointer, keyword, reason, fix))

    def note(self, pointer: str, keyword: str, reason: str, fix: str) -> None:
        """Add a keyword that is kept, but not as written."""
        self._add(Unenforced(pointer, keyword, reason, fix, "note"))

    def _add(self, entry: Unenforced) -> None:
        spend(2)
        self._found.setdefault(entry)


def is_narrowed(entries: Sequence[Unenforced]) -> bool:
    """Whether another backend might enforce more of the schema, or admit more of its values.

    Numbers between bounds are narrower with all of them.
    """
    return any(
        entry.by_backend and not (entry.level == "note" and entry.keyword in _BOUNDS)
        for entry in entries
    )


def narrowing(entries: Iterable[Unenforced]) -> list[Unenforced]:
    """The notes by which the grammar admits less than the schema."""
    return [entry for entry in entries if entry.level == "note" and entry.keyword != "format"]


def escape(name: str) -> str:
    """A property name as one token of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def unescape(token: str) -> str:
    """The property name that one token of a JSON pointer stands for."""
    return token.replace("~1", "/").replace("~0", "~")


def find(value: Any, pointer: str) -> Any:
    """The value at a JSON pointer. Raises LookupError where there is none."""
    for token in pointer.split("/")[1:]:
        name = unescape(token)
        if isinstance(value, dict):
            value = value[name]
        elif isinstance(value, list) and name.isdecimal():
            value = value[int(name)]
        else:
            raise LookupError(pointer)
    return value


def describe(errors: Sequence[Unenforced]) -> str:
    """The message about keywords that cannot be enforced."""
    lines = [f"{e.pointer or '/'}: {e.keyword}: {e.reason}; {e.fix}" for e in errors[:_SHOWN]]
    if len(errors) > _SHOWN:
        lines.append(f"and {len(errors) - _SHOWN} more (see schema.find_unenforced)")
    return "the JSON schema cannot be enforced in full:\n  " + "\n  ".join(lines)


_ONE = ("items", "additionalProperties")
_LISTS = ("allOf", "anyOf", "prefixItems")
_MAPS = ("properties", "patternProperties")
HOLDS_PARTS = frozenset({*_ONE, *_LISTS, *_MAPS})
"""Keywords of a subschema, or several."""


def parts_of(node: dict[str, Any]) -> Iterator[Any]:
    """The subschemas right below ``node``, definitions aside."""
    yield from (node[keyword] for keyword in _ONE if keyword in node)
    for keyword in _LISTS:
        yield from node.get(keyword, ())
    for keyword in _MAPS:
        yield from node.get(keyword, {}).values()


def all_parts(schema: Any) -> Iterator[Any]:
    """A schema and all below it, definitions aside."""
    stack = [schema]
    while stack:
        node = stack.pop()
        spend(1)
        yield node
        if isinstance(node, dict) and not HOLDS_PARTS.isdisjoint(node):
            stack += parts_of(node)


def change_parts(node: dict[str, Any], change: Callable[[Any, str], Any]) -> dict[str, Any]:
    """A copy of ``node`` with ``change(part, path)`` for each subschema right below it.

    path: from ``node`` to the part, the tail of a JSON pointer.
    """
    changed = dict(node)
    spend(_OF_COPY + len(node))
    for keyword in node:
        if keyword in _ONE:
            changed[keyword] = change(node[keyword], keyword)
        elif keyword in _LISTS:
            changed[keyword] = [
                change(part, f"{keyword}/{index}") for index, part in enumerate(node[keyword])
            ]
        elif keyword in _MAPS:
            changed[keyword] = {
                name: change(part, f"{keyword}/{escape(name)}")
                for name, part in node[keyword].items()
            }
    return changed


AdditionalProperties = Literal["closed", "schema"]

_MAX_DEPTH = 16
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
# How a definition is used: as a value of its own, closed; as one of several parts that hold
# together, closed further in only; or as it was written.
_Form = Literal["value", "part", "plain"]


class ClosedSchema(NamedTuple):
    """A schema with closed objects.

    open_at: JSON pointers of the lowered schema, of objects in which nothing below is closed: two
        parts of them describe the same key differently.
    """

    schema: Any
    open_at: tuple[str, ...] = ()


def close_objects(schema: Any) -> ClosedSchema:
    """``schema``, as ``lower.lower`` writes it, with closed objects. A new value."""
    if not isinstance(schema, dict):
        return ClosedSchema(schema)
    return _Closing(schema).run()


class _Declared(NamedTuple):
    """What the parts that apply together to one value declare.

    names: with how many parts describe it by more than a scalar. is_listed: whether all values are.
    """

    names: dict[str, int]
    patterns: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    has_keys: bool = False
    is_explicit: bool = False
    is_listed: bool = False

    def also(self, other: _Declared) -> _Declared:
        """What both declare together."""
        spend(_OF_DECLARING + len(self.names) + len(other.names))
        names = {n: self.names.get(n, 0) + other.names.get(n, 0) for n in self.names | other.names}
        return _Declared(
            names,
            tuple(dict.fromkeys(self.patterns + other.patterns)),
            tuple(dict.fromkeys(self.required + other.required)),
            self.has_keys or other.has_keys,
            self.is_explicit or other.is_explicit,
            self.is_listed or other.is_listed,
        )

    @property
    def is_contested(self) -> bool:
        """Whether two parts describe what is inside one key."""
        return any(count > 1 for count in self.names.values())

    def closure(self) -> dict[str, Any]:
        """A schema that admits these keys only."""
        keys = dict.fromkeys([*self.names, *self.required], True)
        schema: dict[str, Any] = {"properties": keys} if keys else {}
        schema |= {"patternProperties": dict.fromkeys(self.patterns, True)} if self.patterns else {}
        return {**schema, "additionalProperties": False}


_NOTHING = _Declared({})


class _Closing:
    """One pass over one schema."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._old: dict[str, Any] = root.get("$defs", {})
        self._new: dict[str, Any] = {}
        self._open_at: dict[str, None] = {}

    def run(self) -> ClosedSchema:
        root = {key: value for key, value in self._root.items() if key != "$defs"}
        schema = self._value(root, "", _NOTHING)
        if self._new:
            schema = {**schema, "$defs": self._new}
        return ClosedSchema(schema, tuple(self._open_at))

    def _value(self, node: Any, pointer: str, outer: _Declared) -> Any:
        """The schema of a whole value. outer: of a branch, what its siblings declare."""
        if not isinstance(node, dict):
            return node
        if node.keys() - _ANNOTATIONS == {"$ref"} and outer == _NOTHING:
            return {**node, "$ref": self._refer(node["$ref"], "value")}
        always = outer.also(self._always(node))
        branches = [self._always(branch) for branch in self._branches(node)]
        if always.is_listed:
            return self._as_written(node)
        is_one = len(node.get("anyOf", ())) == len(branches)
        every = reduce(_Declared.also, branches, always)
        together = [always.also(branch) for branch in branches] if is_one else [every]
        is_contested = any(declared.is_contested for declared in [always, *together])
        if is_contested:
            self._open_at[pointer] = None
        elif is_one and any(branch.has_keys or branch.is_explicit for branch in branches):
            return self._by_branch(node, pointer, always)
        body = self._as_written(node) if is_contested else self._part(node, pointer)
        if every.is_explicit or not every.has_keys or not _may_be_object(node):
            return body
        return _with_closure(body, every.closure())

    def _by_branch(self, node: dict[str, Any], pointer: str, always: _Declared) -> dict[str, Any]:
        """Each branch closed around its own keys and the common ones."""
        rest = {key: value for key, value in node.items() if key != "anyOf"}
        common = always if always.has_keys else _NOTHING
        options = []
        for index, branch in enumerate(node["anyOf"]):
            place = f"{pointer}/anyOf/{index}"
            if always.is_explicit:
                options.append(self._part(branch, place))
            else:
                options.append(self._value(branch, place, common))
        return {**self._part(rest, pointer), "anyOf": options}

    def _part(self, node: Any, pointer: str) -> Any:
        """One of the parts that hold together: closed further in only."""
        if not isinstance(node, dict):
            return node

        def close(part: Any, path: str) -> Any:
            if path.startswith(("allOf/", "anyOf/")):
                return self._part(part, f"{pointer}/{path}")
            return self._value(part, f"{pointer}/{path}", _NOTHING)

        return self._referring(change_parts(node, close), "part")

    def _as_written(self, node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        return self._referring(change_parts(node, lambda part, _: self._as_written(part)), "plain")

    def _referring(self, node: dict[str, Any], form: _Form) -> dict[str, Any]:
        return {**node, "$ref": self._refer(node["$ref"], form)} if "$ref" in node else node

    def _refer(self, reference: str, form: _Form) -> str:
        """The reference to a definition in this form, which is made when it is first needed."""
        target = self._resolve(reference)
        if reference == "#" and form == "value":
            return reference
        if target is None:
            return reference  # to nothing: the backend says so
        name = self._name(reference, form)
        if name not in self._new:
            self._new[name] = {}  # for itself
            pointer = reference[1:]
            if form == "value":
                self._new[name] = self._value(target, pointer, _NOTHING)
            elif form == "part":
                self._new[name] = self._part(target, pointer)
            else:
                self._new[name] = self._as_written(target)
        return f"#/$defs/{escape(name)}"

    def _name(self, reference: str, form: _Form) -> str:
        own = unescape(reference.rpartition("/")[2]) if reference != "#" else "root"
        if form == "value":
            return own
        name = f"{own}.{form}"  # of a form that is rare
        while name in self._old:
            name += "'"
        return name

    def _resolve(self, reference: str) -> Any:
        if reference == "#":
            return {key: value for key, value in self._root.items() if key != "$defs"}
        return self._old.get(unescape(reference.removeprefix("#/$defs/")))

    def _always(self, node: Any, depth: int = 0) -> _Declared:
        """What ``node`` declares, with all parts that apply wherever it does."""
        if not isinstance(node, dict) or depth > _MAX_DEPTH:
            return _NOTHING
        listed = node.get("properties", {})
        spend(_OF_DECLARING + len(listed))
        found = _Declared(
            {n: int(not _is_scalar(part)) for n, part in listed.items() if part is not False},
            tuple(node.get("patternProperties", ())),
            tuple(node.get("required", ())),
            ("properties" in node and (not listed or any(p is not False for p in listed.values())))
            or bool(node.get("patternProperties")),
            "additionalProperties" in node,
            "enum" in node or "const" in node,
        )
        parts = (self._always(part, depth + 1) for part in self._parts(node))
        return reduce(_Declared.also, parts, found)

    def _parts(self, node: dict[str, Any]) -> list[Any]:
        parts = list(node.get("allOf", ()))
        return [*parts, self._resolve(node["$ref"])] if "$ref" in node else parts

    def _branches(self, node: Any, depth: int = 0) -> Iterator[Any]:
        """Of every ``anyOf`` that holds wherever ``node`` does; the node's own come first."""
        if isinstance(node, dict) and depth <= _MAX_DEPTH:
            spend(_OF_COPY + len(node.get("anyOf", ())))
            yield from node.get("anyOf", ())
            for part in self._parts(node):
                yield from self._branches(part, depth + 1)


def _with_closure(body: dict[str, Any], closure: dict[str, Any]) -> dict[str, Any]:
    if body.keys() == {"allOf"}:
        return {"allOf": [*body["allOf"], closure]}
    if "allOf" in body or "$ref" in body:
        return {"allOf": [body, closure]}
    merged = {**body, "additionalProperties": False}
    for keyword in _MAPS:
        if keyword in closure:
            merged[keyword] = {**body.get(keyword, {})}
            for name, part in closure[keyword].items():
                merged[keyword].setdefault(name, part)
    return merged


def _may_be_object(node: dict[str, Any]) -> bool:
    return "object" in node.get("type", "object")


def _is_scalar(node: Any) -> bool:
    return not isinstance(node, dict) or (HOLDS_PARTS | {"$ref"}).isdisjoint(node)
