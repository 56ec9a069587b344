"""Hidden states that a running vLLM makes, while the draft trains on those it made before.

A server that was started to extract hidden states (``extract_hidden_states`` as its method of
speculation, and ``ExampleHiddenStatesConnector``) answers a prompt with the path of a file that it
is about to write: ``hidden_states`` and ``token_ids`` as speculators has them. Until it is written
a lock is held on the file beside it. The folder has to be seen from here.

Written after the code of vLLM 0.33, and tested with a stand-in that answers, locks and writes so.
"""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from guided_spec.errors import ConfigError, RequestError
from guided_spec.training.algorithm import TargetStates, TrainingBatch
from guided_spec.training.data.endpoint import Endpoint
from guided_spec.training.features import (
    FeatureDtype,
    feature_file,
    pad_states,
    read_states,
    write_states,
)

__all__ = ["ServedFeatures"]

AT_ONCE = 16  # requests


class ServedFeatures:
    """Asks the server for the states of each document, up to ``ahead`` batches before they train.

    layers: hidden states for ``TargetStates.aux``; the server has to extract these, and the last
        layer's output behind them. folder: files with the states of documents, which are read
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

        Raises ConfigError where the server does not answer, refuses, or wrote what does not fit.
        """
        self.begin(batch)
        return pad_states([self._begun.pop(i).result() for i in batch.indices.tolist()], batch)

    def close(self) -> None:
        """Forget what was begun, and close the connections."""
        self._pool.shutdown(cancel_futures=True)
        self._endpoint.close()

    def _states(self, index: int, token_ids: Tensor) -> Tensor:
        path = None if self._folder is None else feature_file(self._folder, index)
        if path is not None and path.is_file():
            return read_states(path, token_ids, self._layers)
        states = self._ask(token_ids)
        if path is None:
            return states
        write_states(path, states, token_ids, self._layers, self._dtype)
        return read_states(path, token_ids, self._layers)

    def _ask(self, token_ids: Tensor) -> Tensor:
        body = {"prompt": token_ids.tolist(), "max_tokens": 1, "return_token_ids": True}
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
        states = read_states(path, token_ids, self._layers)
        for done in (path, lock):
            done.unlink(missing_ok=True)
        return states

    def _refuse(self, why: str) -> ConfigError:
        return ConfigError("features_url", self._endpoint.url, why)
