"""What comes with the package: the bundled models, and documents that they were not trained on."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

BUNDLED = "bundled"  # the name of the model that comes with the package, and of its drafts


def bundled_asset(name: str) -> str:
    """The path of ``target``, ``draft``, ``eagle3``, ``mtp``, ``dspark`` or ``heldout.jsonl``."""
    return str(files("guided_spec") / "assets" / name)


def named_model(model: Any) -> Any:
    """What a user calls a model; the folder of the bundled one for None and for "bundled"."""
    return bundled_asset("target") if model in (None, BUNDLED) else model
