"""Layers of many shapes in packed form: norms behind, fused projections, multipliers, no rotation.

Norms have weights of their own here, so that one that is left out or elsewhere shows.
"""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from guided_spec.errors import ModelError
from guided_spec.models.causal_lm import make_causal_lm
from guided_spec.models.heads.mtp import QwenMtpHead
from guided_spec.models.loading import load_model
from guided_spec.models.packed import decoder, layer
from guided_spec.models.packed.blocks import BLOCK
from guided_spec.models.packed.heads import PackedMtp
from guided_spec.models.quantized.fp8 import Fp8Linear
from guided_spec.models.stock.slots import SlotInputs
from guided_spec.ops.attention.slot_attention import HeadNorms
from guided_spec.types import SamplingParams
from tests.models.fp8_checkpoints import FORMS, write_fp8
from tests.models.heads.heads import write_eagle3
from tests.models.speculation import Row, generate_alone, prefill, prompts_of, speculate
from tests.models.tiny import build, make_line_lm
from tests.tiny_llm import VOCAB_SIZE, make_llm

VOCAB = 64
BEHIND = ["olmo2", "olmo3", "exaone4"]  # with no norm before
FUSED = ["phi3", "phi3_longrope", "glm", "glm4"]
OTHERS = ["ernie4_5", "helium", "hunyuan", "hunyuan_alpha", "granite", "smollm3"]
ALL = [*BEHIND, *FUSED, *OTHERS]
LAYERS = (0, 2, 4, -1)


def make(name: str, **fields: Any) -> PreTrainedModel:
    model = build(name, vocab_size=VOCAB, **fields)
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.rand(parameter.shape, generator=source) - 0.5)
    return model


def texts(model: PreTrainedModel, prompts: list[list[int]], expected: list[list[int]]) -> object:
    """In packed form, by drafts that are right some of the time."""
    lm = make_line_lm(model, num_slots=8, max_length=70)
    assert lm.runs_as == "packed forwards"
    slots = [6, 1, 4, 0, 7][: len(prompts)]
    rows = [Row(s, p, e) for s, p, e in zip(slots, prompts, expected, strict=True)]
    prefill(lm, rows)
    source = random.Random(0)
    while open_rows := [row for row in rows if not row.is_done]:
        speculate(lm, open_rows, source)
    return [row.tokens[: len(row.expected)] for row in rows]


@pytest.mark.parametrize("name", ALL)
def test_a_ragged_speculative_batch_gives_what_generate_gives(name: str) -> None:
    model = make(name)
    prompts = prompts_of([5, 17, 11, 1, 23], VOCAB, 0)
    expected = [generate_alone(model, prompt, 20) for prompt in prompts]
    assert texts(model, prompts, expected) == expected


@pytest.mark.parametrize("name", ALL)
def test_alone_and_token_by_token(name: str) -> None:
    model = make(name)
    (prompt,) = prompts_of([11], VOCAB, 5)
    expected = generate_alone(model, prompt, 16)
    lm, row = make_line_lm(model, num_slots=1, max_length=40), Row(0, prompt, expected)
    prefill(lm, [row])
    while not row.is_done:
        fed = SlotInputs(torch.tensor([row.tokens[-1:]]), [0], [row.length], [1])
        logits = lm.forward(fed).logits
        lm.commit([0], [1])
        assert logits is not None
        row.tokens.append(int(logits[0, 0].argmax()))
    assert row.tokens == expected


