"""The notation in which xgrammar prints a grammar: read, and written anew inside JSON strings."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import xgrammar

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.backends.ebnf import regex_ebnf
from guided_spec.grammar.characters import (
    ANY_CHARACTER,
    ESCAPED,
    JSON_PLAIN,
    Ranges,
    complement,
    intersect,
    normalize,
)
from guided_spec.grammar.regex import json_escape, to_fullmatch
from guided_spec.grammar.steps import spend_on_text

_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|([^\\])")
_MOST_SETS = 4096  # that are remembered
_NAMED = dict(zip("nrt0abfve", "\n\r\t\0\a\b\f\v\x1b", strict=True))


def unescape(text: str) -> str:
    """The characters that a printed string or regex stands for, given without its quotes."""
    if "\\" not in text:
        return text
    found = []
    for match in _ESCAPE.finditer(text):
        *codes, named, plain = match.groups()
        code = next((code for code in codes if code), None)
        if code is not None:
            found.append(chr(int(code, 16)))
        else:
            found.append(plain if plain is not None else _NAMED.get(named, named))
    return "".join(found)


@lru_cache(_MOST_SETS)
def set_ranges(text: str) -> Ranges:
    """Of ``a-z_`` or ``^a-z_``: inclusive ranges of code points. Grammars repeat them often."""
    is_negated = text.startswith("^")
    parts = [match.group(0) for match in _ESCAPE.finditer(text[is_negated:])]
    found: list[tuple[int, int]] = []
    at = 0
    while at < len(parts):
        low = ord(unescape(parts[at]))
        if at + 2 < len(parts) and parts[at + 1] == "-":
            found.append((low, ord(unescape(parts[at + 2]))))
            at += 3
        else:
            found.append((low, low))
            at += 1
    return complement(normalize(found)) if is_negated else tuple(found)


_TERMINAL = re.compile(
    r'Regex\("(?P<regex>(?:[^"\\]|\\.)*)"\)|"(?P<text>(?:[^"\\]|\\.)*)"'
    r"|\[(?P<set>(?:[^\]\\]|\\.)*)\](?P<star>\*?)",
    re.DOTALL,
)


def json_text_ebnf(content: dict[str, Any]) -> str:
    """The inside of a JSON string whose value matches a grammar, with the rule ``root``.

    content: has a Lark ``grammar``, in xgrammar's dialect, or a ``pattern``, a regex as
        ``re.fullmatch`` reads it. A class of a grammar never matches U+0000.

    Raises GrammarCompileError.
    """
    pattern = content.get("pattern")
    if isinstance(pattern, str):
        return regex_ebnf(to_fullmatch(pattern, context="json_string"))
    source = content.get("grammar")
    if not isinstance(source, str):
        raise GrammarCompileError("a json_text must have a pattern or a grammar, a str")
    try:
        printed = str(xgrammar.Grammar.from_lark(source))
    except (RuntimeError, ValueError, RecursionError) as error:
        raise GrammarCompileError(f"the lark grammar does not compile: {error}") from error
    spend_on_text(printed)
    return _TERMINAL.sub(_in_json, printed)


def _in_json(found: re.Match[str]) -> str:
    if found["text"] is not None:
        return _literal("".join(map(json_escape, unescape(found["text"]))))
    if found["regex"] is not None:
        pattern = to_fullmatch(unescape(found["regex"]), context="json_string")
        return regex_ebnf(pattern).removeprefix("root ::= ").rstrip()
    ranges = intersect(normalize(set_ranges(found["set"])), ANY_CHARACTER)
    plain, escaped = intersect(ranges, JSON_PLAIN), intersect(ranges, ESCAPED)
    options = [_literal(json_escape(chr(c))) for low, high in escaped for c in range(low, high + 1)]
    if plain:
        options.insert(0, f"[{''.join(f'{_code(a)}-{_code(b)}' for a, b in plain)}]")
    if not options:
        raise GrammarCompileError("the lark grammar has a class that holds no character; widen it")
    return f"({' | '.join(options)}){found['star']}"


def _literal(text: str) -> str:
    return f'"{"".join(map(_code, text))}"'


def _code(character: str | int) -> str:
    code = ord(character) if isinstance(character, str) else character
    return f"\\U{code:08x}"
