"""Widening: larger tensors, the same function, and the same drafts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from benchmarks.widening import models
from benchmarks.widening.files import write_safetensors
from benchmarks.widening.layer import WideTensor
from benchmarks.widening.models import WideFolders, main, write_wide, write_wide_head
from benchmarks.widening.shape import (
    LLAMA_8B,
    Carrier,
    Shape,
    place_layers,
    rope_theta,
    shape_of,
)
from benchmarks.widening.tokenizer import write_tokenizer
from guided_spec.bundled import bundled_asset
from guided_spec.engine.llm import LLM
from guided_spec.errors import ConfigError, ModelError
from guided_spec.evaluate.measurement import load_workload
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.models.heads.eagle import LAYER_IDS
from guided_spec.models.heads.loading import load_head
from guided_spec.models.loading import load_model
from guided_spec.models.tokenizer import load_tokenizer
from guided_spec.types import SamplingParams
from tests.benchmarks.small_llama import SMALL, small_target, write_small, write_small_block
from tests.learned_heads import behind_tokens
from tests.tiny_llm import VOCAB_SIZE

# Every size grows, and the head size by no whole factor for the draft head.
WIDE = Shape(96, 7, 12, 3, 20, 100, VOCAB_SIZE + 60, 2048, 230)
TOLERANCE = 1e-4


class Pair(NamedTuple):
    """The folders of a target and its head before and after."""

    target: Path
    eagle3: Path
    wide: WideFolders


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("widening")
    small = write_small(folder)
    where: dict[str, Any] = {**small._asdict(), "dtype": torch.float32}
    return Pair(*small, write_wide(folder / "wide", shape=WIDE, **where))


def logits(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCAB_SIZE, (2, 40), generator=generator)
    with torch.inference_mode():
        found: Tensor = model(ids).logits
    return found


def test_the_configuration_says_nothing_of_the_file_that_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of a GGUF file are dequantized, and other engines read what is written here."""

    def load(*names: Any, **options: Any) -> Any:
        model: Any = load_model(*names, **options)
        model.config.quantization_config = {"quant_method": "gguf"}
        return model

    monkeypatch.setattr(models, "load_model", load)
    where: dict[str, Any] = {"shape": WIDE, "dtype": torch.float32}
    found = write_wide(tmp_path / "wide", target=write_small(tmp_path).target, **where)
    config = json.loads((found.target / "config.json").read_text())
    assert config["hidden_size"] == WIDE.hidden_size
    assert "quantization_config" not in config


def test_the_same_logits(pair: Pair) -> None:
    before = logits(AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32))
    wide = AutoModelForCausalLM.from_pretrained(pair.wide.target, dtype=torch.float32)
    assert shape_of(wide.config)[:-1] == WIDE[:-1]
    after = logits(wide)
    assert before.std() > 0.1
    torch.testing.assert_close(after[..., :VOCAB_SIZE], before, atol=TOLERANCE, rtol=0)
    # The padded tokens have no probability at all.
    torch.testing.assert_close(after.softmax(-1)[..., VOCAB_SIZE:].max(), torch.tensor(0.0))


def test_hidden_states_at_the_layers_of_the_head(pair: Pair) -> None:
    small, wide = load_model(pair.target, device="cpu"), load_model(pair.wide.target, device="cpu")
    config = json.loads((pair.wide.eagle3 or Path()).joinpath("config.json").read_text())
    ids = torch.arange(30)[None]
    with torch.inference_mode():
        before = small(ids, output_hidden_states=True).hidden_states
        after = wide(ids, output_hidden_states=True).hidden_states
    assert config[LAYER_IDS] == [2, 4, 7]
    for index, place in zip((1, 2), config[LAYER_IDS], strict=False):
        corner, rest = after[place].split([SMALL.hidden_size, 64], -1)
        torch.testing.assert_close(corner, before[index], atol=TOLERANCE, rtol=0)
        assert rest[..., 0].unique().numel() == 1
        assert not rest[..., 1:].any()


