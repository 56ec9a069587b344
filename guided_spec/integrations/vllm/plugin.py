"""The plugin for vLLM: does nothing unless the environment variable GUIDED_SPEC_VLLM asks for it.

vLLM calls ``register`` in each of its processes, through the entry point group
``vllm.general_plugins``. The proposer needs no plugin: vLLM imports it by its dotted name, see
``proposer``.

A release of vLLM is judged by what it has, not by its number: each feature says which functions,
parameters and attributes it uses, and is on where all of them are there, see ``patches``. What was
asked for and is not on is a warning or an error, and a function that another plugin has changed is
refused before anything is replaced.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from guided_spec.config import THREADS
from guided_spec.errors import ConfigError
from guided_spec.integrations.patches import OneOf, Patch, Wrapper, find, probe, replace

VARIABLE = "GUIDED_SPEC_VLLM"
ENTRY_POINT = "guided_spec"  # in the group vllm.general_plugins
RAY_VARIABLE = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"  # where vLLM looks for names to copy
COUNTER = "guided_spec_vllm_repairs"
ENDINGS = "endings"
FORCED = "forced"
GRAPHS = "graphs"
TABLES = "tables"
FEATURES = {
    "counts": "guided_spec.integrations.vllm.counts",
    "drafts": "guided_spec.integrations.vllm.drafts.heads",
    ENDINGS: "guided_spec.integrations.vllm.endings",
    "exact": "guided_spec.integrations.vllm.exact",
    FORCED: "guided_spec.integrations.vllm.drafts.heads",
    GRAPHS: "guided_spec.integrations.vllm.graphs",
    "guard": "guided_spec.integrations.vllm.guard",
    "schemas": "guided_spec.integrations.vllm.schemas",
    TABLES: "guided_spec.integrations.vllm.drafts.heads",
}
PROMISES = (
    ENDINGS,
    "exact",
    "guard",
    "schemas",
)  # they change what is written; the others how fast it is written


def requested() -> list[str]:
    """The features that the variable names, separated by commas.

    Raises ConfigError for an unknown name.
    """
    value = os.environ.get(VARIABLE, "")
    names = [name.strip() for name in value.split(",") if name.strip()]
    if any(name not in FEATURES for name in names):
        raise ConfigError(VARIABLE, value, f"name some of {','.join(FEATURES)}, or unset it")
    return names


def require_plugin() -> None:
    """Raise ConfigError where vLLM is not installed, or its processes would not find the plugin."""
    if installed_root() is None:
        fix = "vLLM is not installed: pip install vllm"
        raise ConfigError("engine", "vllm", fix)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and ENTRY_POINT not in allowed.split(","):
        fix = f"it keeps the plugin out: add {ENTRY_POINT}, or unset it"
        raise ConfigError("VLLM_PLUGINS", allowed, fix)
    if not entry_points(group="vllm.general_plugins", name=ENTRY_POINT):
        fix = "guided_spec is on the path but not installed, and vLLM does not find its plugin"
        raise ConfigError("engine", "vllm", f"{fix}: pip install it")


def register() -> None:
    """Install the requested features, here and in processes on Ray; again changes nothing.

    A part of a feature that this release of vLLM does not fit is left out, whole, and vLLM's log
    warns of it. A feature that texts depend on is not left out: without it vLLM does not start.

    Raises ConfigError as ``requested`` does, for such a feature, and when something else has
    changed a function that a feature wraps.
    """
    names = requested()
    root = installed_root() if names else None
    if root is None:
        return
    _send_to_ray(root)
    release = f"vLLM {installed_version()}"
    parts = {}
    for name in names:
        wanted = importlib.import_module(FEATURES[name]).PARTS
        parts[name] = {label(name, part): probe(root, patch).lack for part, patch in wanted.items()}
        if name in PROMISES and "" not in parts[name].values():
            lack = "; ".join(parts[name].values())
            fix = f"{release} does not fit it: {lack}; install another release, or leave it out"
            raise ConfigError(VARIABLE, name, fix)
    for name, lacks in parts.items():
        if "" in lacks.values():
            install(f"{VARIABLE}={name}", importlib.import_module(FEATURES[name]).PATCHES)
        for part, lack in lacks.items():
            if lack:
                warn(f"{part} is off, {release} does not fit it: {lack}")
    on = [part for lacks in parts.values() for part, lack in lacks.items() if not lack]
    log(f"{', '.join(on) or 'nothing'} on for {release}")


def label(feature: str, part: str) -> str:
    """What logs call one of the ``PARTS`` of a feature's module."""
    return f"{feature} ({part})" if part else feature


def _send_to_ray(root: Path) -> None:
    """Let the processes that vLLM starts on Ray have the variable: vLLM copies those it knows.

    Its newer executor leaves a node the value that it has; ``ON_RAY`` is for that one.
    """
    copied = [name.strip() for name in os.environ.get(RAY_VARIABLE, "").split(",") if name.strip()]
    if VARIABLE not in copied:
        os.environ[RAY_VARIABLE] = ",".join([*copied, VARIABLE])
    if not probe(root, ON_RAY).lack:
        install(VARIABLE, ON_RAY)


