"""Hidden states of the frozen target, computed as they are needed.

Hidden states of the target in files, one a document: ``hs_{i}.safetensors``.

The format is that of the speculators library, so that either reads what the other wrote:
``hidden_states`` [S, A + 1, H], the last slot being the last layer's output before the final norm,
and ``token_ids`` int64 [S]; i is the number of the record in the data. The header also names the
layers, where the file was written here. A file may hold more tokens than its row, such as the line
end that a chat template writes behind the last answer: states do not depend on what follows them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.errors import ConfigError
from guided_spec.models.target import capture_hidden
from guided_spec.training.algorithm import TargetStates, TrainingBatch

__all__ = [
    "Features",
    "KeptFeatures",
    "OnlineFeatures",
    "StoredFeatures",
    "feature_file",
    "write_features",
]

Features = Callable[[TrainingBatch], TargetStates]
"""Where the target's states of a batch come from: the model itself, or files."""


class OnlineFeatures:
    """Runs the target's decoder over each batch; not its output head.

    target: on one device or spread over several; it is not changed.
    layers: hidden states for ``TargetStates.aux``: index i is the input of layer i, n the output of
        the last layer. May be empty.
    """

    def __init__(self, target: PreTrainedModel, layers: tuple[int, ...]) -> None:
        model: Any = target
        self._decoder: Any = model.get_decoder()
        self._device = target.device
        self._layers = (*layers, model.config.get_text_config(decoder=True).num_hidden_layers)

    @torch.no_grad()
    def __call__(self, batch: TrainingBatch) -> TargetStates:
        """The states of ``batch``, on its device, in the target's dtype.

        Raises ModelError for an unknown layer.

        Not in inference mode: the draft's backward pass has to keep these tensors.
        """
        device = batch.token_ids.device
        token_ids = batch.token_ids.to(self._device)
        place = torch.arange(token_ids.shape[1], device=token_ids.device)
        mask = place < batch.lengths.to(self._device)[:, None]
        with capture_hidden(self._decoder, self._layers) as captured:
            self._decoder(input_ids=token_ids, attention_mask=mask.long(), use_cache=False)
            *aux, last = [states.to(device) for states in captured]
        if not aux:
            return TargetStates(last.new_empty(*last.shape[:2], 0, last.shape[2]), last)
        return TargetStates(torch.stack(aux, 2), last)


DTYPES = ("BF16", "F16", "F32")
REMAKE = "the data or the target has changed: pass another folder, or delete this one"


def feature_file(folder: Path, index: int) -> Path:
    """Where the states of row ``index`` of the dataset are."""
    return folder / f"hs_{index}.safetensors"


def write_features(
    folder: Path, batch: TrainingBatch, states: TargetStates, layers: Sequence[int]
) -> None:
    """Write one file for each document of the batch, in the dtype of ``states``.

    A file appears whole or not at all. layers: those of ``states.aux``, for the header.
    """
    folder.mkdir(parents=True, exist_ok=True)
    together = torch.cat([states.aux, states.last.unsqueeze(2)], 2).cpu()
    token_ids = batch.token_ids.cpu()
    rows = zip(batch.indices.tolist(), batch.lengths.tolist(), strict=True)
    for row, (index, length) in enumerate(rows):
        tensors = {
            "hidden_states": together[row, :length].contiguous(),
            "token_ids": token_ids[row, :length].contiguous(),
        }
        path = feature_file(folder, index)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        save_file(tensors, partial, metadata={"layers": _spell(layers)})
        partial.replace(path)


