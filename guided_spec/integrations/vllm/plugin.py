"""The plugin for vLLM: does nothing unless the environment variable GUIDED_SPEC_VLLM asks for it.

vLLM calls ``register`` in each of its processes, through the entry point group
``vllm.general_plugins``. The proposer needs no plugin: vLLM imports it by its dotted name, see
``proposer``.

Functions of vLLM that are wrapped, each only in the versions it was read in.

A wrapper sees the arguments of the function it was written for. Another version, or a function that
somebody else has changed, is refused before anything is replaced.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from guided_spec.errors import ConfigError

__all__ = [
    "FEATURES",
    "RAY_VARIABLE",
    "VARIABLE",
    "VERSIONS",
    "Patch",
    "Wrapper",
    "around_drafting",
    "install",
    "installed_version",
    "log",
    "register",
    "requested",
]

VARIABLE = "GUIDED_SPEC_VLLM"
RAY_VARIABLE = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"  # where vLLM looks for names to copy
FEATURES = {
    "drafts": "guided_spec.integrations.vllm.drafts",
    "exact": "guided_spec.integrations.vllm.exact",
    "schemas": "guided_spec.integrations.vllm.schemas",
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
        patches = importlib.import_module("guided_spec.integrations.vllm.plugin")
        for name in names:
            feature = importlib.import_module(FEATURES[name])
            patches.install(f"{VARIABLE}={name}", feature.PATCHES)
        patches.log(f"{', '.join(names)} for vLLM {patches.installed_version()}")


def _carry_to_ray() -> None:
    """Let the processes that vLLM starts on Ray have the variable: vLLM copies those it knows."""
    copied = [name.strip() for name in os.environ.get(RAY_VARIABLE, "").split(",") if name.strip()]
    if VARIABLE not in copied:
        os.environ[RAY_VARIABLE] = ",".join([*copied, VARIABLE])


VERSIONS = ("0.25.1", "0.33.0")
_MARK = "__guided_spec_wrappers__"  # those that a function has around it

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


class Patch(NamedTuple):
    """One function and what is put around it.

    module, path: where it is defined: ``"vllm.v1.core.sched.scheduler"``, ``"Scheduler.schedule"``.
    parameters: its parameters' names for each version that has it; others are left alone.
    wrap: takes the function, returns its replacement.
    importers: modules that import the function by name. Those that did so already get the
        replacement too.
    """

    module: str
    path: str
    parameters: Mapping[str, tuple[str, ...]]
    wrap: Wrapper
    importers: tuple[str, ...] = ()


def around_drafting(wrap: Wrapper) -> Patch:
    """Around the function of the older model runner that asks its drafter for a draft."""
    names = (
        *("self", "scheduler_output", "sampled_token_ids", "sampling_metadata", "hidden_states"),
        *("sample_hidden_states", "aux_hidden_states", "spec_decode_metadata"),
        *("common_attn_metadata", "slot_mappings"),
    )
    path = "GPUModelRunner.propose_draft_token_ids"
    parameters = dict.fromkeys(VERSIONS, names)
    return Patch("vllm.v1.worker.gpu_model_runner", path, parameters, wrap)


def installed_version() -> str | None:
    """The version of vLLM in this environment, without its local part; None where there is none."""
    try:
        return version("vllm").partition("+")[0]
    except PackageNotFoundError:
        return None


def install(feature: str, patches: Sequence[Patch]) -> None:
    """Put the wrappers around their functions; doing so again changes nothing.

    feature: what the user asked for, named in errors.

    Raises ConfigError, with nothing replaced, when vLLM is absent, of a version that is not among
    ``VERSIONS``, or when one of the functions is not the one that this version ships.
    """
    found = installed_version()
    if found not in VERSIONS:
        fix = f"{feature} is written for vLLM {' and '.join(VERSIONS)}; install one of them"
        raise ConfigError("vllm", found, f"{fix}, or do not ask for {feature}")
    wanted = [patch for patch in patches if found in patch.parameters]
    targets = [_find(patch, feature, found) for patch in wanted]
    for patch, target in zip(wanted, targets, strict=True):
        if patch.wrap not in getattr(target.function, _MARK, ()):
            _replace(patch, target)


def log(text: str) -> None:
    """One line in vLLM's own log."""
    logger: Any = importlib.import_module("vllm.logger").init_logger("vllm.guided_spec")
    logger.info("guided_spec: %s", text)


class _Target(NamedTuple):
    """Where a function hangs: in a module or in a class."""

    owner: Any
    name: str
    function: Callable[..., Any]


def _find(patch: Patch, feature: str, found: str) -> _Target:
    *classes, name = patch.path.split(".")
    where = f"{patch.module}.{patch.path}"
    try:
        owner: Any = importlib.import_module(patch.module)
        for step in classes:
            owner = getattr(owner, step)
        function = getattr(owner, name)
        parameters = tuple(inspect.signature(function).parameters)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        fix = f"{feature} needs it, and vLLM {found} has it; is it another build? ({error})"
        raise ConfigError(where, None, fix) from error
    if parameters != patch.parameters[found]:
        fix = f"{feature} expects the parameters of vLLM {found}; has another plugin changed it?"
        raise ConfigError(where, parameters, fix)
    return _Target(owner, name, function)


def _replace(patch: Patch, target: _Target) -> None:
    wrapped = patch.wrap(target.function)
    around = getattr(target.function, _MARK, ())
    setattr(wrapped, _MARK, (*around, patch.wrap))
    setattr(target.owner, target.name, wrapped)
    for importer in patch.importers:
        module = sys.modules.get(importer)
        if module is not None and getattr(module, target.name, None) is target.function:
            setattr(module, target.name, wrapped)
