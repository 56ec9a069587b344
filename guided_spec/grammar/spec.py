"""What the text of a request must match: a small hashable record, made without compiling it.

A constructor checks types only. A broken schema, regex or grammar fails when it is compiled, so
that it fails its own request and no other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from guided_spec.errors import ConfigError
from guided_spec.grammar.backends.registry import GrammarBackendName, require_grammar_backend
from guided_spec.grammar.schema.lowered import AdditionalProperties
from guided_spec.kinds import did_you_mean, require_field_kinds, require_kind, require_known_fields

GrammarKind = Literal[
    "json_schema", "json_object", "regex", "choice", "ebnf", "lark", "structural_tag"
]
Unsupported = Literal["error", "rewrite", "warn"]
KeyOrder = Literal["schema", "any"]
MAX_MARKER = 128  # letters or tokens: an automaton is made of it when a request is taken in
_JSON_KINDS = ("json_schema", "json_object")
_SCHEMA_FIELDS = {"key_order": "schema", "additional_properties": "closed", "strict": False}


@dataclass(frozen=True, slots=True)
class Start:
    """The constraint applies after the first ``marker``; up to there the text is free.

    marker: text, or token ids (kept as a tuple), 128 at most; None is the marker of the model's own
        chat template.
    reasoning_budget: free tokens at most, then the marker is written; None leaves it to the model.

    Raises ConfigError for a value of the wrong type or range.
    """

    marker: str | Sequence[int] | None = None
    reasoning_budget: int | None = None

    def __post_init__(self) -> None:
        marker, budget = self.marker, self.reasoning_budget
        fix = "must be a non-empty str, token ids, or None for the model's own"
        if marker is not None and not isinstance(marker, str):
            if not isinstance(marker, Sequence) or not all(map(_is_natural, marker)):
                raise ConfigError("marker", marker, fix)
            object.__setattr__(self, "marker", tuple(marker))
        if marker is not None and len(marker) == 0:
            raise ConfigError("marker", marker, fix)
        if marker is not None and len(marker) > MAX_MARKER:
            told = f"{len(marker)} letters or tokens"
            raise ConfigError("marker", told, f"must have at most {MAX_MARKER}")
        if budget is not None and not _is_natural(budget):
            raise ConfigError("reasoning_budget", budget, "must be an int of at least 0, or None")


def _is_natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """One grammar, as its source text. Make it with a constructor such as ``json_schema``.

    kind: which language ``source`` is written in.
    source: JSON text for ``json_schema`` and ``structural_tag`` (the order of keys is kept, because
        object properties are generated in that order), a JSON array of strings for ``choice``, the
        pattern or grammar itself for the others, and empty for ``json_object``.
    any_whitespace: JSON kinds only. False writes ``", "`` and ``": "`` between values and no other
        whitespace, which bounds the length of the text; True leaves whitespace to the model.
    root: ``ebnf`` only, the rule to start from.
    start: where in the text the constraint begins, see ``after``; None at its first token.
    unsupported: what to do about a JSON schema, here or inside a tag, that cannot be enforced in
        full. "error" raises UnsupportedSchemaError when it is compiled, with JSON pointers and
        what to write instead. "rewrite" admits less instead of it, however little is left, such
        as one item in an array of unique ones. "warn" leaves the keyword out, with a Python warning
        that names it: only then may a text be invalid under its schema.
    key_order: ``json_schema`` only. "schema" writes the keys of each object in the order in which
        the schema lists them, "any" admits every order. The compiled grammar's ``notes`` name the
        objects whose keys stay in the schema's order under "any".
    additional_properties: ``json_schema`` only. "closed" writes no keys but those that the schema
        declares, in objects that list any and do not say ``additionalProperties`` (nor
        ``unevaluatedProperties``) themselves. "schema" takes the schema at its word: such objects
        are open. Every text is valid in both cases.
    strict: ``json_schema`` only. A keyword that looks misspelt is refused, not only warned of.
    backend: what compiles it, see ``with_backend``; None leaves that to the engine.
    value_type: the argument of ``of``, for the value of a finished text; None for plain JSON. It
        is no part of the constraint: specs that differ in it alone are equal.

    Raises ConfigError for a value of the wrong type.
    """

    kind: GrammarKind
    source: str
    any_whitespace: bool = False
    root: str = "root"
    start: Start | None = None
    unsupported: Unsupported = field(default="error", repr=False)
    key_order: KeyOrder = field(default="schema", repr=False)
    additional_properties: AdditionalProperties = field(default="closed", repr=False)
    strict: bool = field(default=False, repr=False)
    backend: GrammarBackendName | None = field(default=None, repr=False)
    value_type: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_field_kinds(self)
        if self.any_whitespace and self.kind not in _JSON_KINDS:
            fix = "only json_schema and json_object take it; write the whitespace in the grammar"
            raise ConfigError("any_whitespace", self.any_whitespace, fix)
        for name, plain in _SCHEMA_FIELDS.items():
            if getattr(self, name) != plain and self.kind != "json_schema":
                raise ConfigError(name, getattr(self, name), "only json_schema takes it")

    @property
    def is_json(self) -> bool:
        """Whether its texts are JSON values."""
        return self.kind in _JSON_KINDS

    @classmethod
    def of(cls, wanted: Any) -> GrammarSpec:
        """The spec that a Python type or value stands for.

        wanted: a pydantic model, dataclass, TypedDict, Enum, Literal, ``list[...]``, union or any
            other type that pydantic knows, for JSON of that type; a compiled regex without flags;
            strings in a list, tuple or set, for one of them;
            a JSON schema or OpenAI's ``response_format`` as a dict; or a spec, returned as it is.

        The values of finished texts are then instances of the type, see ``Completion.parsed``. A
        set is an array in which an item may stand twice where a grammar cannot forbid it. Raises
        ConfigError for anything else.
        """
        from guided_spec.grammar.value import regex_of, schema_of  # only here: it loads jsonschema

        if isinstance(wanted, cls):
            return wanted
        if isinstance(wanted, re.Pattern):
            return cls.regex(regex_of(wanted))
        if isinstance(wanted, Mapping):
            kind = wanted.get("type")  # OpenAI's, none of which is a type of JSON
            form = _of_format(dict(wanted)) if isinstance(kind, str) and kind in _FIELDS else None
            return form or cls.json_schema(wanted)
        if isinstance(wanted, list | tuple | set | frozenset):
            return cls._of_options(wanted)
        if isinstance(wanted, str):
            fix = "text may be of any kind: say which, as GrammarSpec.regex(...) does"
            raise ConfigError("grammar", wanted, fix)
        return replace(cls.json_schema(schema_of(wanted)), value_type=wanted)

    @classmethod
    def _of_options(cls, wanted: Collection[Any]) -> GrammarSpec:
        if not wanted or not all(isinstance(option, str) and option for option in wanted):
            fix = "a list means one of its strings, non-empty ones: for an array pass list[...]"
            raise ConfigError("grammar", wanted, fix)
        is_ordered = isinstance(wanted, list | tuple)
        return cls.choice(list(wanted) if is_ordered else sorted(wanted))

    @classmethod
    def json_schema(  # noqa: PLR0913 - each is an option of its own
        cls,
        schema: object,
        *,
        any_whitespace: bool = False,
        unsupported: Unsupported = "error",
        key_order: KeyOrder = "schema",
        additional_properties: AdditionalProperties = "closed",
        resources: Mapping[str, Any] | None = None,
        strict: bool = False,
    ) -> GrammarSpec:
        """JSON valid under ``schema``: a dict, a bool, JSON text, or a pydantic model class.

        Object properties come out in the order in which the schema lists them, or with
        ``key_order="any"`` in every order, and no others unless the schema asks for them, or with
        ``additional_properties="schema"`` wherever JSON Schema admits them. ``unsupported`` is for
        schemas that cannot be enforced in full; in a tag, set it with ``dataclasses.replace``.

        resources: other schemas by their URIs, to which ``schema`` may refer; nothing is fetched.
            Those of them that it needs become a part of ``source``. JSON Schema's metaschemas are
            known without.

        Raises ConfigError for an argument of the wrong type.
        """
        value_type = None
        if isinstance(schema, type):
            from guided_spec.grammar.value import schema_of

            value_type, schema = schema, schema_of(schema)
        if not isinstance(schema, str | bool | Mapping):
            fix = "must be a dict, JSON text, or a pydantic model class"
            raise ConfigError("schema", schema, fix)
        if resources is not None:
            schema = _bundled(schema, resources)
        return cls(
            "json_schema",
            _canonical("schema", schema),
            any_whitespace,
            unsupported=unsupported,
            key_order=key_order,
            additional_properties=additional_properties,
            strict=strict,
            value_type=value_type,
        )

    @classmethod
    def json_object(cls, *, any_whitespace: bool = False) -> GrammarSpec:
        """Any JSON object."""
        return cls("json_object", "", any_whitespace=any_whitespace)

    @classmethod
    def regex(cls, pattern: str) -> GrammarSpec:
        """Text for which ``re.fullmatch(pattern, text)`` succeeds."""
        require_kind("pattern", pattern, str)
        return cls("regex", pattern)

    @classmethod
    def choice(cls, options: Sequence[str]) -> GrammarSpec:
        """One of ``options``, at least one non-empty string."""
        if isinstance(options, str) or not isinstance(options, Sequence) or not options:
            raise ConfigError("options", options, "must be a non-empty list of strings")
        for option in options:
            if not isinstance(option, str) or not option:
                raise ConfigError("options", option, "each option must be a non-empty str")
        return cls("choice", json.dumps(list(dict.fromkeys(options)), ensure_ascii=False))

    @classmethod
    def ebnf(cls, text: str, *, root: str = "root") -> GrammarSpec:
        """Text derived from rule ``root`` of an EBNF grammar in the backend's GBNF dialect."""
        require_kind("text", text, str)
        return cls("ebnf", text, root=root)

    @classmethod
    def lark(cls, text: str) -> GrammarSpec:
        """Text derived from rule ``start`` of a Lark grammar."""
        require_kind("text", text, str)
        return cls("lark", text)

    @classmethod
    def structural_tag(cls, tag: object) -> GrammarSpec:
        """Free text with constrained parts: a structural tag as a dict or as JSON text."""
        if not isinstance(tag, str | Mapping):
            raise ConfigError("tag", tag, "must be a dict or JSON text")
        return cls("structural_tag", _canonical("tag", tag))

    @classmethod
    def tools(
        cls,
        tools: Sequence[Any],
        tool_choice: str | Mapping[str, Any] = "auto",
        *,
        tool_format: str = "hermes",
        parallel_tool_calls: bool = True,
    ) -> GrammarSpec:
        """Calls of ``tools``, with arguments that match their schemas, also of ``"strict": false``.

        tools: OpenAI's dicts, typed functions with docstrings, or pydantic model classes.
        tool_choice: "auto" is text and calls, "required" a call first, "none" text in which no call
            can begin; a tool's name, or a dict that names a function, is one call of it.
        tool_format: the model family's form by name, see ``TOOL_FORMATS``.
        parallel_tool_calls: False for one call at most.

        Raises ConfigError naming the tool.
        """
        from guided_spec.grammar.tools.format import (  # here: few specs need them
            ToolRules,
            read_choice,
            read_tools,
        )
        from guided_spec.grammar.tools.formats import get_tool_format

        require_kind("parallel_tool_calls", parallel_tool_calls, bool)
        choice, left = read_choice(tool_choice, read_tools(tools))
        content = get_tool_format(tool_format).content(ToolRules(left, choice, parallel_tool_calls))
        tag = {"type": "structural_tag", "format": content}
        return cls("structural_tag", _canonical("tools", tag))

    @classmethod
    def from_response_format(cls, response_format: Any) -> GrammarSpec | None:
        """The spec of OpenAI's or LMDeploy's ``response_format``; None for ``{"type": "text"}``.

        Takes the types text, json_object, json_schema, regex_schema and structural_tag, and what
        ``of`` takes but for a schema. A ``schema`` may stand in json_object too, and beside the
        type json_schema. The text always matches; ``strict`` refuses keywords that look misspelt,
        which are else in the log. ``name`` and ``description`` change nothing. Raises ConfigError
        for all else, and for any other field.
        """
        if isinstance(response_format, Mapping):
            return _of_format(dict(response_format))
        try:
            return cls.of(response_format)
        except ConfigError as error:
            fix = 'must be a dict such as {"type": "json_object"}, a GrammarSpec or a type'
            raise ConfigError("response_format", response_format, fix) from error

    def after(
        self, marker: str | Sequence[int] | None = None, *, reasoning_budget: int | None = None
    ) -> GrammarSpec:
        """The same constraint, applied after the first ``marker`` only, as after reasoning.

        marker: text or token ids, see ``Marker``; None is the model family's own, looked up in the
            chat template when the grammar is compiled.
        reasoning_budget: free tokens at most; then the marker is written. None: any number.

        Up to the marker the text is free, but it does not end there: a finished text satisfies the
        constraint. After a prompt that ends with the marker, the constraint applies at once. Raises
        ConfigError for a value of the wrong type.
        """
        return replace(self, start=Start(marker, reasoning_budget))

    def with_backend(self, backend: GrammarBackendName | None) -> GrammarSpec:
        """The same constraint, compiled by "xgrammar", "llguidance", "auto" or a registered one.

        None is the engine's ``grammar_backend``. Requests of one batch may differ in it. Raises
        ConfigError for a name that is not registered.
        """
        if backend is not None:
            require_grammar_backend("backend", backend)
        return replace(self, backend=backend)


