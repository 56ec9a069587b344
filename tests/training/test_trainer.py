"""Whole runs of a toy draft: it learns, it can be killed and resumed, it runs in processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from guided_spec.errors import ConfigError, ModelError
from guided_spec.training.algorithm import TrainingBatch
from guided_spec.training.run import TrainingReport, train
from guided_spec.training.trainer import Trainer
from tests.processes import run_group
from tests.training.toy_algorithm import ToyTraining, make_options, write_documents, write_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("data") / "documents.jsonl", 24)


def run(target: str, data: str, output: Path, **changes: Any) -> TrainingReport:
    own: dict[str, Any] = {"aux_layer": 1}
    own |= {name: changes.pop(name) for name in ("spoil_step", "stop_step") if name in changes}
    return train(make_options(target, data, output, **changes), own)


def lines(output: Path) -> list[dict[str, Any]]:
    """What was logged, without what depends on the clock."""
    path = output / "logs" / "metrics.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{n: v for n, v in line.items() if n != "tokens_per_second"} for line in found]


def test_the_loss_falls(target: str, data: str, tmp_path: Path) -> None:
    report = run(target, data, tmp_path, epochs=12, gradient_accumulation=2, eval_every=4)
    logged = lines(tmp_path)
    losses = [line["loss"] for line in logged if "loss" in line]
    assert len(losses) == report.steps
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert report.metrics["loss"] == losses[-1]
    validated = [line["heldout_loss"] for line in logged if "heldout_loss" in line]
    assert len(validated) == (report.steps - 1) // 4 + 1
    assert report.heldout["loss"] == validated[-1] < validated[0]
    assert report.heldout["acceptance_length"] == 1 + report.heldout["accept_0"]
    assert json.loads((tmp_path / "training.json").read_text())["steps"] == report.steps
    assert report.tokens > 0
    assert report.peak_cuda_bytes is None
    assert report.expected_cuda_bytes is None
    assert any((tmp_path / "logs" / "guided-spec").glob("events.out.tfevents.*"))
    assert not (tmp_path / "checkpoints").exists()
    card = (tmp_path / "README.md").read_text()
    assert f"base_model: {target}" in card
    assert "guided-spec train --algorithm toy" in card
    assert "--epochs 12" in card
    assert "--grammar-masks" not in card  # as it is by default
    assert "| documents trained on, held out | 19, 5 |" in card
    assert "| of them with a grammar | 100% |" in card
    assert f"| 1 | {report.heldout['accept_0']:.0%} |  |" in card
    plots = sorted(path.name for path in (tmp_path / "plots").iterdir())
    names = ("acceptance_length", "loss")
    assert plots == [f"{name}{suffix}" for name in names for suffix in (".json", ".png")]


def test_the_rate_rises_and_falls(target: str, data: str, tmp_path: Path) -> None:
    run(target, data, tmp_path, max_steps=8, epochs=4, warmup_share=0.25)
    rates = [line["rate"] for line in lines(tmp_path) if "rate" in line]
    assert rates[:3] == [0.005, 0.01, 0.01]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert 0.001 < rates[-1] < 0.003


@pytest.mark.slow
def test_the_best_draft_is_kept(
    target: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By held-out acceptance; the last draft, when it is the best, is that of the run itself."""
    lengths = iter([1.7, 1.2, 1.6])
    monkeypatch.setattr(
        "guided_spec.training.trainer.evaluate", lambda *_: {"acceptance_length": next(lengths)}
    )
    settings = {"epochs": 9, "eval_every": 2, "save_every": 2}
    report = run(target, data, tmp_path, keep_checkpoints=9, max_steps=5, **settings)
    assert report.best_step == 2
    kept, then, last = (
        load_file(tmp_path / name / "model.safetensors")["score.weight"]
        for name in ("best", "checkpoints/step_000002", ".")
    )
    assert torch.equal(kept, then)
    assert not torch.equal(kept, last)
    lengths = iter([1.2, 1.8])
    report = run(target, data, tmp_path / "rising", max_steps=3, **settings)
    assert report.best_step == 3
    assert not (tmp_path / "rising" / "best").exists()


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    target: str, data: str, tmp_path: Path
) -> None:
    settings = {"epochs": 4, "save_every": 2, "gradient_accumulation": 2, "batch_tokens": 600}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(target, data, whole, **settings)
    with pytest.raises(KeyboardInterrupt):
        run(target, data, killed, stop_step=14, **settings)  # the second forward of step 7
    assert [line["step"] for line in lines(killed)] == [1, 2, 3, 4, 5, 6]
    kept = sorted(path.name for path in (killed / "checkpoints").iterdir())
    assert kept == ["step_000004", "step_000006"]
    newest = json.loads((killed / "checkpoints" / kept[-1] / "progress.json").read_text())
    assert newest["progress"]["batch"] > 0  # within an epoch
    (killed / "checkpoints" / "unfinished").mkdir()  # as a kill while saving leaves it
    report = run(target, data, killed, resume=True, **settings)
    assert report.steps == lines(whole)[-1]["step"] > 8
    assert lines(killed) == lines(whole)
    expected, found = (load_file(folder / "model.safetensors") for folder in (whole, killed))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_checkpoints_of_another_run_are_not_gone_on_from(
    target: str, data: str, tmp_path: Path
) -> None:
    settings = {"max_steps": 2, "save_every": 1}
    run(target, data, tmp_path, **settings)
    with pytest.raises(ConfigError, match=r"output=.*pass --resume"):
        run(target, data, tmp_path, **settings)
    with pytest.raises(ConfigError, match=r"seed=7: was 0 in .*step_000002"):
        run(target, data, tmp_path, resume=True, seed=7, **settings)


