"""The plugin for vLLM: does nothing unless the environment variable GUIDED_SPEC_VLLM asks for it.

vLLM calls ``register`` in each of its processes, through the entry point group
``vllm.general_plugins``. The proposer needs no plugin: vLLM imports it by its dotted name, see
``vllm_proposer``.
"""

from __future__ import annotations

import importlib
import os

from guided_spec.errors import ConfigError

__all__ = ["FEATURES", "VARIABLE", "register", "requested"]

VARIABLE = "GUIDED_SPEC_VLLM"
FEATURES = {
    "drafts": "guided_spec.integrations.vllm_drafts",
    "drafts:mask": "guided_spec.integrations.vllm_drafts",
    "drafts:topk_walk": "guided_spec.integrations.vllm_drafts",
    "exact": "guided_spec.integrations.vllm_exact",
    "schemas": "guided_spec.integrations.vllm_schemas",
}


def requested() -> list[str]:
    """The features that the variable names, separated by commas.

    Raises ConfigError for an unknown name and for two policies of ``drafts``.
    """
    value = os.environ.get(VARIABLE, "")
    names = [name.strip() for name in value.split(",") if name.strip()]
    if any(name not in FEATURES for name in names):
        raise ConfigError(VARIABLE, value, f"name some of {','.join(FEATURES)}, or unset it")
    if sum(":" in name for name in names) > 1:
        raise ConfigError(VARIABLE, value, "name one policy of drafts")
    return names


def register() -> None:
    """Install the requested features; again changes nothing.

    Raises ConfigError as ``requested`` does, for a version of vLLM that the features were not
    written for, and when a function they wrap is not the one of that version.
    """
    names = requested()
    if names:
        patches = importlib.import_module("guided_spec.integrations.vllm_patches")
        for name in names:
            feature = importlib.import_module(FEATURES[name])
            patches.install(f"{VARIABLE}={name}", feature.PATCHES)
        patches.log(f"{', '.join(names)} for vLLM {patches.installed_version()}")
