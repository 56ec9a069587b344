"""The rows that the pictures of requests have while these run."""

from __future__ import annotations

from collections.abc import Container

from guided_spec.engine.request import Request, State
from guided_spec.models.pictures.rows import PictureRows


class PicturePlaces:
    """Gives requests the rows of their pictures, and takes them back when they have ended.

    A request that is requeued keeps them. rows: None where the model reads no pictures.
    """

    def __init__(self, rows: PictureRows | None) -> None:
        self._rows = rows
        self._holders: list[Request] = []

    def place(self, request: Request) -> bool:
        """Whether it has rows for all its pictures; False where it must wait for others' end.

        Raises what the vision tower raises.
        """
        prompt = request.job.pictures
        if prompt is None or request.has_pictures_placed:
            return True
        assert self._rows is not None, "no prompt has pictures that the model cannot read"
        ids = self._rows.take(prompt.pictures)
        if ids is None:
            return False
        request.place_pictures(ids)
        self._holders.append(request)
        return True

    def release_ended(self, in_flight: Container[Request]) -> None:
        """in_flight: requests whose rows a launched step still reads."""
        left = []
        for request in self._holders:
            if request.state is not State.FINISHED or request in in_flight:
                left.append(request)
            else:
                assert self._rows is not None
                assert request.job.pictures is not None
                self._rows.release(request.job.pictures.pictures)
        self._holders = left
