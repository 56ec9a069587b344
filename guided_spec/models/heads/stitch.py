"""A target's checkpoint with trained modules of multi-token prediction in it, as engines load them.

vLLM, SGLang and LMDeploy read such modules from the target's own folder: their tensors among the
target's, their number in its config.json.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from guided_spec.errors import ConfigError, ModelError
from guided_spec.models.checkpoint import Checkpoint

__all__ = ["COUNTS", "stitch"]

# What layouts call the number of modules in config.json, and how their tensors' names begin;
# DeepSeek's stand behind the layers of the target, whose number is filled in.
COUNTS = {
    "mtp_num_hidden_layers": "mtp.",
    "num_nextn_predict_layers": "model.layers.{}.",
}
INDEX = "model.safetensors.index.json"
WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")


def stitch(target: str | Path, draft: str | Path, output: str | Path) -> Path:
    """Write ``output``: the folder ``target`` with the modules of the folder ``draft``.

    draft: in the layout "deepseek" or "qwen", made for this target. Files of the target that do not
    change are links to the same data where the file system has them (hard links), else copies.
    Modules that the target has already are replaced. The index gets a file of its own for the
    modules; a target of one file gets an index.

    Raises ConfigError for an output that is there, and ModelError for a draft of another kind or
    for another target, and for a target that is not a folder of safetensors.
    """
    source, modules, folder = Checkpoint.open(target), Checkpoint.open(draft), Path(output)
    if folder.exists():
        raise ConfigError("output", str(folder), "is there already: pass another folder")
    if not Path(target).is_dir() or not all(f.endswith(WEIGHTS[0]) for f in source.files.values()):
        raise ModelError(f"target={source.source!r}: expected a folder with safetensors; pass one")
    count = _count_name(modules)
    _check_fit(source, modules)
    own = {name for name in source.names if _is_module(name, count, source.config)}
    trained = sorted(name for name in modules.names if _is_module(name, count, modules.config))
    tensors = modules.read(trained)
    folder.mkdir(parents=True)
    for path in sorted(Path(target).iterdir()):
        if path.is_file() and not path.name.endswith(WEIGHTS) and path.name != "config.json":
            _link(path, folder / path.name)
    files = _write_weights(source, Path(target), folder, own, tensors)
    size = sum((folder / file).stat().st_size for file in set(files.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
    _write_json(folder / INDEX, index)
    config = json.loads((Path(target) / "config.json").read_text(encoding="utf-8"))
    config.get("text_config", config)[count] = _text(modules.config)[count]
    _write_json(folder / "config.json", config)
    return folder


def _write_weights(
    source: Checkpoint, target: Path, folder: Path, own: set[str], tensors: dict[str, Tensor]
) -> dict[str, str]:
    """The weight map of what is written; own: the target's tensors that are left out."""
    files = {name: file for name, file in source.files.items() if name not in own}
    # Loaders take a model.safetensors for all there is, beside an index or not.
    renamed = {file: _shard(number) for number, file in enumerate(sorted(set(files.values())), 1)}
    for file, name in renamed.items():
        if any(source.files[tensor] == file for tensor in own):
            kept = {n: t for n, t in load_file(target / file).items() if n not in own}
            save_file(kept, folder / name, metadata={"format": "pt"})
        else:
            _link(target / file, folder / name)
    added = _shard(len(renamed) + 1)
    save_file(tensors, folder / added, metadata={"format": "pt"})
    return {n: renamed[file] for n, file in files.items()} | dict.fromkeys(tensors, added)


def _shard(number: int) -> str:
    return f"model-{number:05d}.safetensors"


def _count_name(modules: Checkpoint) -> str:
    text = _text(modules.config)
    for count in COUNTS:
        if text.get(count) and any(_is_module(n, count, modules.config) for n in modules.names):
            return count
    raise ModelError(
        f"draft={modules.source!r}: expected modules of multi-token prediction in the layout "
        "'deepseek' or 'qwen', found none; other drafts are loaded from folders of their own"
    )


def _is_module(name: str, count: str, config: dict[str, Any]) -> bool:
    """Whether a tensor belongs to the modules that ``count`` counts."""
    prefix, text = COUNTS[count], _text(config)
    if "{}" not in prefix:
        return name.startswith(prefix)
    first = text["num_hidden_layers"]
    last = first + (text.get(count) or 0)
    return any(name.startswith(prefix.format(layer)) for layer in range(first, last))


def _check_fit(source: Checkpoint, modules: Checkpoint) -> None:
    expected, found = _text(source.config), _text(modules.config)
    for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
        if expected.get(name) != found.get(name):
            raise ModelError(
                f"draft={modules.source!r}: expected modules for a target with {name}="
                f"{expected.get(name)!r}, found {found.get(name)!r}; pass those of this target"
            )


def _text(config: dict[str, Any]) -> dict[str, Any]:
    text: dict[str, Any] = config.get("text_config", config)
    return text


def _link(source: Path, copy: Path) -> None:
    try:
        os.link(source.resolve(), copy)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, copy)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
