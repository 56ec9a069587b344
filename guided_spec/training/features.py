"""Hidden states of the frozen target: computed as they are needed, from files, or by a server.

Files are ``hs_{i}.safetensors``, one a document, in the format of speculators:
``hidden_states`` [S, A + 1, H], the last slot being the last layer's output before the final norm,
and ``token_ids`` int64 [S]; i is the number of the record in the data. The header also names the
layers, where the file was written here, and the contents of a document's pictures. A file may hold
more tokens than its row, such as the line end that a chat template writes after the last response:
states do not depend on later tokens.

With 8 bits a number ``hidden_states`` are e4m3, and ``hidden_states_scales`` float32 is what they
have to be multiplied by: [S, A + 1, 1] as written here, [S, 1, 1] as speculators' connector does.

A vLLM that was started to extract hidden states (``extract_hidden_states`` as its method of
speculation, and ``ExampleHiddenStatesConnector``) answers a prompt with the path of such a file,
which it is about to write in a folder that has to be seen from here. Until it is written a lock is
held on the file next to it. Written after the code of vLLM 0.33, and tested with a stand-in.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, distributed
from transformers import PreTrainedModel

from guided_spec.errors import ConfigError, RequestError
from guided_spec.models.target import capture_hidden
from guided_spec.training.algorithm import TargetStates, TrainingBatch
from guided_spec.training.data.endpoint import Endpoint
from guided_spec.training.data.pictures import read_pictures_text
from guided_spec.training.pictures import PictureArguments

FeatureDtype = Literal["target", "fp8"]
"""How files hold states: in the target's dtype, or in 8 bits with a scale each."""


class Features(Protocol):
    """Where the target's states of a batch come from: the model itself, files, or a server.

    ahead: for how many batches ``begin`` is called before they are asked for; 0 if that is useless.
    """

    ahead: int

    def __call__(self, batch: TrainingBatch) -> TargetStates:
        """The states of ``batch``, on its device."""
        ...

    def begin(self, batch: TrainingBatch) -> None:
        """Start on a batch that will be asked for; it returns at once."""
        ...

    def close(self) -> None:
        """Nothing is asked for any more."""
        ...


class _Here:
    """States of this process: they are read or computed when they are asked for."""

    ahead = 0

    def begin(self, batch: TrainingBatch) -> None:
        """Nothing: the device is busy with the batch before."""

    def close(self) -> None:
        """Nothing: no connection is open."""


class OnlineFeatures(_Here):
    """Runs the target's decoder over each batch; not its output head.

    target: on one device or spread over several; it is not changed.
    layers: hidden states for ``TargetStates.aux``: index i is the input of layer i, n the output of
        the last layer. May be empty.
    """

    def __init__(self, target: PreTrainedModel, layers: tuple[int, ...]) -> None:
        model: Any = target
        self._decoder: Any = model.get_decoder()
        self._device = target.device
        self._pictures = PictureArguments(target)
        self._layers = (*layers, model.config.get_text_config(decoder=True).num_hidden_layers)

    @torch.no_grad()
    def __call__(self, batch: TrainingBatch) -> TargetStates:
        """The states of ``batch``, on its device, in the target's dtype.

        Raises ModelError for an unknown layer.

        Not in inference mode: the draft's backward pass has to keep these tensors.
        """
        device = batch.token_ids.device
        token_ids = batch.token_ids.to(self._device)
        index = torch.arange(token_ids.shape[1], device=token_ids.device)
        mask = index < batch.lengths.to(self._device)[:, None]
        given = {"attention_mask": mask.long(), **self._pictures.of(batch, token_ids)}
        with capture_hidden(self._decoder, self._layers) as captured:
            self._decoder(input_ids=token_ids, use_cache=False, **given)
            *aux, last = [states.to(device) for states in captured]
        if not aux:
            return TargetStates(last.new_empty(*last.shape[:2], 0, last.shape[2]), last)
        return TargetStates(torch.stack(aux, 2), last)


DTYPES = ("BF16", "F16", "F32")
STATES, SCALES, SMALL = "hidden_states", "hidden_states_scales", "F8_E4M3"
REMAKE = "the data or the target has changed: pass another folder, or delete this one"