@pytest.mark.usefixtures("drafted_from_the_start")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("proposer", ["eagle3", "eagle3:validate"])
def test_the_same_texts_and_drafts(pair: Pair, proposer: str, temperature: float) -> None:
    grammar = GrammarSpec.regex("[a-z ]{30,40}")
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=5, ignore_eos=True)
    constrained = replace(params, seed=6, ignore_eos=False, grammar=grammar, complete=False)
    found = []
    for target, head in ((pair.target, pair.eagle3), pair.wide):
        options: dict[str, Any] = {"draft": str(head), "device": "cpu", "max_model_len": 128}
        with LLM(str(target), proposer, 4, **options) as llm:
            outputs = llm.generate(["The cat", "A dog"], [params, constrained])
        texts = [output.completions[0] for output in outputs]
        # Not their text: an id without any in the small tokenizer has some in the filled-up one.
        found.append([(t.token_ids, t.stats.drafted, t.stats.accepted) for t in texts])
    assert found[0] == found[1]
    assert all(sum(drafted) > 0 for _, drafted, _ in found[0])


@pytest.mark.usefixtures("drafted_from_the_start")
@pytest.mark.parametrize("method", ["p_eagle", "dflash", "dspark"])
def test_the_same_drafts_of_blocks(pair: Pair, method: str, tmp_path: Path) -> None:
    small = load_model(pair.target, device="cpu")
    before = write_small_block(tmp_path / "small", method, small)
    where: dict[str, Any] = {"target": pair.target, "dtype": torch.float32}
    after = write_wide_head(tmp_path / "wide", before, shape=WIDE, **where)
    grammar = GrammarSpec.regex("[a-z ]{30,40}")
    params = SamplingParams(max_tokens=24, temperature=0.0, seed=5, ignore_eos=True)
    constrained = replace(params, ignore_eos=False, grammar=grammar, complete=False)
    found = []
    for target, head in ((pair.target, before), (pair.wide.target, after)):
        options: dict[str, Any] = {"draft": str(head), "device": "cpu", "max_model_len": 128}
        with LLM(str(target), "auto", 5, **options) as llm:
            assert llm.proposer == method
            outputs = llm.generate(["The cat", "A dog"], [params, constrained])
        texts = [output.completions[0] for output in outputs]
        found.append([(t.token_ids, t.stats.drafted, t.stats.accepted) for t in texts])
    assert found[0] == found[1]
    assert all(sum(drafted) > 0 for _, drafted, _ in found[0])


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_the_same_outputs_of_blocks(pair: Pair, method: str, tmp_path: Path) -> None:
    targets = [load_model(path, device="cpu") for path in (pair.target, pair.wide.target)]
    folders = [write_small_block(tmp_path / "small", method, targets[0])]
    where: dict[str, Any] = {"target": pair.target, "dtype": torch.float32}
    folders.append(write_wide_head(tmp_path / "wide", folders[0], shape=WIDE, **where))
    ids = torch.arange(30, 50)[None]
    scored = []
    for target, folder in zip(targets, folders, strict=True):
        head: Any = load_head(method, folder, target)
        with torch.inference_mode():
            states = target(ids, output_hidden_states=True).hidden_states
            aux = torch.cat([states[layer] for layer in head.aux_hidden_layers], -1)
            blocks = head.train_blocks(ids[:, 10:12], torch.tensor([[10, 11]]), 5, aux)
            outputs = blocks.flatten(0, -3)
            logits = head.logits(outputs)
            if head.transition is not None:
                before = ids[0, 5:15].view(2, 5)
                logits = behind_tokens(head.transition, logits, outputs, before)
            logits = logits.flatten(0, 1)
        scored.append(logits)
    assert scored[0].std() > 0.1
    torch.testing.assert_close(scored[1][:, :VOCAB_SIZE], scored[0], atol=TOLERANCE, rtol=0)
    assert scored[1].argmax(-1).max() < VOCAB_SIZE


