"""Hidden states from a vLLM server that extracts them, and files of 8 bits."""

from __future__ import annotations

import fcntl
import json
import threading
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from guided_spec.errors import ConfigError
from guided_spec.models.loading import load_model
from guided_spec.training import run as run_module
from guided_spec.training.algorithm import TargetStates, TrainingBatch
from guided_spec.training.features import (
    FeatureDtype,
    KeptFeatures,
    OnlineFeatures,
    ServedFeatures,
    StoredFeatures,
    feature_file,
)
from guided_spec.training.run import train
from guided_spec.training.trainer import _looked_ahead
from tests.answering import Answering, running
from tests.models.tiny import build
from tests.training.test_features import LAYERS, make_batch
from tests.training.toy_algorithm import ToyTraining, make_options, write_documents, write_target

DELAY = 0.02  # seconds that a file is written behind its answer


class FakeExtractor:
    """As vLLM's connector: the answer comes first, then the file, whose lock is held meanwhile.

    wrong: what to do otherwise: "silent" names no file, "refuses" answers with an error, "tokens"
    writes other tokens, "elsewhere" names a folder that is not there, "unlocked" has no locks.
    """

    def __init__(self, target: Any, layers: tuple[int, ...], folder: Path, wrong: str = "") -> None:
        self._features = OnlineFeatures(target, layers)
        self._folder, self._wrong = folder, wrong
        self.prompts: list[list[int]] = []
        self._lock = threading.Lock()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["max_tokens"] == 1
        assert body["return_token_ids"]
        with self._lock:
            self.prompts.append(body["prompt"])
            states = self._run(body["prompt"])
            path = self._folder / f"cmpl-{len(self.prompts)}.safetensors"
        if self._wrong == "silent":
            return {"choices": [{"text": "a"}]}
        if self._wrong == "elsewhere":
            return {"kv_transfer_params": {"hidden_states_path": "/nowhere/a.safetensors"}}
        together = torch.cat([states.aux, states.last.unsqueeze(2)], 2)[0]
        token_ids = torch.tensor(body["prompt"]) + (self._wrong == "tokens")
        tensors = {"hidden_states": together.contiguous(), "token_ids": token_ids}
        if self._wrong == "unlocked":
            save_file(tensors, path)
        else:
            held = path.with_name(f"{path.name}.lock").open("w")
            fcntl.flock(held, fcntl.LOCK_EX)

            def write() -> None:
                save_file(tensors, path)
                held.close()

            threading.Timer(DELAY, write).start()
        return {"kv_transfer_params": {"hidden_states_path": str(path)}}

    def _run(self, prompt: list[int]) -> TargetStates:
        ids = torch.tensor([prompt])
        ones = torch.ones_like(ids)
        index = torch.zeros(1, dtype=torch.int64)
        lengths = torch.tensor([len(prompt)])
        return self._features(TrainingBatch(ids, ones.bool(), lengths, ones[:, :1], ones, index))

    def running(self) -> AbstractContextManager[str]:
        """Its address, up to ``/v1``."""
        fake = self

        class Handler(Answering):
            def do_GET(self) -> None:
                self.reply(json.dumps({"data": [{"id": "served"}]}))

            def do_POST(self) -> None:
                body = self.read()
                if fake._wrong == "refuses":
                    self.reply(json.dumps({"error": "the prompt is too long"}), 400)
                else:
                    self.reply(json.dumps(fake.answer(body)))

        return running(Handler)


def assert_same(found: TargetStates, wanted: TargetStates, batch: TrainingBatch) -> None:
    for row, length in enumerate(batch.lengths.tolist()):
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours[row, :length], theirs[row, :length])


@pytest.mark.parametrize("wrong", ["", "unlocked"])
def test_states_are_those_of_the_target(tmp_path: Path, wrong: str) -> None:
    """Asked for ahead, and kept nowhere: the server's files are gone once they are read."""
    target, batch, later = build("llama"), make_batch(), make_batch(7)
    # One at a time: the server runs the same model, in threads of its own.
    wanted = [OnlineFeatures(target, LAYERS)(each) for each in (batch, later)]
    fake = FakeExtractor(target, LAYERS, tmp_path, wrong)
    with fake.running() as url:
        features = ServedFeatures(url, LAYERS)
        features.begin(batch)
        features.begin(later)
        for each, states in zip((batch, later), wanted, strict=True):
            assert_same(features(each), states, each)
        assert len(fake.prompts) == 6
        features(batch)  # of the next epoch: asked again
        assert len(fake.prompts) == 9
        features.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["target", "fp8"])
def test_files_are_kept_and_read_again(tmp_path: Path, dtype: Any) -> None:
    target, batch, folder = build("llama"), make_batch(), tmp_path / "kept"
    served = tmp_path / "served"
    served.mkdir()
    fake = FakeExtractor(target, LAYERS, served)
    with fake.running() as url:
        features = ServedFeatures(url, LAYERS, folder, dtype)
        first = features(batch)
        again = features(batch)
        assert len(fake.prompts) == 3
        features.close()
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
    for ours, theirs in zip(StoredFeatures(folder, LAYERS)(batch), first, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("silent", r"features_url=.*names no file with hidden states"),
        ("refuses", r"features_url=.*400.*too long"),
        ("tokens", r"holds other tokens"),
        ("elsewhere", r"features_url=.*writes to /nowhere, which is not there"),
    ],
)
def test_a_server_that_does_not_fit(tmp_path: Path, wrong: str, message: str) -> None:
    with FakeExtractor(build("llama"), LAYERS, tmp_path, wrong).running() as url:
        features = ServedFeatures(url, LAYERS)
        with pytest.raises(ConfigError, match=message):
            features(make_batch())
        features.close()
    with pytest.raises(ConfigError, match=r"features_url=.*does not answer"):
        ServedFeatures(url, LAYERS)


