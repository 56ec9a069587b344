"""The host's part of a drafted position, without a device."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.masks.positions import PARTS, time_steps
from guided_spec.bundled import bundled_asset
from guided_spec.config import EngineConfig
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.guide import Guide
from guided_spec.models.tokenizer import load_tokenizer


def timed(**options: Any) -> dict[str, list[float]]:
    tokenizer = load_tokenizer(bundled_asset("target"))
    vocabulary = Vocabulary.from_tokenizer(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    config = EngineConfig(num_draft_tokens=3, max_batch_size=2, **options)
    guide = Guide(vocabulary, tokenizer, config, device=torch.device("cpu"))
    times = time_steps(guide, tokenizer, 2, 4)
    guide.close()
    return times


def test_every_part_of_a_step_is_timed() -> None:
    times = timed()
    assert set(times) == set(PARTS)
    assert {len(times[part]) for part in ("batch", "positions", "commit")} == {4}
    assert all(second >= 0 for part in PARTS for second in times[part])


def test_with_tables_the_host_fills_no_rows() -> None:
    assert set(timed(grammar_tables="always")) == {*PARTS} - {"rows"}
