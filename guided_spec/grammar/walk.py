"""One request's way along its draft: its fork, the tokens so far, and whether more may follow."""

from __future__ import annotations

from guided_spec.grammar.constraint import Fork

__all__ = ["Walk"]


class Walk:
    """Made once a step and request.

    request: its index in the batch. fork: None for a free text, and until it is needed.
    drafted: the legal draft tokens so far. filled: mask rows 0 to filled - 1 are filled.
    has_ended: the draft's last token ended the text, or nothing could follow it from the start.
    is_open: nothing has ended the draft. is_paused: the turn is another proposer's; is_held: the
    request's tokens are walked later. refused: the illegal token that ended the draft. starved:
    positions at which the drafter knew none of the legal tokens.
    """

    __slots__ = (
        "drafted",
        "filled",
        "fork",
        "has_ended",
        "is_held",
        "is_open",
        "is_paused",
        "limit",
        "refused",
        "request",
        "starved",
    )

    def __init__(self, request: int, fork: Fork | None, limit: int) -> None:
        self.request = request
        self.fork = fork
        self.limit = limit
        self.drafted: list[int] = []
        self.filled = 0
        self.has_ended = fork is not None and fork.matcher.is_terminated()
        self.is_open = limit > 0 and not self.has_ended
        self.is_paused = False
        self.is_held = False
        self.refused: int | None = None
        self.starved = 0

    @property
    def num_missing(self) -> int:
        """Mask rows of the draft so far that are not filled; a complete text has none behind it."""
        if self.fork is None:
            return 0
        missing = len(self.drafted) + (not self.has_ended) - self.filled
        return missing if missing > 0 else 0  # a third of the time of ``max``

    @property
    def is_drafting(self) -> bool:
        """Whether a token may be appended now."""
        return self.is_open and not self.is_paused and not self.is_held

    def append(self, token_id: int) -> bool:
        """Append a token; False, and no change, where the fork refuses it."""
        fork = self.fork
        if fork is not None:
            if not fork.accept(token_id):
                return False
            self.has_ended = fork.matcher.is_terminated()
        self.drafted.append(token_id)
        self.is_open = not self.has_ended and len(self.drafted) < self.limit
        return True

    def take(self, fork: Fork) -> None:
        """From here on the fork goes with the draft, of which there is nothing yet."""
        self.fork = fork
        if fork.matcher.is_terminated():  # it disagrees with its text, which fails at the commit
            self.end()

    def end(self) -> None:
        """The text is complete: nothing follows."""
        self.has_ended, self.is_open = True, False

    def refuse(self, token_id: int) -> None:
        """An illegal token ends the draft."""
        self.is_open, self.refused = False, token_id
