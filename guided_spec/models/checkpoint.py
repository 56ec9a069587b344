"""A checkpoint on disk or on the hub, read tensor by tensor.

Draft heads are no models of transformers, and MTP layers are a corner of a large one: both need a
few named tensors, not a whole model. ``stitch`` writes one: a target's, with trained modules of
multi-token prediction in it, as vLLM, SGLang and LMDeploy read them: their tensors among the
target's, their number in its config.json.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils.hub import cached_file

from guided_spec.bundled import BUNDLED, READER
from guided_spec.errors import ConfigError, ModelError
from guided_spec.kinds import did_you_mean

_LOG = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
HUB_SECONDS = 10.0  # for which an answer is waited
LONGEST_REASON = 300
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
LAYOUTS = tuple(name for single in SINGLE_FILES for name in (single, f"{single}.index.json"))
SAFETENSORS = ".safetensors"
FP8_KIND = "F8_E4M3"  # what safetensors calls it
MOST_NAMES = 8

# What layouts call the number of modules in config.json, and how their tensors' names begin;
# DeepSeek's come after the layers of the target, whose number is filled in.
COUNTS = {
    "mtp_num_hidden_layers": "mtp.",
    "num_nextn_predict_layers": "model.layers.{}.",
}
INDEX = "model.safetensors.index.json"
WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")

Fetch = Callable[[str], Path | None]


class Checkpoint:
    """Named tensors and the config.json next to them; made by ``open``.

    source: what errors name: the argument, and the folder or hub id in it.
    config: config.json, parsed.
    names: every tensor there is; known without reading the data of one. files: where each is.
    """

    def __init__(
        self, source: str, config: dict[str, Any], files: Mapping[str, str], fetch: Fetch
    ) -> None:
        self.source = source
        self.config = config
        self.names = frozenset(files)
        self.files = files
        self._fetch = fetch

    @classmethod
    def open(
        cls, source: str | Path, *, revision: str | None = None, argument: str = "checkpoint"
    ) -> Checkpoint:
        """Read config.json and the list of tensors.

        source: a folder, or a hub id such as "org/name". The weights are looked for as
            model.safetensors, its index with shards, pytorch_model.bin, its index with shards.
        revision: branch, tag or commit on the hub; a folder has none.
        argument: its name in errors, as the caller knows it.

        From the hub, only config.json and the index are fetched here; a checkpoint without an
        index is one file, which is fetched whole. Raises ModelError, naming the source, for a
        missing or broken config.json, missing weights, and a corrupt file.
        """
        name, is_folder = f"{argument}={str(source)!r}", Path(source).is_dir()
        fetch = _from_folder(source) if is_folder else _from_hub(source, revision, name)
        path = fetch("config.json")
        if path is None:
            raise _error(name, "expected a config.json, found none", "pass a model folder or id")
        config = _read_json(name, path)
        for layout in LAYOUTS:
            path = fetch(layout)
            if path is not None:
                return cls(name, config, _list_tensors(name, path, layout), fetch)
        raise _error(name, f"expected one of {', '.join(LAYOUTS)}, found none", "add the weights")

    def matching(self, prefix: str) -> list[str]:
        """The names that start with ``prefix``, sorted."""
        return sorted(name for name in self.names if name.startswith(prefix))

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors, on the CPU in their stored dtype; opens only the files that hold them.

        Raises ModelError for names that are not there, a shard that is missing, and one that is
        corrupt or lacks what the index promises.
        """
        wanted = list(names)
        unknown = sorted(set(wanted) - self.names)
        if unknown:
            found = f"found {len(self.names)} other tensors, such as {_some(sorted(self.names))}"
            problem = f"expected the tensors {_some(unknown)}, {found}"
            raise _error(self.source, problem, "pass a checkpoint of the right kind")
        by_file: dict[str, list[str]] = {}
        for name in wanted:
            by_file.setdefault(self.files[name], []).append(name)
        tensors: dict[str, Tensor] = {}
        for file, group in by_file.items():
            path = self._fetch(file)
            if path is None:
                problem = f"its index expects the file {file!r} for {_some(group)}, found no such"
                raise _error(self.source, problem, "download the whole checkpoint")
            tensors.update(_read_tensors(self.source, path, group))
        return {name: tensors[name] for name in wanted}

    def fp8_names(self) -> frozenset[str]:
        """The tensors in float8_e4m3fn, found without reading one; of safetensors only.

        Raises ModelError as ``read`` does.
        """
        found: set[str] = set()
        for file in sorted(set(self.files.values())):
            path = self._fetch(file) if file.endswith(SAFETENSORS) else None
            if path is None:
                problem = f"expected safetensors for weights in fp8, found {file!r} or no such file"
                raise _error(self.source, problem, "download the whole checkpoint")
            with _safe_open(self.source, path) as opened:
                names: list[str] = opened.keys()
                found |= {n for n in names if opened.get_slice(n).get_dtype() == FP8_KIND}
        return frozenset(found)


