"""States of stock layers stand behind the tokens that stay, whatever was fed after them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.errors import ModelError
from guided_spec.models.slot_lm import SlotLM
from guided_spec.models.stock.slots import SlotInputs
from guided_spec.models.stock.state_rules import record_rules, recording, take_recorded
from tests.models.tiny import build

NAMES = ("qwen3_next", "kimi_linear", "granitemoehybrid", "falcon_h1", "mamba", "jamba")
STEPS = st.lists(
    st.tuples(st.integers(1, 6), st.tuples(st.integers(0, 6), st.integers(0, 6))),
    min_size=1,
    max_size=8,
)


@settings(max_examples=15, deadline=None)
@given(STEPS)
@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_stay_leaves_no_trace(name: str, steps: list[tuple[int, Any]]) -> None:
    """Two texts by turns; each step feeds as many tokens to both, and keeps fewer of each."""
    model: Any = build(name)
    lm = SlotLM(model, num_slots=3, max_length=80)
    source, texts = random.Random(len(steps)), [list[int](), list[int]()]
    for fed, staying in [(3, (3, 3)), *steps, (1, (1, 1))]:
        rows = [[source.randrange(lm.vocab_size) for _ in range(fed)] for _ in texts]
        starts = [len(text) for text in texts]
        found = lm.forward(SlotInputs(torch.tensor(rows), [2, 0], starts, [fed, fed])).logits
        keep = [min(fed, count) for count in staying]
        lm.commit(keep, [fed, fed])
        texts = [text + row[:n] for text, row, n in zip(texts, rows, keep, strict=True)]
    assert found is not None
    with torch.inference_mode():
        own = [
            model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1] for text in texts
        ]
    torch.testing.assert_close(found[:, -1], torch.stack(own), atol=1e-3, rtol=1e-3)


def test_rules_are_recorded_where_somebody_asks() -> None:
    model: Any = build("granitemoehybrid")
    assert record_rules(model), "a forward needs two tokens"
    assert record_rules(model), "and may be asked for again"
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode(), recording():
        expected = model(input_ids=ids, use_cache=False).logits
        with pytest.raises(ModelError, match="whose rule is not known"):
            take_recorded()  # of two layers
    with torch.inference_mode():
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected)
    assert not record_rules(build("qwen3_next"))
    with pytest.raises(ModelError, match="gated delta rules, Mamba and Mamba-2 only"):
        record_rules(build("rwkv"))
