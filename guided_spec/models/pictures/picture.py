"""A picture or a video as a vision tower reads it, and a prompt that holds some."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

_OFFSET_BITS = 24  # a picture has fewer tokens
MOST_BYTES = 2**27  # of the arrays that a vision tower reads at a time, or one picture's


class Sight(NamedTuple):
    """Whether and how a model reads pictures.

    refusal: why it does not, None where it does. placeholder: the token that stands for each row of
    a picture. num_rows: of the table. video_placeholder: of a video; the same one in some models.
    videos: why it reads no videos, None where it does.
    """

    refusal: str | None
    placeholder: int = -1
    num_rows: int = 0
    video_placeholder: int = -1
    videos: str | None = None

    @property
    def placeholders(self) -> tuple[int, ...]:
        """All tokens that stand for rows."""
        if self.videos is not None or self.video_placeholder in (-1, self.placeholder):
            return (self.placeholder,)
        return (self.placeholder, self.video_placeholder)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Picture:
    """What a processor made of one picture or video; equal to every other of the same content.

    content: a digest of its pixels; ``inputs`` hold eight times as many bytes. count: tokens it
    takes. inputs: arrays by the names of the vision tower's arguments, in one piece each; none
    where the picture has been read.
    """

    content: bytes
    count: int = field(compare=False)
    inputs: dict[str, NDArray[Any]] = field(compare=False, repr=False)

    @classmethod
    def of(cls, pixels: bytes, inputs: Mapping[str, NDArray[Any]], count: int) -> Picture:
        """The picture of a processor's arrays. pixels: all that these depend on, as a video's
        frames and their rate do."""
        content = hashlib.blake2b(pixels, digest_size=16).digest()
        arrays = {name: np.asarray(array, order="C") for name, array in inputs.items()}
        return cls(content, count, arrays)

    def names(self) -> Iterator[int]:
        """A number for each of its tokens that no other picture's token has, and no word's."""
        first = int.from_bytes(self.content) << _OFFSET_BITS
        return (-1 - first - at for at in range(self.count))


def alike(pictures: Sequence[Picture]) -> Iterator[list[Picture]]:
    """Pictures that a vision tower can read together, up to ``MOST_BYTES`` of them at a time.

    Their arrays differ in the first dimension alone.
    """
    by_form: dict[Any, list[Picture]] = {}
    for one in pictures:
        shapes = [(name, a.dtype.str, a.shape[1:]) for name, a in sorted(one.inputs.items())]
        by_form.setdefault(tuple(shapes), []).append(one)
    for group in by_form.values():
        batch, size = list[Picture](), 0
        for one in group:
            own = sum(array.nbytes for array in one.inputs.values())
            if batch and size + own > MOST_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(one)
            size += own
        yield batch


@dataclass(frozen=True, slots=True)
class PicturePrompt:
    """Token ids in which a placeholder stands wherever a row of a picture is read.

    pictures: and videos, in the order of the prompt. places: [N] the positions that stand for their
    rows; text may be between those of one video.
    """

    token_ids: list[int]
    pictures: tuple[Picture, ...]
    places: list[int]

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """Of its pictures' arrays."""
        arrays = [array for one in {*self.pictures} for array in one.inputs.values()]
        return sum(array.nbytes for array in arrays)

    @property
    def spans(self) -> tuple[range, ...]:
        """Where places follow one another: each picture, or several without text between them."""
        parted = [at for at, (one, after) in enumerate(pairwise(self.places), 1) if after > one + 1]
        cuts = pairwise([0, *parted, len(self.places)])
        found = (self.places[first:end] for first, end in cuts)
        return tuple(range(one[0], one[-1] + 1) for one in found if one)

    def read(self) -> PicturePrompt:
        """The same without the arrays, which whoever has read them does not need any more."""
        return replace(self, pictures=tuple(replace(one, inputs={}) for one in self.pictures))

    def forget(self) -> None:
        """Let the arrays go, for all that hold this prompt: it cannot be read again."""
        for one in self.pictures:
            one.inputs.clear()

    def named(self) -> list[int]:
        """The tokens, with names of their content where pictures are: equal for equal prompts."""
        return self._filled(name for one in self.pictures for name in one.names())

    def placed(self, ids: Sequence[Sequence[int]]) -> list[int]:
        """The tokens to feed. ids: of each picture, those of its rows."""
        return self._filled(token for one in ids for token in one)

    def _filled(self, values: Iterator[int]) -> list[int]:
        filled = list(self.token_ids)
        for place, value in zip(self.places, values, strict=True):
            filled[place] = value
        return filled


class TextAfter(Sequence[int]):
    """Tokens that begin otherwise than they are written. tokens: they may grow, and it with them.

    begin: takes the place of as many of the first ones.
    """

    __slots__ = ("_begin", "_tokens")

    def __init__(self, begin: list[int], tokens: Sequence[int]) -> None:
        self._begin, self._tokens = begin, tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        size = len(self._begin)
        if not isinstance(at, slice):
            at = range(len(self))[at]
            return self._begin[at] if at < size else self._tokens[at]
        start, stop, step = at.indices(len(self))
        if step != 1:
            return [self[index] for index in range(start, stop, step)]
        return [*self._begin[start:stop], *self._tokens[max(start, size) : max(stop, size)]]

    def __iter__(self) -> Iterator[int]:
        yield from self._begin
        yield from islice(self._tokens, len(self._begin), None)
