"""``guided-spec``, with the toy algorithm among the others."""

from __future__ import annotations

import torch

from guided_spec.cli.main import app
from tests.training import toy_algorithm as toy_algorithm  # registers it

if __name__ == "__main__":
    torch.set_num_threads(1)
    app()
