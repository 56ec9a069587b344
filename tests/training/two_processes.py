"""What each of two processes runs: a toy training, then what it holds of the draft into a file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from guided_spec.training import run
from guided_spec.training.options import TrainOptions
from guided_spec.training.run import make_accelerator
from tests.training.toy_algorithm import ToyTraining, make_options


def make_sharding_accelerator(options: TrainOptions) -> Any:
    """accelerate shards on CUDA devices only; torch can do it between two CPU processes too."""
    accelerator = make_accelerator(options)
    for state in (AcceleratorState(), PartialState()):
        state.distributed_type = DistributedType.FSDP
    AcceleratorState().fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
    )
    return accelerator


if __name__ == "__main__":
    torch.set_num_threads(1)
    target, data, output, sharding, steps, resume = sys.argv[1:]
    changes: dict[str, Any] = {"max_steps": int(steps), "resume": resume == "resume"}
    if sharding.startswith("target"):
        changes |= {"tensor_parallel": True}
        changes |= {"features": f"{output}_features"} if sharding == "target and files" else {}
    options = make_options(target, data, Path(output), epochs=4, save_every=2, **changes)
    if sharding == "fsdp":
        vars(run)["make_accelerator"] = make_sharding_accelerator
    run.train(options, {"aux_layer": 1})
    assert ToyTraining.latest is not None
    # What is outside of the layers may be left whole after its last use.
    layers = list(ToyTraining.latest.layers.parameters())
    assert all(isinstance(p, DTensor) == (sharding == "fsdp") for p in layers)
    if sharding == "none":
        parameters = dict(ToyTraining.latest.named_parameters())
        torch.save(parameters, Path(output) / f"rank_{os.environ['RANK']}.pt")