_NAMES = ("name", "description", "strict")
_FIELDS: dict[str, Collection[str]] = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema", "schema", *_NAMES),
    "regex_schema": ("regex_schema",),
    "structural_tag": ("format",),
}


def _of_format(given: dict[str, Any]) -> GrammarSpec | None:
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _FIELDS:
        fix = f"must be one of {', '.join(_FIELDS)}{did_you_mean(kind, _FIELDS)}"
        if kind is None or kind in ("object", "array", "string"):
            fix += '; a JSON schema goes into {"type": "json_schema", "json_schema": {"schema": …}}'
        raise ConfigError("response_format.type", kind, fix)
    require_known_fields("response_format", given, ("type", *_FIELDS[kind]))
    match kind:
        case "text":
            return None
        case "regex_schema":
            return GrammarSpec.regex(_member(given, "regex_schema"))
        case "structural_tag":
            return GrammarSpec.structural_tag({"type": kind, "format": _member(given, "format")})
        case "json_object" if given.get("schema") is None:
            return GrammarSpec.json_object()
    strict = _is_strict("response_format", given)
    inner = given.get("json_schema")
    if isinstance(inner, Mapping):
        strict |= _is_strict("response_format.json_schema", inner)
    schema = _schema_member(given)
    if not isinstance(schema, str | bool | Mapping | type):
        place = "response_format" + (".json_schema" if isinstance(inner, Mapping) else "")
        raise ConfigError(f"{place}.schema", schema, "must be a JSON schema, a dict")
    return GrammarSpec.json_schema(schema, strict=strict)


