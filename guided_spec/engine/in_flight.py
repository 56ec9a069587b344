"""Steps that are launched and not yet committed: one, or two that take turns.

A draft under masks waits for the host at each of its tokens, and meanwhile the device has nothing
else to do. So the texts of a large batch decode in two halves: one drafts, with the host, while the
device verifies the other. Two forwards of half the tokens each must not take much longer than one
of all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from guided_spec.core import DecodeBatch, PromptPiece
from guided_spec.engine.draft_length import DraftLengthPolicy, ForwardTimes
from guided_spec.engine.request import Request
from guided_spec.engine.target.target import Target
from guided_spec.models.packed.graph_pool import bucket
from guided_spec.ops.host import named_range
from guided_spec.step import Committed, Step, commit

# As many times as long as the forward of all texts those of both halves may take. What is above it
# is about what the host takes for a draft of so many.
WORTH = 1.35
STAYING = 0.75  # of the texts that turns begin with


class Piece(NamedTuple):
    """The next tokens of a request's prompt."""

    request: Request
    tokens: PromptPiece

    @classmethod
    def next_of(cls, request: Request, most: int) -> Piece:
        """Up to ``most`` tokens of what is not read of a request."""
        start, tokens = request.num_cached, request.text.tokens
        end = start + min(most, request.num_unread)
        return cls(request, PromptPiece(request.text.slot, start, tokens[start:end], tokens[end]))


class StepInFlight(NamedTuple):
    """A launched step.

    requests: of ``batch``. pieces: prompt pieces that its forward reads. policy: the draft length
    policy that chose ``num_drafted``; None: K was used. started: time of the launch, in seconds.
    """

    requests: Sequence[Request]
    pieces: Sequence[Piece]
    batch: DecodeBatch
    step: Step
    policy: DraftLengthPolicy | None
    num_drafted: int
    started: float

    @property
    def everyone(self) -> Iterator[Request]:
        """Requests that decode or read a prompt in this step; some of them twice."""
        yield from self.requests
        yield from (piece.request for piece in self.pieces)

    def commit(self, target: Target) -> list[Committed]:
        """Wait for the step; returns what it committed to each text."""
        batch, step = self.batch, self.step
        with named_range("commit"):
            committed = commit(batch, step.accepted, step.packed)
            num_accepted = [row.num_accepted for row in committed]
            target.commit(batch, num_accepted, step.output)
        return committed


class StepsInFlight:
    """The steps in flight of an engine, in the order of their launch.

    turns_from: texts that have to decode for two halves of them to take turns; None: never.
    """

    def __init__(self) -> None:
        self._steps = deque[StepInFlight]()
        self.turns_from: int | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def measure(self, times: ForwardTimes, width: int, most: int) -> None:
        """Let texts take turns from now on, if that pays.

        times: of forwards; empty where nothing was measured, and then no texts take turns. width:
        tokens of a text in a forward. most: texts at most.
        """
        for num_texts in range(most, 1, -1) if times else ():
            half = -(-num_texts // 2)
            both = 2 * times.of(bucket(half * width))
            if both > WORTH * times.of(bucket(num_texts * width)):
                break
            self.turns_from = num_texts

    def take_turns(self, num_texts: int) -> bool:
        """Whether ``num_texts`` texts decode in two halves."""
        if self.turns_from is None:
            return False
        # Once begun, turns go on with somewhat fewer texts: each change costs about half a step.
        return num_texts >= (STAYING * self.turns_from if self._steps else self.turns_from)

    def launch(self, step: StepInFlight) -> None:
        """Add a launched step."""
        self._steps.append(step)

    def pop(self) -> StepInFlight:
        """Remove and return the oldest step, which is to be committed."""
        return self._steps.popleft()

    def drop(self) -> None:
        """Forget all steps without a commit: their requests have failed."""
        self._steps.clear()

    @property
    def requests(self) -> set[Request]:
        """Requests that decode or read a prompt in any step in flight."""
        return {request for step in self._steps for request in step.everyone}

    @property
    def reads(self) -> dict[int, int]:
        """Prompt tokens read once the steps in flight are done, by the requests' numbers."""
        return {
            request.number: tokens.start + len(tokens.token_ids)
            for step in self._steps
            for request, tokens in step.pieces
        }
