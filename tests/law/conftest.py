"""The harness runs in one thread: its tensors are small, and threads would wait for one another."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    """A batch holds lists by the tens of thousands, in none of which there is a circle."""
    gc.disable()
    yield
    gc.enable()
