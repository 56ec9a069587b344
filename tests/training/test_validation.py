"""Decoding held-out documents with a draft."""

from __future__ import annotations

from pathlib import Path

import pytest

from guided_spec.bundled import bundled_asset
from guided_spec.errors import ModelError
from guided_spec.evaluate.measurement import WorkItem
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.models.loading import load_model
from guided_spec.models.tokenizer import load_tokenizer
from guided_spec.training.validation import HeldoutDecoding
from guided_spec.types import SamplingParams

SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


@pytest.mark.slow
def test_the_bundled_draft_saves_forwards() -> None:
    path = bundled_asset("target")
    target, tokenizer = load_model(path, device="cpu"), load_tokenizer(path)
    draft = Path(bundled_asset("draft"))
    items = [
        WorkItem(list(tokenizer(text)["input_ids"]), GrammarSpec.json_schema(SCHEMA))
        for text in ("The order is fine.\n\nFields: ok\nJSON: ", "Nothing works.\nJSON: ")
    ]
    params = SamplingParams(max_tokens=60)
    found = HeldoutDecoding(target, tokenizer, items, params, 3).run(draft)
    assert found.name == "draft_model"
    assert found.requests == 2
    assert found.valid == 1.0
    assert found.drafted > 0
    assert found.acceptance_length == found.tokens / found.forwards > 1
    long = [WorkItem([5] * 5000, None)]
    with pytest.raises(ModelError, match="a held-out document failed: prompt has 5000 tokens"):
        HeldoutDecoding(target, tokenizer, long, params, 3).run(draft)
