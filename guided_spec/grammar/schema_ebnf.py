"""xgrammar's own grammar of a prepared JSON schema, as text."""

from __future__ import annotations

import json
import re
from typing import Any

import xgrammar

__all__ = ["schema_ebnf"]

_ESCAPED = re.compile(r"\\(?:x([0-9a-fA-F]{2})|.)", re.DOTALL)


def schema_ebnf(prepared: Any, *, any_whitespace: bool) -> str:
    """The grammar, with the rule ``root``. Raises RuntimeError where xgrammar does not take it."""
    grammar = xgrammar.Grammar.from_json_schema(
        json.dumps(prepared), any_whitespace=any_whitespace, strict_mode=False
    )
    # xgrammar 0.2.8 prints "\xe9" before any letter, and reads "\xe9e" as one character.
    return _ESCAPED.sub(lambda found: f"\\u00{found[1]}" if found[1] else found[0], str(grammar))
