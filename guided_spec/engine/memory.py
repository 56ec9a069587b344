"""How many KV slots fit the memory."""

from __future__ import annotations

import os
from typing import Any

import torch

from guided_spec.config import EngineConfig
from guided_spec.errors import ConfigError
from guided_spec.models.causal_lm import CausalLM

__all__ = ["slots_that_fit"]

CPU_SHARE = 0.25  # of the machine's memory: other programs live there too
CUDA_SHARE = 0.5  # of what the weights left: activations and a draft model need the rest


def slots_that_fit(model: Any, config: EngineConfig, max_model_len: int) -> int:
    """At most ``config.max_batch_size``; fewer when the memory budget holds fewer.

    Raises ConfigError when not even one slot fits.
    """
    probe = CausalLM(model, num_slots=1, max_length=1, kernels="stock")
    slot_bytes = max_model_len * probe.kv_bytes_per_token + probe.state_bytes_per_slot
    budget = config.kv_memory_bytes
    if budget is None:
        budget = _default_budget(torch.device(model.device))
    fitting = budget // max(slot_bytes, 1)
    if fitting < 1:
        fix = (
            f"one request of {max_model_len} tokens takes {slot_bytes} bytes and the KV cache may "
        )
        fix += f"take {budget}: lower max_model_len or raise kv_memory_bytes"
        raise ConfigError("max_model_len", max_model_len, fix)
    return min(config.max_batch_size, int(fitting))


def _default_budget(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * CUDA_SHARE)
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * CPU_SHARE)