def test_a_head_of_another_kind_is_refused(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a head of eagle3, p_eagle, dflash, dspark"):
        write_wide_head(tmp_path, pair.target, target=pair.target, shape=WIDE)


def test_the_padded_draft_vocabulary(pair: Pair) -> None:
    assert pair.wide.eagle3 is not None
    tensors = load_file(pair.wide.eagle3 / "model.safetensors")
    ids = tensors["d2t"] + torch.arange(WIDE.draft_vocab_size)
    assert torch.equal(ids[:200], torch.arange(200) * 2)
    assert torch.equal(ids[200:], torch.arange(VOCAB_SIZE, VOCAB_SIZE + 30))
    assert torch.equal(tensors["t2d"].nonzero().flatten(), ids.sort().values)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (12 * 20, 2 * 96)


def test_the_bundled_pair(tmp_path: Path) -> None:
    small = shape_of(load_model(bundled_asset("target"), device="cpu").config)
    larger = {"hidden_size": 288, "num_hidden_layers": 7, "draft_vocab_size": 2056}
    shape = small._replace(**larger, vocab_size=small.vocab_size + 8)
    folders = write_wide(tmp_path, shape=shape, dtype=torch.float32)
    grammar = GrammarSpec.json_schema({"type": "object", "properties": {"a": {"type": "string"}}})
    params = SamplingParams(max_tokens=12, temperature=0.0, grammar=grammar)
    found = []
    for target, head in ((bundled_asset("target"), bundled_asset("eagle3")), folders):
        with LLM(str(target), "eagle3", draft=str(head), device="cpu", dtype="float32") as llm:
            completion = llm.generate("A is b.\n\nFields: a\nJSON: ", params)[0].completions[0]
        found.append((completion.text, completion.stats.drafted, completion.stats.accepted))
    assert found[0] == found[1]
    assert sum(found[0][2]) > 0


def test_the_shape_of_an_8b_llama() -> None:
    """The attention of the bundled target keeps its scores exactly: no factor but powers of 2."""
    small = shape_of(load_model(bundled_asset("target"), device="cpu").config)
    carrier = Carrier.between(small.hidden_size, LLAMA_8B.hidden_size, 1e-5)
    assert carrier.scale == 0.25
    assert carrier.value == 2.0**-5
    assert carrier.eps > 0
    assert small.head_dim == LLAMA_8B.head_dim
    assert place_layers(small.num_hidden_layers, 32) == (0, 5, 10, 16, 21, 26)


def test_the_constant_channel() -> None:
    """A norm over the channel is the norm without it, times sqrt(h / H)."""
    carrier = Carrier.between(8, 24, 1e-2)
    x = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.1
    wide = torch.zeros(5, 24, dtype=torch.float64)
    wide[:, :8], wide[:, carrier.channel] = x, carrier.value
    before = x * (x.square().mean(-1, keepdim=True) + 1e-2).rsqrt()
    after = wide * (wide.square().mean(-1, keepdim=True) + carrier.eps).rsqrt()
    torch.testing.assert_close(after[:, :8] * carrier.scale, before, atol=1e-12, rtol=0)
    assert Carrier.between(8, 8, 1e-2) == (-1, 0.0, 1e-2, 1.0)
    with pytest.raises(ModelError, match="constant channel"):
        Carrier.between(8, 24, 1e-4, carrier.value)


def test_frequencies_are_kept() -> None:
    small, wide = 12, 20
    theta = rope_theta(1e4, small, wide)
    kept = [theta ** (-2 * i / wide) for i in range(small // 2)]
    assert kept == pytest.approx([1e4 ** (-2 * i / small) for i in range(small // 2)])


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({"hidden_size": 16}, "hidden_size"),
        ({"hidden_size": 32}, "hidden_size"),  # no room for the channel of padded tokens
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"num_attention_heads": 3}, "num_attention_heads"),
        ({"head_dim": 21}, "head_dim"),
        ({"draft_vocab_size": 100}, "draft_vocab_size"),
        ({"draft_vocab_size": 200 + 61}, "draft_vocab_size"),
    ],
)
def test_sizes_that_do_not_go_together(
    pair: Pair, tmp_path: Path, sizes: dict[str, int], name: str
) -> None:
    shape = WIDE._replace(**sizes)
    with pytest.raises(ConfigError, match=name):
        write_wide(tmp_path, target=pair.target, eagle3=pair.eagle3, shape=shape)


def test_other_models(pair: Pair, tmp_path: Path) -> None:
    small_target(attention_bias=True).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="attention_bias"):
        write_wide(tmp_path / "wide", target=tmp_path, shape=WIDE)
    with pytest.raises(ConfigError, match="dtype"):
        write_wide(tmp_path, target=pair.target, dtype=torch.float16)


def test_files_and_shards(tmp_path: Path) -> None:
    """Whatever the shards, the tensors are what was filled in, and zero elsewhere."""

    def fill(out: Tensor) -> None:
        out[1] = 2

    tensors = [WideTensor(f"t{index}", (3, 5), fill) for index in range(4)]
    tensors.append(WideTensor("ids", (3,), fill, torch.int64))
    write_safetensors(tmp_path, tensors, torch.bfloat16, shard_bytes=70)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * 30 + 24
    assert len(set(index["weight_map"].values())) == 3
    found: dict[str, Tensor] = {}
    for path in tmp_path.glob("*.safetensors"):
        found |= load_file(path)
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        **{f"t{index}": torch.bfloat16 for index in range(4)},
        "ids": torch.int64,
    }
    for tensor in found.values():
        assert tensor[1].eq(2).all()
        assert not tensor[0].any()
        assert not tensor[2].any()


