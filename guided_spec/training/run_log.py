"""What a run reports while it trains: a progress bar, lines of JSON, and trackers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from guided_spec.errors import ConfigError
from guided_spec.training.options import TrainOptions

LOGS, LINES = "logs", "metrics.jsonl"  # a folder in the output of a run, and a file in it
PAUSE = 60.0  # seconds between lines on a stderr that is no terminal


class RunLog:
    """Writes on the main process only; a context manager.

    On a terminal there is a bar, elsewhere a line a minute.

    accelerator: an ``accelerate.Accelerator`` that logs with the trackers of ``options``. folder:
    for ``LINES``. done, total: optimizer steps done before, and of the whole run. What an earlier
    process logged for later steps is dropped: they are run again. Only TensorBoard and the lines go
    on where they ended; other trackers show a resumed run as one of its own.

    Entering raises ConfigError for a tracker that does not start.
    """

    def __init__(
        self, accelerator: Any, folder: Path, options: TrainOptions, *, done: int, total: int
    ) -> None:
        self._accelerator, self._options = accelerator, options
        self._path = folder / LINES
        self._done, self._total = done, total
        # disable: None is where stderr is no terminal.
        is_hidden = None if accelerator.is_main_process else True
        self._bar = tqdm(total=total, initial=done, unit="step", disable=is_hidden)
        self._loss = ""
        self._started = self._written = time.monotonic()

    def __enter__(self) -> RunLog:
        if self._accelerator.is_main_process:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lines = self._path.read_text().splitlines() if self._path.exists() else []
            kept = [line for line in lines if json.loads(line)["step"] <= self._done]
            self._path.write_text("".join(line + "\n" for line in kept))
        try:
            self._start_trackers()
        except Exception as error:  # each has its own: no key, no network, no such server
            names = ", ".join(chosen_trackers(self._options))
            fix = f"cannot start: {error}; correct that, or pass --tracker none"
            raise ConfigError("tracker", names, fix) from error
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
        trackers, self._accelerator.trackers = self._accelerator.trackers, []
        for tracker in trackers:
            tracker.finish()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of one step, under their names."""
        if self._accelerator.is_main_process:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
            if "loss" in values:
                self._loss = f"loss {values['loss']:.4f}"
                self._bar.set_postfix_str(self._loss)
        self._accelerator.log(dict(values), step=step)

    def advance(self, step: int) -> None:
        """Show that ``step`` is done."""
        if not self._bar.disable:
            self._bar.update(step - self._bar.n)
        elif self._accelerator.is_main_process and self._is_due(step):
            seconds = time.monotonic() - self._started
            shape = {"initial": self._done, "unit": "step", "postfix": self._loss}
            self.say(tqdm.format_meter(step, self._total, seconds, ncols=0, **shape))

    def say(self, line: str) -> None:
        """A line for who watches the run, on stderr."""
        if self._accelerator.is_main_process:
            tqdm.write(line, file=sys.stderr)

    def _start_trackers(self) -> None:
        options = self._options
        name = Path(options.output).resolve().name
        own = {
            "tensorboard": {"purge_step": self._done + 1},
            "wandb": {"name": name},
            "trackio": {"name": name},
            "mlflow": {"run_name": name},
        }
        self._accelerator.init_trackers(options.project, init_kwargs=own)
        settings = {key: _plain(value) for key, value in asdict(options).items()}
        for tracker in self._accelerator.trackers:
            if tracker.name != "tensorboard":  # would show them as a run of its own
                tracker.store_init_configuration(settings)

    def _is_due(self, step: int) -> bool:
        now = time.monotonic()
        is_due = step == self._total or now >= self._written + PAUSE
        self._written = now if is_due else self._written
        return is_due


def _plain(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def chosen_trackers(options: TrainOptions) -> list[str]:
    """The names of the trackers, each once. Raises ConfigError where one is not installed."""
    from accelerate.tracking import get_available_trackers  # an extra

    names = [name for name in dict.fromkeys(options.tracker) if name != "none"]
    for name in names:
        if name not in map(str, get_available_trackers()):
            fix = f"is not installed: pip install {name}, or pass --tracker none"
            raise ConfigError("tracker", name, fix)
    return names
