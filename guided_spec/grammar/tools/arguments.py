"""Arguments that are written one by one, each between its own marks, as XML-like formats have them.

Strings stand there without quotes, as the families' chat templates write them, and all else as
JSON. So where a value may be a string or something else, its text alone says which.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jsonschema

from guided_spec.errors import ConfigError
from guided_spec.grammar.tools.format import (
    Arguments,
    MarkedText,
    Tool,
    either,
    in_sequence,
    literal,
    read_value,
    schema_content,
)

_NOTES = frozenset({"title", "description", "default", "examples"})
_PLAIN_KEYS = _NOTES | {"type", "minLength", "maxLength"}
_ENUM_KEYS = _NOTES | {"type", "enum", "const"}
_ROOT_KEYS = _NOTES | {"type", "properties", "required", "additionalProperties"}
_ROOT_KEYS |= {"$defs", "definitions", "$schema", "$id", "$comment"}
_DEFINITIONS = ("$defs", "definitions")
_MOST_PARTS = 300
_TYPES = ("string", "number", "boolean", "null", "object", "array")


class ArgumentForm(NamedTuple):
    """How one argument is written.

    text: with ``{key}``, ``{value}`` and perhaps ``{string}``, "true" or "false": whether the value
        is a string written without quotes, or ``{type}``: its type in JSON's words.
    none: what stands for no arguments at all. escapes: what is replaced in a key, by what.
    """

    text: str
    none: str = ""
    escapes: tuple[tuple[str, str], ...] = ()

    def around(self, key: str, kind: str) -> tuple[str, str]:
        """The text before the value of an argument, and the text after it.

        kind: one of ``kinds``.
        """
        for written, escape in self.escapes:
            key = key.replace(written, escape)
        text = self.text.replace("{string}", kind).replace("{type}", kind)
        begin, end = text.split("{value}")
        return begin.replace("{key}", key), end

    @property
    def kinds(self) -> tuple[str, ...]:
        """What the text before a value can say of it: the first for strings without quotes."""
        if "{type}" in self.text:
            return _TYPES
        return ("true", "false") if "{string}" in self.text else ("",)


class _Kinds(NamedTuple):
    """What a value may be.

    strings: schemas of strings that are written without quotes. other: the schema of all else, and
    None where there is nothing else.
    """

    strings: tuple[Mapping[str, Any], ...]
    other: Any = None


def arguments_content(tool: Tool, form: ArgumentForm) -> dict[str, Any]:
    """The format of a tool's arguments in a structural tag.

    Strings stand without quotes where their schema bounds nothing but their length or lists them,
    also beside other values, as in ``str | None``. Raises ConfigError for a schema that cannot be
    written so.
    """
    _check_root(tool)
    required = tool.parameters.get("required", [])
    elements = []
    for key, schema in tool.parameters.get("properties", {}).items():
        one = either(_argument(tool, form, key, _kinds(tool, schema)))
        elements.append(one if key in required else {"type": "optional", "content": one})
    listed = {"type": "sequence", "elements": elements or [literal(form.none)]}
    is_all = form.none and elements and not required
    return either([listed, literal(form.none)]) if is_all else listed


def _argument(tool: Tool, form: ArgumentForm, key: str, kinds: _Kinds) -> list[dict[str, Any]]:
    """An argument in each of its forms: one, if strings and others look alike."""
    contents: dict[str, list[dict[str, Any]]] = {}
    if kinds.strings:
        contents[form.kinds[0]] = [_text_content(kinds.strings)]
    for kind, schema in _parts(tool, form, kinds.other).items():
        if kind in contents and any(map(_is_any_text, kinds.strings)):
            continue  # any text holds it too
        content = schema_content(tool, _with_definitions(tool, schema), key)
        contents.setdefault(kind, []).append(content)
    found = []
    for kind, options in contents.items():
        content = either(options)
        begin, end = form.around(key, kind)
        # The line break apart: xgrammar 0.2.8 confuses free text before a token and more.
        mark, rest = end.rstrip("\n"), end[len(end.rstrip("\n")) :]
        one: dict[str, Any] = {"type": "tag", "begin": begin, "content": content, "end": mark}
        found.append(in_sequence(one, literal(rest)) if rest else one)
    return found


def _text_content(schemas: tuple[Mapping[str, Any], ...]) -> dict[str, Any]:
    if any(map(_is_any_text, schemas)):
        return {"type": "any_text"}
    options = [option for schema in schemas for option in _options(schema) or ()]
    texts = [literal(option) for option in dict.fromkeys(options)]
    for schema in schemas:
        if _options(schema) is None:
            least, most = schema.get("minLength", 0), schema.get("maxLength", "")
            # What ends the value begins with "<" or a line break: "<" cannot stand inside.
            texts.append({"type": "regex", "pattern": f"[^<]{{{least},{most}}}"})
    return either(texts)


def _is_any_text(schema: Mapping[str, Any]) -> bool:
    bounds = (schema.get("minLength", 0), schema.get("maxLength"))
    return _options(schema) is None and bounds == (0, None)


def read_arguments(
    tool: Tool, form: ArgumentForm, text: str, at: int, marks: MarkedText
) -> Arguments | None:
    """What ``arguments_content`` has written into a text at an index; None where it has not."""
    values: dict[str, Any] = {}
    for key, schema in tool.parameters.get("properties", {}).items():
        for kind in form.kinds:
            begin, end = map(marks.mark, form.around(key, kind))
            if text.startswith(begin, at):
                break
        else:
            continue
        kinds = _kinds(tool, schema)
        strings = kinds.strings if kind == form.kinds[0] else ()
        kinds = _Kinds(strings, _parts(tool, form, kinds.other).get(kind))
        found = _read_one(tool, kinds, text, at + len(begin), end)
        if found is None:
            return None
        at, values[key] = found
    none = marks.mark(form.none)
    at += len(none) if not values and text.startswith(none, at) else 0
    return Arguments(values, at) if {*tool.parameters.get("required", [])} <= {*values} else None


def _read_one(tool: Tool, kinds: _Kinds, text: str, at: int, end: str) -> tuple[int, Any] | None:
    """Where the text after a value at an index ends, and the value; None where there is none."""
    if kinds.other is not None:
        stop, value = read_value(text, at)
        is_ended = stop >= 0 and text.startswith(end, stop)
        if is_ended and (not kinds.strings or _is_valid(tool, kinds.other, value)):
            return stop + len(end), value
    if not kinds.strings:
        return None
    stop = text.find(end, at)
    return None if stop < 0 else (stop + len(end), text[at:stop])


def _is_valid(tool: Tool, schema: Any, value: Any) -> bool:
    if schema == {"type": "null"}:
        return value is None
    whole = _with_definitions(tool, schema)
    kind = jsonschema.validators.validator_for(whole)
    return bool(kind(whole).is_valid(value))


def _kinds(tool: Tool, schema: Any) -> _Kinds:
    """What an argument may be. tool: whose definitions the schema refers to."""
    if tool.input is not None:
        return _Kinds((), schema)
    return _kinds_of(json.dumps(schema), json.dumps(_shared(tool)))


def _parts(tool: Tool, form: ArgumentForm, other: Any) -> Mapping[str, Any]:
    """The parts of a schema of values that are written as JSON, by kind of value."""
    if other is None or form.kinds is not _TYPES:
        return {} if other is None else {form.kinds[-1]: other}
    return _types_of(json.dumps(other), json.dumps(_shared(tool))) or {_TYPES[-1]: other}


# A stream asks both for every piece.
@lru_cache(maxsize=1024)
def _types_of(schema: str, shared: str) -> Mapping[str, Any]:
    return _Splitter(json.loads(shared)).by_type(json.loads(schema))


@lru_cache(maxsize=1024)
def _kinds_of(schema: str, shared: str) -> _Kinds:
    return _Splitter(json.loads(shared)).kinds(json.loads(schema))


class _Splitter:
    """Takes schemas apart. shared: the definitions that they refer to.

    References and alternatives inside each other may be without end, or double at each level. So
    what is beyond ``_MOST_PARTS`` is not taken apart.
    """

    def __init__(self, shared: Mapping[str, Any]) -> None:
        self._shared = shared
        self._left = _MOST_PARTS

    def kinds(self, schema: Any) -> _Kinds:
        """The strings among the values of a schema, and all else."""
        if not isinstance(schema, Mapping) or not self._may_go_on():
            return _Kinds((), schema)
        if (target := self._target(schema)) is not None:
            found = self.kinds(target)
            return found if found.strings else _Kinds((), schema)
        if (options := _alternatives(schema)) is not None:
            parts = [self.kinds(one) for one in options]
            others = [part.other for part in parts if part.other is not None]
            strings = tuple(one for part in parts for one in part.strings)
            if strings:
                return _Kinds(strings, _joined(others))
        if (values := _options(schema)) is not None and schema.keys() <= _ENUM_KEYS:
            return _split_options(schema, values)
        kinds = schema.get("type")
        listed = kinds if isinstance(kinds, list) else [kinds]
        if "string" in listed and schema.keys() <= _PLAIN_KEYS:
            rest = [kind for kind in listed if kind != "string"]
            bounds = {key: schema[key] for key in ("minLength", "maxLength") if key in schema}
            other = {"type": rest[0] if len(rest) == 1 else rest} if rest else None
            return _Kinds(({"type": "string", **bounds},), other)
        return _Kinds((), schema)

    def by_type(self, schema: Any) -> dict[str, Any]:
        """The parts of a schema by the type of the value, "number" for integers too."""
        if not isinstance(schema, Mapping):
            return {} if schema is False else {kind: {"type": kind} for kind in _TYPES}
        if self._may_go_on():
            if (target := self._target(schema)) is not None:
                return self.by_type(target)
            if (options := _alternatives(schema)) is not None:
                parts = [self.by_type(option) for option in options]
                kinds = dict.fromkeys(kind for part in parts for kind in part)
                return {kind: _joined([p[kind] for p in parts if kind in p]) for kind in kinds}
        given = schema.get("type", list(_TYPES))
        listed = given if isinstance(given, list) else [given]
        if not all(isinstance(one, str) for one in listed):
            return {}  # no schema
        found: dict[str, list[str]] = {}
        for one in listed:
            found.setdefault("number" if one == "integer" else one, []).append(one)
        values = _options(schema)
        if values is not None:
            held = set(map(_type_of, values))
            found = {kind: names for kind, names in found.items() if kind in held}
        return {
            kind: {**schema, "type": names[0] if len(names) == 1 else names}
            for kind, names in found.items()
        }

    def _may_go_on(self) -> bool:
        self._left -= 1
        return self._left >= 0

    def _target(self, schema: Mapping[str, Any]) -> Any:
        """What a schema that is a reference refers to; None for others, and where it is unknown."""
        if schema.keys() - _NOTES != {"$ref"}:
            return None
        reference = schema["$ref"]
        parts = reference.split("/") if isinstance(reference, str) else ()
        if len(parts) == 3 and parts[0] == "#" and parts[1] in self._shared:
            return self._shared[parts[1]].get(parts[2])
        return None


def _alternatives(schema: Mapping[str, Any]) -> list[Any] | None:
    options = schema["anyOf"] if schema.keys() - _NOTES == {"anyOf"} else None
    return options if isinstance(options, list) else None


def _split_options(schema: Mapping[str, Any], options: list[Any]) -> _Kinds:
    kinds = schema.get("type", "string")
    allowed = kinds if isinstance(kinds, list) else [kinds]
    is_plain = [isinstance(o, str) and bool(o) and "<" not in o for o in options]
    if "string" not in allowed or not any(is_plain):
        return _Kinds((), schema)
    strings = [option for option, plain in zip(options, is_plain, strict=True) if plain]
    rest = [option for option, plain in zip(options, is_plain, strict=True) if not plain]
    if kinds == "string" and "type" in schema:
        rest = [option for option in rest if isinstance(option, str)]
    typed = {"type": kinds} if "type" in schema else {}
    return _Kinds(({"enum": strings},), {**typed, "enum": rest} if rest else None)


def _type_of(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case int() | float():
            return "number"
        case str():
            return "string"
        case Mapping():
            return "object"
    return "array"


def _joined(others: list[Any]) -> Any:
    if not others:
        return None
    return others[0] if len(others) == 1 else {"anyOf": others}


def _options(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]] if "enum" not in schema else None
    options = schema.get("enum")
    return options if isinstance(options, list) and options else None


def _with_definitions(tool: Tool, schema: Any) -> Any:
    shared = _shared(tool)
    return {**shared, **schema} if shared and isinstance(schema, Mapping) else schema


def _shared(tool: Tool) -> dict[str, Any]:
    """The definitions that a tool's arguments may refer to."""
    return {key: tool.parameters[key] for key in _DEFINITIONS if key in tool.parameters}


def _check_root(tool: Tool) -> None:
    parameters = tool.parameters
    unknown = sorted(parameters.keys() - _ROOT_KEYS)
    properties = parameters.get("properties", {})
    missing = [key for key in parameters.get("required", []) if key not in properties]
    if unknown or missing or parameters.get("type", "object") != "object":
        reason = (
            f"uses {unknown[0]}" if unknown else f"requires {missing}" if missing else "is none"
        )
        fix = (
            f"of the tool {tool.name!r}: this format writes one argument after another, so the "
            f"schema must be an object that lists its properties; it {reason}"
        )
        raise ConfigError("parameters", dict(parameters), fix)