def test_the_command(tmp_path: Path) -> None:
    command = typer.Typer()
    command.command()(main)
    result = CliRunner().invoke(command, ["--output", str(tmp_path), "--dtype", "float16"])
    assert result.exit_code == 1
    assert "bfloat16 or float32" in " ".join(result.stderr.split())


def test_the_command_widens_any_llama_and_its_heads(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "write_wide", partial(write_wide, shape=WIDE))
    monkeypatch.setattr(models, "write_wide_head", partial(write_wide_head, shape=WIDE))
    command = typer.Typer()
    command.command()(main)
    arguments = ["--output", str(tmp_path), "--target", str(pair.target), "--dtype", "float32"]
    result = CliRunner().invoke(command, [*arguments, "--head", str(pair.eagle3)])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {
        "target": str(tmp_path / "target"),
        pair.eagle3.name: str(tmp_path / pair.eagle3.name),
    }
    for name, before in (("target", pair.wide.target), (pair.eagle3.name, pair.wide.eagle3)):
        (found,) = (tmp_path / name).glob("*.safetensors")
        assert before is not None
        assert found.read_bytes() == (before / found.name).read_bytes()


def test_a_tokenizer_keeps_its_chat_template(tmp_path: Path) -> None:
    source, folder = tmp_path / "small", tmp_path / "wide"
    shutil.copytree(bundled_asset("target"), source)
    folder.mkdir()
    (source / "chat_template.jinja").write_text("{{ messages }}")
    write_tokenizer(source, folder, range(4096, 4100))
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_filled_up_tokenizer_writes_what_the_small_one_does(tmp_path: Path) -> None:
    source = Path(bundled_asset("target"))
    write_tokenizer(source, tmp_path, range(4096, 20_000))
    small, large = load_tokenizer(source), load_tokenizer(tmp_path)
    assert (len(small), len(large)) == (4096, 20_000)
    texts = [item.prompt for item in load_workload(Path(bundled_asset("heldout.jsonl")), 40)]
    texts += ["", "  \n\t", "naïve 東京 🙂", '{"a": [1, 2.5e-3, null]}']
    for text in map(str, texts):
        ids = small(text, add_special_tokens=False)["input_ids"]
        assert large(text, add_special_tokens=False)["input_ids"] == ids
        assert large.decode(ids) == small.decode(ids)
    filled = large.convert_ids_to_tokens(list(range(4096, 20_000)))
    assert len(set(filled)) == len(filled)
    assert all(filled)
