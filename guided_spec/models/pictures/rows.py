"""Which rows of the embedding table hold which picture."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from guided_spec.models.pictures.embedding import PictureEmbedding
from guided_spec.models.pictures.picture import Picture, alike


class ReadsPictures(Protocol):
    """A vision tower, with what brings its features to the width of the embedding."""

    def features(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """Of pictures that are ``alike``, each [picture.count, 1 + D, H], see ``PictureEmbedding``.

        Raises ModelError.
        """


@dataclass(slots=True)
class _Held:
    """A picture in the table. users: texts that read it."""

    rows: list[int]
    users: int = 0


class PictureRows:
    """Reads each picture once, and keeps its features while a text uses them and there is room.

    Several are read together. Rows that nobody uses stay until others need them; the least recently
    used go first. A text holds its rows until it has ended, so that an id means one picture for all
    of its life. Used by one thread.
    """

    def __init__(self, embedding: PictureEmbedding, vision: ReadsPictures) -> None:
        self._embedding, self._vision = embedding, vision
        self._free = list(range(embedding.num_rows))[::-1]
        # By content, for the arrays of a picture are not needed any more. The unused ones are in
        # the order of their use. No LRUCache: those in use may not go.
        self._held: OrderedDict[bytes, _Held] = OrderedDict()
        self.num_read = 0  # pictures that the tower has read

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return self._embedding.num_rows

    def holds(self, content: bytes) -> bool:
        """Whether the picture of this content has rows, so that its arrays are not needed."""
        return content in self._held

    def take(self, pictures: Sequence[Picture], most: int | None = None) -> list[list[int]] | None:
        """The token ids of each picture's rows, for a text that then calls ``release``.

        most: pictures to read now; None is all of them. None where other texts hold too many rows,
        or where more are left to be read at the next call. Raises what the vision tower raises.
        """
        asked = {one.content: one for one in pictures}
        missing = [one for one in asked.values() if not self.holds(one.content)]
        kept = sum(
            len(held.rows)
            for content, held in self._held.items()
            if not held.users and content not in asked
        )
        if sum(one.count for one in missing) > len(self._free) + kept:
            return None
        for content in asked.keys() & self._held.keys():
            self._held.move_to_end(content)  # so that none of them makes room for another
        self._read(missing[:most])
        if most is not None and len(missing) > most:
            return None
        for content in asked:
            self._held[content].users += 1
        first = self._embedding.num_tokens
        return [[first + row for row in self._held[one.content].rows] for one in pictures]

    def read_ahead(self, pictures: Iterable[Picture], most: int | None = None) -> None:
        """Read pictures of several texts together, as far as rows are free for those in front.

        most: as of ``take``, which finds them. Raises what the vision tower raises.
        """
        missing, left = list[Picture](), len(self._free)
        for one in dict.fromkeys(pictures):
            if not self.holds(one.content):
                left -= one.count
                if left < 0:
                    break
                missing.append(one)
        self._read(missing[:most])

    def release(self, pictures: Sequence[Picture]) -> None:
        """A text that took these has ended."""
        for content in {one.content for one in pictures}:
            self._held[content].users -= 1

    def _read(self, pictures: Sequence[Picture]) -> None:
        for batch in alike(pictures):
            for one, features in zip(batch, self._vision.features(batch), strict=True):
                self._write(one, features)

    def _write(self, picture: Picture, features: Tensor) -> None:
        while len(self._free) < picture.count:
            oldest = next(key for key, held in self._held.items() if not held.users)
            self._free += self._held.pop(oldest).rows
        left = len(self._free) - picture.count
        rows = self._free[left:]
        self._embedding.write(rows, features)
        del self._free[left:]  # had it failed, nobody would give them back
        self._held[picture.content] = _Held(rows)
        self.num_read += 1
