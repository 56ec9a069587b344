"""The plugin for vLLM: does nothing unless the environment variable GUIDED_SPEC_VLLM asks for it.

vLLM calls ``register`` in each of its processes, through the entry point group
``vllm.general_plugins``. The proposer needs no plugin: vLLM imports it by its dotted name, see
``vllm_proposer``.
"""

from __future__ import annotations

import importlib
import os

from guided_spec.errors import ConfigError

__all__ = ["FEATURES", "VARIABLE", "register"]

VARIABLE = "GUIDED_SPEC_VLLM"
FEATURES = {
    "exact": "guided_spec.integrations.vllm_exact",
    "schemas": "guided_spec.integrations.vllm_schemas",
}


def register() -> None:
    """Install the features that the variable names, separated by commas; again changes nothing.

    Raises ConfigError for an unknown name, for a version of vLLM that the features were not written
    for, and when a function they wrap is not the one of that version.
    """
    value = os.environ.get(VARIABLE, "")
    names = [name.strip() for name in value.split(",") if name.strip()]
    unknown = [name for name in names if name not in FEATURES]
    if unknown:
        raise ConfigError(VARIABLE, value, f"name some of {','.join(FEATURES)}, or unset it")
    if names:
        patches = importlib.import_module("guided_spec.integrations.vllm_patches")
        for name in names:
            feature = importlib.import_module(FEATURES[name])
            patches.install(f"{VARIABLE}={name}", feature.PATCHES)
