"""Checkpoints of a run that is still going on, so that it can be resumed where it was killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from guided_spec.errors import ConfigError

__all__ = ["CHECKPOINTS", "Checkpoints", "Progress", "check_folder", "check_output"]

CHECKPOINTS = "checkpoints"  # in the output folder of a run

PROGRESS = "progress.json"
PARTIAL = "unfinished"
MODEL_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json")


def check_output(folder: Path, *, resume: bool) -> None:
    """Refuse the output folder of a run that it cannot write to, or that holds another one's files.

    Raises ConfigError where a model would be overwritten, where there are checkpoints that
    ``resume`` does not ask for, and for a folder that cannot be written.
    """
    has_checkpoints = Checkpoints(folder / CHECKPOINTS, 1, {}).newest() is not None
    if has_checkpoints and not resume:
        fix = "holds the checkpoints of a run: pass --resume, or another folder"
        raise ConfigError("output", str(folder), fix)
    models = [name for name in MODEL_FILES if (folder / name).exists()]
    if models and not has_checkpoints:
        fix = f"holds a model ({', '.join(models)}) that would be overwritten: pass another folder"
        raise ConfigError("output", str(folder), fix)
    check_folder("output", folder)


def check_folder(option: str, folder: Path) -> None:
    """Make a folder, and raise ConfigError, naming the option, where it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        fix = f"cannot be written to ({error}): pass another folder"
        raise ConfigError(option, str(folder), fix) from error


@dataclass
class Progress:
    """How far a run is.

    step: optimizer steps done. epoch: the one it is in, from 0. batch: batches of that epoch done
    by each process. tokens: document tokens seen by all processes. seconds: of training.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Checkpoints:
    """The newest few checkpoints of one run, in a folder each.

    folder: where they are. keep: how many. identity: what must not change when the run is resumed,
        because the order of the data depends on it; JSON values.
    """

    def __init__(self, folder: Path, keep: int, identity: Mapping[str, Any]) -> None:
        self._folder, self._keep = folder, keep
        self._identity = dict(identity)

    def newest(self) -> Path | None:
        """The folder of the last complete checkpoint; None where there is none."""
        found = self._complete()
        return found[-1] if found else None

    def save(self, accelerator: Any, progress: Progress) -> Path:
        """Write model, optimizer, random states and ``progress``; every process has to call it.

        Returns its folder, which gets its name when it is complete: a kill leaves no broken one.
        """
        partial, final = self._folder / PARTIAL, self._folder / f"step_{progress.step:06d}"
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(partial))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            record = {"progress": asdict(progress), "identity": self._identity}
            (partial / PROGRESS).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            for old in self._complete()[: -self._keep]:
                shutil.rmtree(old)
        accelerator.wait_for_everyone()
        return final

    def load(self, accelerator: Any) -> Progress:
        """Restore the newest checkpoint; every process has to call it. A fresh start if none.

        Raises ConfigError when the run's identity was another one.
        """
        folder = self.newest()
        if folder is None:
            return Progress()
        record = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        for name, value in self._identity.items():
            before = record["identity"].get(name)
            if before != value:
                fix = f"was {before!r} in {folder}: pass that, or start anew in another folder"
                raise ConfigError(name, value, fix)
        accelerator.load_state(str(folder))
        return Progress(**record["progress"])

    def _complete(self) -> list[Path]:
        found = [path.parent for path in self._folder.glob(f"step_*/{PROGRESS}")]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))