def _from_folder(source: str | Path) -> Fetch:
    def fetch(file: str) -> Path | None:
        path = Path(source) / file
        return path if path.is_file() else None

    return fetch


def _from_hub(source: str | Path, revision: str | None, name: str) -> Fetch:
    """name: what to name in errors."""
    if looks_local(source):
        raise _error(name, "expected a folder, found none", "pass a model folder or a hub id")
    check_hub(name, source, revision)

    def fetch(file: str) -> Path | None:
        # Layouts are asked for that need not be there; what is wrong with the id, the revision or
        # the connection shows when config.json is asked for, which comes first.
        is_needed = file == "config.json"
        flags = {
            "_raise_exceptions_for_missing_entries": is_needed,
            "_raise_exceptions_for_connection_errors": is_needed,
        }
        try:
            found = cached_file(source, file, revision=revision, **flags)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            problem = f"expected a folder or a model on the hub, found neither: {reason}"
            fix = "check the name, the revision and the connection"
            raise _error(name, problem, fix) from error
        return None if found is None else Path(found)

    return fetch


def _read_json(source: str, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problem = f"{path.name}: expected JSON, found something else ({error})"
        raise _error(source, problem, "download it again") from error
    if not isinstance(value, dict):
        problem = f"{path.name}: expected a JSON object, found {type(value).__name__}"
        raise _error(source, problem, "download it again")
    return value


def _list_tensors(source: str, path: Path, layout: str) -> dict[str, str]:
    """The file of each tensor."""
    if not layout.endswith(".index.json"):
        return dict.fromkeys(_read_names(source, path), layout)
    files = _read_json(source, path).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        problem = f"{layout}: expected a weight_map of tensor names to files, found {files!r:.80}"
        raise _error(source, problem, "download it again")
    return files


def _read_names(source: str, path: Path) -> list[str]:
    if path.suffix != ".safetensors":
        return list(_load_pickle(source, path))
    with _safe_open(source, path) as file:
        return list(file.keys())


def _read_tensors(source: str, path: Path, names: list[str]) -> dict[str, Tensor]:
    if path.suffix != ".safetensors":
        stored = _load_pickle(source, path)
        _check_stored(source, path, names, stored)
        return {name: stored[name] for name in names}
    with _safe_open(source, path) as file:
        _check_stored(source, path, names, set(file.keys()))
        return {name: file.get_tensor(name) for name in names}


def _check_stored(source: str, path: Path, names: list[str], stored: Iterable[str]) -> None:
    lacking = sorted(set(names).difference(stored))
    if lacking:
        problem = f"its index expects {_some(lacking)} in {path.name}, found no such tensors there"
        raise _error(source, problem, "download the checkpoint again")


def _safe_open(source: str, path: Path) -> Any:
    # safetensors raises its own class, which derives from Exception only.
    try:
        return safe_open(path, framework="pt", device="cpu")
    except Exception as error:
        raise _corrupt(source, path, "a safetensors file", error) from error


def _load_pickle(source: str, path: Path) -> dict[str, Tensor]:
    try:
        try:
            stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files of torch before 1.6 are no archives and cannot be mapped
            stored = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch each raise their own
        raise _corrupt(source, path, "a torch file of nothing but tensors", error) from error
    if not isinstance(stored, dict) or not all(isinstance(t, Tensor) for t in stored.values()):
        problem = f"{path.name}: expected a mapping of names to tensors, found other objects"
        raise _error(source, problem, "save the state dict alone")
    return stored


def _corrupt(source: str, path: Path, expected: str, error: Exception) -> ModelError:
    reason = " ".join(str(error).split())[:200]
    problem = f"{path.name}: expected {expected}, found something else ({reason})"
    return _error(source, problem, "download it again")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _error(source: str, problem: str, fix: str) -> ModelError:
    return ModelError(f"{source}: {problem}; {fix}")


def stitch(target: str | Path, draft: str | Path, output: str | Path) -> Path:
    """Write ``output``: the folder ``target`` with the modules of the folder ``draft``.

    draft: in the layout "deepseek" or "qwen", made for this target. Files of the target that do not
    change are links to the same data where the file system has them (hard links), else copies.
    Modules that the target has already are replaced. The index gets a file of its own for the
    modules; a target of one file gets an index.

    Raises ConfigError for an output that is there, and ModelError for a draft of another kind or
    for another target, and for a target that is not a folder of safetensors.
    """
    source = Checkpoint.open(target, argument="target")
    modules, folder = Checkpoint.open(draft, argument="draft"), Path(output)
    if folder.exists():
        raise ConfigError("output", str(folder), "is there already: pass another folder")
    if not Path(target).is_dir() or not all(f.endswith(WEIGHTS[0]) for f in source.files.values()):
        raise ModelError(f"{source.source}: expected a folder with safetensors; pass one")
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
    # Loaders take a model.safetensors for all there is, with an index or without.
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
        f"{modules.source}: expected modules of multi-token prediction in the layout "
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
                f"{modules.source}: expected modules for a target with {name}="
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


def find_file(path: str | Path, name: str, revision: str | None) -> str | None:
    """Where a file of a folder or a repository of the hub is; None where it has no such.

    None, too, where a hub has no such repository: the reason shows where the model is loaded.
    """
    if Path(path).is_dir():
        file = Path(path) / name
        return str(file) if file.is_file() else None
    try:
        found = cached_file(str(path), name, revision=revision)
    except (OSError, ValueError):
        return None
    return None if found is None else str(found)


def looks_local(path: str | Path) -> bool:
    """Whether it is plainly a path of this machine, and no id of the hub."""
    return isinstance(path, Path) or path.startswith((".", "/", "~"))


def check_folder(argument: str, path: str | Path, wanted: str, *names: str) -> None:
    """Refuse what is plainly a folder and not there, before a hub is asked for it.

    wanted: what errors tell the caller to pass. names: files of which the folder must have one.
    """
    shown = f"{argument}={str(path)!r}"
    if looks_local(path) and not Path(path).is_dir():
        raise ModelError(f"{shown}: there is no such folder; pass one or a hub id")
    if Path(path).is_dir() and not any((Path(path) / name).is_file() for name in names):
        raise ModelError(f"{shown}: the folder has no {names[0]}; pass {wanted}")


def check_hub(shown: str, source: str | Path, revision: str | None) -> None:
    """Refuse a model of a hub that does not answer, at once: others ask it for minutes.

    shown: the argument and its value. What is in the cache is not asked for.
    """
    name, _, file = str(source).partition("/")
    repo = f"{name}/{file.partition('/')[0]}" if file else name
    if looks_local(source) or Path(source).exists() or constants.HF_HUB_OFFLINE:
        return
    kept = ("config.json", ADAPTER_CONFIG, *str(source).split("/", 2)[2:])
    try:
        if any(
            isinstance(try_to_load_from_cache(repo, one, revision=revision), str) for one in kept
        ):
            return
    except ValueError:  # no name of a repository, which is said where it is loaded
        return
    try:
        _ask_hub(repo, revision)
    except Exception as error:  # of the package that hubs are asked with, of which there are two
        reason = f"{constants.ENDPOINT} does not answer: {error}"
        fix = "pass a folder, or check the name and the connection"
        fix += did_you_mean(repo, (BUNDLED, READER))
        raise ModelError(f"{shown}: there is no such folder, and {reason}; {fix}") from error


@cache
def _ask_hub(repo: str, revision: str | None) -> None:
    """Raise what says that there is no answer: for a name that is not there the loading has it."""
    _LOG.warning("asking %s for %s", constants.ENDPOINT, repo)
    with suppress(HfHubHTTPError):
        HfApi().model_info(repo, revision=revision, timeout=HUB_SECONDS)


def loading_failure(argument: str, path: str | Path, error: Exception) -> str:
    """The message of a ModelError: the argument, its value, and the first letters of the reason."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if "trust_remote_code" in reason:  # at the end of a long text
        reason = "it comes with code of its own; pass trust_remote_code=True if you trust it"
    reason = reason if len(reason) <= LONGEST_REASON else reason[: LONGEST_REASON - 1] + "…"
    return f"{argument}={str(path)!r} cannot be loaded: {reason}"
