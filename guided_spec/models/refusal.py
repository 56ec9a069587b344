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

__all__ = ["CheckedEmbeddings", "errors_naming", "likely_cause", "refusal"]


@contextmanager
def errors_naming(model: PreTrainedModel, what: str, cause: str = "") -> Iterator[None]:
    """Turn errors into ModelErrors that name the model's type, what failed, and its cause if known.

    ModelErrors stay as they are, and so do errors for lack of memory.
    """
    try:
        yield
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # models raise nearly every class of exception here
        reason = " ".join(str(error).split()) or type(error).__name__
        raise refusal(model, f"{what}{cause and f', {cause}'}: {reason}") from error


def refusal(model: PreTrainedModel, what: str) -> ModelError:
    """The error for a model that cannot be used, for the reason ``what``."""
    kind = model.config.model_type
    return ModelError(f"model_type={kind!r}: {what}; docs/models.md lists the families that run")


def likely_cause(model: PreTrainedModel) -> str:
    """What about the model explains that slots do not serve it; empty if nothing does."""
    if model.training:
        return "for it is in training mode: call model.eval() first"
    if getattr(model.config, "is_decoder", True) is False:
        return "for its configuration says is_decoder=False: a decoder needs is_decoder=True"
    arguments = inspect.signature(model.forward).parameters
    if "input_ids" not in arguments:  # a wrapper, which tells nothing
        return ""
    if "past_key_values" not in arguments:
        return "for it keeps its past in a form of its own, not as past_key_values"
    if "position_ids" not in arguments:
        return (
            "for it counts positions by itself and takes no position_ids, as rows of different "
            "lengths need them"
        )
    return ""


class CheckedEmbeddings(TorchFunctionMode):
    """While it is open, rows that an embedding does not have raise IndexError on any device.

    Without it, a CUDA device would be of no more use to the process.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Look at the arguments of ``torch.nn.functional.embedding``, and at no others."""
        del types
        # Of a sharded model they are tensors of another kind, without values to look at.
        if func is functional.embedding and type(args[0]) is Tensor:
            row, rows = int(args[0].max()), len(args[1])
            if row >= rows:
                raise IndexError(
                    f"it looks up row {row} of an embedding of {rows} rows; if that is a table of "
                    "positions, use a smaller max_model_len"
                )
        return func(*args, **(kwargs or {}))