def _is_strict(path: str, given: Mapping[str, Any]) -> bool:
    """Whether misspelt keywords are refused. The other words about a schema are looked at."""
    for name in ("name", "description"):
        require_kind(f"{path}.{name}", given.get(name), str | None)
    require_kind(f"{path}.strict", given.get("strict"), bool | None)
    return given.get("strict") is True


def _schema_member(given: Mapping[str, Any]) -> Any:
    """The schema, which stands in a member of its own, or beside the type."""
    wrapper, path = given.get("json_schema"), "response_format.json_schema"
    schema = given.get("schema")
    if schema is not None:
        if wrapper is not None:
            raise ConfigError(path, wrapper, "a schema is given too; leave one out")
        return schema
    if isinstance(wrapper, Mapping):
        require_known_fields(path, wrapper, ("schema", *_NAMES))
        schema = wrapper.get("schema")
    if schema is None:
        raise ConfigError(path, wrapper, 'must be a dict such as {"name": "a", "schema": {...}}')
    return schema


def _member(response_format: Mapping[str, Any], name: str) -> Any:
    if name not in response_format:
        raise ConfigError("response_format", response_format, f"must have the key {name!r}")
    return response_format[name]


def _bundled(schema: object, resources: object) -> object:
    from guided_spec.grammar.schema.bundle import bundle  # only here: it loads jsonschema

    if not isinstance(resources, Mapping):
        raise ConfigError("resources", resources, "must be a dict of JSON schemas by URI")
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            return schema  # broken JSON is the compiler's to report
    return bundle(schema, resources) if isinstance(schema, Mapping) else schema


def _canonical(argument: str, value: object) -> str:
    """JSON text in one spelling of whitespace and escapes; text that is not JSON stays."""
    if isinstance(value, str):
        try:
            return _dump(json.loads(value))
        except (ValueError, RecursionError):
            return value  # broken JSON is the compiler's to report, for this request alone
    try:
        return _dump(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(argument, value, f"must hold JSON values only: {error}") from None


def _dump(value: object) -> str:
    if isinstance(value, Mapping):
        value = dict(value)
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
