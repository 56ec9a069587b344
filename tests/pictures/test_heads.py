"""Draft heads of models whose positions have three axes get the same positions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from guided_spec.models.causal_lm import make_causal_lm
from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.eagle import Eagle3Head
from guided_spec.models.heads.slot_head import SlotHead, SlotLimits
from guided_spec.models.packed.heads import PackedEagle3, PackedMtp
from guided_spec.models.packed.slot_head import PackedSlotHead
from guided_spec.models.pictures.vision import split_vision
from tests.models.heads.fresh import fresh_head, spread, write_mtp
from tests.models.heads.heads import write_eagle3
from tests.pictures.sighted import sighted
from tests.pictures.test_texts import AXES, PROMPTS, expected, texts

CPU = torch.device("cpu")
LENGTH = 9
# Of a text with a picture, and of what comes after it.
PLACES = torch.tensor(
    [
        [0, 1, 1, 1, 1, 3, 4, 5, 6],
        [0, 1, 1, 2, 2, 3, 4, 5, 6],
        [0, 1, 2, 1, 2, 3, 4, 5, 6],
    ]
)


def language_of(family: str) -> Any:
    return split_vision(sighted(family).model, 8).language


@torch.inference_mode()
def logits_over_slots(form: Any, language: Any, tokens: list[int], states: Tensor) -> Tensor:
    """After all tokens but the last, and one draft token, which it is."""
    target = make_causal_lm(language, num_slots=2, max_length=32)
    assert target.axes is not None
    target.axes.put(1, PLACES[:, :6])
    where: Any = {"device": CPU, "dtype": torch.float32}
    if isinstance(form, PackedEagle3 | PackedMtp):
        head: Any = PackedSlotHead(form, SlotLimits(2, 32), blocks=target.blocks, **where)
    else:
        head = SlotHead(form, SlotLimits(2, 32), axes=target.axes, **where)
    target.grow(1, 32)
    head.read([1], [tokens[:5]], [states[:5]])  # in pieces
    head.read([1], [tokens[5:-1]], [states[5:-1]])
    head.append([1], torch.tensor(tokens[-1:]))
    logits: Tensor = head.logits([1])[0]
    return logits


@torch.inference_mode()
def logits_by_itself(head: Any, tokens: list[int], states: Tensor) -> Tensor:
    """By the stock head, of three axes."""

    def forward(fed: list[int], hidden: Tensor) -> Tensor:
        count = len(fed)
        mask = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
        found: Tensor = head(
            torch.tensor([fed]),
            hidden[None],
            module=0,
            position_ids=PLACES[:, None, :count],
            attention_mask=mask,
            cache=None,
        )
        return found[0]

    features = head.features(states[:-1])
    recycled = forward(tokens[:-1], features)[-1:]
    logits: Tensor = head.logits(forward(tokens, torch.cat([features, recycled]))[-1])
    return logits


def drawn(language: Any, head: Any) -> tuple[list[int], Tensor]:
    random = torch.Generator().manual_seed(2)
    width = len(head.aux_hidden_layers) * language.config.hidden_size
    tokens = torch.randint(40, (LENGTH,), generator=random).tolist()
    return tokens, torch.randn(LENGTH, width, generator=random)


@pytest.mark.parametrize("family", AXES)
def test_mtp(family: str) -> None:
    language = language_of(family)
    head = fresh_head("qwen_mtp", language, initialize="random")
    spread(head)
    form = PackedMtp.of(head, 32)
    assert form is not None
    tokens, states = drawn(language, head)
    expected = logits_by_itself(head, tokens, states)
    for one in (form, head):  # packed, and by its stock modules
        found = logits_over_slots(one, language, tokens, states)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["default", "mrope"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_eagle3(tmp_path: Path, kind: str, *, interleaved: bool) -> None:
    """Whose configuration says which numbers turn with which axis."""
    language = language_of("qwen2_vl")
    rope: dict[str, Any] = {"mrope_section": [2, 1, 1], "type": kind}
    if interleaved:
        rope["mrope_interleaved"] = True
    changes = {"rope_scaling": rope, "rope_theta": 10000.0}
    write_eagle3(tmp_path, language, draft_vocab_size=24, changes=changes)
    head: Any = Eagle3Head.from_checkpoint(Checkpoint.open(tmp_path), language)
    tokens, states = drawn(language, head)
    form = PackedEagle3.of(head, 32)
    assert form is not None
    found = logits_over_slots(form, language, tokens, states)
    rotary: Any = Qwen3VLTextRotaryEmbedding if interleaved else Qwen2VLRotaryEmbedding
    head.rotary_emb = rotary(
        SimpleNamespace(
            rope_parameters={**rope, "rope_type": "default", "rope_theta": 10000.0},
            **{"head_dim": 8, "max_position_embeddings": 64},
            standardize_rope_params=None,
        )
    )
    torch.testing.assert_close(found, logits_by_itself(head, tokens, states), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernels", ["packed", "stock"])
@pytest.mark.parametrize("family", AXES)
def test_texts_with_mtp(tmp_path: Path, family: str, kernels: str) -> None:
    write_mtp(tmp_path / "head", language_of(family))
    with sighted(family).llm("mtp", draft=str(tmp_path / "head"), kernels=kernels) as llm:
        assert texts(llm, PROMPTS) == texts(llm, PROMPTS) == expected(family, PROMPTS)


@pytest.mark.parametrize("family", AXES)
def test_texts_with_eagle3(tmp_path: Path, family: str) -> None:
    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    options = {"draft_vocab_size": 300, "changes": {"rope_scaling": rope}}
    write_eagle3(tmp_path / "head", language_of(family), **options)
    with sighted(family).llm("eagle3", draft=str(tmp_path / "head"), kernels="packed") as llm:
        assert texts(llm, PROMPTS) == texts(llm, PROMPTS) == expected(family, PROMPTS)
