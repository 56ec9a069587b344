"""Loading models from a folder or the Hugging Face hub."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
)

from guided_spec.errors import ModelError
from guided_spec.models.checkpoint import (
    ADAPTER_CONFIG,
    Checkpoint,
    find_file,
)
from guided_spec.models.gguf import GgufFile, find_gguf, gguf_failure
from guided_spec.models.pictures.vision import is_vision_config, may_read_pictures
from guided_spec.models.quantized.fp8 import Fp8Recipe, load_fp8
from guided_spec.models.quantized.int4 import load_int4
from guided_spec.models.quantized.int4_layouts import Int4Recipe

_LOG = logging.getLogger(__name__)

PACKED_DEVICES = ("cpu", "cuda")  # where quantized weights are multiplied as they are stored
_UNTRUSTED = {"trust_remote_code": False}  # else transformers asks at the terminal, and waits
_SAME_AS = {"kimi_k2": "deepseek_v3"}  # by model_type: what transformers calls the same model


def load_model(  # noqa: PLR0913 - how a model is loaded
    path: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    tp_plan: str | dict[str, str] | None = None,
    argument: str = "model",
    pictures: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """Load a causal LM for inference.

    path: a folder with a config.json, or a hub id such as "org/name"; or a LoRA adapter of peft,
        whose base model is then loaded and its weights merged; or a GGUF file, see ``find_gguf``.
    dtype: torch.bfloat16, "bfloat16", ... or "auto" for the checkpoint's own; None is float32 on
        the CPU and "auto" elsewhere. A GGUF file has none of its own: "auto" is bfloat16.
    device: where to put it; None is CUDA where there is one, else the CPU. "auto" tries CUDA, then
        Apple's MPS, then takes the CPU.
    device_map: spread the layers over devices instead, as accelerate does ("auto").
    tp_plan: split each layer over the processes of torchrun instead ("auto").
    argument: its name in errors, as the caller knows it.
    pictures: whether a model that may be loaded for text alone, such as Qwen 3.5, is to have its
        vision tower where it can be used: on one device, with plain weights.
    options: further arguments of ``from_pretrained``: attn_implementation, revision,
        trust_remote_code, quantization_config, ... Of an adapter, the revision is the adapter's.

    Raises ModelError, naming the argument and what to do, when it cannot be loaded.
    """
    if sum(value is not None for value in (device, device_map, tp_plan)) > 1:
        raise ModelError("device, device_map and tp_plan exclude each other: pass one of them")
    gguf = find_gguf(path, "config.json", argument=argument, revision=options.get("revision"))
    target = _target_device(device)
    arguments = {"dtype": resolve_dtype(dtype, target), **_UNTRUSTED, **options}
    if device_map is not None:
        _require("accelerate", "parallel", f"device_map={device_map!r}")
        arguments["device_map"] = device_map
    if tp_plan is not None:
        arguments["distributed_config"] = _distributed_config(tp_plan)
    place = target if device_map is None and tp_plan is None else None
    began = time.perf_counter()
    try:
        adapter = None if gguf else find_file(path, ADAPTER_CONFIG, options.get("revision"))
        with _without_bars():
            if gguf is not None:
                model = _load_gguf(path, gguf, arguments, place)
            elif adapter is None:
                model = _load_whole(path, arguments, place, pictures=pictures)
            else:
                model = _load_merged(path, adapter, arguments, place, argument)
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers raises nearly every class of exception here
        raise _failure(path, argument, error) from error
    loaded: PreTrainedModel = model.eval()
    about = (path, loaded.device, loaded.dtype, time.perf_counter() - began)
    _LOG.info("loaded %s on %s as %s in %.1f s", *about)
    return loaded


def _failure(path: str | Path, argument: str, error: Exception) -> ModelError:
    """``gguf_failure``; raises one that names a file of weights which a folder lacks, or broken."""
    is_of_a_file = isinstance(error, SafetensorError | FileNotFoundError)
    if is_of_a_file and (Path(path) / "config.json").is_file():
        checkpoint = Checkpoint.open(path, argument=argument)
        for name in {file: name for name, file in checkpoint.files.items()}.values():
            checkpoint.read([name])
    return gguf_failure(path, argument, error)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Transformers shows none of its bars, such as that of weights; downloads show theirs."""

    def hide(make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return make(*args, **{**options, "disable": True})

    before = transformers.logging.set_tqdm_hook(hide)
    try:
        yield
    finally:
        transformers.logging.set_tqdm_hook(before)


def _load_whole(
    path: str | Path,
    arguments: dict[str, Any],
    target: torch.device | None,
    *,
    pictures: bool = False,
) -> Any:
    """target: where to put all of the model; None leaves that to ``arguments``."""
    config, arguments = _with_config(path, arguments)
    is_plain = target is not None and not _is_quantized(config, arguments)
    has_tower = is_vision_config(config) or (pictures and is_plain and may_read_pictures(config))
    if target is not None and _is_quantized(config, arguments):
        may_be_packed = target.type in PACKED_DEVICES and not has_tower
        stored = _stored_quantization(config, arguments) if may_be_packed else {}
        loaded = _load_as_stored(str(path), stored, config, arguments, target)
        if loaded is not None:
            return loaded.to(target)
        if stored.get("quant_method") == "fp8":
            _LOG.warning("%s: its experts are in fp8, and loaded as %s", path, arguments["dtype"])
            config.quantization_config["dequantize"] = True
            arguments = {**arguments, "config": config}
        # Its weights may exist on one kind of device only: they are made there, and not moved.
        _require("accelerate", "parallel", "a quantized model")
        arguments, target = {**arguments, "device_map": {"": target}}, None
    kind: Any = AutoModelForImageTextToText if has_tower else AutoModelForCausalLM
    model: Any = kind.from_pretrained(str(path), **arguments)
    return model if target is None else model.to(target)


def _load_gguf(
    path: str | Path, file: GgufFile, arguments: dict[str, Any], target: torch.device | None
) -> Any:
    """Its weights as plain ones; the model is known by ``path`` from then on."""
    given = {**file.options, **arguments}
    if given["dtype"] == "auto":
        given["dtype"] = torch.bfloat16
    is_plain = given.get("quantization_config") is None
    if is_plain and (kept := getattr(transformers, "GgufConfig", None)) is not None:
        given["quantization_config"] = kept(dequantize=True)  # earlier versions know no other way
    model: Any = AutoModelForCausalLM.from_pretrained(file.source, **given)
    model.config.name_or_path = str(path)
    if is_plain and hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # of the file
    return model if target is None else model.to(target)


def _load_as_stored(
    path: str, stored: Any, config: Any, arguments: dict[str, Any], target: torch.device
) -> Any:
    """With weights as the checkpoint has them; None where that is not done, or not for all."""
    try:
        fp8, int4 = Fp8Recipe.of(stored), Int4Recipe.of(stored)
    except (TypeError, ValueError, AttributeError, LookupError) as error:  # of another structure
        problem = f"quantization_config={stored!s:.200} cannot be read ({error})"
        raise ModelError(f"model={path!r}: {problem}; download its config.json again") from error
    if fp8 is not None:
        return load_fp8(path, fp8, config, arguments)
    return None if int4 is None else load_int4(path, int4, config, arguments, target)


def _stored_quantization(config: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Of config.json; empty where a user says how weights are quantized."""
    stored = getattr(config, "quantization_config", None)
    if arguments.get("quantization_config") is not None or not isinstance(stored, dict):
        return {}
    return stored


def _is_quantized(config: Any, arguments: dict[str, Any]) -> bool:
    kept = getattr(config, "quantization_config", None)
    return arguments.get("quantization_config", kept) is not None


def _config_of_same(path: str | Path, arguments: dict[str, Any]) -> Any:
    """Of the class of another name; None where transformers has the checkpoint's own.

    No code that comes with the checkpoint is needed then.
    """
    file = find_file(path, "config.json", arguments.get("revision"))
    values: dict[str, Any] = {}
    with suppress(ValueError):  # transformers says what is wrong with it
        values = {} if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
    kind = values.get("model_type")
    if kind in CONFIG_MAPPING or kind not in _SAME_AS:
        return None
    values |= {"model_type": _SAME_AS[kind], "name_or_path": str(path)}
    values.pop("auto_map", None)
    return CONFIG_MAPPING[_SAME_AS[kind]].from_dict(values)


def _with_config(path: str | Path, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The configuration, and the arguments with it if transformers would not find it itself."""
    config = arguments.get("config") or _config_of_same(path, arguments)
    if config is not None:
        return config, {**arguments, "config": config}
    names = ("revision", "trust_remote_code")
    known: dict[str, Any] = {name: arguments[name] for name in names if name in arguments}
    return AutoConfig.from_pretrained(str(path), **known), arguments


def _load_merged(
    path: str | Path,
    adapter: str,
    arguments: dict[str, Any],
    target: torch.device | None,
    argument: str,
) -> Any:
    """The base model that a LoRA adapter names, with the adapter in its weights."""
    shown = f"{argument}={str(path)!r} is a LoRA adapter"
    _require("peft", "lora", shown)
    settings = json.loads(Path(adapter).read_text(encoding="utf-8"))
    base = settings.get("base_model_name_or_path")
    if not base:
        raise ModelError(f"{shown} whose {ADAPTER_CONFIG} names no base_model_name_or_path: add it")
    revision = arguments.pop("revision", None)
    if settings.get("revision") is not None:
        arguments["revision"] = settings["revision"]
    config, arguments = _with_config(base, arguments)
    if _is_quantized(config, arguments):
        fix = "merge it into the whole model, save that, and quantize it"
        raise ModelError(f"{shown}, which would be rounded in a quantized base model: {fix}")
    from peft import PeftModel  # an extra

    model = _load_whole(base, arguments, target)
    known = {} if revision is None else {"revision": revision}
    merged: Any = PeftModel.from_pretrained(model, str(path), **known)
    return merged.merge_and_unload(safe_merge=True)


def _target_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "auto":
        return _best_device()
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ModelError(
            f"device={device!r}: pass 'auto', 'cpu', 'cuda' or 'cuda:<index>'"
        ) from error
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ModelError(f"device={str(device)!r}: torch sees {count} CUDA devices; pass another")
    return target


def _best_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> str | torch.dtype:
    """What ``load_model`` loads a checkpoint as: a dtype, or "auto" for its own.

    Raises ModelError for what names no dtype.
    """
    if dtype is None:
        return torch.float32 if device.type == "cpu" else "auto"
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else None
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


def _require(package: str, extra: str, shown: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ModelError(f"{shown}: it needs {package}: pip install 'guided-spec[{extra}]'")


def load_ends(
    path: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: torch.device,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model of a checkpoint with no weights in its layers, which take no memory.

    Where the names in the checkpoint are the module's own and nothing is quantized, the last layer
    has its weights too: modules of multi-token prediction may start as a copy of it. No weight
    takes a gradient.

    path: a folder or a hub id. dtype: as of ``load_model``.

    Raises ModelError for a checkpoint that has the ends under other names, or quantized.
    """
    checkpoint = Checkpoint.open(path, argument="model")
    model = _build_empty(str(path), resolve_dtype(dtype, device), trust_remote_code)
    names = {id(module): name for name, module in model.named_modules()}
    decoder = model.get_decoder()
    ends = [model.get_input_embeddings(), decoder.norm]
    if not model.config.get_text_config(decoder=True).tie_word_embeddings:
        ends.append(model.get_output_embeddings())
    for module in ends:
        missing = _fill(module, names[id(module)], checkpoint)
        if missing:
            problem = f"expected plain weights {', '.join(missing)}, found none"
            raise ModelError(f"model={str(path)!r}: {problem}; load all of it")
    if "quantization_config" not in checkpoint.config:
        _fill(decoder.layers[-1], names[id(decoder.layers[-1])], checkpoint)
    model.tie_weights()
    for module in model.modules():
        for name, tensor in module.named_buffers(recurse=False):
            setattr(module, name, tensor.to(device))
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    model.requires_grad_(requires_grad=False).eval()
    assert isinstance(model, PreTrainedModel)
    return model


def has_layers(model: PreTrainedModel) -> bool:
    """Whether the layers have their weights; a device map may keep them outside of the model."""
    is_mapped = getattr(model, "hf_device_map", None) is not None
    return is_mapped or not any(parameter.is_meta for parameter in model.parameters())


@contextmanager
def without_layers(decoder: nn.Module) -> Iterator[None]:
    """While it is open the decoder runs from its embedding to its last norm at once."""
    layers, decoder.layers = decoder.layers, nn.ModuleList()
    try:
        yield
    finally:
        decoder.layers = layers


def _build_empty(source: str, dtype: Any, trust_remote_code: bool) -> Any:  # noqa: FBT001
    """With parameters that have a shape only, and real buffers: those of rotary embeddings."""
    from accelerate import init_empty_weights  # an extra

    try:
        config = _config_of_same(source, {}) or AutoConfig.from_pretrained(
            source, trust_remote_code=trust_remote_code
        )
        stored = config.dtype or torch.float32
        with init_empty_weights(include_buffers=False):
            model: Any = AutoModelForCausalLM.from_config(
                config,
                dtype=stored if dtype == "auto" else dtype,
                trust_remote_code=trust_remote_code,
            )
    except Exception as error:  # transformers raises nearly every class of exception here
        raise ModelError(f"model={source!r} cannot be built without weights: {error}") from error
    with suppress(OSError):  # it has none
        model.generation_config = GenerationConfig.from_pretrained(source)
    return model


def _fill(module: nn.Module, prefix: str, checkpoint: Checkpoint) -> list[str]:
    """Read the weights of ``module``, in the dtype that they are to have, if all are there.

    Returns the names of those that are not.
    """
    stored = {f"{prefix}.{name}": name for name, _ in module.named_parameters()}
    missing = sorted(set(stored) - checkpoint.names)
    tensors = {} if missing else checkpoint.read(stored)
    for full, tensor in tensors.items():
        owner, _, name = stored[full].rpartition(".")
        holder: Any = module.get_submodule(owner)
        empty = getattr(holder, name)
        if empty.shape != tensor.shape:
            found, expected = list(tensor.shape), list(empty.shape)
            problem = f"{full}: expected {expected}, found {found}"
            raise ModelError(f"{checkpoint.source}: {problem}")
        setattr(holder, name, nn.Parameter(tensor.to(empty.dtype), requires_grad=False))
    return missing
