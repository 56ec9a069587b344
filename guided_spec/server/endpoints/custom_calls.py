"""Calls of custom tools: the engine gives their text as JSON, and clients want the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from guided_spec.engine.chat import ToolCallDelta
from guided_spec.grammar.tools.custom import InputReader, custom_names


class CustomCalls:
    """The calls of custom tools in one reply that is streamed.

    tools: of the request, as chats have them.
    """

    def __init__(self, tools: Sequence[Any] | None) -> None:
        self._names = custom_names(tools)
        self._readers: dict[int, InputReader] = {}

    def feed(self, piece: ToolCallDelta) -> str | None:
        """What a piece adds to the text of its call; None for the call of a function."""
        if piece.name in self._names:
            self._readers[piece.call_index] = InputReader()
        reader = self._readers.get(piece.call_index)
        return None if reader is None else reader.feed(piece.arguments)
