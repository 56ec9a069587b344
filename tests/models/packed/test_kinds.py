"""Classes of transformers' that have a packed form are known by their names alone."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from torch import nn

from guided_spec.models.packed.decoder import FAMILY
from guided_spec.models.packed.feed import GPT_OSS, GROUPED, KNOWN, MAY_NORMALIZE, SHARING, SOFTMAX
from guided_spec.models.packed.kinds import is_a_kind, is_kind
from guided_spec.models.packed.latent import COMPLEX
from guided_spec.models.packed.latent import KNOWN as LATENT
from guided_spec.models.packed.layer import SHIFTED_NORMS


def family(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


@pytest.mark.every_case
@pytest.mark.parametrize("name", FAMILY)
def test_the_names_of_models(name: str) -> None:
    module = family(FAMILY[name])
    assert getattr(module, name).__module__ == module.__name__


def test_the_names_of_their_parts() -> None:
    modules = [family(name) for name in {*FAMILY.values(), "qwen3_vl_moe"}]
    known = {
        name for one in modules for name, value in vars(one).items() if isinstance(value, type)
    }
    assert {*KNOWN, *LATENT, *SHIFTED_NORMS} <= known
    assert {*GPT_OSS, *GROUPED, *MAY_NORMALIZE, *SHARING, *SOFTMAX} <= {*KNOWN}
    assert {*COMPLEX} <= {*LATENT}


def test_a_class_of_the_same_name_is_another_one() -> None:
    """Such as one that comes with a checkpoint."""
    norm = family("gemma3").Gemma3RMSNorm
    child = type("Child", (norm,), {})(4)
    other = type("Gemma3RMSNorm", (nn.Module,), {"__module__": "transformers_modules.a"})()
    assert is_kind(norm(4), SHIFTED_NORMS)
    assert is_a_kind(child, SHIFTED_NORMS)
    assert not is_kind(child, SHIFTED_NORMS)
    assert not is_a_kind(other, SHIFTED_NORMS)
