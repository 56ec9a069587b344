"""An extension of griffe: lists the fields that docstrings describe, as ``name: what it is``."""

from __future__ import annotations

import re
from typing import Any

import griffe

_FIELD = re.compile(r"(?P<names>[a-z_]\w*(?:, [a-z_]\w*)*): (?P<text>.*)", re.IGNORECASE)


def with_lists(docstring: str) -> str:
    """A docstring whose paragraphs of fields are lists of Markdown; others stay as they are."""
    return "\n\n".join(map(_listed, docstring.split("\n\n")))


def _listed(paragraph: str) -> str:
    lines = paragraph.splitlines()
    if not lines or _FIELD.fullmatch(lines[0]) is None:
        return paragraph
    found = []
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            found.append(f"    {line.strip()}")
        else:
            names = ", ".join(f"`{name}`" for name in field["names"].split(", "))
            found.append(f"- {names}: {field['text']}")
    return "\n".join(found)


class FieldLists(griffe.Extension):
    """Applies ``with_lists`` to all docstrings that are loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object once it and what it holds is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)
