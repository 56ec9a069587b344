"""Loading models and tokenizers from a folder or the Hugging Face hub."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from guided_spec.errors import ModelError

__all__ = ["end_of_text_ids", "load_model", "load_tokenizer"]

LARGEST_REASON = 300


def load_model(
    path: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    tp_plan: str | dict[str, str] | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Load a causal LM for inference.

    path: a folder with a config.json, or a hub id such as "org/name".
    dtype: torch.bfloat16, "bfloat16", ... or "auto" for the checkpoint's own; None is "auto" on
        CUDA and float32 on the CPU.
    device: where to put it; None is CUDA where there is one, else the CPU.
    device_map: spread the layers over devices instead, as accelerate does ("auto").
    tp_plan: split each layer over the processes of torchrun instead ("auto").
    options: further arguments of ``from_pretrained``: attn_implementation, revision,
        trust_remote_code, quantization_config, ...

    Raises ModelError, naming the argument and what to do, when it cannot be loaded.
    """
    if sum(value is not None for value in (device, device_map, tp_plan)) > 1:
        raise ModelError("device, device_map and tp_plan exclude each other: pass one of them")
    _check_folder("model", path, "config.json")
    target = _target_device(device)
    arguments = {"dtype": _resolve_dtype(dtype, target), **options}
    if device_map is not None:
        _require_accelerate(device_map)
        arguments["device_map"] = device_map
    if tp_plan is not None:
        arguments["distributed_config"] = _distributed_config(tp_plan)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(str(path), **arguments)
        if device_map is None and tp_plan is None:
            model = model.to(target)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # transformers raises nearly every class of exception here
        raise ModelError(_explain("model", path, error)) from error
    model.eval()
    assert isinstance(model, PreTrainedModel)
    return model


def load_tokenizer(path: str | Path, **options: Any) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or by a hub id.

    options: further arguments of ``from_pretrained``: revision, trust_remote_code, ...
    Raises ModelError, naming the argument and what to do, when it cannot be loaded.
    """
    _check_folder("tokenizer", path, "tokenizer_config.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), **options)
    except Exception as error:  # transformers raises nearly every class of exception here
        raise ModelError(_explain("tokenizer", path, error)) from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ModelError(f"tokenizer={str(path)!r}: the folder or repository has no tokenizer")
    return tokenizer


def end_of_text_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[int, ...]:
    """The ids that end a text, ascending: what model, its generation config and tokenizer name."""
    text_config: Any = model.config.get_text_config(decoder=True)
    sources = (model.generation_config, model.config, text_config, tokenizer)
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return tuple(sorted(found))


def _check_folder(argument: str, path: str | Path, file: str) -> None:
    """Refuse what is plainly a folder and not there, before a hub is asked for it."""
    looks_local = isinstance(path, Path) or str(path).startswith((".", "/", "~"))
    shown = f"{argument}={str(path)!r}"
    if looks_local and not Path(path).is_dir():
        raise ModelError(f"{shown}: there is no such folder; pass one or a hub id")
    if Path(path).is_dir() and not (Path(path) / file).is_file():
        raise ModelError(f"{shown}: the folder has no {file}; pass a {argument} folder")


def _target_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"device={device!r}: pass 'cpu', 'cuda' or 'cuda:<index>'") from error
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ModelError(f"device={str(device)!r}: torch sees {count} CUDA devices; pass another")
    return target


def _resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> str | torch.dtype:
    if dtype is None:
        return "auto" if device.type == "cuda" else torch.float32
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ModelError(f"dtype={dtype!r}: pass 'auto', 'float32', 'bfloat16' or 'float16'")
    return found


def _distributed_config(tp_plan: str | dict[str, str]) -> Any:
    from transformers.distributed import configuration_utils  # only here: it imports DTensor

    if "RANK" not in os.environ:
        fix = "start one process a device: torchrun --nproc-per-node=<devices> ..."
        raise ModelError(f"tp_plan={tp_plan!r}: {fix}")
    module: Any = configuration_utils
    return module.DistributedConfig(tp_plan=tp_plan)


def _require_accelerate(device_map: object) -> None:
    if importlib.util.find_spec("accelerate") is None:
        fix = "it needs accelerate: pip install 'guided-spec[parallel]'"
        raise ModelError(f"device_map={device_map!r}: {fix}")


def _explain(argument: str, path: str | Path, error: Exception) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    reason = reason if len(reason) <= LARGEST_REASON else reason[: LARGEST_REASON - 1] + "…"
    return f"{argument}={str(path)!r} cannot be loaded: {reason}"
