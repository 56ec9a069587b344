"""A page: a square picture of printed text, with the place of every character."""

import random
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

SIDE = 256  # pixels
CELL = 16  # pixels a side of what one picture token shows
CELLS = SIDE // CELL
SLOTS = 4  # characters of a cell that training asks for
CHARACTERS = "".join(map(chr, range(33, 127)))
_OTHER = 0  # no character


@lru_cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    # Pillow's own font is Aileron (CC0), ASCII only.
    font = ImageFont.load_default(size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError("Pillow was built without FreeType, and cannot draw text of any size")
    return font


@lru_cache(maxsize=100_000)
def _width(text: str, size: int) -> float:
    return _font(size).getlength(text)


class DoesNotFit(Exception):
    """What was drawn would leave the page."""


@dataclass(frozen=True)
class Ink:
    """A character and its middle, in pixels."""

    character: str
    x: float
    y: float


@dataclass
class Page:
    """A grey page of ``SIDE`` x ``SIDE`` pixels, and the characters that are on it."""

    paper: int = 255
    ink: int = 0
    inks: list[Ink] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.image = Image.new("L", (SIDE, SIDE), self.paper)
        self._draw = ImageDraw.Draw(self.image)

    @staticmethod
    def width(text: str, size: int) -> float:
        """Pixels that a line takes."""
        return _width(text, size)

    def text(self, x: float, y: float, text: str, size: int, anchor: str = "l") -> float:
        """Draw a line; return its width in pixels.

        x, y: its left end ("l"), middle ("m") or right end ("r"), and its top.
        Raises DoesNotFit where it would leave the page.
        """
        width = _width(text, size)
        left = x - {"l": 0, "m": width / 2, "r": width}[anchor]
        if left < 2 or left + width > SIDE - 2 or y < 0 or y + size > SIDE - 2:
            raise DoesNotFit(text)
        self._draw.text((left, y), text, fill=self.ink, font=_font(size), anchor="la")
        for character in text:
            step = _width(character, size)
            if character != " ":
                self.inks.append(Ink(character, left + step / 2, y + size / 2))
            left += step
        return width

    @staticmethod
    def require(taken: float, room: float) -> None:
        """Raise DoesNotFit where more is taken than there is room."""
        if taken > room:
            raise DoesNotFit

    def line(self, x0: float, y0: float, x1: float, y1: float) -> None:
        """Draw a thin line."""
        self._draw.line((x0, y0, x1, y1), fill=(self.ink + self.paper) // 2)

    def box(self, x: float, y: float, side: int, *, crossed: bool) -> None:
        """Draw a box to tick."""
        self._draw.rectangle((x, y, x + side, y + side), outline=self.ink)
        if crossed:
            self._draw.line((x + 2, y + 2, x + side - 2, y + side - 2), fill=self.ink)
            self._draw.line((x + 2, y + side - 2, x + side - 2, y + 2), fill=self.ink)

    def pixels(self, rng: random.Random) -> npt.NDArray[np.uint8]:
        """The page with a little noise: [SIDE, SIDE] uint8."""
        grey = np.asarray(self.image, dtype=np.int16)
        if rng.random() < 0.5:
            noise = np.random.default_rng(rng.getrandbits(32))
            grey = grey + noise.integers(-8, 9, grey.shape, dtype=np.int16)
        return np.clip(grey, 0, 255).astype(np.uint8)

    def labels(self) -> npt.NDArray[np.uint8]:
        """The characters in each cell, row by row: [CELLS * CELLS, SLOTS] uint8.

        0 stands for none, n for the nth of ``CHARACTERS``.
        """
        found = np.full((CELLS * CELLS, SLOTS), _OTHER, dtype=np.uint8)
        used = [0] * (CELLS * CELLS)
        for ink in sorted(self.inks, key=lambda one: (one.y, one.x)):
            cell = int(ink.y // CELL) * CELLS + int(ink.x // CELL)
            if used[cell] < SLOTS:
                found[cell, used[cell]] = CHARACTERS.index(ink.character) + 1
                used[cell] += 1
        return found