@pytest.mark.parametrize("name", ALL)
@torch.inference_mode()
def test_logits_and_hidden_states_are_those_of_transformers(name: str) -> None:
    """Those that draft heads read: of the stream between layers, and behind the last norm."""
    model: Any = make(name)
    ids = torch.tensor(prompts_of([30], VOCAB, 2))
    lm = make_line_lm(model, num_slots=2, max_length=40)
    found = lm.forward(SlotInputs(ids, [1], [0], [30]), hidden_layers=LAYERS)
    output = model(ids, output_hidden_states=True, use_cache=False)  # leaves hooks on it
    assert found.logits is not None
    torch.testing.assert_close(found.logits, output.logits, rtol=1e-4, atol=1e-4)
    assert found.hidden_states is not None
    parts = found.hidden_states.split(32, -1)
    for at, part in zip((0, 2), parts[:2], strict=True):
        torch.testing.assert_close(part, output.hidden_states[at], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(parts[3], output.hidden_states[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*BEHIND, *FUSED])
@torch.inference_mode()
def test_a_prefix_that_is_kept_is_read_as_it_was(name: str) -> None:
    """Blocks of an earlier text, under the same tokens."""
    model = make(name)
    (prompt,) = prompts_of([BLOCK + 20], VOCAB, 4)
    lm = make_line_lm(model, num_slots=2, max_length=BLOCK + 30)
    ids = torch.tensor([prompt])
    lm.forward(SlotInputs(ids, [0], [0], [len(prompt)]), logits="none")
    lm.copy_slot(0, [1], len(prompt))
    last = torch.tensor([[9]])
    expected = cast(Any, model)(torch.cat([ids, last], 1), use_cache=False).logits[:, -1:]
    found = lm.forward(SlotInputs(last, [1], [len(prompt)], [1])).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_packing_leaves_the_stock_model_what_it_was(name: str) -> None:
    model: Any = make(name)
    ids = torch.arange(9).unsqueeze(0)
    with torch.no_grad():
        expected = model(ids).logits
        nbytes = _stored(model)
        make_line_lm(model, num_slots=1, max_length=20)
        assert torch.equal(model(ids).logits, expected)
    assert _stored(model) == nbytes, "something is stored twice"


def _stored(model: PreTrainedModel) -> int:
    storages = [parameter.untyped_storage() for parameter in model.parameters()]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


@pytest.mark.parametrize("name", ["olmo3", "phi3", "glm4"])
@pytest.mark.parametrize("form", ["compressed channels", "compressed tensors", "small blocks"])
def test_weights_in_fp8(name: str, form: str, tmp_path: Path) -> None:
    whole = write_fp8(tmp_path, make(name), FORMS[form])
    model = load_model(tmp_path, device="cpu")
    assert any(isinstance(module, Fp8Linear) for module in model.modules())
    prompts = prompts_of([5, 11, 1], VOCAB, 0)
    expected = [generate_alone(whole, prompt, 16) for prompt in prompts]
    assert texts(model, prompts, expected) == expected


@pytest.mark.parametrize(("name", "merged"), [("phi3", "qkv_proj"), ("olmo3", "k_proj")])
@torch.inference_mode()
def test_a_merged_adapter(name: str, merged: str, tmp_path: Path) -> None:
    model: Any = make(name)
    model.save_pretrained(tmp_path / "base")
    base: Any = load_model(tmp_path / "base", device="cpu")
    settings = LoraConfig(r=4, target_modules=[merged, "down_proj"], init_lora_weights=False)
    adapted = get_peft_model(base, settings).eval()
    ids = torch.tensor(prompts_of([11], VOCAB, 2))
    expected = adapted(ids).logits
    adapted.save_pretrained(str(tmp_path / "adapter"))
    lm = make_line_lm(load_model(tmp_path / "adapter", device="cpu"), num_slots=1, max_length=20)
    found = lm.forward(SlotInputs(ids, [0], [0], [11])).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert float((model(ids).logits - expected).abs().max()) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["olmo3", "phi3", "exaone4", "granite"])
