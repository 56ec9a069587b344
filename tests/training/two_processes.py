"""What each of two processes runs: a toy training, then its parameters into a file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from guided_spec.training.run import train
from tests.training.toy_algorithm import ToyTraining, make_options

if __name__ == "__main__":
    torch.set_num_threads(1)
    target, data, output = sys.argv[1:]
    options = make_options(target, data, Path(output), max_steps=4, epochs=4, save_every=2)
    train(options, {"aux_layer": 1})
    assert ToyTraining.latest is not None
    torch.save(ToyTraining.latest.state_dict(), Path(output) / f"rank_{os.environ['RANK']}.pt")
