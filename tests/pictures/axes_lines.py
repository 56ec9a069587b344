"""Logits of texts with a picture, fed to slots by pieces, and by the stock modules at once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guided_spec.models.causal_lm import make_causal_lm
from guided_spec.models.line_lm import LineLM
from guided_spec.models.packed.graph_pool import CaptureWindow
from guided_spec.models.pictures.vision import split_vision
from guided_spec.models.stock.slots import SlotInputs
from guided_spec.models.target import capture_hidden, find_decoder
from tests.pictures.sighted import sighted

ROWS = 6  # a picture of two by three
SHAPE = torch.tensor([[3] * ROWS, [3, 3, 3, 4, 4, 4], [3, 4, 5, 3, 4, 5]])
BEFORE, AFTER = 3, 9  # tokens around it
LENGTH = BEFORE + ROWS + AFTER
# Pieces of both texts: tokens that stay, and that do not.
PIECES = ((5, 0), (6, 2), (1, 0), (2, 3), (1, 0), (1, 1), (2, 0))
WIDTH = 6
LAYERS = (0, 1, 2, -1)  # of which the hidden states are asked for


class Compared(NamedTuple):
    """[T, X]: logits of a text over slots, or hidden states, and by the stock modules."""

    found: Tensor
    expected: Tensor

    @property
    def error(self) -> float:
        """Of a median token, the norm of the difference by the norm."""
        both = [one.float() - one.float().mean(-1, keepdim=True) for one in self]
        norms = (both[0] - both[1]).norm(dim=-1), both[1].norm(dim=-1)
        return float((norms[0] / norms[1]).median())


def places() -> Tensor:
    """int64 [3, LENGTH]: of the text with the picture."""
    before = torch.arange(BEFORE).expand(3, -1)
    after = torch.arange(AFTER).expand(3, -1) + int(SHAPE.max()) + 1
    return torch.cat([before, SHAPE, after], 1)


@torch.inference_mode()
def compared(family: str, device: str, dtype: torch.dtype) -> Iterator[Compared]:
    """A text with a picture, and one without, side by side."""
    model: Any = copy.deepcopy(sighted(family, head_dim=16).model)
    model = model.to(device, dtype)
    language: Any = split_vision(model, 16).language
    window = CaptureWindow(largest=64)
    options: dict[str, Any] = {"num_slots": 4, "max_length": 100, "width": 4, "window": window}
    lm = make_causal_lm(language, kernels="packed", **options)
    assert isinstance(lm, LineLM)
    assert lm.runs_as == "packed forwards"
    assert lm.axes is not None
    for _ in lm.capture(LAYERS):
        pass
    table = language.get_input_embeddings()
    random = torch.Generator().manual_seed(4)
    depth = 1 if table.deep is None else 1 + table.deep.shape[1]
    rows = [9, 2, 3, 11, 0, 5]
    table.write(rows, torch.randn(ROWS, depth, table.embedding_dim, generator=random))
    plain = torch.randint(2, 300, (2, LENGTH), generator=random)
    seen = plain[0].clone()
    seen[BEFORE : BEFORE + ROWS] = table.num_tokens + torch.tensor(rows)
    slots = {2: seen, 0: plain[1]}
    lm.axes.put(2, places()[:, : LENGTH - 4], BEFORE + ROWS)  # the rest is no prompt
    found = feed(lm, slots)
    wholes = {2: places(), 0: torch.arange(LENGTH).expand(3, -1)}
    for slot, ids in slots.items():
        given = ids.to(device)[None]
        position_ids = wholes[slot].to(device).unsqueeze(1)
        more = table.deep_arguments(given) if slot == 2 else {}
        arguments = {"input_ids": given, "position_ids": position_ids, "use_cache": False, **more}
        with capture_hidden(find_decoder(language), LAYERS) as captured:
            own = language(**arguments)
        logits, hidden = found[slot]
        yield Compared(logits, own.logits[0])
        yield Compared(hidden, torch.cat(captured, -1)[0])


class Fed(NamedTuple):
    """[T, V] and [T, len(LAYERS) * H], of a slot's text."""

    logits: Tensor
    hidden: Tensor


def feed(lm: LineLM, texts: dict[int, Tensor]) -> dict[int, Fed]:
    """What each slot's text gives; after each piece come tokens that do not stay."""
    start, found = 0, {slot: list[Fed]() for slot in texts}
    for staying, others in PIECES:
        fed = torch.ones(len(texts), WIDTH + 3, dtype=torch.int64)
        for row, ids in enumerate(texts.values()):
            fed[row, :staying] = ids[start : start + staying]
        count = staying + others
        inputs = SlotInputs(fed, [*texts], [start] * len(texts), [count] * len(texts))
        logits, hidden = lm.forward(inputs, hidden_layers=LAYERS)
        lm.commit([staying] * len(texts), [count] * len(texts))
        assert logits is not None
        assert hidden is not None
        for row, slot in enumerate(texts):
            found[slot].append(Fed(logits[row, :staying].clone(), hidden[row, :staying].clone()))
        start += staying
    assert start == LENGTH
    return {
        slot: Fed(*(torch.cat(parts) for parts in zip(*fed, strict=True)))
        for slot, fed in found.items()
    }