def feature_file(folder: Path, index: int) -> Path:
    """Where the states of row ``index`` of the dataset are."""
    return folder / f"hs_{index}.safetensors"


def write_features(
    folder: Path,
    batch: TrainingBatch,
    states: TargetStates,
    layers: Sequence[int],
    dtype: FeatureDtype = "target",
) -> None:
    """Write one file for each document of the batch; see ``write_states``."""
    together = torch.cat([states.aux, states.last.unsqueeze(2)], 2).cpu()
    rows = zip(batch.indices.tolist(), _documents(batch), strict=True)
    for row, (index, document) in enumerate(rows):
        own = together[row, : len(document.token_ids)]
        write_states(feature_file(folder, index), own, document, layers, dtype)


class Document(NamedTuple):
    """What states are of. token_ids: int64 [S], as written. contents: of pictures, "" for none."""

    token_ids: Tensor
    contents: str = ""


def _documents(batch: TrainingBatch) -> list[Document]:
    """Those of a batch, on the CPU."""
    rows = zip(batch.written_ids.cpu(), batch.lengths.tolist(), batch.contents, strict=True)
    return [Document(token_ids[:length], contents) for token_ids, length, contents in rows]


def write_states(
    path: Path, states: Tensor, document: Document, layers: Sequence[int], dtype: FeatureDtype
) -> None:
    """Write the file of a document, which appears whole or not at all.

    states: [S, A + 1, H], on the CPU. layers: of the first A, for the header.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {STATES: states.contiguous()}
    if dtype == "fp8":
        most = torch.finfo(torch.float8_e4m3fn).max
        scales = (states.float().abs().amax(-1, keepdim=True) / most).clamp_min(1e-12)
        tensors = {STATES: (states.float() / scales).to(torch.float8_e4m3fn), SCALES: scales}
    partial = path.with_suffix(f".{os.getpid()}.partial")
    tensors["token_ids"] = document.token_ids.contiguous()
    header = {"layers": _spell(layers)}
    if document.contents:
        header["pictures"] = document.contents
    save_file(tensors, partial, metadata=header)
    partial.replace(path)


def read_states(path: Path, document: Document, layers: Sequence[int]) -> Tensor:
    """Hidden states [S, A + 1, H] of a document's S tokens; those of 8 bits as bfloat16.

    Raises ConfigError, naming the file, when it is missing or broken, or was made for other tokens,
    pictures or layers.
    """
    length = len(document.token_ids)
    with _opened(path, document, layers) as file:
        states: Tensor = file.get_slice(STATES)[:length]
        if SCALES not in set(file.keys()):
            return states
        whole: Tensor = states.float() * file.get_slice(SCALES)[:length]
        return whole.bfloat16()


def pad_states(found: Sequence[Tensor], batch: TrainingBatch) -> TargetStates:
    """The states [S, A + 1, H] of a batch's documents as it has them, on its device.

    Raises ConfigError where they differ in width or dtype.
    """
    shape = (len(found), batch.token_ids.shape[1], *found[0].shape[1:])
    together = torch.zeros(shape, dtype=found[0].dtype)
    for row, states in enumerate(found):
        if states.shape[2] != shape[3] or states.dtype != together.dtype:
            name = f"hs_{int(batch.indices[row])}"
            raise _wrong(name, "holds states of another width or dtype than its neighbours")
        together[row, : len(states)] = states
    moved = together.to(batch.token_ids.device, non_blocking=True)
    return TargetStates(moved[:, :, :-1], moved[:, :, -1])


@contextmanager
def _opened(path: Path, document: Document, layers: Sequence[int]) -> Iterator[Any]:
    """The file of a document, which fits it and the layers."""
    if not path.is_file():
        raise ConfigError("features", str(path), "there is no such file; make it first")
    try:
        with safe_open(path, "pt") as file:
            _check_file(path, file, document, layers)
            yield file
    except SafetensorError as error:
        raise _wrong(path, f"cannot be read: {error}") from error


def _check_file(path: Path, file: Any, document: Document, layers: Sequence[int]) -> None:
    known = file.metadata() or {}
    header = known.get("layers", _spell(layers))
    if header != _spell(layers):
        raise _wrong(path, f"holds the layers {header}, expected {_spell(layers)}")
    own = file.get_tensor("token_ids")
    if not torch.equal(own[: len(document.token_ids)], document.token_ids):
        raise _wrong(path, "holds other tokens than the dataset's row")
    if known.get("pictures", "") != document.contents:
        raise _wrong(path, "is of other pictures than the dataset's row")
    states, slots = file.get_slice(STATES), len(layers) + 1
    shape, dtype = list(states.get_shape()), states.get_dtype()
    if len(shape) != 3 or shape[:2] != [len(own), slots]:
        expected = f"[{len(own)}, {slots}, H]"
        raise _wrong(path, f"holds states {shape}, expected {expected}")
    has_scales = SCALES in set(file.keys())
    if dtype not in ((SMALL,) if has_scales else DTYPES):
        problem = f"holds states of {dtype} {'with' if has_scales else 'without'} scales"
        raise _wrong(path, f"{problem}; write them in bfloat16")
    found = list(file.get_slice(SCALES).get_shape()) if has_scales else None
    if found not in (None, [len(own), 1, 1], [len(own), slots, 1]):
        raise _wrong(path, f"holds scales {found}, expected [{len(own)}, {slots}, 1]")


class SplitFeatures(_Here):
    """Runs a target of which each process holds a part of every layer: tensor parallel.

    All processes run the batch of each of them in turn, and every one keeps the states of its own:
    all have to call it, as often. Of its arguments the batches may differ, shapes included.
    """

    def __init__(self, target: PreTrainedModel, layers: tuple[int, ...]) -> None:
        self._online = OnlineFeatures(target, layers)

    def __call__(self, batch: TrainingBatch) -> TargetStates:
        """The states of ``batch``, on its device, in the target's dtype."""
        own = TargetStates(torch.empty(0), torch.empty(0))
        for turn in range(distributed.get_world_size()):
            token_ids = _shared(batch.token_ids, turn)
            states = self._online(
                batch._replace(token_ids=token_ids, lengths=_shared(batch.lengths, turn))
            )
            if turn == distributed.get_rank():
                own = states
        return own

    @staticmethod
    def any_of_all(is_so: bool) -> bool:  # noqa: FBT001 - as the builtin takes it
        """Whether it is so in any process; all have to call it."""
        device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
        found = torch.tensor([is_so], dtype=torch.int64, device=device)
        distributed.all_reduce(found, distributed.ReduceOp.MAX)
        return bool(found)


