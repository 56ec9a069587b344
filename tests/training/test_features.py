"""The target's states: computed, kept in files, and turned into its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from guided_spec.errors import ConfigError, ModelError
from guided_spec.models.loading import has_layers, load_ends
from guided_spec.models.target import TargetEnds
from guided_spec.models.tokenizer import end_of_text_ids
from guided_spec.training.algorithm import TargetStates, TrainingBatch
from guided_spec.training.features import (
    KeptFeatures,
    OnlineFeatures,
    StoredFeatures,
    feature_file,
    write_features,
)
from guided_spec.training.target_rows import TargetHead
from tests.models.tiny import BASE, build

LENGTHS = (5, 9, 1)
LAYERS = (1, 3, 0)
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("CohereConfig", {"logit_scale": 0.3}),
    "granite": ("GraniteConfig", {"logits_scaling": 3.0}),
    "gemma2_capped": ("Gemma2Config", {"head_dim": 8, "final_logit_softcapping": 2.0}),
}


def make_target(name: str) -> PreTrainedModel:
    if name not in OTHERS:
        return build(name)
    kind, differences = OTHERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**BASE, "vocab_size": 64, **differences})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data, 0.0, 0.3)
    found = model.eval()
    assert isinstance(found, PreTrainedModel)
    return found


def make_batch(first: int = 4) -> TrainingBatch:
    shape = (len(LENGTHS), max(LENGTHS))
    generator = torch.Generator().manual_seed(0)
    return TrainingBatch(
        token_ids=torch.randint(1, 64, shape, generator=generator),
        loss_mask=torch.ones(shape, dtype=torch.bool),
        lengths=torch.tensor(LENGTHS),
        bitmask=torch.full((1, 2), -1, dtype=torch.int32),
        mask_rows=torch.zeros(shape, dtype=torch.int64),
        indices=torch.arange(first, first + len(LENGTHS)),
    )


def real(states: Tensor) -> Tensor:
    """The rows that are not padding, one after another."""
    rows = zip(states, LENGTHS, strict=True)
    return torch.cat([row[:length] for row, length in rows])


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_oss", "qwen3_5", "deepseek_v3"])
def test_states_are_those_of_each_document_alone(name: str) -> None:
    target = make_target(name)
    batch = make_batch()
    states = OnlineFeatures(target, LAYERS)(batch)
    assert states.aux.shape == (3, 9, 3, 32)
    assert not states.last.is_inference()
    assert not states.last.requires_grad
    head = TargetHead(target)
    for row, length in enumerate(LENGTHS):
        with torch.no_grad():
            alone: Any = target(batch.token_ids[row : row + 1, :length], output_hidden_states=True)
            logits = head.logits(head.normed(states.last[row, :length]))
        for place, layer in enumerate(LAYERS):
            found = states.aux[row, :length, place]
            torch.testing.assert_close(found, alone.hidden_states[layer][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits, alone.logits[0], rtol=1e-3, atol=1e-3)


def test_no_layer_but_the_last() -> None:
    states = OnlineFeatures(build("llama"), ())(make_batch())
    assert states.aux.shape == (3, 9, 0, 32)
    assert states.last.shape == (3, 9, 32)


def test_a_layer_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelError, match="hidden layer 5: the model has 4 layers"):
        OnlineFeatures(build("llama"), (5,))(make_batch())


@pytest.mark.parametrize("name", ["llama", "gemma3", *OTHERS])
def test_the_head_gives_the_targets_own_logits(name: str) -> None:
    target, batch = make_target(name), make_batch()
    head = TargetHead(target)
    with torch.no_grad():
        states = OnlineFeatures(target, ())(batch)
        mask = torch.arange(9) < batch.lengths[:, None]
        expected: Any = target(batch.token_ids, attention_mask=mask.long()).logits
        found = head.logits(head.normed(states.last))
    torch.testing.assert_close(real(found), real(expected))


@pytest.mark.parametrize("part", ["all", "ends"])
def test_a_target_with_an_unknown_step_behind_its_head_is_refused(
    part: str, tmp_path: Path
) -> None:
    target: Any = build("llama")
    if part == "ends":
        target.save_pretrained(tmp_path)
        target = load_ends(tmp_path, device=torch.device("cpu"))
    forward = target.forward

    def tripled(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 3
        return output

    target.forward = tripled
    with pytest.raises(ModelError, match="model_type='llama': it changes its logits"):
        TargetHead(target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_give_back_what_was_written(dtype: torch.dtype, tmp_path: Path) -> None:
    batch = make_batch()
    target: Any = build("llama")
    states = OnlineFeatures(target.to(dtype), LAYERS)(batch)
    write_features(tmp_path, batch, states, LAYERS)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"hs_{index}.safetensors" for index in (4, 5, 6)
    ]
    found = StoredFeatures(tmp_path, LAYERS)(batch)
    for ours, theirs in zip(found, states, strict=True):
        assert ours.dtype == dtype
        assert torch.equal(real(ours), real(theirs))


def test_the_files_are_those_of_speculators(tmp_path: Path) -> None:
    batch = make_batch()
    states = OnlineFeatures(build("llama"), LAYERS)(batch)
    write_features(tmp_path, batch, states, LAYERS)
    tensors = load_file(feature_file(tmp_path, 5))
    assert set(tensors) == {"hidden_states", "token_ids"}
    assert tensors["hidden_states"].shape == (9, 4, 32)
    assert torch.equal(tensors["hidden_states"][:, -1], states.last[1])
    assert tensors["token_ids"].dtype == torch.int64
    save_file(tensors, feature_file(tmp_path, 5))  # as they write it, with no header
    assert torch.equal(StoredFeatures(tmp_path, LAYERS)(batch).last[1], states.last[1])


def test_a_file_may_go_on_behind_its_row(tmp_path: Path) -> None:
    """The line end of a chat template behind the last answer, which no document here ends with."""
    batch, target = make_batch(), build("llama")
    states = OnlineFeatures(target, LAYERS)(batch)
    longer = batch._replace(
        token_ids=functional.pad(batch.token_ids, (0, 1), value=3), lengths=batch.lengths + 1
    )
    write_features(tmp_path, longer, OnlineFeatures(target, LAYERS)(longer), LAYERS)
    found = StoredFeatures(tmp_path, LAYERS)(batch)
    for row, length in enumerate(batch.lengths.tolist()):
        for ours, theirs in zip(found, states, strict=True):
            torch.testing.assert_close(ours[row, :length], theirs[row, :length])
            assert not ours[row, length:].any()


def test_states_are_computed_only_where_files_are_missing(tmp_path: Path) -> None:
    online, calls = OnlineFeatures(build("llama"), LAYERS), []

    def compute(batch: TrainingBatch) -> TargetStates:
        calls.append(batch.indices.tolist())
        return online(batch)

    kept = KeptFeatures(tmp_path, LAYERS, compute)
    first = kept(make_batch())
    again = kept(make_batch())
    feature_file(tmp_path, 5).unlink()
    kept(make_batch())
    assert calls == [[4, 5, 6]] * 2
    assert torch.equal(real(first.aux), real(again.aux))


def spoil(path: Path, problem: str) -> None:
    tensors = load_file(path)
    states = tensors["hidden_states"]
    match problem:
        case "missing":
            path.unlink()
            return
        case "broken":
            path.write_bytes(path.read_bytes()[:40])
            return
        case "tokens":
            tensors["token_ids"][0] += 1
        case "shorter":
            tensors["token_ids"] = tensors["token_ids"][:-1].contiguous()
        case "slots":
            tensors["hidden_states"] = states[:, 1:].contiguous()
        case "dtype":
            tensors["hidden_states"] = states.to(torch.float8_e4m3fn)
        case "neighbour":
            tensors["hidden_states"] = states.bfloat16()
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("missing", "there is no such file"),
        ("broken", "cannot be read"),
        ("tokens", "holds other tokens than the dataset's row"),
        ("shorter", "holds other tokens than the dataset's row"),
        ("slots", r"holds states \[9, 3, 32\], expected \[9, 4, H\]"),
        ("dtype", "holds states of F8_E4M3"),
        ("neighbour", "another width or dtype than its neighbours"),
    ],
)
def test_wrong_files_are_refused(problem: str, message: str, tmp_path: Path) -> None:
    batch = make_batch()
    write_features(tmp_path, batch, OnlineFeatures(build("llama"), LAYERS)(batch), LAYERS)
    spoil(feature_file(tmp_path, 5), problem)
    with pytest.raises(ConfigError, match=rf"features=.*{message}"):
        StoredFeatures(tmp_path, LAYERS)(batch)


def test_files_of_other_layers_are_refused(tmp_path: Path) -> None:
    batch = make_batch()
    write_features(tmp_path, batch, OnlineFeatures(build("llama"), LAYERS)(batch), LAYERS)
    with pytest.raises(ConfigError, match="holds the layers 1 3 0, expected 1 2 0"):
        StoredFeatures(tmp_path, (1, 2, 0))(batch)


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gemma3", "deepseek_v3", *OTHERS])
def test_the_ends_alone(name: str, tmp_path: Path) -> None:
    """What trains from files has the target's embedding, norm and head, and none of its layers."""
    target, batch = make_target(name), make_batch()
    target.save_pretrained(tmp_path)
    ends = load_ends(tmp_path, device=torch.device("cpu"))
    assert has_layers(target)
    assert not has_layers(ends)
    assert ends.device.type == "cpu"
    held = sum(p.numel() for p in ends.parameters() if not p.is_meta)
    assert held < sum(p.numel() for p in target.parameters()) / 2
    states = OnlineFeatures(target, ())(batch).last
    whole, own = TargetHead(target), TargetHead(ends)
    assert torch.equal(own.logits(own.normed(states)), whole.logits(whole.normed(states)))
    tokens = torch.arange(64)
    assert torch.equal(TargetEnds(ends).embed(tokens), TargetEnds(target).embed(tokens))
    assert end_of_text_ids(ends) == end_of_text_ids(target)


def test_ends_that_are_not_there(tmp_path: Path) -> None:
    make_target("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("lm_head.weight", "head.qweight"): t for name, t in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"expected plain weights lm_head.weight, found none"):
        load_ends(tmp_path, device=torch.device("cpu"))
