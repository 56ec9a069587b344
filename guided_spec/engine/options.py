"""Keyword arguments of an ``LLM``, and the tokenizer that they name: no model code is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import torch

from guided_spec.config import EngineConfig
from guided_spec.engine.chats.picture_reader import PictureReader
from guided_spec.errors import ConfigError
from guided_spec.kinds import require_kinds, require_known
from guided_spec.models.tokenizer import load_tokenizer
from guided_spec.types import require_no_sampling

OF_LLM = ("model", "proposer", "draft", "engine", "engine_options")  # arguments of their own


@dataclass(frozen=True, slots=True)
class Options:
    """How to load the model, and the engine's settings.

    tokenizer: a hub id, a folder or a loaded tokenizer; None takes the model's own.
    processor: likewise, of a model that reads pictures.
    loras: folders or hub ids of LoRA adapters, by the names that requests call them.
    load: keyword arguments of ``guided_spec.models.loading.load_model``: device, dtype, device_map,
        tp_plan, attn_implementation, quantization_config, revision, trust_remote_code. They are of
        use for a model that is named, and refused for one that is loaded.
    config: the engine's settings.
    """

    tokenizer: Any = None
    processor: Any = None
    loras: Mapping[str, str | Path] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)
    config: EngineConfig = field(default_factory=EngineConfig)

    LOAD_KINDS: ClassVar[dict[str, Any]] = {
        "attn_implementation": str | dict[str, str],
        "device": str | int | torch.device,
        "device_map": str | dict[str, Any],
        "dtype": str | torch.dtype,
        "quantization_config": Any,
        "revision": str,
        "tp_plan": str | dict[str, str],
        "trust_remote_code": bool,
    }

    @classmethod
    def from_dict(cls, options: dict[str, Any]) -> Options:
        """Sort keyword arguments into options.

        Raises ConfigError for an unknown one, and for one that cannot be.
        """
        engine_names = {f.name for f in fields(EngineConfig)}
        known = {*OF_LLM, "tokenizer", "processor", "loras", *cls.LOAD_KINDS, *engine_names}
        for name, value in options.items():
            if name not in known:
                require_no_sampling(name, value)
            require_known(name, value, known)
        load = {n: options[n] for n in cls.LOAD_KINDS if options.get(n) is not None}
        require_kinds(load, cls.LOAD_KINDS)
        return cls(
            tokenizer=options.get("tokenizer"),
            processor=options.get("processor"),
            loras=_read_loras(options.get("loras")),
            load=load,
            config=EngineConfig(**{n: v for n, v in options.items() if n in engine_names}),
        )


def _read_loras(given: object) -> dict[str, str | Path]:
    fix = "must map names to folders or hub ids, as in {'sql': 'path/to/adapter'}"
    if not isinstance(given, Mapping | None):
        raise ConfigError("loras", given, fix)
    for name, path in (given or {}).items():
        if not isinstance(name, str) or not name or not name.isprintable():
            raise ConfigError("loras", name, f"{fix}; a name is a non-empty str")
        if not isinstance(path, str | Path) or not str(path):
            raise ConfigError(f"loras[{name!r}]", path, "must be a folder or a hub id")
    return dict(given or {})


def find_tokenizer(model: Any, options: Options, reader: PictureReader) -> Any:
    """The one that ``options`` name, else the model's own. Raises ModelError.

    model: a hub id, a folder, or a loaded model. reader: whose chat template takes the place of the
        tokenizer's: that may have no places for pictures.
    """
    tokenizer = _tokenizer(model, options, reader)
    if reader.chat_template is not None:
        tokenizer.chat_template = reader.chat_template
    return tokenizer


def _tokenizer(model: Any, options: Options, reader: PictureReader) -> Any:
    tokenizer = options.tokenizer
    if tokenizer is None and reader.tokenizer is not None:
        return reader.tokenizer
    if tokenizer is not None:
        return load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    if not isinstance(model, str | Path):
        return load_tokenizer(model.config.name_or_path)
    names = ("revision", "trust_remote_code")  # of the same repository
    return load_tokenizer(model, **{n: options.load[n] for n in names if n in options.load})
