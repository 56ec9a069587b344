"""Untrained heads of every method, and what vLLM's counters say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from guided_spec.errors import ConfigError, ModelError
from guided_spec.evaluate.acceptance import ServedDrafts, write_untrained
from guided_spec.models.heads.loading import find_method, load_head
from tests.learned_heads import TARGETS, write_head


@pytest.mark.parametrize("method", sorted(TARGETS.keys() - {"dflash2", "domino", "lilicorr"}))
def test_an_untrained_head_has_the_same_tensors(tmp_path: Path, method: str) -> None:
    """It drafts by the same method, over the same tokens; the weights are others, each time."""
    target, draft = write_head(tmp_path / "trained", method, 64)
    target.config.name_or_path = str(tmp_path / "trained")
    trained: Any = load_head(method, draft, target)
    state = torch.get_rng_state()
    folder = write_untrained(draft, target, tmp_path / "untrained")
    assert torch.equal(torch.get_rng_state(), state)
    found = find_method(folder, target)
    assert found == method
    untrained: Any = load_head(found, folder, target)
    assert type(untrained) is type(trained)
    both = (trained.state_dict(), untrained.state_dict())
    # A fresh head has the target's embedding, perhaps its output head, and no biases.
    is_own = {name for name in both[0] if "embed_tokens" not in name and "lm_head" not in name}
    assert {name for name in is_own if not name.endswith(".bias")} <= both[1].keys()
    for name in both[0].keys() & both[1].keys():
        assert both[0][name].shape == both[1][name].shape
        assert not name.endswith("q_proj.weight") or not torch.equal(both[0][name], both[1][name])
    assert untrained.aux_hidden_layers == trained.aux_hidden_layers
    if trained.vocabulary is not None:
        assert torch.equal(untrained.vocabulary.target_ids, trained.vocabulary.target_ids)
    again: Any = load_head(found, write_untrained(draft, target, tmp_path / "again"), target)
    for ours, theirs in zip(untrained.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("method", ["dflash2", "domino", "lilicorr"])
def test_a_head_that_is_not_written_here(tmp_path: Path, method: str) -> None:
    target, draft = write_head(tmp_path / "trained", method, 64)
    with pytest.raises(ModelError, match="train a fresh one"):
        write_untrained(draft, target, tmp_path / "untrained")


def test_counters_of_several_engines_are_added() -> None:
    lines = [
        'vllm:generation_tokens_total{engine="0"} 7.0',
        'vllm:generation_tokens_total{engine="1"} 1e3',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 4.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 1.0',
        "",
    ]
    found = ServedDrafts.read("http://a", "\n".join(lines))
    assert found == ServedDrafts(1007, 0, 0, 0, (5, 2))
    later = ServedDrafts(1010, 1, 3, 2, (6, 3, 0))
    assert later.since(found) == ServedDrafts(3, 1, 3, 2, (1, 1, 0))


def test_another_servers_counters_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"url='http://a'.*vllm:generation_tokens"):
        ServedDrafts.read("http://a", "sglang:generation_tokens_total 3\n")
