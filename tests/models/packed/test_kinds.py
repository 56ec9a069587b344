"""Classes of transformers' that have a packed form are known by their names alone."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from torch import nn

from guided_spec.models.packed.decoder import FAMILY
from guided_spec.models.packed.feed import KNOWN
from guided_spec.models.packed.latent import KINDS as LATENT
from guided_spec.models.packed.layer import IN_PAIRS, SHIFTS
from guided_spec.models.target import kind_of


def module_of(kind: str) -> Any:
    return importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")


@pytest.mark.slow
def test_the_names_are_transformers_own() -> None:
    modules = [module_of(kind) for kind in (*FAMILY, *LATENT, *IN_PAIRS, "qwen3_vl_moe")]
    names = {name for one in modules for name, found in vars(one).items() if type(found) is type}
    assert {*KNOWN, *SHIFTS} <= names


def test_a_class_of_the_same_name_is_another_one() -> None:
    """Such as one that comes with a checkpoint."""
    norm = module_of("gemma3").Gemma3RMSNorm
    other = type("Gemma3RMSNorm", (nn.Module,), {"__module__": "transformers_modules.a"})()
    assert kind_of(norm(4)) == "gemma3"
    assert kind_of(type("Child", (norm,), {})(4)) == ""
    assert kind_of(other) == ""
