"""How much requests hold of pictures that the engine has yet to read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from guided_spec.engine.chats.pictures import num_pictures
from guided_spec.engine.outputs import Chunk
from guided_spec.models.pictures.picture import PicturePrompt

_MOST_BYTES = 512 * 2**20


class PictureRoom:
    """Lets requests with pictures in while those before them hold less than ``most_bytes``.

    Others wait with their files, which are much smaller. The last one may go beyond. Used by one
    event loop.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most, self._held = most_bytes, 0
        self._turn, self._changed = asyncio.Lock(), asyncio.Event()

    @asynccontextmanager
    async def turn(self, messages: Sequence[Any]) -> AsyncIterator[None]:
        """In which a conversation is read: those with pictures one after another."""
        if not num_pictures(messages):
            yield
            return
        async with self._turn:
            while self._held >= self._most:
                self._changed.clear()
                await self._changed.wait()
            yield

    def count(self, num_bytes: int) -> None:
        """So many bytes more are held; fewer, where it is negative."""
        self._held += num_bytes
        self._changed.set()


class HeldPictures:
    """Pictures of a request, held until the engine has read them for each sample.

    prompt: None without pictures.
    """

    def __init__(self, room: PictureRoom, prompt: PicturePrompt | None, num_samples: int) -> None:
        self._room, self._prompt = room, prompt
        self._unread = {*range(num_samples)}
        self._num_bytes = 0 if prompt is None else prompt.num_bytes
        room.count(self._num_bytes)

    def see(self, chunk: Chunk) -> None:
        """A chunk of one sample, whose pictures have been read."""
        self._unread.discard(chunk.sample_index)
        if not self._unread:
            self.release()

    def release(self) -> None:
        """Let them go. May be called more than once."""
        if self._prompt is not None:
            self._prompt.forget()
            self._room.count(-self._num_bytes)
            self._prompt = None
