"""Models in llama.cpp's files: what is read of them, and what each mistake is answered with."""

from __future__ import annotations

import importlib.util
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from guided_spec import LLM, GrammarSpec, SamplingParams
from guided_spec.bundled import bundled_asset
from guided_spec.errors import ModelError
from guided_spec.models import gguf as files
from guided_spec.models.gguf import GgufFile, find_gguf
from guided_spec.models.loading import load_model
from guided_spec.models.tokenizer import load_tokenizer
from tests.models.gguf_files import tiny_llama, write_gguf

SPEC = GrammarSpec.json_schema(
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yes"]}}}
)
find = partial(find_gguf, needed="config.json", argument="model")
TOKEN_IDS = torch.tensor([[1, 5, 9, 20, 33]])


@pytest.fixture(name="tokenizer", scope="module")
def _tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(bundled_asset("target"))


@pytest.fixture(name="model", scope="module")
def _model(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    return tiny_llama(len(tokenizer))


@pytest.fixture(name="file", scope="module")
def _file(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, model, tokenizer)
    return path


def test_the_weights_and_the_tokenizer_are_the_model_s(
    file: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    loaded, own = load_model(file, device="cpu"), load_tokenizer(file)
    assert torch.equal(loaded(TOKEN_IDS).logits, model(TOKEN_IDS).logits)
    assert loaded.dtype == torch.float32
    for text in ("Hello  world 1", '{"a": [1, 2]}', "é 😀\n\n x"):
        assert own(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert own.chat_template == tokenizer.chat_template
    assert own.eos_token_id == tokenizer.eos_token_id
    assert loaded.config.name_or_path == str(file)


@pytest.mark.parametrize("kernels", ["stock", "packed"])
def test_texts_are_those_of_the_model_it_was_made_from(
    kernels: Any, file: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=3, grammar=SPEC)
    options: dict[str, Any] = {"max_model_len": 128, "kernels": kernels}
    texts = list[list[str]]()
    for llm in (
        LLM(str(file), "none", device="cpu", **options),
        LLM(model, "none", tokenizer=tokenizer, **options),
    ):
        with llm:
            texts.append([one.text for one in llm.generate(["a", "b c"], params)])
    assert texts[0] == texts[1]


def test_a_draft_model_may_be_one(file: Path) -> None:
    with LLM(str(file), "draft_model", draft=str(file), device="cpu", max_model_len=128) as llm:
        (output,) = llm.generate(["a"], SamplingParams(max_tokens=30, temperature=0.0))
    assert sum(output.stats.accepted) > 0


def test_quantized_weights_are_multiplied_out(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.Q8_0.GGUF"
    write_gguf(path, model, tokenizer, kind=gguf.GGMLQuantizationType.Q8_0)
    loaded = load_model(path, device="cpu", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    with torch.inference_mode():
        found, wanted = loaded(TOKEN_IDS).logits.float(), model(TOKEN_IDS).logits
    assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()


def test_a_folder_with_one_file_names_it(file: Path, tmp_path: Path) -> None:
    shutil.copy(file, tmp_path / "one.gguf")
    (tmp_path / "mmproj-one.gguf").touch()  # of pictures
    assert find(tmp_path) == GgufFile(str(tmp_path), "one.gguf")
    assert load_model(tmp_path, device="cpu").config.vocab_size == 4096
    (tmp_path / "two.gguf").touch()
    with pytest.raises(ModelError, match=r"several GGUF files \(one.gguf, two.gguf\): pass one"):
        load_model(tmp_path, device="cpu")
    (tmp_path / "config.json").touch()  # another model, with what was made from it
    assert find(tmp_path) is None


def test_names_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = {"org/one": ["README.md", "one-Q4.gguf"], "org/none": ["README.md"]}
    monkeypatch.setattr(files, "list_repo_files", lambda name, **_: listed[name])
    monkeypatch.setattr(files, "find_file", lambda *_: None)
    assert find("org/one") == GgufFile("org/one", "one-Q4.gguf")
    assert find("org/none") is None
    assert find("org/unknown") is None  # said where it is loaded
    named = find("org/many/sub/b.gguf")
    assert named == GgufFile("org/many", "sub/b.gguf")


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
@pytest.mark.parametrize("path", ["missing.gguf", "./org/name/missing.gguf", Path("a/b/c.gguf")])
def test_a_file_that_is_not_there(load: Any, path: str | Path) -> None:
    with pytest.raises(ModelError, match=r"no such file; pass a file, or one of the hub as"):
        load(path)


def test_a_part_is_told_how_to_be_whole(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00002.gguf"
    path.touch()
    with pytest.raises(ModelError, match="join them with llama-gguf-split"):
        load_model(path)


def test_another_kind_is_refused_with_those_that_are_read(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = tmp_path / "other.gguf"
    write_gguf(path, model, tokenizer, architecture="rwkv7")
    for load in (load_model, load_tokenizer):
        with pytest.raises(
            ModelError, match=r"rwkv7 is not supported yet; transformers reads .*llama"
        ):
            load(path)
    path.write_bytes(b"GGUF but not really")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(path)


def test_without_its_package(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"pip install 'guided-spec\[gguf\]'"):
        load_model(file)