def start_with_variable(original: Callable[..., None]) -> Callable[..., None]:
    """Around ``Executor.__init__``: its workers on Ray start with this process's variable.

    Ranks of one model must draft the same tokens, whatever Ray's nodes were started with.
    """

    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any) -> None:
        config = vllm_config.parallel_config
        runtime_env = config.ray_runtime_env or {}
        variables = {**runtime_env.get("env_vars", {}), VARIABLE: os.environ.get(VARIABLE, "")}
        config.ray_runtime_env = {**runtime_env, "env_vars": variables}
        original(self, vllm_config)

    return __init__


ON_RAY = (
    Patch("vllm.v1.executor.abstract", "Executor.__init__", "self vllm_config",
          start_with_variable),
    Patch("vllm.config.parallel", "ParallelConfig", attributes="ray_runtime_env"),
)  # fmt: skip
"""What gives workers on Ray the variable as it is in the engine."""


def around_drafting(wrap: Wrapper) -> Patch:
    """Around the function of the older model runner that asks its drafter for a draft."""
    path = "GPUModelRunner.propose_draft_token_ids"
    parameters = "self scheduler_output sampled_token_ids ..."
    return Patch("vllm.v1.worker.gpu_model_runner", path, parameters, wrap)


def in_workers(feature: str, parts: Sequence[Sequence[Patch | OneOf]]) -> Patch:
    """Around ``WorkerBase.__init__``: a worker gets those of ``parts`` that fit, and one thread.

    So no other process imports what workers run, or has fewer threads. The class around it,
    ``WorkerWrapperBase``, may be an actor of Ray's, and Ray calls an actor's methods as they were
    when its process began.
    """

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            root = installed_root()
            keep_to_one_thread()
            for wanted in parts:
                if root is not None and not probe(root, wanted).lack:
                    install(f"{VARIABLE}={feature}", wanted)
            original(self, *args, **kwargs)

        return __init__

    parameters = "self vllm_config local_rank rank distributed_init_method ..."
    return Patch("vllm.v1.worker.worker_base", "WorkerBase.__init__", parameters, wrap)


def keep_to_one_thread() -> None:
    """Let torch compute in one thread on the host of a GPU, as vLLM does where it has more workers.

    With more, all of them wait in a loop after each copy of a step's masks, and the thread that
    launches kernels shares its core. Changes nothing where ``THREADS`` is set.
    """
    torch: Any = importlib.import_module("torch")  # here: most processes need no more than a look
    if torch.cuda.is_available() and THREADS not in os.environ and torch.get_num_threads() > 1:
        log(f"torch computes in one thread instead of {torch.get_num_threads()}")
        torch.set_num_threads(1)


def installed_root() -> Path | None:
    """The folder in which this environment has the package of vLLM; None where there is none."""
    found = importlib.util.find_spec("vllm")
    return None if found is None or found.origin is None else Path(found.origin).parent.parent


def installed_version() -> str | None:
    """The version of vLLM in this environment, without its local part; None where there is none."""
    try:
        return version("vllm").partition("+")[0]
    except PackageNotFoundError:
        return None


def install(feature: str, wanted: Sequence[Patch | OneOf]) -> None:
    """Put the wrappers around their functions; doing so again changes nothing.

    feature: what the user asked for, named in errors.

    Raises ConfigError, with nothing replaced, when vLLM is absent, lacks something that the feature
    uses, or has one of the functions changed in this process.
    """
    root = installed_root()
    if root is None:
        raise ConfigError("vllm", None, f"install vLLM, or do not ask for {feature}")
    probed = probe(root, wanted)
    if probed.lack:
        fix = f"{feature} does not fit this release: {probed.lack}; install another"
        raise ConfigError("vllm", installed_version(), f"{fix}, or do not ask for {feature}")
    targets = [find(patch, feature) for patch in probed.patches if patch.wrap is not None]
    for target in targets:
        if not target.is_replaced:
            replace(target)


def acceptable_drafts(output: Any) -> list[int] | None:
    """How many of each request's draft tokens a worker verifies; None before 0.32: all of them.

    output: vLLM's GrammarOutput.
    """
    found: list[int] | None = getattr(output, "num_acceptable_drafts", None)
    return found


def count(feature: str, times: int = 1) -> None:
    """What a feature has repaired or refused, for vLLM's ``/metrics``."""
    counter(COUNTER, "What features of guided_spec did.", "feature").labels(feature).inc(times)


@functools.cache
def counter(name: str, text: str, *labels: str) -> Any:
    """Prometheus gathers the counters of all processes where PROMETHEUS_MULTIPROC_DIR is set."""
    return importlib.import_module("prometheus_client").Counter(name, text, labels)


def log(text: str) -> None:
    """One line in vLLM's own log."""
    _logger().info("guided_spec: %s", text)


def warn(text: str) -> None:
    """Log a warning about a feature that was asked for and is not on."""
    _logger().warning("guided_spec: %s", text)


def _logger() -> Any:
    return importlib.import_module("vllm.logger").init_logger("vllm.guided_spec")
