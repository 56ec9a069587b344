"""A bar on stderr: how many requests of a call are done."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm

from guided_spec.engine.outputs import Chunk

__all__ = ["ProgressBar"]


class ProgressBar:
    """A context manager. total: prompts of the call; None shows nothing."""

    def __init__(self, total: int | None) -> None:
        self._bar: Any = tqdm(total=total, unit="prompt", disable=total is None)
        self._num_tokens = 0

    def update(self, chunk: Chunk) -> None:
        """Count a finished sample; the prompt counts with its first one."""
        if chunk.completion is None:
            return
        self._num_tokens += len(chunk.completion.token_ids)
        self._bar.set_postfix(tokens=self._num_tokens, refresh=False)
        self._bar.update(int(chunk.sample_index == 0))

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()
