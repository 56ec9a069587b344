"""Widened models as safetensors files, in which what is zero takes no room on disk."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.widening.layer import WideTensor

SHARD_BYTES = 2 * 2**30

# https://github.com/huggingface/safetensors#format
NAMES = {
    torch.bool: "BOOL",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.int64: "I64",
}


def write_safetensors(
    folder: Path,
    tensors: Iterable[WideTensor],
    dtype: torch.dtype,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write model.safetensors into ``folder``, or shards and their index.

    A file is made as long as it has to be, and only what is not zero is written: a file system with
    sparse files stores no more than that. One tensor is filled at a time. A tensor that is larger
    than ``shard_bytes`` has a shard of its own.
    """
    shards = _shards(list(tensors), dtype, shard_bytes)
    if len(shards) == 1:
        _write_file(folder / "model.safetensors", shards[0], dtype)
        return
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_file(folder / name, shard, dtype)
        files |= {tensor.name: name for tensor in shard}
    total = sum(_bytes(tensor, dtype) for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _shards(
    tensors: Sequence[WideTensor], dtype: torch.dtype, limit: int
) -> list[list[WideTensor]]:
    shards: list[list[WideTensor]] = [[]]
    room = limit
    for tensor in tensors:
        room -= _bytes(tensor, dtype)
        if room < 0 and shards[-1]:
            shards.append([])
            room = limit - _bytes(tensor, dtype)
        shards[-1].append(tensor)
    return shards


def _write_file(path: Path, tensors: Sequence[WideTensor], dtype: torch.dtype) -> None:
    # Those of the widest elements first: each then begins at a multiple of its element's size.
    ordered = sorted(tensors, key=lambda t: -(t.dtype or dtype).itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        begin, end = end, end + _bytes(tensor, dtype)
        kind = NAMES[tensor.dtype or dtype]
        header[tensor.name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("w+b") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        offset = file.tell()
        file.truncate(offset + end)
        file.flush()
        with mmap.mmap(file.fileno(), offset + end) as memory:
            for tensor in ordered:
                _fill(memory, offset, tensor, tensor.dtype or dtype)
                offset += _bytes(tensor, dtype)


def _fill(memory: mmap.mmap, offset: int, tensor: WideTensor, dtype: torch.dtype) -> None:
    count = math.prod(tensor.shape)
    flat: Tensor = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
    tensor.fill(flat.view(tensor.shape))


def _bytes(tensor: WideTensor, dtype: torch.dtype) -> int:
    return math.prod(tensor.shape) * (tensor.dtype or dtype).itemsize
