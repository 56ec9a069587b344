"""What a run reports while it goes on: a progress bar, TensorBoard, and lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

__all__ = ["LINES", "RunLog"]

LINES = "metrics.jsonl"


class RunLog:
    """Writes on the main process only; a context manager.

    accelerator: an ``accelerate.Accelerator`` that logs with TensorBoard. folder: for ``LINES``.
    done, total: optimizer steps done before, and of the whole run. What an earlier process logged
    for later steps is dropped: they are run again.
    """

    def __init__(self, accelerator: Any, folder: Path, *, done: int, total: int) -> None:
        self._accelerator = accelerator
        self._path = folder / LINES
        self._done = done
        # disable: None is where stderr is no terminal.
        is_hidden = None if accelerator.is_main_process else True
        self._bar = tqdm(total=total, initial=done, unit="step", disable=is_hidden)

    def __enter__(self) -> RunLog:
        if self._accelerator.is_main_process:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lines = self._path.read_text().splitlines() if self._path.exists() else []
            kept = [line for line in lines if json.loads(line)["step"] <= self._done]
            self._path.write_text("".join(line + "\n" for line in kept))
        settings = {"tensorboard": {"purge_step": self._done + 1}}
        self._accelerator.init_trackers("", init_kwargs=settings)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
        for tracker in self._accelerator.trackers:
            tracker.finish()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of one step, under their names."""
        if self._accelerator.is_main_process:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
            if "loss" in values:
                self._bar.set_postfix_str(f"loss {values['loss']:.4f}")
        self._accelerator.log(dict(values), step=step)

    def advance(self, step: int) -> None:
        """Move the bar to ``step``."""
        self._bar.update(step - self._bar.n)
