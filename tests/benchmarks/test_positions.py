"""The host's part of a drafted position, without a device."""

from __future__ import annotations

import torch

from benchmarks.positions import PARTS, time_steps
from guided_spec.config import EngineConfig
from guided_spec.engine.setup import bundled_asset
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.guide import Guide
from guided_spec.models.loading import load_tokenizer


def test_every_part_of_a_step_is_timed() -> None:
    tokenizer = load_tokenizer(bundled_asset("target"))
    vocabulary = Vocabulary.from_tokenizer(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    config = EngineConfig(num_draft_tokens=3, tree_nodes=7, max_batch_size=2)
    guide = Guide(vocabulary, tokenizer, config, device=torch.device("cpu"))
    times = time_steps(guide, tokenizer, 2, 4)
    guide.close()
    assert set(times) == set(PARTS)
    assert {len(times[part]) for part in ("batch", "positions", "tree", "commit")} == {4}
    assert all(second >= 0 for part in PARTS for second in times[part])
