"""Loading from folders: what comes out, and what each mistake is answered with."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from guided_spec.errors import ModelError
from guided_spec.models.loading import end_of_text_ids, load_model, load_tokenizer
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
        ({"device": "cpu", "device_map": "auto"}, "exclude each other"),
    ],
)
def test_wrong_arguments_are_named(folder: Path, arguments: dict[str, str], message: str) -> None:
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
