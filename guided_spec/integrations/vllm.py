"""The plugin for vLLM: does nothing unless the environment variable GUIDED_SPEC_VLLM asks for it.

vLLM calls ``register`` in each of its processes, through the entry point group
``vllm.general_plugins``. The proposer needs no plugin: vLLM imports it by its dotted name, see
``vllm_proposer``.
"""

from __future__ import annotations

import importlib
import os

from guided_spec.errors import ConfigError

__all__ = ["FEATURES", "RAY_VARIABLE", "VARIABLE", "register", "requested"]

VARIABLE = "GUIDED_SPEC_VLLM"
RAY_VARIABLE = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"  # where vLLM looks for names to copy
FEATURES = {
    "drafts": "guided_spec.integrations.vllm_drafts",
    "exact": "guided_spec.integrations.vllm_exact",
    "schemas": "guided_spec.integrations.vllm_schemas",
}


def requested() -> list[str]:
    """The features that the variable names, separated by commas.

    Raises ConfigError for an unknown name.
    """
    value = os.environ.get(VARIABLE, "")
    names = [name.strip() for name in value.split(",") if name.strip()]
    if any(name not in FEATURES for name in names):
        raise ConfigError(VARIABLE, value, f"name some of {','.join(FEATURES)}, or unset it")
    return names


def register() -> None:
    """Install the requested features, here and in processes on Ray; again changes nothing.

    Raises ConfigError as ``requested`` does, for a version of vLLM that the features were not
    written for, and when a function they wrap is not the one of that version.
    """
    names = requested()
    if names:
        _carry_to_ray()
        patches = importlib.import_module("guided_spec.integrations.vllm_patches")
        for name in names:
            feature = importlib.import_module(FEATURES[name])
            patches.install(f"{VARIABLE}={name}", feature.PATCHES)
        patches.log(f"{', '.join(names)} for vLLM {patches.installed_version()}")


def _carry_to_ray() -> None:
    """Let the processes that vLLM starts on Ray have the variable: vLLM copies those it knows."""
    copied = [name.strip() for name in os.environ.get(RAY_VARIABLE, "").split(",") if name.strip()]
    if VARIABLE not in copied:
        os.environ[RAY_VARIABLE] = ",".join([*copied, VARIABLE])