def test_an_eagle3_head_drafts_for_it_and_prompts_are_read_once(name: str, tmp_path: Path) -> None:
    """The texts of a drafting engine are those of a plain one, the second time by kept blocks."""
    target = build(name, vocab_size=VOCAB_SIZE)
    write_eagle3(tmp_path, target, draft_vocab_size=VOCAB_SIZE * 3 // 4)
    prompts = ["The name of the cat is Ada. " * 20, "A", "1, 2.5, "]
    params, found = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), []
    for kernels, proposer, draft in (
        ("stock", "none", None),
        ("packed", "none", None),
        ("packed", "eagle3", str(tmp_path)),
    ):
        with make_llm(target, proposer, draft, kernels=kernels, max_batch_size=3) as llm:
            first, outputs = llm.generate(prompts[:1], params), llm.generate(prompts, params)
        found.append([one.token_ids for one in outputs])
        assert first[0].token_ids == outputs[0].token_ids
        assert (outputs[0].stats.cached_tokens > 0) == (kernels == "packed")
    assert found == [found[0]] * 3


@pytest.mark.parametrize("name", [*BEHIND, "glm4", "granite"])
def test_mtp_modules_of_such_layers_keep_their_stock_form(name: str) -> None:
    assert PackedMtp.of(QwenMtpHead.fresh(make(name), initialize="random"), 10) is None


def test_a_growing_rotation_is_packed_as_far_as_it_does_not_grow() -> None:
    model = make("phi3_longrope")
    assert make_line_lm(model, num_slots=1, max_length=96).runs_as == "packed forwards"
    assert decoder.PackedDecoder.of(model, 97, [None] * 4) is None
    with pytest.raises(ModelError, match="longrope .* beyond 96 tokens"):
        make_causal_lm(model, num_slots=1, max_length=97)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("olmo2", "norms"),
        ("exaone4", "norms"),
        ("glm4", "norms"),
        ("olmo3", "heads"),
        ("hunyuan", "heads"),
        ("glm", "pairs"),
        ("phi3", "pairs"),
        ("exaone4", "rotated"),
        ("smollm3", "rotated"),
        ("granite", "multiplier"),
    ],
)
def test_a_wrong_equation_is_refused(
    name: str, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the trial of the forms, and the stock modules run instead, over blocks as well."""
    fields = {"logits_scaling": 1.0} if name == "granite" else {}  # the others' heads are plain
    model, norms = make(name, **fields), decoder.LayerNorms.of
    if fault == "norms":  # what is added has none
        wrong = classmethod(lambda _, one: norms(one)._replace(attended=None))
        monkeypatch.setattr(decoder.LayerNorms, "of", wrong)
    elif fault == "heads":
        read = layer._head_norms

        def turned(attention: Any) -> HeadNorms:
            found = read(attention)
            assert found is not None
            return found._replace(query=found.query.flip(0), come_after=not found.come_after)

        monkeypatch.setattr(layer, "_head_norms", turned)
    elif fault == "pairs":
        monkeypatch.setattr(layer, "IN_PAIRS", () if name == "glm" else ("phi3",))
    elif fault == "rotated":
        monkeypatch.setattr(decoder, "is_rotated", lambda _: True)
    else:
        monkeypatch.setattr(decoder, "RESIDUAL", "none")
    with pytest.raises(ModelError, match="its logits in packed form"):
        make_causal_lm(model, num_slots=2, max_length=80, kernels="packed")
    with caplog.at_level(logging.WARNING):
        lm = make_causal_lm(model, num_slots=2, max_length=80)
    assert lm.runs_as == "stock modules over blocks"
    assert "in packed form" in caplog.text


@torch.inference_mode()
def test_half_precision_is_near() -> None:
    for name in ("olmo3", "phi3", "granite"):
        model: Any = cast(Any, make(name)).to(torch.bfloat16)
        ids = torch.tensor(prompts_of([30], VOCAB, 2))
        expected = model(ids, use_cache=False).logits.float()
        lm = make_line_lm(model, num_slots=1, max_length=40)
        found = lm.forward(SlotInputs(ids, [0], [0], [30])).logits
        assert found is not None
        errors = (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert float(errors.median()) < 0.05
