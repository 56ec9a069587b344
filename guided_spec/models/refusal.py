"""Why a model cannot run over slots, in words that its user can do something with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from guided_spec.errors import ModelError

__all__ = ["CheckedEmbeddings", "errors_naming", "likely_cause"]


@contextmanager
def errors_naming(model: PreTrainedModel, what: str) -> Iterator[None]:
    """Turn any error into a ModelError of the model's type, ``what`` failed, and the likely cause.

    ModelErrors stay as they are, and so do errors for lack of memory.
    """
    try:
        yield
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # models raise nearly every class of exception here
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(
            f"model_type={model.config.model_type!r}: {what}{likely_cause(model)}: {reason}"
        ) from error


def likely_cause(model: PreTrainedModel) -> str:
    """What about the model's forward explains that slots do not serve it; empty if nothing does."""
    if model.training:
        return " (it is in training mode: call model.eval() first)"
    arguments = inspect.signature(model.forward).parameters
    if "past_key_values" not in arguments:
        return (
            " (it keeps its past in a form of its own, not as keys and values in past_key_values, "
            "so slots cannot hold it)"
        )
    if "position_ids" not in arguments:
        return (
            " (its forward takes no position_ids: it counts positions by itself, which is wrong "
            "for rows of different lengths)"
        )
    return ""


class CheckedEmbeddings(TorchFunctionMode):
    """While it is open, rows that an embedding does not have raise ModelError.

    On a CUDA device they would end the process's use of it.
    max_length: of texts, whose last position is tried.
    """

    def __init__(self, model: PreTrainedModel, max_length: int) -> None:
        super().__init__()
        self._model, self._max_length = model, max_length

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Look at the arguments of ``torch.nn.functional.embedding``, and at no others."""
        del types
        if func is functional.embedding:
            self._check(*args[:2])
        return func(*args, **(kwargs or {}))

    def _check(self, rows: Tensor, weight: Tensor) -> None:
        beyond = int(rows.max()) + 1 - len(weight)
        if beyond > 0:
            raise ModelError(
                f"model_type={self._model.config.model_type!r}, max_model_len={self._max_length}: "
                f"it embeds {beyond} positions fewer; use a max_model_len of at most "
                f"{self._max_length - beyond}"
            )
