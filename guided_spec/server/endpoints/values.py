"""What is wrong with a value of a body, in words: its name, what came, and what may come."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from reprlib import Repr
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from guided_spec.errors import ConfigError
from guided_spec.kinds import described, did_you_mean
from guided_spec.server.endpoints.bodies import ChatBody, Strict
from guided_spec.server.faults import ApiError, invalid_value

_SHOWN = Repr()  # of a body of megabytes too
_SHOWN.maxstring = _SHOWN.maxother = 80
_REASONS = {
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "too_long": "must have at most {max_length} items",
    "too_short": "must have at least {min_length} items",
    "string_too_long": "must have at most {max_length} characters",
    "finite_number": "must be a finite number",
}
USUAL_OF_TOOL = {"defer_loading": False, "allowed_callers": ["direct"]}
_USUAL = {**USUAL_OF_TOOL, "caller": {"type": "direct"}}  # what is done here in any case
_KINDS = {"int": int, "float": float, "bool": bool, "string": str, "list": list}


def body_fault(error: ValidationError, kind: type[BaseModel]) -> ApiError:
    """The first thing that is wrong with a body. kind: what it should have been."""
    faults: Sequence[Any] = error.errors(include_url=False)
    field, depth = _field_at(kind, faults[0]["loc"])
    same = [one for one in faults if one["loc"][:depth] == faults[0]["loc"][:depth]]
    # Of several kinds the one that fits but for a bound.
    first = next((one for one in same if one["type"] in _REASONS), faults[0])
    at = first["loc"]
    if not at:
        return invalid_value(f"the body={_SHOWN.repr(first['input'])}: must be an object", None)
    if first["type"] == "extra_forbidden":
        return _unknown(kind, at, first["input"])
    reason = _reason(first)
    if at[-1] == "[key]":
        at, reason = at[:-2], f"the key {_SHOWN.repr(first['input'])} {reason}"
    elif len(at) == depth or len(same) > 1:
        at = at[:depth]
        if field and first["type"] not in (*_REASONS, "literal_error"):
            reason = f"must be {described(_plain(field.annotation))}"
    path = shown_path(at)
    if first["type"] == "missing":
        return invalid_value(f"{path} is missing: {reason}", path)
    return invalid_value(f"{path}={_SHOWN.repr(first['input'])}: {reason}", path)


def chat_of(fields: Mapping[str, Any]) -> ChatBody:
    """The chat that another body asks for. Raises ApiError for a value that a chat has not."""
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as error:
        raise body_fault(error, ChatBody) from None


def require_usual(path: str, holder: Mapping[str, Any]) -> None:
    """Raise ConfigError for a field of a tool or call that asks for what is not done here."""
    for name, usual in _USUAL.items():
        if holder.get(name, usual) not in (usual, None):
            raise ConfigError(f"{path}.{name}", holder[name], f"must be {usual} here, or left out")


def shown_path(parts: Sequence[str | int]) -> str:
    """A place in a body, as in ``messages[0].role``."""
    steps = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts]
    return "".join(steps).removeprefix(".")


def _reason(fault: Mapping[str, Any]) -> str:
    name, context = fault["type"], fault.get("ctx", {})
    if name in _REASONS:
        return _REASONS[name].format_map(context)
    if name == "literal_error":
        known = re.findall("'([^']*)'", context["expected"])
        return f"must be {context['expected']}" + did_you_mean(fault["input"], known)
    kind = _KINDS.get(name.partition("_")[0])
    if kind is not None:
        return f"must be {described(kind)}"
    return "must be an object" if name.startswith(("dict", "model")) else str(fault["msg"])


def _unknown(kind: type[BaseModel], at: Sequence[str | int], value: Any) -> ApiError:
    """A field that is not known at its place, with the nearest one that is."""
    for part in at[:-1]:
        field = kind.model_fields.get(_field_name(kind, part))
        inner = [] if field is None else _models(field.annotation)
        kind = inner[0] if inner else kind
    path, name = shown_path(at), str(at[-1])
    known = {field.alias or own for own, field in kind.model_fields.items()}
    elsewhere = kind.elsewhere.get(name) if issubclass(kind, Strict) else None
    meant = did_you_mean(name, known) if elsewhere is None else f"; did you mean {elsewhere}?"
    listed = meant or f"; there is {', '.join(sorted(known))}"
    message = f"{path}={_SHOWN.repr(value)}: is not known here, leave it out{listed}"
    return ApiError(400, message, code="unknown_parameter", param=path)


class _Field(NamedTuple):
    """The innermost field that a fault is in, and how many parts of its place name it."""

    info: FieldInfo | None
    depth: int


def _field_at(kind: type[BaseModel], at: Sequence[str | int]) -> _Field:
    found = _Field(None, 1)
    for depth, part in enumerate(at, 1):
        info = kind.model_fields.get(_field_name(kind, part))
        if info is None:
            break
        found, inner = _Field(info, depth), _models(info.annotation)
        if not inner:
            break
        kind = inner[0]
    return found


def _field_name(kind: type[BaseModel], shown: str | int) -> str:
    for name, field in kind.model_fields.items():
        if field.alias == shown:
            return name
    return str(shown)


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in _models(part)]


def _plain(kind: Any) -> Any:
    """A field's type without its bounds and without None, in kinds of JSON."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _plain(inner[0])
    if origin in (Union, UnionType):
        kinds = [_plain(one) for one in inner if one is not NoneType]
        return Union[tuple(kinds)]  # noqa: UP007 - of any number
    if origin is list:
        return list[_plain(inner[0])]  # type: ignore[misc]
    return dict if isinstance(kind, type) and issubclass(kind, BaseModel) else kind
