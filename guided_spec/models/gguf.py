"""Which GGUF file a path names: llama.cpp's format, read and dequantized by transformers."""

from __future__ import annotations

import importlib.util
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import list_repo_files

from guided_spec.errors import ModelError
from guided_spec.models.checkpoint import (
    ADAPTER_CONFIG,
    check_folder,
    check_hub,
    find_file,
    loading_failure,
    looks_local,
)

SUFFIX = ".gguf"
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_PROJECTOR = "mmproj"  # of pictures, beside the language model
_PACKAGES = ("gguf", "accelerate")
_MOST_NAMES = 6
_HUB_PARTS = 2  # of "org/name"
_NO_KINDS = frozenset({"general", "tokenizer"})  # what transformers lists besides


class GgufFile(NamedTuple):
    """A file, and the folder or hub id that it is in: the two arguments of ``from_pretrained``."""

    source: str
    name: str

    @property
    def options(self) -> dict[str, str]:
        """Further arguments of ``from_pretrained``."""
        return {"gguf_file": self.name}


def find_gguf(
    path: str | Path, needed: str, *, argument: str, revision: str | None = None
) -> GgufFile | None:
    """The GGUF file that ``path`` names; None where it names none.

    path: a file, "org/name/file.gguf" of the hub, or a folder or hub id that holds one such file
        and no config.json. needed: what any other folder must hold, see ``check_folder``.
    argument: its name in errors, as the caller knows it. revision: on the hub.

    Raises ModelError for a file or folder that is not there, several files, one of several parts,
    and where a package is missing that reads them.
    """
    shown = f"{argument}={str(path)!r}"
    is_file = str(path).lower().endswith(SUFFIX)
    found = _named(path, shown, revision) if is_file else _only(path, shown, revision)
    if found is None:
        check_folder(argument, path, f"a {argument} folder", needed, ADAPTER_CONFIG)
        return None
    if _PART.search(found.name):
        fix = "join them with llama-gguf-split --merge, and pass the whole"
        raise ModelError(f"{shown}: {found.name} is a part, which is not read alone; {fix}")
    if missing := [one for one in _PACKAGES if importlib.util.find_spec(one) is None]:
        names = " and ".join(missing)
        raise ModelError(f"{shown}: it needs {names}: pip install 'guided-spec[gguf]'")
    return found


def gguf_failure(path: str | Path, argument: str, error: Exception) -> ModelError:
    """``loading_failure``, with what can be done for a kind that transformers does not read."""
    if "GGUF model with architecture" not in str(error):
        return ModelError(loading_failure(argument, path, error))
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    kinds = ", ".join(sorted({*GGUF_SUPPORTED_ARCHITECTURES} - _NO_KINDS))
    fix = f"transformers reads {kinds}; pass the model's safetensors instead"
    return ModelError(f"{argument}={str(path)!r} cannot be loaded: {str(error).rstrip('.')}; {fix}")


def _named(path: str | Path, shown: str, revision: str | None) -> GgufFile:
    file = Path(path).expanduser()
    if file.is_file():
        return GgufFile(str(file.parent), file.name)
    parts = str(path).split("/")
    if looks_local(path) or len(parts) <= _HUB_PARTS:
        fix = "pass a file, or one of the hub as 'org/name/file.gguf'"
        raise ModelError(f"{shown}: there is no such file; {fix}")
    check_hub(shown, path, revision)
    return GgufFile("/".join(parts[:_HUB_PARTS]), "/".join(parts[_HUB_PARTS:]))


def _only(path: str | Path, shown: str, revision: str | None) -> GgufFile | None:
    """Of a folder or repository without another model."""
    if Path(path).is_dir():
        names = sorted(file.name for file in Path(path).iterdir())
        if {"config.json", ADAPTER_CONFIG} & {*names}:
            return None
    elif looks_local(path):
        return None
    else:
        check_hub(shown, path, revision)
        if any(find_file(path, name, revision) for name in ("config.json", ADAPTER_CONFIG)):
            return None
        names = list[str]()
        with suppress(Exception):  # no connection, no such id: said where the model is loaded
            names = list_repo_files(str(path), revision=revision)
    files = [name for name in names if name.lower().endswith(SUFFIX) and _PROJECTOR not in name]
    if len(files) > 1:
        more = ", ..." if len(files) > _MOST_NAMES else ""
        shown_files = ", ".join(files[:_MOST_NAMES]) + more
        raise ModelError(f"{shown} holds several GGUF files ({shown_files}): pass one by its path")
    return GgufFile(str(path), files[0]) if files else None
