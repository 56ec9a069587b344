"""Tiny targets with a draft head of every method, and a quick way to teach a head a few texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from guided_spec.models.causal_lm import CausalLM, SlotInputs
from guided_spec.models.heads.dflash import BlockContext, DFlashHead
from guided_spec.models.heads.draft_head import DraftHead
from guided_spec.models.loading import load_model
from guided_spec.ops.slot_attention import KeyValues
from tests.models.heads import mtp_checkpoints
from tests.models.heads.fresh import write_mtp
from tests.models.heads.heads import write_dflash, write_eagle, write_eagle3
from tests.models.tiny import build

__all__ = ["TARGETS", "HeadedTarget", "overfit", "write_head"]

# method: the architecture of its tiny target
TARGETS = {
    "eagle": "llama",
    "eagle3": "llama",
    "dflash": "llama",
    "deepseek_mtp": "deepseek_v3",
    "glm4_moe_mtp": "glm4_moe",
    "qwen3_5_mtp": "qwen3_5",
    "mtp": "qwen3",
}


class HeadedTarget(NamedTuple):
    """A tiny target, and where its head was written; None: in the target's own checkpoint."""

    target: PreTrainedModel
    draft: str | None


def write_head(folder: Path, method: str, vocab_size: int, **changes: Any) -> HeadedTarget:
    """A target of ``vocab_size`` tokens and a random head of ``method``, in published layouts."""
    name = TARGETS[method]
    if method.endswith("_mtp"):
        mtp_checkpoints.write(folder, name, vocab_size=vocab_size, **changes)
        return HeadedTarget(load_model(folder, device="cpu"), None)
    target = build(name, vocab_size=vocab_size)
    if method == "mtp":
        write_mtp(folder, target, **changes)
    elif method == "eagle":
        write_eagle(folder, target, **changes)
    elif method == "dflash":
        write_dflash(folder, target, **changes)
    else:
        write_eagle3(folder, target, draft_vocab_size=vocab_size * 3 // 4, **changes)
    return HeadedTarget(target, str(folder))


def overfit(head: Any, target: PreTrainedModel, texts: Sequence[Sequence[int]]) -> None:
    """Teach ``head``, in place, to continue ``texts``: its first pass, and one recycled pass.

    The recycled pass attends to itself alone, which is not quite what drafting does, but enough.
    """
    module: Any = head
    parameters = [p for p in module.parameters() if p.is_floating_point()]
    kind = _BlockExample if isinstance(head, DFlashHead) else _Example
    examples = [kind(head, target, text) for text in texts]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small only wait for one another
    with torch.inference_mode(mode=False), torch.enable_grad():
        for parameter in parameters:
            parameter.requires_grad_(requires_grad=True)
        optimizer = torch.optim.Adam(parameters, lr=3e-3)
        for _ in range(40):
            losses = torch.stack([example.loss(head) for example in examples])
            optimizer.zero_grad()
            losses.mean().backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
        for parameter in parameters:
            parameter.requires_grad_(requires_grad=False)
    torch.set_num_threads(threads)


class _BlockExample:
    """One text, of which blocks begin behind every position."""

    def __init__(self, head: DFlashHead, target: PreTrainedModel, text: Sequence[int]) -> None:
        self.states = _states(head, target, text[:-1])[0]
        width = head.layout.block_size - 1
        lengths = range(1, len(text) - 1)
        self.last = torch.tensor([text[length] for length in lengths])
        behind = [list(text[length + 1 : length + 1 + width]) for length in lengths]
        self.labels = torch.tensor([row + [-100] * (width - len(row)) for row in behind])
        self.lengths = torch.tensor(lengths)

    def loss(self, head: DFlashHead) -> Tensor:
        positions = torch.arange(len(self.states))
        layers = head.context(head.features(self.states.clone()), positions)
        count = len(self.last)
        rows = [
            KeyValues(*(part.transpose(0, 1).expand(count, -1, -1, -1) for part in layer))
            for layer in layers
        ]
        outputs = head(self.last, self.labels.shape[1], BlockContext(rows, self.lengths))
        return functional.cross_entropy(head.logits(outputs).flatten(0, 1), self.labels.flatten())


def _states(head: Any, target: PreTrainedModel, text: Sequence[int]) -> Tensor:
    """[1, T, X]: what the head is fed with at each token."""
    lm = CausalLM(target, num_slots=1, max_length=len(text) + 2)
    inputs = SlotInputs(torch.tensor([text]), [0], [0], [len(text)])
    output = lm.forward(inputs, logits="none", hidden_layers=head.aux_hidden_layers)
    assert output.hidden_states is not None
    return output.hidden_states.clone()


class _Example:
    """One text: the target's hidden states, and the draft ids of the tokens two further on."""

    def __init__(self, head: DraftHead, target: PreTrainedModel, text: Sequence[int]) -> None:
        self.states = _states(head, target, text[:-2])
        self.tokens = torch.tensor([text[1:-1]])
        self.labels = torch.tensor(text[2:])
        if head.vocabulary is not None:
            of_target = torch.full((head.vocabulary.target_size,), -100)
            of_target[head.vocabulary.target_ids] = torch.arange(len(head.vocabulary))
            self.labels = of_target[self.labels]

    def loss(self, head: DraftHead) -> Tensor:
        hidden = self._pass(head, self.tokens, head.features(self.states.clone()))
        first = functional.cross_entropy(head.logits(hidden[0]), self.labels)
        hidden = self._pass(head, self.tokens[:, 1:], hidden[:, :-1])
        return first + functional.cross_entropy(head.logits(hidden[0]), self.labels[1:])

    def _pass(self, head: DraftHead, tokens: Tensor, hidden: Tensor) -> Tensor:
        length, run = tokens.shape[1], head
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        output: Tensor = run.forward(
            tokens,
            hidden,
            module=0,
            position_ids=torch.arange(length).unsqueeze(0),
            attention_mask=mask[None, None],
            past_key_values=None,
        )
        return output
