"""One request's text as it is committed: whole characters only, and never part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from guided_spec.grammar.text import TextDecoder
from guided_spec.grammar.vocabulary import Vocabulary

__all__ = ["OutputText"]


class OutputText:
    """Decodes tokens into text and watches for stop strings, also across token boundaries.

    prefix: what the text begins with; stop strings are not searched in it.
    """

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str], prefix: str = "") -> None:
        self.is_stopped = False
        self._text = prefix
        self._decoder = TextDecoder(vocabulary)
        self._stop = tuple(stop)
        self._held = ""
        self._unread: list[int] = []

    @property
    def text(self) -> str:
        """What has been released.

        Text that could still turn out to be the beginning of a stop string, or of a character, is
        held back until that is known.
        """
        self._read()
        return self._text

    def feed(self, token_id: int) -> bool:
        """Append a token; returns whether a stop string is now complete, which ends the text."""
        if not self._stop:
            self._unread.append(token_id)  # nobody may want the text before its end
            return False
        self._held += self._decoder.feed([token_id])
        self._find_stop()
        if not self.is_stopped:
            self._release(len(self._held) - self._tail_in_doubt())
        return self.is_stopped

    @property
    def length(self) -> int:
        """Characters of the text, those that are held back included."""
        self._read()
        return len(self._text) + len(self._held)

    def finish(self) -> None:
        """The text ends here: release what was held back, unless a stop string ended it."""
        if not self.is_stopped:
            self._read()
            self._held += self._decoder.flush()
            self._release(len(self._held))

    def _read(self) -> None:
        if self._unread:
            self._text += self._decoder.feed(self._unread)
            self._unread.clear()

    def _release(self, length: int) -> None:
        self._text += self._held[:length]
        self._held = self._held[length:]

    def _find_stop(self) -> None:
        starts = [(self._held.find(stop), len(stop)) for stop in self._stop]
        # The one that is complete first, however the text is cut into tokens.
        found = min(((at + length, at) for at, length in starts if at >= 0), default=None)
        if found is not None:
            self._release(found[1])
            self.is_stopped = True

    def _tail_in_doubt(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest
