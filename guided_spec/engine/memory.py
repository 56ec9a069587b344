"""How many KV slots fit the memory, and how long a text they hold."""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple

import torch

from guided_spec.config import EngineConfig
from guided_spec.engine.parallel import agree_on_least
from guided_spec.errors import ConfigError
from guided_spec.models.causal_lm import CausalLM, largest_context

__all__ = ["SlotPlan", "plan_slots"]

CPU_SHARE = 0.25  # of the machine's memory: other programs live there too
CUDA_SHARE = 0.5  # of what the weights left: activations and a draft model need the rest

LEAST_CONTEXT = 4096  # before slots are given up for longer texts
STEP = 256  # tokens that a context which memory limits is a multiple of

_FOR_MEMORY = (
    "the KV cache may take %d bytes, for max_batch_size=%d texts of %d bytes a token. Pass "
    "max_model_len for longer ones (there are fewer slots then, and requests queue), a smaller "
    "max_batch_size, or more kv_memory_bytes"
)
_FOR_ROPE = "behind that its rotary embedding depends on the longest text of a batch"

logger = logging.getLogger(__name__)


class SlotPlan(NamedTuple):
    """The slots to allocate: how many, and the tokens that each holds."""

    num_slots: int
    max_model_len: int


class _Memory(NamedTuple):
    """Bytes: of all slots, of one token, and of a slot besides its tokens."""

    budget: int
    token: int
    state: int

    def slots(self, length: int) -> int:
        return self.budget // max(length * self.token + self.state, 1)

    def length(self, num_slots: int) -> int:
        return (self.budget // num_slots - self.state) // max(self.token, 1)


def plan_slots(model: Any, config: EngineConfig) -> SlotPlan:
    """Slots for ``config.max_batch_size`` requests, as far as the memory budget goes.

    With ``max_model_len`` given, there are fewer slots where the budget holds fewer. With None, a
    text may be as long as the model's own context. Where the budget has no room for that in every
    slot, it may be as long as fits, and a warning says so. Below 4096 tokens it does not go for
    that: there are fewer slots instead.

    Raises ConfigError when not even one slot fits, and for more tokens than the model takes.
    """
    probe = CausalLM(model, num_slots=1, max_length=1, kernels="stock")
    budget = config.kv_memory_bytes
    if budget is None:
        budget = agree_on_least(_default_budget(torch.device(model.device)), model.device)
    memory = _Memory(budget, probe.kv_bytes_per_token, probe.state_bytes_per_slot)
    text_config = model.config.get_text_config(decoder=True)
    own: int | None = getattr(text_config, "max_position_embeddings", None)
    most = largest_context(text_config)
    length = config.max_model_len
    if length is None:
        length = _default_length(most, memory, config.max_batch_size)
    elif own is not None and length > own:
        raise ConfigError("max_model_len", length, f"the model's context is {own}; pass less")
    fitting = memory.slots(length)
    if fitting < 1:
        size = length * memory.token + memory.state
        fix = f"one request of {length} tokens takes {size} bytes and the KV cache may take "
        fix += f"{budget}: lower max_model_len or raise kv_memory_bytes"
        raise ConfigError("max_model_len", length, fix)
    if config.max_model_len is None and own is not None and length < own:
        reason = _FOR_MEMORY % (budget, config.max_batch_size, memory.token)
        reason = _FOR_ROPE if length == most else reason
        logger.warning("texts may have %d tokens, the model's own %d: %s.", length, own, reason)
    return SlotPlan(min(config.max_batch_size, fitting), length)


def _default_length(most: int | None, memory: _Memory, num_slots: int) -> int:
    """most: that the model takes, None if that is unknown."""
    if most is None:
        return LEAST_CONTEXT
    if memory.slots(most) >= num_slots:
        return most
    fitting = memory.length(num_slots) // STEP * STEP
    return min(most, max(LEAST_CONTEXT, fitting))


def _default_budget(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * CUDA_SHARE)
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * CPU_SHARE)
