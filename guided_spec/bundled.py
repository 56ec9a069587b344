"""What comes with the package: the bundled models, and what they were not trained on."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

BUNDLED = "bundled"  # the name of the model that comes with the package, and of its drafts
READER = "bundled-reader"  # the name of the one that reads pictures


def bundled_asset(name: str) -> str:
    """A path: ``target``, ``draft``, ``eagle3``, ``mtp``, ``dspark``, ``reader``, ``heldout.jsonl``
    or ``pages``, which are pictures.
    """
    return str(files("guided_spec") / "assets" / name)


def named_model(model: Any) -> Any:
    """What a user calls a model; a folder for None, "bundled" and "bundled-reader"."""
    if model in (None, BUNDLED):
        return bundled_asset("target")
    return bundled_asset("reader") if model == READER else model


def name_of(path: str) -> str:
    """What a bundled model is called; the path itself of others."""
    names = {bundled_asset("target"): BUNDLED, bundled_asset("reader"): READER}
    return names.get(path, path)
