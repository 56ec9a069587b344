"""SlotHead: reading piece by piece and walking ragged drafts give what one full pass gives."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.draft_head import DraftHead
from guided_spec.models.heads.eagle import Eagle3Head
from guided_spec.models.heads.loading import load_head
from guided_spec.models.heads.slot_head import SlotHead, SlotLimits
from tests.models.heads import mtp_checkpoints
from tests.models.heads.heads import write_eagle3
from tests.models.tiny import build

VOCAB = 64
SLOTS = 4
LONGEST = 48
KINDS = ["eagle3", "eagle3 of two layers", "mtp 1", "mtp 2", "mtp 3"]


@pytest.fixture(scope="module", params=KINDS)
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DraftHead:
    folder: Path = tmp_path_factory.mktemp("head") / "checkpoint"
    if request.param.startswith("eagle3"):
        target = build("llama")
        num_layers = 2 if "two" in request.param else 1
        write_eagle3(folder, target, layout="speculators", num_layers=num_layers)
        return Eagle3Head.from_checkpoint(Checkpoint.open(folder), target)
    modules = int(request.param.split()[-1])
    mtp_checkpoints.write(folder, "deepseek_v3", num_modules=modules)
    return load_head("deepseek_mtp", folder, build("deepseek_v3"))


class Text:
    """One slot's tokens, the target's hidden states of all but the last, and its draft."""

    def __init__(self, dice: random.Random, width: int) -> None:
        self.dice, self.width = dice, width
        self.tokens = [dice.randrange(VOCAB)]
        self.states = torch.zeros(0, width)
        self.draft: list[int] = []

    def grow(self, count: int) -> tuple[list[int], Tensor]:
        """``count`` verified tokens more; the draft is gone."""
        new = [self.dice.randrange(VOCAB) for _ in range(count)]
        generator = torch.Generator().manual_seed(self.dice.randrange(1000))
        states = torch.randn(count, self.width, generator=generator)
        self.tokens += new
        self.states = torch.cat([self.states, states])
        self.draft = []
        return new, states


@torch.no_grad()
def full_pass(head: DraftHead, text: Text) -> Tensor:
    """Logits [D] behind the text and its draft, without a cache: every module over everything."""
    run: Any = head
    tokens, hidden = [*text.tokens[1:], *text.draft], head.features(text.states.unsqueeze(0))
    count = len(text.states)
    for module in range(min(len(text.draft), head.num_modules - 1) + 1):
        hidden = once(run, tokens[module : module + count], hidden, module)
        inner = hidden
    last = head.num_modules - 1
    if len(text.draft) > last:
        inner = inputs(run, head, text, last)
        for depth in range(last + 1, len(text.draft) + 1):
            recycled = hidden[:, -1:]
            inner = torch.cat([inner, recycled], 1)
            hidden = once(run, tokens[last : count + depth], inner, last)
    return head.logits(hidden[0, -1])


def inputs(run: Any, head: DraftHead, text: Text, module: int) -> Tensor:
    """What ``module`` is fed with over the verified positions."""
    tokens, hidden = [*text.tokens[1:], *text.draft], head.features(text.states.unsqueeze(0))
    for before in range(module):
        hidden = once(run, tokens[before : before + len(text.states)], hidden, before)
    return hidden


def once(run: Any, tokens: Sequence[int], hidden: Tensor, module: int) -> Tensor:
    length = len(tokens)
    output: Tensor = run(
        torch.tensor([list(tokens)]),
        hidden,
        module=module,
        position_ids=torch.arange(length).unsqueeze(0),
        attention_mask=torch.ones(length, length, dtype=torch.bool).tril()[None, None],
        cache=None,
    )
    return output


def check(slots: SlotHead, head: DraftHead, texts: dict[int, Text]) -> None:
    order = sorted(texts)
    found = slots.logits(order)
    for row, slot in enumerate(order):
        torch.testing.assert_close(found[row], full_pass(head, texts[slot]), rtol=1e-4, atol=1e-4)
        assert slots.length(slot) == len(texts[slot].states)
        assert slots.depth(slot) == len(texts[slot].draft)


def make(head: DraftHead, piece: int = 1024) -> SlotHead:
    room = SlotLimits(SLOTS, LONGEST, piece)
    return SlotHead(head, room, device=torch.device("cpu"), dtype=torch.float32)


def read(slots: SlotHead, texts: dict[int, Text], counts: dict[int, int]) -> None:
    grown = {slot: texts[slot].grow(count) for slot, count in counts.items()}
    order = sorted(counts)
    slots.read(order, [grown[s][0] for s in order], [grown[s][1] for s in order])


def walk(slots: SlotHead, texts: dict[int, Text], chosen: Sequence[int]) -> None:
    for slot in chosen:
        texts[slot].draft.append(texts[slot].dice.randrange(VOCAB))
    slots.append(list(chosen), torch.tensor([texts[slot].draft[-1] for slot in chosen]))


@pytest.mark.parametrize("seed", range(4))
def test_any_course_of_reading_and_drafting(head: DraftHead, seed: int) -> None:
    dice = random.Random(seed)
    width = 3 * 32 if len(head.aux_hidden_layers) == 3 else 32
    slots, texts = make(head, piece=dice.choice([5, 1024])), dict[int, Text]()
    for _ in range(6):
        for slot in range(SLOTS):
            if slot not in texts and dice.random() < 0.6:
                texts[slot] = Text(dice, width)
            elif dice.random() < 0.15 and slot in texts:
                slots.release([slot])
                del texts[slot]
        fresh = {slot: dice.randint(1, 9) for slot, text in texts.items() if not len(text.states)}
        later = {slot: dice.randint(1, 4) for slot, text in texts.items() if len(text.states)}
        if texts:
            read(slots, texts, fresh | later)
            check(slots, head, texts)
        for _ in range(dice.randint(0, 4)):
            chosen = [slot for slot in sorted(texts) if dice.random() < 0.7]
            if chosen:
                walk(slots, texts, chosen)
                check(slots, head, texts)


def test_rewinding(head: DraftHead) -> None:
    width = 32 * len(head.aux_hidden_layers)
    slots, texts = make(head), {1: Text(random.Random(0), width), 2: Text(random.Random(1), width)}
    read(slots, texts, {1: 5, 2: 7})
    for marked in ({1: 0, 2: 0}, {1: 2, 2: 1}):
        for slot, depth in marked.items():
            for _ in range(depth):
                walk(slots, texts, [slot])
        slots.mark([1, 2])
        for _ in range(3):
            walk(slots, texts, [1, 2])
        check(slots, head, texts)
        slots.rewind([1, 2])
        for slot, depth in marked.items():
            del texts[slot].draft[depth:]
        check(slots, head, texts)
        walk(slots, texts, [2])
        check(slots, head, texts)
        slots.rewind([1, 2])
        del texts[2].draft[marked[2] :]
    slots.release([1, 2])
    assert [slots.length(1), slots.depth(2)] == [0, 0]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield
