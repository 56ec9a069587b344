"""Loading from folders: what comes out, and what each mistake is answered with."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    QuantoConfig,
)

from guided_spec.bundled import named_model
from guided_spec.errors import ModelError
from guided_spec.models.loading import _target_device, load_model
from guided_spec.models.tokenizer import end_of_text_ids, load_tokenizer
from tests.models.tiny import build


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    build("llama", vocab_size=12).save_pretrained(path)
    words = {word: index for index, word in enumerate(["<unk>", "</s>", *"abcdefghij"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), eos_token="</s>"
    )
    tokenizer.save_pretrained(path)
    return path


def test_a_folder_loads_ready_for_inference(folder: Path) -> None:
    model = load_model(folder, device="cpu")
    assert not model.training
    assert model.dtype == torch.float32
    assert model.device == torch.device("cpu")
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.decode([2, 3]) == "a b"


def test_options_reach_transformers(folder: Path) -> None:
    model = load_model(folder, device="cpu", dtype="bfloat16", attn_implementation="eager")
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    assert load_model(folder, device="cpu", dtype=torch.float16).dtype == torch.float16


def test_a_model_is_known_by_another_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kimi K2 is DeepSeek V3; the code that comes with it is not run."""
    model = build("deepseek_v3")
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    code = {"AutoConfig": "no.Config", "AutoModelForCausalLM": "no.Model"}
    changed = {**settings, "model_type": "kimi_k2", "auto_map": code}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    options: Any
    for options in ({}, {"trust_remote_code": True}):
        found = load_model(tmp_path, device="cpu", **options)
        assert found.config.model_type == "deepseek_v3"
        same, ids = found.state_dict(), torch.arange(9)[None]
        assert all(torch.equal(value, same[name]) for name, value in model.state_dict().items())
        assert torch.equal(found(input_ids=ids).logits, model(input_ids=ids).logits)
    (tmp_path / "config.json").write_text(json.dumps({**changed, "model_type": "kimi_k9"}))
    with pytest.raises(ModelError, match="trust_remote_code=True"):
        load_model(tmp_path, device="cpu")
    assert "[y/N]" not in capsys.readouterr().out  # nobody is asked


def test_a_device_map_spreads_the_layers(folder: Path) -> None:
    pytest.importorskip("accelerate")
    model = load_model(folder, device_map={"": "cpu"})
    assert model.device == torch.device("cpu")


def test_a_device_map_without_accelerate_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"pip install 'guided-spec\[parallel\]'"):
        load_model(folder, device_map="auto")


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        (None, "expects the file '{}' for .*, found no such; download"),
        (0, "{}: expected a safetensors file, found something else .*; download it again"),
        (900, "{}: expected a safetensors file, found something else .*; download it again"),
    ],
)
def test_a_shard_that_is_missing_or_cut_off_is_named(
    rest: int | None, said: str, tmp_path: Path
) -> None:
    """rest: the bytes that are left of it."""
    build("llama", vocab_size=12).save_pretrained(tmp_path, max_shard_size="20KB")
    last = max(tmp_path.glob("model-*.safetensors"))
    data = last.read_bytes()
    last.unlink()
    if rest is not None:
        last.write_bytes(data[:rest])
    with pytest.raises(ModelError, match=f"^draft='.*': .*{said.format(last.name)}"):
        load_model(tmp_path, device="cpu", argument="draft")


def test_a_missing_folder_is_not_looked_for_on_a_hub(tmp_path: Path) -> None:
    for load in (load_model, load_tokenizer):
        with pytest.raises(ModelError, match="there is no such folder"):
            load(str(tmp_path / "nowhere"))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_model(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="tokenizer="):
        load_tokenizer(tmp_path)


def test_an_empty_folder_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer=.*: the folder has no tokenizer_config\.json"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_needs_no_model_beside_it(folder: Path, tmp_path: Path) -> None:
    load_tokenizer(folder).save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()
    assert load_tokenizer(tmp_path).decode([2, 3]) == "a b"


def test_a_model_that_is_not_a_decoder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "nowhere"}, "device='nowhere'"),
        ({"device": "cuda:99"}, "device='cuda:99': torch sees"),
        ({"dtype": "float33"}, "dtype='float33'"),
        ({"dtype": "nn"}, "dtype='nn'"),
        ({"dtype": 16}, "dtype=16"),
        ({"device": "cpu", "device_map": "auto"}, "exclude each other"),
    ],
)
def test_wrong_arguments_are_named(folder: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(folder, **arguments)


def test_a_tensor_parallel_plan_needs_torchrun(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ModelError, match="tp_plan='auto': start one process a device"):
        load_model(folder, tp_plan="auto")


def test_end_of_text_ids_gather_all_sources(folder: Path) -> None:
    model, tokenizer = load_model(folder, device="cpu"), load_tokenizer(folder)
    assert end_of_text_ids(model, tokenizer) == (1,)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [7, 1]
    model.config.eos_token_id = 4
    assert end_of_text_ids(model, tokenizer) == (1, 4, 7)
    assert end_of_text_ids(model) == (1, 4, 7)


@pytest.mark.parametrize(
    ("has_cuda", "has_mps", "expected"),
    [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")],
)
def test_auto_is_the_best_device_there_is(
    monkeypatch: pytest.MonkeyPatch, *, has_cuda: bool, has_mps: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(has_cuda))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    assert _target_device("auto") == torch.device(expected)
    assert _target_device(None) == torch.device("cuda" if has_cuda else "cpu")


def test_a_quantized_checkpoint_loads(folder: Path, tmp_path: Path) -> None:
    """In fp8, which transformers turns back where there is no GPU."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    stored, expected = {}, load_model(folder, device="cpu")
    for name, weight in load_file(folder / "model.safetensors").items():
        stored[name] = weight
        if "_proj." in name:
            scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
            stored[name] = (weight / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale.view(1, 1)
            with torch.no_grad():
                expected.get_parameter(name).copy_(stored[name].float() * scale)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**settings, "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = torch.tensor([[1, 2, 3]])
    found: Any = load_model(tmp_path, device="cpu")
    whole: Any = expected
    torch.testing.assert_close(found(ids).logits, whole(ids).logits, rtol=2e-2, atol=2e-2)


def test_a_quantized_model_is_made_on_its_device(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    load = AutoModelForCausalLM.from_pretrained

    def record(path: str, **arguments: Any) -> Any:
        seen.append(arguments)
        return load(path)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", record)
    settings = QuantoConfig()
    load_model(folder, device="cpu", quantization_config=settings)
    assert seen[0]["quantization_config"] is settings
    assert seen[0]["device_map"] == {"": torch.device("cpu")}
    load_model(folder, device="cpu")
    assert "device_map" not in seen[1]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"pip install 'guided-spec\[parallel\]'"):
        load_model(folder, device="cpu", quantization_config=settings)


class Adapter(NamedTuple):
    """A LoRA adapter as peft writes it, and what its model says."""

    path: Path
    logits: torch.Tensor


IDS = torch.tensor([[3, 4, 5, 6]])


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    path = tmp_path_factory.mktemp("adapter")
    base: Any = load_model(folder, device="cpu")
    settings = LoraConfig(
        r=4,
        lora_alpha=8,
        use_rslora=True,
        target_modules=["q_proj", "down_proj"],
        init_lora_weights=False,
    )
    torch.manual_seed(3)
    model = get_peft_model(base, settings)
    model.eval()
    with torch.no_grad():
        logits = model(IDS).logits
    model.save_pretrained(str(path))
    return Adapter(path, logits)


def test_an_adapter_is_merged_into_its_base_model(folder: Path, adapter: Adapter) -> None:
    assert not (adapter.path / "config.json").exists()
    model: Any = load_model(adapter.path, device="cpu")
    torch.testing.assert_close(model(IDS).logits, adapter.logits)
    assert type(model) is type(load_model(folder, device="cpu"))
    assert not any("lora" in name for name, _ in model.named_parameters())
    base: Any = load_model(folder, device="cpu")
    assert (base(IDS).logits - adapter.logits).abs().max() > 0.1
    half = load_model(adapter.path, device="cpu", dtype="bfloat16")
    assert half.dtype == torch.bfloat16


def test_an_adapter_has_the_tokenizer_of_its_base_or_its_own(
    folder: Path, adapter: Adapter, tmp_path: Path
) -> None:
    assert load_tokenizer(adapter.path).decode([2, 3]) == "a b"
    shutil.copytree(adapter.path, tmp_path, dirs_exist_ok=True)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).convert_tokens_to_ids("new") == 12


def test_an_adapter_without_peft_says_what_to_install(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"is a LoRA adapter: it needs peft: pip install 'guided-"):
        load_model(adapter.path)


def test_adapters_that_cannot_be_merged_are_refused(adapter: Adapter, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="would be rounded in a quantized base model"):
        load_model(adapter.path, quantization_config=QuantoConfig())
    settings = json.loads((adapter.path / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = None
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="names no base_model_name_or_path"):
        load_model(tmp_path)
    settings["base_model_name_or_path"] = str(tmp_path / "gone")
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="gone"):
        load_model(tmp_path)


def test_the_bundled_tokenizer_is_that_of_its_folder() -> None:
    """It is loaded without the config of its model."""
    path = named_model(None)
    ours, other = load_tokenizer(path), AutoTokenizer.from_pretrained(path)
    assert type(ours) is type(other)
    assert ours.get_vocab() == other.get_vocab()
    assert ours.chat_template == other.chat_template
    assert ours.init_kwargs.keys() == other.init_kwargs.keys()
    for text in ('Caf\u00e9 {"a": 1}\n\n', ""):
        assert ours(text)["input_ids"] == other(text)["input_ids"]
