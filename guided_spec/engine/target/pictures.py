"""The rows that the pictures of requests have while these run."""

from __future__ import annotations

from collections.abc import Container, Iterable
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor

from guided_spec.engine.request import Request, State
from guided_spec.errors import ModelError
from guided_spec.models.causal_lm import CausalLM
from guided_spec.models.pictures.axes import SlotAxes
from guided_spec.models.pictures.rows import PictureRows
from guided_spec.models.pictures.spans import SlotSpans
from guided_spec.models.pictures.vision import SplitModel, VisionTower


class PromptAxes(NamedTuple):
    """tower: counts the positions of a prompt with pictures. slots: of the texts that run."""

    tower: VisionTower
    slots: SlotAxes


class PicturePlaces:
    """Gives requests the rows of their pictures, and takes them back when they have ended.

    A request that is requeued keeps them. rows: None where the model reads no pictures.
    axes: what gives a prompt's positions, and where they are kept; None where they have one axis.
    spans: where pictures are read in both directions, those of texts; else None.
    """

    def __init__(
        self,
        rows: PictureRows | None,
        axes: PromptAxes | None = None,
        spans: SlotSpans | None = None,
    ) -> None:
        self.rows, self._axes, self._spans = rows, axes, spans
        self._holders: dict[Request, Tensor | None] = {}  # and positions of their prompts

    @classmethod
    def of(cls, split: SplitModel, target: CausalLM) -> PicturePlaces:
        """target: of the split model's language. Raises ModelError where it keeps no positions, or
        reads in one direction only."""
        lacks_spans = target.spans is None and SlotSpans.of(split.language) is not None
        if lacks_spans or (split.tower is not None and target.axes is None):
            kind = split.language.config.model_type
            raise ModelError(f"model_type={kind!r}: pictures need texts over slots, it has none")
        axes = None
        if split.tower is not None and target.axes is not None:
            axes = PromptAxes(split.tower, target.axes)
        return cls(split.pictures, axes, target.spans)

    @property
    def num_read(self) -> int:
        """Pictures that the vision tower has read."""
        return 0 if self.rows is None else self.rows.num_read

    def read_ahead(self, requests: Iterable[Request], most: int | None) -> None:
        """Read the pictures of several requests together, where there is room; see ``place``.

        What cannot be read is left to the request whose it is.
        """
        if self.rows is None:
            return
        waiting = [one.job.pictures for one in requests if not one.has_pictures_placed]
        prompts = [prompt for prompt in waiting if prompt is not None]
        if len(prompts) < 2:
            return
        with suppress(Exception):  # towers raise nearly every class; it is raised again for its own
            self.rows.read_ahead((one for prompt in prompts for one in prompt.pictures), most)

    def place(self, request: Request, most: int | None = None) -> bool:
        """Whether it has rows for all its pictures; False where it has to be asked for again.

        Then others have to end before, or more than ``most`` are to be read. Raises what the vision
        tower raises.
        """
        prompt = request.job.pictures
        if prompt is None or request.has_pictures_placed:
            return True
        assert self.rows is not None, "no prompt has pictures that the model cannot read"
        ids = self.rows.take(prompt.pictures, most)
        if ids is None:
            return False
        self._holders[request] = None
        if self._axes is not None:
            self._holders[request] = self._axes.tower.positions(prompt)
        request.place_pictures(ids)
        request.spans = () if self._spans is None else prompt.spans
        return True

    def begin(self, request: Request) -> None:
        """The request has got a slot, in which its prompt will be read."""
        if self._spans is not None:
            self._spans.put(request.text.slot, request.spans)
        if self._axes is not None:
            prompt = request.job.pictures
            end = prompt.places[-1] + 1 if prompt is not None and prompt.places else 0
            self._axes.slots.put(request.text.slot, self._holders.get(request), end)

    def release_ended(self, in_flight: Container[Request]) -> None:
        """in_flight: requests whose rows a launched step still reads."""
        ended = [
            one for one in self._holders if one.state is State.FINISHED and one not in in_flight
        ]
        for request in ended:
            del self._holders[request]
            assert self.rows is not None
            assert request.job.pictures is not None
            self.rows.release(request.job.pictures.pictures)
