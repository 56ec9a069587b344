"""A flow: lines that are printed one below the other."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tools.drawn_documents.page import SIDE, Page


@dataclass
class Flow:
    """Where the next line goes. left, right: its ends. y: its top. size, pitch: in pixels."""

    page: Page
    left: float
    right: float
    y: float
    size: int
    pitch: float

    @classmethod
    def anywhere(cls, rng: random.Random, page: Page, margin: int) -> Flow:
        """A flow with random margins, size and spacing."""
        size = rng.choice((11, 12, 12, 13, 13, 14))
        left, right = rng.randint(5, margin), SIDE - rng.randint(5, margin)
        top = rng.randint(3, rng.choice((12, 24, 90)))
        return cls(page, left, right, top, size, size + rng.randint(3, 7))

    def line(self, text: str, anchor: str = "l", larger: int = 0) -> None:
        """Print a line at the left ("l"), in the middle ("m") or at the right ("r")."""
        x = {"l": self.left, "m": (self.left + self.right) / 2, "r": self.right}[anchor]
        self.page.text(x, self.y, text, self.size + larger, anchor)
        self.y += self.pitch + larger

    def pair(self, name: str, value: str, larger: int = 0) -> None:
        """Print a name at the left and its value at the right."""
        size = self.size + larger
        taken = self.page.text(self.left, self.y, name, size)
        taken += self.page.text(self.right, self.y, value, size, "r")
        self.page.require(taken + 6, self.right - self.left)
        self.y += self.pitch + larger

    def rule(self) -> None:
        """Print a thin line from end to end."""
        self.page.line(self.left, self.y, self.right, self.y)
        self.y += 5