class StoredFeatures:
    """Reads the states from files.

    layers: hidden states that the draft reads, in its order; the files must hold as many, and just
        these where their header names them.
    """

    def __init__(self, folder: Path, layers: Sequence[int]) -> None:
        self._folder = folder
        self._layers = tuple(layers)

    def __call__(self, batch: TrainingBatch) -> TargetStates:
        """The states of ``batch``, on its device, in the dtype of the files.

        Raises ConfigError, naming the file, when it is missing or broken, or was made for other
        tokens or layers.
        """
        token_ids, lengths = batch.token_ids.cpu(), batch.lengths.tolist()
        found = [
            self._read(index, token_ids[row, : lengths[row]])
            for row, index in enumerate(batch.indices.tolist())
        ]
        shape = (len(found), token_ids.shape[1], *found[0].shape[1:])
        together = torch.zeros(shape, dtype=found[0].dtype)
        for row, states in enumerate(found):
            if states.shape[2] != shape[3] or states.dtype != together.dtype:
                path = feature_file(self._folder, int(batch.indices[row]))
                raise _wrong(path, "holds states of another width or dtype than its neighbours")
            together[row, : len(states)] = states
        moved = together.to(batch.token_ids.device, non_blocking=True)
        return TargetStates(moved[:, :, :-1], moved[:, :, -1])

    def check(self, dataset: Any) -> bool:
        """Whether every row of ``dataset`` has its file.

        dataset: as ``load_examples`` makes it. Files are opened, their states are not read. Raises
        ConfigError for a file that is there, but not of its row.
        """
        is_complete = True
        for row in dataset.select_columns(["index", "input_ids"]):
            index = int(row["index"])
            if not feature_file(self._folder, index).is_file():
                is_complete = False
                continue
            with self._opened(index, torch.from_numpy(np.asarray(row["input_ids"]))):
                pass
        return is_complete

    def _read(self, index: int, token_ids: Tensor) -> Tensor:
        """Hidden states [S, A + 1, H] of one document."""
        with self._opened(index, token_ids) as file:
            states: Tensor = file.get_slice("hidden_states")[: len(token_ids)]
        return states

    @contextmanager
    def _opened(self, index: int, token_ids: Tensor) -> Iterator[Any]:
        """The file of a document, which fits it and the layers."""
        path = feature_file(self._folder, index)
        if not path.is_file():
            raise ConfigError("features", str(path), "there is no such file; make it first")
        try:
            with safe_open(path, "pt") as file:
                self._check_file(path, file, token_ids)
                yield file
        except SafetensorError as error:
            raise _wrong(path, f"cannot be read: {error}") from error

    def _check_file(self, path: Path, file: Any, token_ids: Tensor) -> None:
        header = (file.metadata() or {}).get("layers", _spell(self._layers))
        if header != _spell(self._layers):
            raise _wrong(path, f"holds the layers {header}, expected {_spell(self._layers)}")
        own = file.get_tensor("token_ids")
        if not torch.equal(own[: len(token_ids)], token_ids):
            raise _wrong(path, "holds other tokens than the dataset's row")
        states, slots = file.get_slice("hidden_states"), len(self._layers) + 1
        shape, dtype = list(states.get_shape()), states.get_dtype()
        if len(shape) != 3 or shape[:2] != [len(own), slots]:
            expected = f"[{len(own)}, {slots}, H]"
            raise _wrong(path, f"holds states {shape}, expected {expected}")
        if dtype not in DTYPES:
            raise _wrong(path, f"holds states of {dtype}; write them in bfloat16")


class KeptFeatures:
    """Reads the states of the batches that have files; computes and writes those of the others."""

    def __init__(self, folder: Path, layers: Sequence[int], compute: Features) -> None:
        self._folder, self._layers = folder, tuple(layers)
        self._compute = compute
        self._stored = StoredFeatures(folder, layers)

    def __call__(self, batch: TrainingBatch) -> TargetStates:
        """The states of ``batch``. Raises ConfigError as ``StoredFeatures`` does."""
        indices = batch.indices.tolist()
        if all(feature_file(self._folder, index).is_file() for index in indices):
            return self._stored(batch)
        states = self._compute(batch)
        write_features(self._folder, batch, states, self._layers)
        return states


def _spell(layers: Sequence[int]) -> str:
    return " ".join(map(str, layers)) or "none"


def _wrong(path: Path, problem: str) -> ConfigError:
    return ConfigError("features", str(path), f"{problem}; {REMAKE}")
