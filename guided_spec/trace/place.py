"""Where a JSON text that is being written stands: the pointer of the value to come, or begun."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

__all__ = ["JsonPlace"]

WHITESPACE = b" \t\n\r"


@dataclass(slots=True)
class _Container:
    """An object or array that is open.

    at: key or index of the value that is being written, None between two of them. count: of an
    array's items that are done; None for an object.
    """

    at: str | int | None = None
    count: int | None = None


class JsonPlace:
    """Follows the bytes of a JSON text, which may be cut anywhere.

    It reads the text alone and checks nothing: it is for texts that a grammar keeps to JSON.
    """

    def __init__(self) -> None:
        self._open: list[_Container] = []
        self._string: bytearray | None = None  # its bytes so far, inside of one
        self._is_escaped = False
        self._key = ""

    @property
    def pointer(self) -> str:
        """RFC 6901: "" is the whole text; inside of a key, the object that it belongs to."""
        steps = [str(container.at) for container in self._open if container.at is not None]
        return "".join("/" + step.replace("~", "~0").replace("/", "~1") for step in steps)

    def feed(self, data: bytes) -> None:
        """The text goes on with ``data``."""
        for byte in data:
            if self._string is None:
                self._read(byte)
            else:
                self._read_in_string(self._string, byte)

    def fork(self) -> JsonPlace:
        """A copy that goes its own way."""
        other = JsonPlace()
        other._open = [replace(container) for container in self._open]
        other._string = None if self._string is None else bytearray(self._string)
        other._is_escaped, other._key = self._is_escaped, self._key
        return other

    def _read(self, byte: int) -> None:
        match bytes([byte]):
            case b":":
                if self._open:
                    self._open[-1].at = self._key
            case b",":
                self._end_value()
                if self._open and self._open[-1].count is not None:
                    self._open[-1].at = self._open[-1].count
            case b"}" | b"]":
                del self._open[-1:]
                self._end_value()
            case _ if byte in WHITESPACE:
                pass
            case char:
                self._begin_value(char)

    def _begin_value(self, char: bytes) -> None:
        """A value's first byte, one of a number or word, or the quote before a key."""
        if self._open and self._open[-1].at is None:
            self._open[-1].at = self._open[-1].count
        if char == b'"':
            self._string = bytearray()
        elif char in (b"{", b"["):
            self._open.append(_Container(count=0 if char == b"[" else None))

    def _end_value(self) -> None:
        """What stood at ``at`` is whole."""
        if not self._open or self._open[-1].at is None:
            return
        top = self._open[-1]
        top.at = None
        if top.count is not None:
            top.count += 1

    def _read_in_string(self, string: bytearray, byte: int) -> None:
        if byte != ord('"') or self._is_escaped:
            string.append(byte)
            self._is_escaped = byte == ord("\\") and not self._is_escaped
            return
        self._string = None
        if self._open and self._open[-1].at is None:
            quoted = '"' + string.decode("utf-8", "replace") + '"'
            self._key = json.loads(quoted, strict=False)
        else:
            self._end_value()
