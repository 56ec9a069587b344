"""What a run could not finish is refused before its first step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from guided_spec.errors import ConfigError, GuidedSpecError, ModelError
from guided_spec.models.heads.loading import find_method, load_head
from guided_spec.training.algorithm import DraftAlgorithm
from guided_spec.training.options import TrainOptions
from guided_spec.training.registry import find_algorithm
from guided_spec.training.run import rehearse, train
from tests.models.tiny import build
from tests.tiny_llm import VOCAB_SIZE, tiny_tokenizer
from tests.training.toy_algorithm import ToyTraining, make_options, write_documents, write_target

TARGETS = (
    *("llama", "qwen3", "gemma3", "gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_5", "gemma3n"),
)
LAYOUTS = (None, "deepseek", "qwen", "safeailab", "speculators", "transformers", "zlab")


class Sources(NamedTuple):
    """Folder and file."""

    target: str
    data: str


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
ALGORITHMS: list[tuple[str, dict[str, Any]]] = [
    ("eagle", {}),
    ("eagle3", {"layer_type": "llama"}),
    ("eagle3", {"layer_type": "qwen3", "num_layers": 2, "fc_norm": True}),
    ("mtp", {"form": "auto"}),
    ("mtp", {"form": "deepseek"}),
    ("mtp", {"form": "qwen", "num_modules": 2}),
    ("draft_model", SMALL),
    ("dflash", {"num_layers": 2, "ttt_steps": 3}),
    ("dspark", {"num_layers": 1, "ttt_steps": 3, "markov_rank": 4}),
    ("p_eagle", {"ttt_steps": 3}),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("data") / "documents.jsonl", 24)


@pytest.fixture
def sources(llama: str, data: str) -> Sources:
    return Sources(llama, data)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_what_is_not_refused_can_be_written(tmp_path: Path, name: str) -> None:
    """Every algorithm, kind of layer and layout, with a draft whose weights have changed."""
    target: Any = build(name, vocab_size=VOCAB_SIZE)
    source = str(tmp_path / "target")
    tiny_tokenizer().save_pretrained(source)
    target.config.name_or_path = source
    refused = []
    for number, (kind, own) in enumerate(ALGORITHMS):
        algorithm = find_algorithm(kind)
        for layout in LAYOUTS:
            output = tmp_path / f"{number}_{layout}"
            options = TrainOptions(
                algorithm=kind, target=source, data=["-"], output=str(output), layout=layout
            )
            try:
                with rehearse(options, algorithm, own, target):
                    pass
            except GuidedSpecError as error:
                refused.append((number, layout))
                # The option is named, or the target where no option helps.
                is_named = "layout=" in str(error) or "model_type=" in str(error)
                assert is_named
                assert not (output / "rehearsal").exists()
                continue
            assert_written(algorithm, own, target, output, layout)
    finished = {number for number in range(len(ALGORITHMS)) if (number, None) not in refused}
    assert finished >= (set() if name == "gemma3n" else {0, 1, 2, 6, 7})


def assert_written(
    algorithm: Any, own: dict[str, Any], target: Any, folder: Path, layout: str | None
) -> None:
    config = target.config.get_text_config(decoder=True)
    model: DraftAlgorithm = algorithm.from_training_args(
        config, target=target, vocabulary=None, **own
    )
    module: Any = model
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.5
    model.export(folder, layout=layout or model.layouts[0], tensors=module.state_dict())
    method = find_method(folder, target)
    assert method is None or load_head(method, folder, target)


@pytest.mark.parametrize(
    ("options", "own", "message"),
    [
        (("mtp", "speculators"), {}, "layout='speculators': this mtp draft is written as"),
        (("eagle3", "safeailab"), {"layer_type": "qwen3"}, "layers of Llama, found qwen3; save it"),
        (("eagle", "speculators"), {}, "layout='speculators': this eagle draft is written as safe"),
    ],
)
def test_a_layout_that_does_not_fit(
    sources: Sources, tmp_path: Path, options: tuple[str, str], own: dict[str, Any], message: str
) -> None:
    algorithm, layout = options
    chosen: dict[str, Any] = {"algorithm": algorithm, "layout": layout, "max_steps": 1}
    with pytest.raises((ConfigError, ModelError), match=message):
        train(make_options(*sources, tmp_path, **chosen), own)
    assert not any(tmp_path.iterdir())


def test_an_export_that_fails(
    llama: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any algorithm: it declares nothing."""

    def export(*_: object, **__: object) -> None:
        raise ModelError("layout='plain': not of this draft")

    monkeypatch.setattr(ToyTraining, "export", export)
    with pytest.raises(ModelError, match="not of this draft"):
        train(make_options(llama, data, tmp_path, max_steps=1), {})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changes",
    [
        {"data": ["absent.jsonl"]},
        {"target": "absent"},
        {"sharding": "fsdp"},
        {"draft_vocab_size": 10**6},
        {"features": "new/features", "layout": "absent"},
    ],
)
def test_a_refused_run_leaves_no_folder(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = replace(make_options(*sources, Path("new/output")), **changes)
    with pytest.raises(GuidedSpecError):
        train(options, {})
    assert not any(tmp_path.iterdir())


def test_a_failed_run_keeps_what_it_wrote(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        (tmp_path / "new" / "written").touch()
        raise ModelError("out of order")

    monkeypatch.setattr("guided_spec.training.run._open_target", fail)
    with pytest.raises(ModelError, match="out of order"):
        train(make_options(*sources, tmp_path / "new" / "output"), {})
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == [
        "new",
        "new/written",
    ]


def test_a_rehearsal_draws_no_random_numbers(
    llama: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.Tensor] = []
    plain = ToyTraining.from_training_args

    def record(*arguments: Any, **options: Any) -> ToyTraining:
        toy = plain(*arguments, **options)
        made.append(toy.score.weight.detach().clone())
        return toy

    monkeypatch.setattr(ToyTraining, "from_training_args", record)
    train(make_options(llama, data, tmp_path, max_steps=1), {})
    assert len(made) == 2
    assert torch.equal(*made)


def test_folders_that_cannot_be_written(llama: str, data: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"output=.*holds a model \(config.json, model.safe"):
        train(make_options(llama, data, Path(llama)), {})
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="output=.*cannot be written to .*pass another folder"):
        train(make_options("absent", data, tmp_path / "file" / "head"), {})
    features = str(tmp_path / "file")
    with pytest.raises(ConfigError, match="features=.*cannot be written to"):
        train(make_options("absent", data, tmp_path / "head", features=features), {})


def test_a_draft_vocabulary_larger_than_the_targets(llama: str, data: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size=100000: the target has"):
        train(make_options(llama, data, tmp_path, draft_vocab_size=100000), {})
    with pytest.raises(ConfigError, match="draft_vocab_size=1: must be at least"):
        train(make_options(llama, data, tmp_path, draft_vocab_size=1), {})


def test_a_document_that_cannot_be_decoded(llama: str, data: str, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in Path(data).read_text().splitlines()]
    broken = tmp_path / "broken.jsonl"
    schema = {"type": "object", "properties": {"a": {"$ref": "#/absent"}}}
    broken.write_text("".join(json.dumps({**line, "schema": schema}) + "\n" for line in lines))
    options = make_options(llama, str(broken), tmp_path / "head", algorithm="eagle", decode_limit=2)
    with pytest.raises(
        ConfigError, match=r"(?s)decode_limit=2: .*document failed: .*absent.*--decode-limit 0"
    ):
        train(options, {})
    assert not (tmp_path / "head").exists()


def test_kept_features_of_other_data(llama: str, data: str, tmp_path: Path) -> None:
    settings = {"features": str(tmp_path / "features"), "max_steps": 1, "batch_tokens": 8192}
    train(make_options(llama, data, tmp_path / "first", **settings), {})
    kept = sorted((tmp_path / "features").iterdir())[-1]
    save_file({**load_file(kept), "token_ids": torch.tensor([1])}, kept)
    with pytest.raises(ConfigError, match="features=.*other tokens than the dataset's row"):
        train(make_options(llama, data, tmp_path / "second", **settings), {})
    assert not (tmp_path / "second" / "logs").exists()