def _shared(tensor: Tensor, turn: int) -> Tensor:
    """What process ``turn`` has, int64 and of as many dimensions as here."""
    shape = torch.tensor(tensor.shape, device=tensor.device)
    distributed.broadcast(shape, turn)
    mine = turn == distributed.get_rank()
    found = tensor.contiguous() if mine else tensor.new_empty(shape.tolist())
    distributed.broadcast(found, turn)
    return found


class StoredFeatures(_Here):
    """Reads the states from files.

    layers: hidden states that the draft reads, in its order; the files must hold as many, and just
        these where their header names them.
    """

    def __init__(self, folder: Path, layers: Sequence[int]) -> None:
        self._folder = folder
        self._layers = tuple(layers)

    def __call__(self, batch: TrainingBatch) -> TargetStates:
        """The states of ``batch``, on its device, in the dtype of the files; bfloat16 of 8 bits.

        Raises ConfigError as ``read_states`` and ``pad_states`` do.
        """
        files = (feature_file(self._folder, index) for index in batch.indices.tolist())
        pairs = zip(files, _documents(batch), strict=True)
        found = [read_states(path, document, self._layers) for path, document in pairs]
        return pad_states(found, batch)

    def check(self, dataset: Any) -> bool:
        """Whether every row of ``dataset`` has its file.

        dataset: as ``load_examples`` makes it. Files are opened, their states are not read. Raises
        ConfigError for a file that is there, but not of its row.
        """
        is_complete = True
        for row in dataset.select_columns(["index", "input_ids", "pictures"]):
            index = int(row["index"])
            path = feature_file(self._folder, index)
            if not path.is_file():
                is_complete = False
                continue
            pictures = read_pictures_text(str(row["pictures"]))
            contents = "" if pictures is None else pictures.contents
            document = Document(torch.from_numpy(np.asarray(row["input_ids"])), contents)
            with _opened(path, document, self._layers):
                pass
        return is_complete