@pytest.mark.slow
def test_a_training_by_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as with the target at hand, of which nothing but the ends is loaded."""
    source = write_target(tmp_path / "target")
    data = write_documents(tmp_path / "data.jsonl", 10)
    options = make_options(source, data, tmp_path / "here", epochs=2)
    here = train(options, {})
    folder = tmp_path / "served"
    folder.mkdir()
    fake = FakeExtractor(load_model(source, device="cpu"), (1,), folder)

    def refuse(*_: Any) -> None:
        raise AssertionError("the whole target was loaded")

    monkeypatch.setattr(run_module, "_load_target", refuse)
    with fake.running() as url:
        there = train(replace(options, output=str(tmp_path / "there"), features_url=url), {})
    assert there.steps == here.steps
    assert there.metrics == pytest.approx(here.metrics, rel=1e-4)
    assert there.heldout == pytest.approx(here.heldout, rel=1e-4)
    assert not list(folder.iterdir())
    assert not [t for t in threading.enumerate() if t.name.startswith("hidden-states")]
    assert ToyTraining.latest is not None


def test_the_server_works_ahead(tmp_path: Path) -> None:
    """Batches are begun before those ahead of them have trained, but not all at once."""
    target = build("llama")
    with FakeExtractor(target, LAYERS, tmp_path).running() as url:
        features = ServedFeatures(url, LAYERS)
        batches = [make_batch(3 * at) for at in range(8)]
        begun = []
        for at, batch in enumerate(_looked_ahead(batches, features)):
            begun.append(len(features._begun) // 3)
            features(batch)
            assert batch is batches[at]
        features.close()
    assert begun == [5, 5, 5, 5, 4, 3, 2, 1]


def test_files_of_8_bits(tmp_path: Path) -> None:
    """Half as large as those of bfloat16, and within one part in sixteen of each number."""
    target: Any = build("llama")
    target.to(torch.bfloat16)
    batch, sizes = make_batch(), {}
    exact = OnlineFeatures(target, LAYERS)(batch)
    dtypes: tuple[FeatureDtype, ...] = ("target", "fp8")
    for dtype in dtypes:
        folder = tmp_path / dtype
        KeptFeatures(folder, LAYERS, lambda _: exact, dtype)(batch)
        sizes[dtype] = load_file(feature_file(folder, 5))
    small = sizes["fp8"]
    assert small["hidden_states"].nbytes * 2 == sizes["target"]["hidden_states"].nbytes
    assert small["hidden_states_scales"].shape == (9, 4, 1)
    stored = StoredFeatures(tmp_path / "fp8", LAYERS)
    found = stored(batch)
    for row, length in enumerate(batch.lengths.tolist()):
        for ours, theirs in zip(found, exact, strict=True):
            assert ours.dtype == torch.bfloat16
            one, other = ours[row, :length].float(), theirs[row, :length].float()
            most = other.abs().amax(-1, keepdim=True)
            assert ((one - other).abs() <= other.abs() / 16 + most / 448 / 8 + 1e-6).all()
    for scales, message in (
        (small["hidden_states_scales"][:, :2], "holds scales"),
        (None, "without"),
    ):
        changed = {k: v for k, v in small.items() if k != "hidden_states_scales"}
        changed |= {} if scales is None else {"hidden_states_scales": scales.contiguous()}
        save_file(changed, feature_file(tmp_path / "fp8", 5))
        with pytest.raises(ConfigError, match=message):
            stored(batch)
    with pytest.raises(ConfigError, match="feature_dtype='fp8'.*name their folder"):
        make_options("t", "d", tmp_path, feature_dtype="fp8")


def test_8_bits_are_those_of_speculators(tmp_path: Path) -> None:
    """Its reader takes files of here, and here those of its connector, of one scale a token."""
    utils = pytest.importorskip("hs_connectors.fp8_utils")
    batch = make_batch()
    exact = OnlineFeatures(build("llama"), LAYERS)(batch)
    KeptFeatures(tmp_path, LAYERS, lambda _: exact, "fp8")(batch)
    stored = StoredFeatures(tmp_path, LAYERS)
    found, path = stored(batch), feature_file(tmp_path, 5)
    own = load_file(path)
    read = utils.dequantize_fp8_tensor(own["hidden_states"], own[utils.SCALES_KEY], torch.float32)
    torch.testing.assert_close(read[:, :-1].bfloat16(), found.aux[1])
    whole = torch.cat([exact.aux[1], exact.last[1, :, None]], 1)
    small, scales = utils.quantize_tensor_to_fp8(whole)
    theirs = {"hidden_states": small, utils.SCALES_KEY: scales, "token_ids": own["token_ids"]}
    save_file(theirs, path)
    assert scales.shape == (9, 1, 1)
    torch.testing.assert_close(stored(batch).last[1].float(), exact.last[1], rtol=0.08, atol=0.1)


def test_zeros_of_8_bits(tmp_path: Path) -> None:
    batch = make_batch()
    nothing = TargetStates(torch.zeros(3, 9, 3, 32), torch.zeros(3, 9, 32))
    KeptFeatures(tmp_path, LAYERS, lambda _: nothing, "fp8")(batch)
    found = StoredFeatures(tmp_path, LAYERS)(batch)
    assert not found.aux.any()
    assert not found.last.any()
