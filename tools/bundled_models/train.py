"""The training loops: cross entropy for the target, distillation for the draft."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch.nn import functional
from transformers import AttentionInterface, LlamaForCausalLM

from tools.bundled_models.corpus import Batch

logger = logging.getLogger(__name__)

PROMPT_WEIGHT = 0.1  # loss weight of a prompt token; an answer token weighs 1
_ATTENTION = "causal_training"
Tensor = torch.Tensor


@dataclass(frozen=True)
class TrainConfig:
    """One run: it ends after `steps` steps or `seconds` seconds, whichever comes first.

    The learning rate warms up over `warmup` steps, then follows a cosine to one fiftieth.
    """

    steps: int
    seconds: float = math.inf
    learning_rate: float = 2e-3
    warmup: int = 300
    weight_decay: float = 0.05
    compiled: bool = False
    log_every: int = 500


@dataclass(frozen=True)
class TrainResult:
    """What a run took: steps, document tokens (no padding), seconds and the last mean loss."""

    steps: int
    tokens: int
    seconds: float
    loss: float


LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


def _causal_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    del attention_mask, kwargs
    groups = int(module.num_key_value_groups)  # type: ignore[arg-type]
    attended = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        scale=float(module.scaling),  # type: ignore[arg-type]
        enable_gqa=groups > 1,
    )
    return attended.transpose(1, 2).contiguous(), None


def use_causal_attention(model: LlamaForCausalLM) -> None:
    """Let `model` attend causally without a mask, which keeps the fast kernel under compile.

    Padding lies right of every document, so a causal model never attends to it.
    """
    AttentionInterface.register(_ATTENTION, _causal_attention)
    model.set_attn_implementation(_ATTENTION)


def target_loss(model: LlamaForCausalLM) -> LossFunction:
    """Return the loss of the target: weighted cross entropy of the next token."""

    def loss(ids: Tensor, prompts: Tensor, lengths: Tensor) -> Tensor:
        logits = model(input_ids=ids, use_cache=False).logits
        weights = token_weights(ids, prompts, lengths)
        return _mean(_cross_entropy(logits, ids), weights)

    return loss


def draft_loss(
    draft: LlamaForCausalLM, target: LlamaForCausalLM, *, hard_share: float = 0.1
) -> LossFunction:
    """Return the draft's loss: KL to the target's distribution, mixed with cross entropy."""

    def loss(ids: Tensor, prompts: Tensor, lengths: Tensor) -> Tensor:
        with torch.no_grad():
            goal = functional.log_softmax(target(input_ids=ids, use_cache=False).logits.float(), -1)
        logits = draft(input_ids=ids, use_cache=False).logits
        found = functional.log_softmax(logits.float(), -1)
        divergence = (goal.exp() * (goal - found)).sum(-1)[:, :-1]
        weights = token_weights(ids, prompts, lengths)
        soft = _mean(divergence, weights)
        return (1 - hard_share) * soft + hard_share * _mean(_cross_entropy(logits, ids), weights)

    return loss


def token_weights(ids: Tensor, prompts: Tensor, lengths: Tensor) -> Tensor:
    """Return the loss weight of each predicted token, [documents, width - 1]."""
    position = torch.arange(1, ids.shape[1], device=ids.device)
    weights = torch.where(position >= prompts[:, None], 1.0, PROMPT_WEIGHT)
    return weights * (position < lengths[:, None])


def _cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten().long(), reduction="none"
    ).view(ids.shape[0], -1)


def _mean(losses: Tensor, weights: Tensor) -> Tensor:
    return (losses * weights).sum() / weights.sum()


def train(
    model: LlamaForCausalLM, loss_function: LossFunction, data: Iterator[Batch], config: TrainConfig
) -> TrainResult:
    """Train `model` in place on its own device, until the steps, the time or the data end."""
    device = model.device
    if config.compiled:
        loss_function = torch.compile(loss_function, dynamic=True)
    optimizer = make_optimizer(model, config.learning_rate, config.weight_decay)
    model.train()
    start = time.monotonic()
    step = tokens = 0
    recent = torch.zeros((), device=device)
    for step, batch in enumerate(data, 1):
        progress = max(step / config.steps, (time.monotonic() - start) / config.seconds)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * _schedule(step, config.warmup, progress)
        arrays = to_device((batch.ids, batch.prompts, batch.lengths), device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_function(*arrays)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += int(batch.lengths.sum())
        recent = loss.detach() if step == 1 else 0.98 * recent + 0.02 * loss.detach()
        if step % config.log_every == 0 or step == 1:
            spent = time.monotonic() - start
            logger.info(
                "step %d loss %.4f tokens/s %.0f at %.0f s", step, recent, tokens / spent, spent
            )
        if progress >= 1:
            break
    return TrainResult(step, tokens, time.monotonic() - start, float(recent))


def to_device(arrays: Iterable[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on the device."""
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cuda":
        # From pinned memory the copy does not wait for the kernels queued before it.
        tensors = [tensor.pin_memory() for tensor in tensors]
    return [tensor.to(device, non_blocking=True) for tensor in tensors]


def make_optimizer(
    model: torch.nn.Module, learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """AdamW, which decays matrices alone."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98), fused=True)


def cosine(progress: float) -> float:
    """The share of the learning rate after a part of the run: from 1 to a fiftieth."""
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def _schedule(step: int, warmup: int, progress: float) -> float:
    return step / warmup if step < warmup else cosine(progress)