class KeptFeatures(_Here):
    """Reads the states of the batches that have files; computes and writes those of the others.

    agree: whether they are computed, by whether they have to be; of several processes that compute
        together, whether any of them has to.
    """

    def __init__(
        self,
        folder: Path,
        layers: Sequence[int],
        compute: Callable[[TrainingBatch], TargetStates],
        dtype: FeatureDtype = "target",
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        self._folder, self._layers = folder, tuple(layers)
        self._compute, self._dtype, self._agree = compute, dtype, agree
        self._stored = StoredFeatures(folder, layers)

    def __call__(self, batch: TrainingBatch) -> TargetStates:
        """The states of ``batch``. Raises ConfigError as ``StoredFeatures`` does."""
        indices = batch.indices.tolist()
        has_files = all(feature_file(self._folder, index).is_file() for index in indices)
        if not self._agree(not has_files):
            return self._stored(batch)
        states = self._compute(batch)
        write_features(self._folder, batch, states, self._layers, self._dtype)
        return states


def _spell(layers: Sequence[int]) -> str:
    return " ".join(map(str, layers)) or "none"


def _wrong(path: Path | str, problem: str) -> ConfigError:
    return ConfigError("features", str(path), f"{problem}; {REMAKE}")


AT_ONCE = 16  # requests


class ServedFeatures:
    """Asks the server for the states of each document, up to ``ahead`` batches before they train.

    layers: hidden states for ``TargetStates.aux``; the server has to extract these, and the last
        layer's output after them. folder: files with the states of documents, which are read
        where they are there, and written of the others; None keeps nothing.
    """

    ahead = 4

    def __init__(
        self,
        url: str,
        layers: Sequence[int],
        folder: Path | None = None,
        dtype: FeatureDtype = "target",
    ) -> None:
        self._endpoint = Endpoint(url, None, option="features_url", at_once=AT_ONCE)
        self._layers, self._folder, self._dtype = tuple(layers), folder, dtype
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="hidden-states")
        self._begun: dict[int, Future[Tensor]] = {}

    def begin(self, batch: TrainingBatch) -> None:
        """Ask for the states of a batch; returns at once."""
        token_ids, lengths = batch.token_ids.cpu(), batch.lengths.tolist()
        for row, index in enumerate(batch.indices.tolist()):
            if index not in self._begun:
                own = token_ids[row, : lengths[row]]
                self._begun[index] = self._pool.submit(self._states, index, own)

    def __call__(self, batch: TrainingBatch) -> TargetStates:
        """The states of ``batch``, on its device; asked for now, unless it was begun.

        Raises ConfigError where the server is down, refuses, or wrote what does not fit.
        """
        self.begin(batch)
        return pad_states([self._begun.pop(i).result() for i in batch.indices.tolist()], batch)

    def close(self) -> None:
        """Forget what was begun, and close the connections."""
        self._pool.shutdown(cancel_futures=True)
        self._endpoint.close()

    def _states(self, index: int, token_ids: Tensor) -> Tensor:
        path = None if self._folder is None else feature_file(self._folder, index)
        document = Document(token_ids)
        if path is not None and path.is_file():
            return read_states(path, document, self._layers)
        states = self._ask(document)
        if path is None:
            return states
        write_states(path, states, document, self._layers, self._dtype)
        return read_states(path, document, self._layers)

    def _ask(self, document: Document) -> Tensor:
        body = {"prompt": document.token_ids.tolist(), "max_tokens": 1, "return_token_ids": True}
        try:
            answer = self._endpoint.complete(body)
        except RequestError as error:
            raise self._refuse(str(error)) from error
        found = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
        if found is None:
            raise self._refuse("names no file with hidden states in its answer: start it so")
        path = Path(found)
        if not path.parent.is_dir():
            raise self._refuse(f"writes to {path.parent}, which is not there: share that folder")
        lock = path.with_name(f"{path.name}.lock")
        if lock.is_file():
            with lock.open() as held:
                fcntl.flock(held, fcntl.LOCK_SH)  # until it is written
        states = read_states(path, document, self._layers)
        for done in (path, lock):
            done.unlink(missing_ok=True)
        return states

    def _refuse(self, why: str) -> ConfigError:
        return ConfigError("features_url", self._endpoint.url, why)
