"""The processes of a run: one, or those that torchrun or ``accelerate launch`` started."""

from __future__ import annotations

import gc
import importlib.util
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from guided_spec.errors import ConfigError, ModelError
from guided_spec.training.options import TrainOptions

__all__ = ["close_accelerator", "make_accelerator", "shard_layers"]

PACKAGES = ("accelerate", "datasets", "tensorboard")
LONGEST_WAIT = timedelta(hours=2)  # for the process that writes answers the longest


def make_accelerator(options: TrainOptions) -> Any:
    """The ``accelerate.Accelerator`` of this process; on CUDA it computes in bfloat16.

    Raises ModelError where a package is missing, and ConfigError where the device is, or where
    there is nothing to shard over.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        fix = "pip install 'guided-spec[train]'"
        raise ModelError(f"training needs {', '.join(missing)}: {fix}")
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import InitProcessGroupKwargs, set_seed

    has_cuda = torch.cuda.is_available()
    if options.device == "cuda" and not has_cuda:
        raise ConfigError("device", "cuda", "torch sees no CUDA device; pass cpu")
    on_cpu = options.device == "cpu" or not has_cuda
    plugin = None
    if options.sharding == "fsdp":
        _check_sharding(on_cpu=on_cpu)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
        )
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision="no" if on_cpu else "bf16",
        gradient_accumulation_steps=options.gradient_accumulation,
        log_with="tensorboard",
        project_dir=Path(options.output) / "logs",
        fsdp_plugin=plugin,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=LONGEST_WAIT)],
    )
    set_seed(options.seed)
    return accelerator


def close_accelerator(accelerator: Any) -> None:
    """End a run; nothing may use its model any more. One of several processes starts no other."""
    # What is wrapped for several processes has to go before their connection does.
    accelerator.free_memory()
    gc.collect()
    accelerator.end_training()


def shard_layers(accelerator: Any, layers: nn.ModuleList) -> None:
    """Tell FSDP, where it is used, to shard each of ``layers``; before the model is prepared."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        plugin.transformer_cls_names_to_wrap = sorted({type(layer).__name__ for layer in layers})


def _check_sharding(*, on_cpu: bool) -> None:
    if on_cpu:
        raise ConfigError("sharding", "fsdp", "needs CUDA devices; pass none")
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        fix = "needs several processes: start with torchrun --nproc-per-node=<devices> ..."
        raise ConfigError("sharding", "fsdp", fix)
