"""Whatever its architecture, a model writes over slots what it writes by itself, or is refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from guided_spec.errors import ModelError
from guided_spec.models.causal_lm import make_causal_lm
from guided_spec.models.slot_lm import SlotLM
from guided_spec.models.stock import kv_cache
from guided_spec.models.text_lm import TextLM
from tests.models.families import (
    ENCODER,
    KINDS,
    NOT_BUILT,
    all_families,
    build_family,
    families_of,
)
from tests.models.family_sweep import EQUAL, NO_PACKED_FORM, outcome_of
from tests.models.tiny import build

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()
LINES = dict(re.findall(r"^(\S+) +\S+ +\S+ +(\S.*)$", PAGE, re.MULTILINE))  # its last column
IS_OF_THE_PAGE = f"With transformers {transformers.__version__}:" in PAGE
RUN = {
    "big_bird": NO_PACKED_FORM,  # as a decoder
    "diffllama": "in packed form differ",
    "falcon": "in packed form failed",
    "gemma3_text": EQUAL,
    "gpt2": EQUAL,
    "hy_v4": NO_PACKED_FORM,
    "lfm2": NO_PACKED_FORM,
    "modernbert-decoder": NO_PACKED_FORM,
    "mpt": "in packed form failed",
    "olmo_hybrid": NO_PACKED_FORM,
    "qwen3_5": EQUAL,
    "qwen3_next": EQUAL,
}
POSITIONS = "for it counts positions by itself"
PAST = "for it keeps its past in a form of its own"
REFUSED = {
    "bart": POSITIONS,
    "bert" + ENCODER: "is_decoder=False",
    "big_bird" + ENCODER: "is_decoder=False",
    "bloom": POSITIONS,
    "cpmant": POSITIONS,
    "blt": "its layers cannot be kept in slots",
    "gpt_neo": "does not keep to its masks",
    "minimax": "layers of type 'linear_attention'",
    "moshi": "under the windows of its configuration",
    "openai-gpt": PAST,
    "prophetnet": POSITIONS,
    "reformer": PAST,
    "roformer": POSITIONS,
    "rwkv": PAST,
    "trocr": POSITIONS,
    "xlm": "a forward over KV slots failed",
    "xlnet": PAST,
    "xlstm": POSITIONS,
}


ALL_REFUSED = ("bert", "big_bird", "cpmant", "prophetnet", "reformer", "xlm", "xlnet")
WITHOUT_A_CACHE = ("blt", "moshi", "openai-gpt", "rwkv", "xlstm")


def refusal(model: PreTrainedModel, max_length: int = 80) -> str:
    """Why it does not run over slots."""
    with pytest.raises(ModelError) as caught:
        SlotLM(model, num_slots=2, max_length=max_length)
    return str(caught.value)


def known(families: Iterable[str]) -> list[str]:
    """Those that the installed transformers has."""
    return [family for family in families if family.removesuffix(ENCODER) in KINDS]


@pytest.mark.slow
@pytest.mark.parametrize("family", known(RUN))
def test_these_write_what_generate_writes(family: str) -> None:
    found = outcome_of(family)
    assert found.stock == EQUAL
    assert RUN[family] in found.packed


@pytest.mark.parametrize("family", known(REFUSED))
def test_these_do_not_run_over_slots_and_the_reason_is_named(family: str) -> None:
    model, kind = build_family(family), family.removesuffix(ENCODER)
    message = refusal(model)
    assert message.startswith(f"model_type='{kind}': ")
    assert REFUSED[family] in message
    if kind in ALL_REFUSED:
        with pytest.raises(ModelError) as caught:
            make_causal_lm(model, num_slots=2, max_length=80)
        assert str(caught.value).startswith(message)
        assert "one text at a time: " in str(caught.value)
    else:
        lm = make_causal_lm(model, num_slots=2, max_length=80)
        assert isinstance(lm, TextLM)
        assert lm.runs_as.endswith(" without a cache") == (kind in WITHOUT_A_CACHE)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_every_family_writes_what_generate_writes_or_is_refused(kind: str) -> None:
    for family in families_of(kind):
        check_family(family)


def check_family(family: str) -> None:
    if family in NOT_BUILT:
        with pytest.raises(Exception):  # noqa: B017, PT011 - of all kinds
            build_family(family)
        return
    found = outcome_of(family)
    if not IS_OF_THE_PAGE or family.endswith(ENCODER):
        return
    form = found.runs_as or "refused"
    assert LINES[family].split(": ")[0] == form, "docs/models.md says otherwise"


@pytest.mark.skipif(not IS_OF_THE_PAGE, reason="docs/models.md is of another transformers")
def test_the_page_has_every_family() -> None:
    wanted = {family for family in all_families() if not family.endswith(ENCODER)}
    assert set(LINES) >= wanted


@pytest.mark.parametrize("family", ["diffllama", "mpt"])
def test_auto_keeps_the_stock_form_where_the_packed_one_is_wrong(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        lm = make_causal_lm(build_family(family), num_slots=2, max_length=80)
    assert not lm.is_packed
    assert f"model_type='{family}'" in caplog.text
    assert "in packed form" in caplog.text
    caplog.clear()
    assert make_causal_lm(build("llama"), num_slots=2, max_length=80).is_packed
    assert not caplog.text


@pytest.mark.parametrize("max_length", [8, 20, 400])
def test_a_mask_of_a_models_own_is_found_in_slots_of_any_size(max_length: int) -> None:
    """Its own windows have 8 tokens here; a mask by columns is wrong even within them."""
    assert "does not keep to its masks" in refusal(build_family("gpt_neo"), max_length)


def test_windows_that_were_read_wrongly_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mistral")
    make_causal_lm(model, num_slots=2, max_length=200)
    monkeypatch.setattr(kv_cache, "read_layers", lambda _: (["full_attention"] * 4, {}))
    assert "under the windows of its configuration" in refusal(model, 200)


@pytest.mark.parametrize("num_slots", [1, 3])
@pytest.mark.parametrize("max_length", range(1, 13))
def test_slots_of_any_size_can_be_tried(num_slots: int, max_length: int) -> None:
    for kernels in ("stock", "packed"):
        make_causal_lm(build("llama"), num_slots=num_slots, max_length=max_length, kernels=kernels)
    if max_length > 2:
        assert POSITIONS in refusal(build_family("trocr"), max_length)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_and_is_tried_all_the_same(dtype: torch.dtype) -> None:
    for family in ("gemma3n_text", "mixtral", "mpt"):
        half = build_family(family).to(dtype)  # type: ignore[arg-type]
        make_causal_lm(half, num_slots=2, max_length=80)
    for family in ("gpt_neo", "moshi", "rwkv", "roberta"):
        refusal(build_family(family).to(dtype))  # type: ignore[arg-type]


def test_a_model_in_training_mode_is_told_so() -> None:
    model = build("llama", attention_dropout=0.5).train()
    assert "call model.eval()" in refusal(model)
    with pytest.raises(ModelError, match="call model.eval"):
        make_causal_lm(model, num_slots=1, max_length=80)


def test_a_table_of_positions_that_is_too_short_is_named() -> None:
    model = build_family("gpt2")
    make_causal_lm(model, num_slots=1, max_length=512)
    assert "row 512 of an embedding of 512 rows" in refusal(model, 513)
    assert "row 599 of an embedding of 512 rows" in refusal(model, 600)
    with pytest.raises(ModelError, match="row 512"):
        make_causal_lm(model, num_slots=1, max_length=513)


def test_logits_that_are_no_numbers_are_refused() -> None:
    model = build("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = torch.nan
    assert "differ from its own by nan" in refusal(model)
    with pytest.raises(ModelError, match="by nan"):
        make_causal_lm(model, num_slots=1, max_length=80)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe", "gemma3"])
def test_a_trial_leaves_everything_as_it_was(name: str) -> None:
    model = build(name)
    before, random_ = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    make_causal_lm(model, num_slots=2, max_length=80, kernels="packed")
    assert torch.equal(torch.get_rng_state(), random_)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    modules = list(model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_with_hooks_can_be_tried() -> None:
    """accelerate moves weights and states between devices with them."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = build("llama")
    for module in model.modules():
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu", io_same_device=True))
    make_causal_lm(model, num_slots=2, max_length=80, kernels="stock")
