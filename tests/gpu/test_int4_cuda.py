"""Products with int4 weights on a GPU, in graphs too, and checkpoints that run by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from guided_spec.bundled import bundled_asset
from guided_spec.engine.llm import LLM
from guided_spec.models.causal_lm import make_causal_lm
from guided_spec.models.loading import load_model
from guided_spec.ops.linear.int4_linear import Int4Weight, int4_linear, multiply_out
from guided_spec.ops.pointwise import rms_norm
from guided_spec.types import SamplingParams
from tests.models.int4_checkpoints import FORMS, write_int4
from tests.models.speculation import generate_alone, prompts_of, speculated
from tests.models.tiny import build
from tests.ops.linear.test_int4_linear import exact, weight_of

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
SHAPES = {  # outputs, inputs
    "one block": (64, 256),
    "outputs that end within a block": (1100, 2048),
    "sums of slices": (72, 12288),
    "layers of 8B": (4096, 4096),
}
GROUPS = {"32": 32, "128": 128, "channel": None}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 6, 8, 48, 64, 100, 384])
@torch.inference_mode()
def test_products_agree_with_the_reference(
    count: int, shape: str, group: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(count)
    outputs, inputs = SHAPES[shape]
    weight = weight_of(outputs, inputs, inputs // (GROUPS[group] or inputs), device="cuda")
    x = torch.randn(count, inputs, device=CUDA, dtype=dtype)
    bias = torch.randn(outputs, device=CUDA, dtype=dtype)
    for given in (None, bias):
        expected = exact(x, weight, given)
        for _ in range(3):  # programs count each other, and leave no count behind
            found = int4_linear(x, weight, given)
            assert found.dtype == dtype
            torch.testing.assert_close(found.float(), expected, atol=3e-2, rtol=3e-2)
            assert not weight.arrived.any()


@pytest.mark.parametrize("group", GROUPS)
@torch.inference_mode()
def test_a_matrix_is_multiplied_out_as_the_reference_does(group: str) -> None:
    torch.manual_seed(0)
    weight = weight_of(1100, 2048, 2048 // (GROUPS[group] or 2048), device="cuda")
    kernels = pytest.importorskip("guided_spec.ops.linear.int4_linear_triton")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(kernels.multiply_out(weight, dtype), multiply_out(weight, dtype))


@pytest.mark.parametrize("count", [3, 40])
@torch.inference_mode()
def test_float32_and_orders_of_inputs(count: int) -> None:
    torch.manual_seed(0)
    weight = weight_of(200, 512, 4, is_permuted=True, device="cuda")
    x = torch.randn(2, count, 512, device=CUDA)
    found = int4_linear(x, weight)
    torch.testing.assert_close(found, exact(x, weight, None), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("count", [1, 6, 8, 48, 64, 384])
@torch.inference_mode()
def test_graphs_replay_what_is_computed(count: int, group: str) -> None:
    """Each product reads what a kernel just before it wrote, which lets its successor begin."""
    torch.manual_seed(count)
    weights = [weight_of(1024, 1024, 1024 // (GROUPS[group] or 1024), device="cuda")] * 3
    x = torch.randn(count, 1024, device=CUDA, dtype=torch.bfloat16)
    ones = torch.ones(1024, device=CUDA, dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        states = x
        for weight in weights:
            states = int4_linear(rms_norm(states, ones, 1e-6), weight)
        return states

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(3):
        x.normal_()
        graph.replay()
        expected = reference(x, ones, weights)
        torch.testing.assert_close(found.float(), expected, atol=6e-2, rtol=6e-2)


def reference(x: torch.Tensor, ones: torch.Tensor, weights: list[Int4Weight]) -> torch.Tensor:
    states = x
    for weight in weights:
        states = exact(rms_norm(states, ones, 1e-6), weight, None).to(x.dtype)
    return states.float()


@pytest.mark.parametrize("form", ["awq", "gptq, ordered", "compressed channels"])
def test_a_checkpoint_gives_what_its_numbers_give(form: str, tmp_path: Path) -> None:
    model = build("llama", vocab_size=64, hidden_size=128, intermediate_size=256)
    whole = write_int4(tmp_path, model, FORMS[form])
    prompts = prompts_of([5, 17, 90], 64, 0)
    expected = [generate_alone(whole, prompt, 20) for prompt in prompts]
    lm = make_causal_lm(load_model(tmp_path, dtype="float32"), num_slots=3, max_length=130)
    assert lm.is_packed
    found = speculated(lm, prompts, expected)
    assert [tokens[: len(own)] for tokens, own in zip(found, expected, strict=True)] == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_llm_runs_by_graphs(dtype: str, tmp_path: Path) -> None:
    target = load_model(bundled_asset("target"), device="cpu")
    write_int4(tmp_path, target, FORMS["awq"])
    params = SamplingParams(temperature=0.0, max_tokens=24)
    options: dict[str, Any] = {"tokenizer": bundled_asset("target"), "max_model_len": 256}
    with LLM(str(tmp_path), "ngram", dtype=dtype, **options) as llm:
        outputs = llm.generate(["Name: Ada", "A list of fruits: apples and"], params)
    assert all(output.error is None and output.token_ids for output in outputs)