def test_a_loss_that_is_no_number_ends_the_run(target: str, data: str, tmp_path: Path) -> None:
    settings = {"gradient_accumulation": 2, "log_every": 5, "epochs": 4}
    with pytest.raises(ModelError, match="step 3: the loss is nan; lower learning_rate"):
        run(target, data, tmp_path, spoil_step=6, **settings)


def test_the_largest_batch_is_tried_first(
    target: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run on a GPU begins."""
    tried: list[TrainingBatch] = []
    forward = ToyTraining.forward

    def record(self: ToyTraining, batch: TrainingBatch, *rest: Any, **options: Any) -> Any:
        tried.append(batch)
        return forward(self, batch, *rest, **options)

    def only_try(trainer: Trainer, _: Path) -> None:
        sizes = []
        for batch in trainer._data.train:
            sizes.append(batch.token_ids.numel())
        held = sum(p.nbytes for p in trainer.model.parameters())
        assert trainer.try_largest() == 2 * held
        assert tried[0].token_ids.numel() == max(sizes)
        assert all(p.grad is None for p in trainer.model.parameters())
        log, order = Mock(), Mock()
        for name in ("reset_peak_memory_stats", "max_memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, getattr(order, name))
        order.max_memory_allocated.return_value = 2**30 - 2 * held
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 2**31))
        assert trainer._state_memory(log) == 2**30
        log.say.assert_called_once_with("the largest batch takes 1.0 of 2.0 GiB")
        # The trial is not counted in what the steps took.
        assert order.mock_calls[-1] == call.reset_peak_memory_stats()
        vars(ToyTraining.latest)["forward"] = Mock(side_effect=torch.OutOfMemoryError)
        trainer.try_largest()

    monkeypatch.setattr(ToyTraining, "forward", record)
    monkeypatch.setattr(Trainer, "run", only_try)
    with pytest.raises(ConfigError, match="batch_tokens=1024: so many tokens do not fit"):
        run(target, data, tmp_path)
    assert len(tried) == 2


def test_a_run_without_a_step_is_refused(target: str, data: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gradient_accumulation=100: .* make no step"):
        run(target, data, tmp_path, gradient_accumulation=100)


def test_what_an_algorithm_cannot_do_is_refused(target: str, data: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layout='other': this toy draft is written as plain"):
        run(target, data, tmp_path, layout="other")
    with pytest.raises(ConfigError, match="sharding='fsdp': needs CUDA devices"):
        run(target, data, tmp_path, sharding="fsdp")
    sharded = make_options(target, data, tmp_path, algorithm="eagle3", sharding="fsdp")
    with pytest.raises(ConfigError, match="gradient_checkpointing=.*does not go with sharding"):
        train(sharded, {"gradient_checkpointing": True})


def test_a_reduced_vocabulary_reaches_the_draft(target: str, data: str, tmp_path: Path) -> None:
    run(target, data, tmp_path, max_steps=1, draft_vocab_size=90)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["target_ids"].shape == (90,)
    assert tensors["score.weight"].shape[0] == 90


def test_masks_can_be_left_out(target: str, data: str, tmp_path: Path) -> None:
    assert run(target, data, tmp_path, max_steps=1, grammar_masks="off").steps == 1


@pytest.mark.slow
def test_regenerated_answers_are_trained_on(target: str, data: str, tmp_path: Path) -> None:
    regenerate = {"regenerate": True, "regenerate_max_tokens": 400, "regenerate_temperature": 1.0}
    run(target, data, tmp_path, max_steps=1, limit=6, max_length=1024, **regenerate)
    text = (tmp_path / "regenerated" / "part_0_of_1.jsonl").read_text()
    written = text.removesuffix("\n").split("\n")  # answers may hold other ends of lines
    assert 0 < len(written) <= 6
    assert all(json.loads(line)["response"] for line in written)
    assert sorted(path.name for path in (tmp_path / "regenerated").iterdir()) == [
        "part_0_of_1.jsonl"
    ]


@pytest.mark.slow
def test_features_are_written_once_and_read_again(
    target: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = tmp_path / "features"
    settings = {"epochs": 2, "features": str(features)}
    first = run(target, data, tmp_path / "first", **settings)
    stamps = {path.name: path.stat().st_mtime_ns for path in features.iterdir()}
    assert len(stamps) == 24
    with monkeypatch.context() as context:
        context.delattr("guided_spec.training.run.load_model")  # nothing of the target's layers
        second = run(target, data, tmp_path / "second", **settings)
    assert {path.name: path.stat().st_mtime_ns for path in features.iterdir()} == stamps
    assert first.metrics == second.metrics
    online = run(target, data, tmp_path / "online", epochs=2)
    assert online.metrics == first.metrics


def run_two(
    target: str, data: str, output: Path, *settings: str, per_node: int = 2
) -> dict[str, Tensor]:
    """Train in two processes; what was exported. settings: sharding, steps, "resume" or "anew"."""
    arguments = ("tests.training.two_processes", target, data, str(output), *settings)
    for found in run_group("-m", *arguments, per_node=per_node):
        assert found.returncode == 0, found.errors[-3000:]
    exported: dict[str, Tensor] = load_file(output / "model.safetensors")
    return exported


@pytest.mark.slow
def test_two_processes_train_the_same_draft(target: str, data: str, tmp_path: Path) -> None:
    whole = run_two(target, data, tmp_path / "whole", "none", "4", "anew")
    first, second = (torch.load(tmp_path / "whole" / f"rank_{rank}.pt") for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    logged = lines(tmp_path / "whole")
    assert [line["step"] for line in logged][:4] == [1, 2, 3, 4]
    assert all(torch.tensor(line["loss"]).isfinite() for line in logged if "loss" in line)
    assert all(torch.equal(whole[name], first[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("per_node", [2, 1])
def test_the_first_of_two_processes_decodes(
    target: str, data: str, tmp_path: Path, per_node: int
) -> None:
    """With a target and an engine of its own, before the first step and behind the last."""
    output = tmp_path / "head"
    command = f"guided_spec.cli.main train --algorithm eagle3 --aux-layers 1 --target {target}"
    command += f" --data {data} --output {output} --device cpu --workers 0 --tracker none"
    command += " --batch-tokens 1024 --max-length 512 --heldout-share 0.2 --max-steps 1"
    command += " --decode-limit 1 --decode-max-tokens 16"
    for found in run_group("-m", *command.split(), per_node=per_node):
        assert found.returncode == 0, found.errors[-3000:]
    assert json.loads((output / "training.json").read_text())["decoded"]["requests"] == 1


@pytest.mark.slow
def test_a_sharded_draft_is_the_same_draft(target: str, tmp_path: Path) -> None:
    """As one process trains it; spread over two, resumed on two nodes, gathered for the export."""
    data = write_documents(tmp_path / "documents.jsonl", 32)  # an even number of batches
    settings: dict[str, Any] = {"epochs": 4, "max_steps": 4, "gradient_accumulation": 2}
    run(target, data, tmp_path / "whole", **settings)  # the same batches, one after the other
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    run_two(target, data, tmp_path / "parts", "fsdp", "2", "anew")
    parts = run_two(target, data, tmp_path / "parts", "fsdp", "4", "resume", per_node=1)
    assert whole.keys() == parts.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.slow
def test_a_target_in_parts_gives_the_same_draft(target: str, data: str, tmp_path: Path) -> None:
    """Each layer split over two processes; where they keep files, only one of them lacks any."""
    whole = run_two(target, data, tmp_path / "whole", "none", "4", "anew")
    parts = run_two(target, data, tmp_path / "parts", "target", "4", "anew")
    kept = run_two(target, data, tmp_path / "kept", "target and files", "4", "anew")
    features = tmp_path / "kept_features"
    sorted(features.iterdir())[0].unlink()
    features.rename(tmp_path / "again_features")
    again = run_two(target, data, tmp_path / "again", "target and files", "4", "anew")
    for name, tensor in whole.items():
        for other in (parts, kept, again):
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-6, msg=name)
