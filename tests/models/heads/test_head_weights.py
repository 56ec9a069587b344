"""Tensors go into modules of other dtypes whole or not at all; fp8 is multiplied out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from guided_spec.errors import ModelError
from guided_spec.models.heads.weights import (
    dequantize,
    fill_head,
    load_tensors,
    match_biases,
    recipe_of,
)
from guided_spec.models.quantized.fp8 import Fp8Recipe
from tests.models.fp8_checkpoints import FORMS, put_fp8
from tests.models.tiny import build

BLOCKS = Fp8Recipe((4, 3))


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: torch.randn_like(tensor) for name, tensor in module.state_dict().items()}


def test_load_converts() -> None:
    module = layers().double()
    tensors = {name: tensor.half() for name, tensor in tensors_of(module).items()}
    load_tensors(module, tensors, "x", like=torch.empty(0, dtype=torch.float64))
    for name, tensor in module.state_dict().items():
        assert tensor.dtype == torch.float64
        assert torch.equal(tensor, tensors[name].double())


def test_load_lists_everything_that_is_wrong() -> None:
    module = layers()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    tensors = tensors_of(module)
    del tensors["0.bias"]
    tensors["1.weight"] = torch.ones(3, 1)
    tensors["2.weight"] = torch.ones(5)
    with pytest.raises(ModelError) as caught:
        load_tensors(module, tensors, "org/head", like=torch.empty(0))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("org/head: its tensors do not fit")
    assert lines[1:] == [
        "  0.bias: expected [3], found none",
        "  2.weight: expected none, found [5]",
        "  1.weight: expected [1, 3], found [3, 1]",
    ]
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())


def test_load_cuts_long_lists() -> None:
    module = nn.ModuleList(nn.Linear(1, 1) for _ in range(50))
    with pytest.raises(ModelError, match="and 60 more"):
        load_tensors(module, {}, "x", like=torch.empty(0))


def test_biases_follow_names() -> None:
    module = layers()
    match_biases(module, {"1.bias", "0.weight"})
    assert module.state_dict().keys() == {"0.weight", "1.weight", "1.bias"}
    assert module.state_dict()["1.bias"].shape == (1,)


def test_load_leaves_what_no_checkpoint_holds() -> None:
    with torch.device("meta"):
        module = layers()
    module.frequencies = nn.Buffer(torch.ones(2), persistent=False)
    load_tensors(module, tensors_of(layers()), "x", like=torch.empty(0, dtype=torch.bfloat16))
    assert torch.equal(module.frequencies, torch.ones(2))
    for parameter in module.parameters():
        assert (parameter.device.type, parameter.dtype) == ("cpu", torch.bfloat16)
        assert not parameter.requires_grad


def test_load_keeps_what_is_exact() -> None:
    with torch.device("meta"):
        module = layers()
        last = module.get_submodule("1")
        last.register_buffer("bias_of_router", torch.zeros(3))
        last.register_buffer("count", torch.zeros(1, dtype=torch.int64))
    tensors = {n: torch.ones(t.shape) for n, t in module.state_dict().items()}
    like = torch.empty(0, dtype=torch.bfloat16)
    load_tensors(module, tensors, "x", like=like, exact=["of_router", "0.bias"])
    dtypes = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    assert dtypes == {
        "0.weight": torch.bfloat16,
        "0.bias": torch.float32,
        "1.weight": torch.bfloat16,
        "1.bias_of_router": torch.float32,
        "1.count": torch.int64,
    }
    assert not any(tensor.is_meta for tensor in module.state_dict().values())


def test_a_buffer_that_no_checkpoint_fills_is_an_error() -> None:
    def make() -> nn.Module:
        module = layers()
        module.register_buffer("scale", torch.ones(1), persistent=False)
        return module

    with pytest.raises(ModelError, match="x: .* found scale, which is not"):
        fill_head(make, tensors_of(layers()), build("llama"), "x")


@given(rows=st.integers(1, 9), columns=st.integers(1, 9), seed=st.integers(0, 99))
def test_fp8_blocks(rows: int, columns: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=random).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // 4), -(-columns // 3), generator=random)
    norm = torch.ones(2, dtype=torch.bfloat16)
    stored = {"a.weight": weight, "a.weight_scale_inv": scale, "norm.weight": norm}
    plain = dequantize(stored, BLOCKS, "x", torch.float32)
    assert plain.keys() == {"a.weight", "norm.weight"}
    assert plain["norm.weight"] is norm
    for row in range(rows):
        for column in range(columns):
            expected = weight[row, column].float() * scale[row // 4, column // 3]
            assert plain["a.weight"][row, column] == expected
    assert stored.keys() == {"a.weight", "a.weight_scale_inv", "norm.weight"}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_fp8_that_models_have(form: str) -> None:
    stored = {"a.weight": torch.randn(150, 200)}
    expected = put_fp8(stored, "a", FORMS[form])
    recipe = recipe_of({"quantization_config": FORMS[form].config}, "x")
    assert recipe is not None
    plain = dequantize(stored, recipe, "x", torch.float32)
    assert plain.keys() == {"a.weight"}
    torch.testing.assert_close(plain["a.weight"], expected)


def test_fp8_to_another_dtype() -> None:
    stored = {
        "a.weight": torch.ones(4, 3).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.full((1, 1), 0.3),
    }
    plain = dequantize(stored, BLOCKS, "x", torch.bfloat16)["a.weight"]
    assert torch.equal(plain, torch.full((4, 3), 0.3).bfloat16())


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"a.weight": (4, 3)}, "x: .* one without the other at 'a';"),
        ({"a.weight_scale_inv": (1, 1)}, "one without the other at 'a'"),
        ({"a.weight": (5, 3), "a.weight_scale_inv": (1, 1)}, r"must be \(2, 1\) for blocks"),
        ({"a.weight": (4,), "a.weight_scale_inv": (1,)}, "x: a: values"),
    ],
)
def test_broken_fp8(stored: dict[str, tuple[int, ...]], message: str) -> None:
    tensors = {
        name: torch.ones(shape).to(
            torch.float8_e4m3fn if name.endswith("weight") else torch.float32
        )
        for name, shape in stored.items()
    }
    with pytest.raises(ModelError, match=message):
        dequantize(tensors, BLOCKS, "x", torch.float32)


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}])
def test_plain(config: dict[str, Any]) -> None:
    assert recipe_of(config, "x") is None


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
        {"compression_config": {"quant_method": "compressed-tensors"}},
        {"quantization_config": "odd"},
    ],
)
def test_unreadable(config: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"x: (quantiz|compress)\w+: expected plain"):
        recipe_of(config, "x")
