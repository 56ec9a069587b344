"""A prompt with columns in braces, filled in from rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from string import Formatter
from typing import Any, NamedTuple

from guided_spec.errors import ConfigError, PromptError
from guided_spec.kinds import did_you_mean


class _Part(NamedTuple):
    """Text, and the column whose value comes after it; None at the end."""

    text: str
    column: str | None


class PromptTemplate:
    """A text such as ``"Translate {text}"``. ``{{`` and ``}}`` stand for braces.

    Raises ConfigError for braces that name no column.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise ConfigError("prompt", text, "must be a str with columns in braces: 'Read {text}'")
        self.text = text
        self._parts = list(_parts(text))

    @property
    def columns(self) -> list[str]:
        """The names in braces, each once, in their order."""
        return list(dict.fromkeys(part.column for part in self._parts if part.column is not None))

    def fill(self, row: Any) -> str:
        """The prompt of one row. Raises PromptError for a value that is missing or is no text."""
        if not isinstance(row, Mapping):
            raise PromptError(f"the row is {row!r:.80}, and not an object with columns")
        return "".join(
            part.text if part.column is None else part.text + column_text(row, part.column)
            for part in self._parts
        )


def require_columns(
    argument: str, value: object, wanted: Sequence[str], rows: Iterable[Any], has: str = "has"
) -> None:
    """Raise ConfigError for a column that no row has; they are read until all are known."""
    missing, known = wanted, dict[str, None]()
    for row in rows:
        if isinstance(row, Mapping):
            known |= dict.fromkeys(row)
            missing = [name for name in missing if name not in row]
            if not missing:
                return
    if missing and known:
        raise ConfigError(argument, value, f"{has} {no_column(missing[0], known)}")


def no_column(name: str, columns: Iterable[Any]) -> str:
    """What an error says of a column that is not there."""
    listed = ", ".join(map(str, columns)) or "none"
    meant = did_you_mean(name, columns) or ";"
    fix = "rows need a prompt with their columns in braces, where {{ is a brace"
    return f"no column {name!r}{meant} the columns are {listed}; {fix}"


def column_text(row: Mapping[str, Any], name: str) -> str:
    """A value as text: strings and dates as they are, numbers, lists and objects as JSON.

    Raises PromptError.
    """
    if name not in row:
        raise PromptError(f"the row has {no_column(name, row)}")
    value = row[name]
    if isinstance(value, str):
        return value
    if value is None:
        raise PromptError(f"the row has nothing in column {name!r}: give it a text")
    try:
        is_json = isinstance(value, int | float | list | tuple | Mapping)
        return json.dumps(value, ensure_ascii=False, default=_plain) if is_json else _plain(value)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"the row's column {name!r} is no text: {error}") from error


def _plain(value: object) -> str:
    if isinstance(value, bytes | bytearray):
        raise ValueError("it holds bytes")
    return str(value)


def _parts(text: str) -> list[_Part]:
    try:
        found = list(Formatter().parse(text))
    except ValueError as error:
        raise ConfigError("prompt", text, f"{error}; write {{{{ and }}}} for braces") from error
    parts = []
    for literal, name, form, conversion in found:
        is_plain = not form and conversion is None
        if name is not None and not (name.strip() and is_plain):
            fix = "braces hold the name of a column and nothing else; write {{ and }} for braces"
            raise ConfigError("prompt", text, fix)
        parts.append(_Part(literal, name))
    return parts
