"""LoRA adapters on a CUDA device: in graphs, in packed form and by the stock modules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from guided_spec.models.causal_lm import make_causal_lm
from guided_spec.models.line_lm import LineLM
from guided_spec.models.lora.adapted_model import with_adapters
from guided_spec.models.stock.slots import SlotInputs
from guided_spec.types import SamplingParams
from tests.adapters import merged, write_adapter
from tests.models.tiny import build
from tests.tiny_llm import VOCAB_SIZE, make_llm

pytestmark = pytest.mark.gpu

LORAS = (None, "a", "b")
PROMPT = "The name of the cat is"


def on_cuda(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """With heads of 16 dimensions, what the attention kernel takes."""
    model: Any = build(name, vocab_size=VOCAB_SIZE, hidden_size=64, head_dim=16)
    return model.to("cuda", dtype)


def write_two(model: PreTrainedModel, folder: Path) -> dict[str, str]:
    has_experts = model.config.model_type.startswith("llama4")
    layers: Any = ["q_proj", "v_proj", "o_proj"] if has_experts else "all-linear"
    settings: dict[str, Any] = {"target_modules": layers}
    return {
        name: write_adapter(model, folder / name, seed, rank=2 + 3 * seed, **settings)
        for seed, name in enumerate("ab")
    }


@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2", "llama4"])
@pytest.mark.parametrize("proposer", ["none", "ngram"])
def test_each_text_is_that_of_its_merged_base(name: str, proposer: str, tmp_path: Path) -> None:
    base = on_cuda(name)
    folders = write_two(base, tmp_path)
    greedy = SamplingParams(max_tokens=24, ignore_eos=True)
    asked = [greedy, replace(greedy, temperature=1.0, seed=3)]
    expected: list[list[int]] = []
    for lora in LORAS:
        whole: Any = base if lora is None else merged(base, folders[lora])
        with make_llm(whole.to(base.device), kernels="stock", verifier="coupled") as llm:
            expected += [output.token_ids for output in llm.generate([PROMPT] * 2, asked)]
    assert len({tuple(text) for text in expected}) > len(LORAS)
    params = [replace(one, lora=lora) for lora in LORAS for one in asked]
    options: dict[str, Any] = {"loras": folders, "verifier": "coupled", "prefill_tokens": 16}
    with make_llm(base, proposer, max_batch_size=4, **options) as llm:
        for _ in range(2):
            found = llm.generate([PROMPT] * len(params), params)
            assert [output.error for output in found] == [None] * len(params)
            assert [output.token_ids for output in found] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_graph_reads_the_adapters_that_slots_have_now(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    base = on_cuda("llama", dtype)
    folders = write_two(base, tmp_path)
    model = with_adapters(base, folders, num_slots=2)
    lm = make_causal_lm(model, num_slots=2, max_length=64, width=4)
    assert isinstance(lm, LineLM)
    assert lm.runs_as == "packed forwards"
    for _ in lm.capture(()):
        pass
    adapters = lm.adapters
    assert adapters is not None
    ids = torch.tensor([[5, 6, 7, 9], [5, 6, 7, 9]], device="cuda")
    wholes: dict[str | None, Any] = {None: base}
    wholes |= {lora: merged(base, folder).to(base.device) for lora, folder in folders.items()}
    for pair in ((None, "a"), ("b", None), ("a", "b"), ("b", "b")):
        for slot, lora in enumerate(pair):
            adapters.put(slot, lora)
            lm.release([slot])
        found = lm.forward(SlotInputs(ids, [0, 1], [0, 0], [4, 4])).logits
        lm.commit([4, 4], [4, 4])
        assert found is not None
        with torch.inference_mode():
            own = [wholes[lora](ids[:1]).logits[0] for lora in pair]
        size = 1e-3 if dtype == torch.float32 else 0.2
        for row, expected in zip(found.float(), own, strict=True):
            assert (row - expected.float()).norm() <= size * expected.float().norm()
