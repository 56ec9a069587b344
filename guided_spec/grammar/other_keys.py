"""The keys that an object does not list, as a pattern."""

from __future__ import annotations

import re
from collections.abc import Iterable

from guided_spec.grammar.charset import JSON_PLAIN
from guided_spec.grammar.regex import to_fullmatch

__all__ = ["other_keys"]

_MOST_NODES = 64  # xgrammar 0.2.8 compiles each in some 30 ms, with a vocabulary of 150,000 tokens


def other_keys(names: Iterable[str]) -> str:
    """A pattern for the inside of a JSON string: the keys, without escapes, unlike ``names``.

    As there are no escapes, none can spell one of ``names``. Where these have many letters, keys
    that begin as one of them does are left out as well.
    """
    plain = {name for name in names if _is_plain(name)}  # others are spelled with escapes only
    length = min(max(map(len, plain), default=0), _MOST_NODES)
    while length > 1 and len(_beginnings(plain, length)) > _MOST_NODES:
        length -= 1
    nodes = {*_beginnings(plain, length), *(name for name in plain if len(name) <= length)}
    closed = {name[:length] for name in plain if len(name) > length}
    leaving = "|".join(_leaving(node, nodes | closed) for node in sorted(nodes - closed))
    inside = "|".join(re.escape(node) for node in sorted(nodes - closed - plain))
    pattern = f"(?:{leaving}).*" + (f"|{inside}" if inside else "")
    return to_fullmatch(pattern, place="json_string")


def _beginnings(names: Iterable[str], length: int) -> set[str]:
    """Those of up to ``length`` letters, but for whole names; the empty one is always there."""
    return {"", *(name[:end] for name in names for end in range(min(len(name), length + 1)))}


def _leaving(node: str, nodes: set[str]) -> str:
    """``node`` and one letter more, by which it is no node."""
    following = sorted(other[-1] for other in nodes if other and other[:-1] == node)
    return re.escape(node) + (f"[^{''.join(map(re.escape, following))}]" if following else ".")


def _is_plain(name: str) -> bool:
    return all(any(low <= ord(char) <= high for low, high in JSON_PLAIN) for char in name)
