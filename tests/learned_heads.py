"""Tiny targets with a draft head of every method, and a quick way to teach a head a few texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from guided_spec.models.causal_lm import make_causal_lm
from guided_spec.models.heads.block.model import BlockContext, BlockHead
from guided_spec.models.heads.block.transitions import BlockPosition, Transition
from guided_spec.models.heads.draft_head import DraftHead
from guided_spec.models.heads.eagle import Eagle3Head
from guided_spec.models.loading import load_model
from guided_spec.models.stock.slots import SlotInputs
from guided_spec.ops.attention.slot_attention import KeyValues
from tests.models.heads import mtp_checkpoints
from tests.models.heads.block_checkpoints import DIALECTS, write_block, write_p_eagle
from tests.models.heads.fresh import write_mtp
from tests.models.heads.heads import write_eagle, write_eagle3
from tests.models.tiny import build

# method: the architecture of its tiny target
TARGETS = {
    "eagle": "llama",
    "eagle3": "llama",
    "dflash": "llama",
    "dflash2": "llama",
    "domino": "llama",
    "lilicorr": "llama",
    "dspark": "llama",
    "p_eagle": "llama",
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
    elif method in DIALECTS:
        write_block(folder, target, method, DIALECTS[method][0], **changes)
    elif method == "p_eagle":
        write_p_eagle(folder, target, draft_vocab_size=vocab_size * 3 // 4, **changes)
    else:
        write_eagle3(folder, target, draft_vocab_size=vocab_size * 3 // 4, **changes)
    return HeadedTarget(target, str(folder))


def overfit(head: Any, target: PreTrainedModel, texts: Sequence[Sequence[int]]) -> None:
    """Teach ``head``, in place, to continue ``texts``: its first pass, and one recycled pass.

    The recycled pass attends to itself alone, which is not quite what drafting does, but enough.
    """
    module: Any = head
    parameters = [p for p in module.parameters() if p.is_floating_point()]
    examples: list[Any] = [_example_of(head, target, text) for text in texts]
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


def _example_of(head: Any, target: PreTrainedModel, text: Sequence[int]) -> Any:
    if isinstance(head, BlockHead):
        return _BlockExample(head, target, text)
    is_masked = isinstance(head, Eagle3Head) and head.mask_hidden is not None
    return (_MaskedExample if is_masked else _Example)(head, target, text)


class _BlockExample:
    """One text, of which blocks begin behind every third position."""

    def __init__(self, head: BlockHead, target: PreTrainedModel, text: Sequence[int]) -> None:
        self.states = _states(head, target, text[:-1])[0]
        width = head.layout.width
        lengths = range(1, len(text) - 1, 3)
        self.last = torch.tensor([text[length] for length in lengths])
        behind = [list(text[length + 1 : length + 1 + width]) for length in lengths]
        self.labels = torch.tensor([row + [-100] * (width - len(row)) for row in behind])
        self.lengths = torch.tensor(lengths)

    def loss(self, head: BlockHead) -> Tensor:
        positions = torch.arange(len(self.states))
        layers = head.context(head.features(self.states.clone()), positions)
        count = len(self.last)
        rows = [
            KeyValues(*(part.transpose(0, 1).expand(count, -1, -1, -1) for part in layer))
            for layer in layers
        ]
        outputs = head(self.last, self.labels.shape[1], BlockContext(rows, self.lengths))
        logits = head.logits(outputs)
        loss = functional.cross_entropy(logits.flatten(0, 1), self.labels.flatten())
        if head.transition is None:
            return loss
        before = torch.cat([self.last.unsqueeze(1), self.labels[:, :-1].clamp_min(0)], 1)
        # No candidate: what is ruled out has no gradient, and an infinite loss.
        plan = None
        if head.planner is not None:
            anchors = head.planner.anchors(self.states[self.lengths - 1].clone())
            plan = head.planner.plan(logits, outputs, anchors)
        behind = behind_tokens(head.transition, logits, outputs, before, plan).clamp_min(-30)
        return loss + functional.cross_entropy(behind.flatten(0, 1), self.labels.flatten())


def behind_tokens(
    transition: Transition,
    logits: Tensor,
    outputs: Tensor,
    before: Tensor,
    plan: Tensor | None = None,
) -> Tensor:
    """Logits [R, W, D] of blocks, each position behind the token before it, int64 [R, W].

    outputs: [R, W, H]. plan: as of ``BlockPosition``.
    """
    state, found = outputs.new_zeros(len(outputs), transition.state_size), list[Tensor]()
    places = zip(outputs.unbind(1), before.unbind(1), strict=True)
    for step, (hidden, previous) in enumerate(places):
        state = transition.advance(state, hidden, previous)
        position = BlockPosition(hidden, previous, state, torch.full_like(previous, step), plan)
        found.append(transition.step(logits[:, step], position))
    return torch.stack(found, 1)


def _states(head: Any, target: PreTrainedModel, text: Sequence[int]) -> Tensor:
    """[1, T, X]: what the head is fed with at each token."""
    lm = make_causal_lm(target, num_slots=1, max_length=len(text) + 2)
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
        """Of the first pass over the text, and of one more over its own outputs."""
        hidden = self._pass(head, self.tokens, head.features(self.states.clone()))
        first = functional.cross_entropy(head.logits(hidden[0]), self.labels)
        hidden = self._pass(head, self.tokens[:, 1:], hidden[:, :-1])
        return first + functional.cross_entropy(head.logits(hidden[0]), self.labels[1:])

    def _pass(self, head: DraftHead, tokens: Tensor, hidden: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        return _run(head, tokens, hidden, torch.arange(length), mask)


class _MaskedExample(_Example):
    """One text, with masks behind every fifth position of it."""

    WIDTH, STRIDE = 4, 5

    def loss(self, head: Any) -> Tensor:
        """Of the text's positions, and of all masks, in one pass."""
        length, width = self.tokens.shape[1], self.WIDTH
        begins = torch.arange(0, length, self.STRIDE)
        anchors = begins.repeat_interleave(width)
        steps = torch.arange(1, width + 1).repeat(len(begins))
        masks = torch.full((1, len(anchors)), head.layout.mask_token_id)
        states = head.features(self.states.clone())
        fed = head.features(head.mask_hidden).expand(1, len(anchors), -1)
        places = torch.cat([torch.arange(length), anchors + steps])
        own = torch.cat([torch.full((length,), -1), anchors])  # whose place it is; -1: the text's
        last = torch.cat([torch.arange(length), anchors])  # the last place of the text that it sees
        is_before = places.unsqueeze(1) >= places
        sees = (own < 0) & (last.unsqueeze(1) >= places)
        sees |= (own >= 0) & (own.unsqueeze(1) == own) & is_before
        tokens, hidden = torch.cat([self.tokens, masks], 1), torch.cat([states, fed], 1)
        output = _run(head, tokens, hidden, places, sees)
        labels = torch.cat([self.labels, self.labels.new_full((width,), -100)])[places]
        return functional.cross_entropy(head.logits(output[0]), labels)


def _run(head: Any, tokens: Tensor, hidden: Tensor, places: Tensor, mask: Tensor) -> Tensor:
    output: Tensor = head.forward(
        tokens,
        hidden,
        module=0,
        position_ids=places.unsqueeze(0),
        attention_mask=mask[None, None],
        cache=None,
    )
    return output
