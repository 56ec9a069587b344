"""Fields of a block head's config.json that are of another kind than they must be."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from guided_spec.errors import ModelError
from guided_spec.models.heads.block.layout import SECTION
from guided_spec.models.heads.loading import load_head
from tests.models.heads.block_checkpoints import write_block
from tests.models.tiny import build


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return build("llama", vocab_size=64)


@pytest.mark.parametrize(
    ("dialect", "place", "values", "expected"),
    [
        ("zlab", SECTION, {"causal_head": "false", "use_swa": 2.5}, "true or false"),
        ("zlab", SECTION, {"shift_label": 1}, "true or false"),
        ("zlab", SECTION, {"mask_token_id": "3", "conv_kernel_size": -1}, "0 or more"),
        ("zlab", SECTION, {"selector_rank": 2.5, "block_size": 0}, ". or more, a whole"),
        ("zlab", SECTION, {"target_layer_ids": "01"}, "a list of layers"),
        ("zlab", SECTION, {"target_layer_ids": [0, True]}, "a list of layers"),
        ("zlab", SECTION, {"output_multiplier": math.nan}, "0 or more, a number"),
        ("zlab", SECTION, {"final_logit_softcapping": "x"}, "0 or more, a number"),
        ("zlab", None, {"block_size": "8", "markov_rank": [4]}, ". or more, a whole number"),
        ("zlab", None, {"dflash_config": "x", "draft_vocab_size": 1e400}, ""),
        ("speculators", None, {"block_size": True, "selector_top_k": -1}, "1 or more, a whole"),
        ("speculators", None, {"sample_from_anchor": "no"}, "true or false"),
        ("speculators", None, {"aux_hidden_state_layer_ids": 3}, "a list of layers"),
        ("speculators", None, {"transformer_layer_config": [3]}, "an object"),
    ],
)
def test_fields_of_another_kind_are_named(
    target: PreTrainedModel,
    tmp_path: Path,
    dialect: str,
    place: str | None,
    values: dict[str, Any],
    expected: str,
) -> None:
    """Whatever reads them later: text for a switch would be taken for true."""
    folder = write_block(tmp_path, target, "dflash", dialect)
    written: dict[str, Any] = json.loads((folder / "config.json").read_text())
    for name, value in values.items():
        config = copy.deepcopy(written)
        (config if place is None else config[place])[name] = value
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=f"{name}: expected {expected}.*; correct config.json"):
            load_head("dflash", folder, target)
