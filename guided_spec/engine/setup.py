"""Putting an engine together: model, tokenizer, slots, proposer, grammars."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from guided_spec.config import EngineConfig
from guided_spec.engine.engine import Engine
from guided_spec.engine.memory import plan_slots
from guided_spec.engine.prompt import PromptEncoder
from guided_spec.errors import ConfigError
from guided_spec.grammar.backends import require_grammar_backend
from guided_spec.grammar.pipeline import RequestGrammars
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.models.causal_lm import CausalLM
from guided_spec.models.loading import end_of_text_ids, load_model, load_tokenizer
from guided_spec.proposers import build_proposer
from guided_spec.proposers.auto import resolve_auto
from guided_spec.proposers.context import ProposerContext

__all__ = ["Options", "Setup", "bundled_asset"]

BUNDLED_HEADS = ("eagle3", "mtp")


def bundled_asset(name: str) -> str:
    """The path of what comes with the package: ``target``, ``draft`` or ``heldout.jsonl``."""
    return str(files("guided_spec") / "assets" / name)


@dataclass(frozen=True, slots=True)
class Options:
    """How to load the model, and the engine's settings.

    tokenizer: a hub id, a folder or a loaded tokenizer; None takes the model's own.
    load: keyword arguments of ``guided_spec.models.loading.load_model``: device, dtype, device_map,
        tp_plan, attn_implementation, quantization_config, revision, trust_remote_code. They are of
        use for a model that is named, and refused for one that is loaded.
    config: the engine's settings.
    """

    tokenizer: Any = None
    load: dict[str, Any] = field(default_factory=dict)
    config: EngineConfig = field(default_factory=EngineConfig)

    LOAD_NAMES = (
        "attn_implementation",
        "device",
        "device_map",
        "dtype",
        "quantization_config",
        "revision",
        "tp_plan",
        "trust_remote_code",
    )

    @classmethod
    def from_dict(cls, options: dict[str, Any]) -> Options:
        """Sort keyword arguments into their places. Raises ConfigError for an unknown one."""
        engine_names = {f.name for f in fields(EngineConfig)}
        known = {"tokenizer", *cls.LOAD_NAMES, *engine_names}
        for name, value in options.items():
            if name not in known:
                raise ConfigError(
                    name, value, f"unknown; the options are {', '.join(sorted(known))}"
                )
        return cls(
            tokenizer=options.get("tokenizer"),
            load={n: options[n] for n in cls.LOAD_NAMES if options.get(n) is not None},
            config=EngineConfig(**{n: v for n, v in options.items() if n in engine_names}),
        )


@dataclass(slots=True)
class Setup:
    """Everything an ``LLM`` is made of."""

    model: Any
    tokenizer: Any
    config: EngineConfig
    proposer_name: str
    max_model_len: int
    vocabulary: Vocabulary
    spell: Callable[[str], list[int]]
    encoder: PromptEncoder
    grammars: RequestGrammars
    engine: Engine

    @classmethod
    def build(cls, model: Any, proposer: str | None, draft: Any, options: Options) -> Setup:
        """Load what has to be loaded and put the engine together."""
        require_grammar_backend("grammar_backend", options.config.grammar_backend)
        proposer = proposer or "chain:grammar_forced+auto"
        model = bundled_asset("target") if model is None else model
        loaded = _loaded(model, options.load)
        if draft is None and loaded.config.name_or_path == bundled_asset("target"):
            draft = _bundled_draft(proposer)
        tokenizer = _tokenizer(model, options)
        config = options.config
        num_slots, max_model_len = plan_slots(loaded, config)
        kernels = config.kernels
        target = CausalLM(loaded, num_slots=num_slots, max_length=max_model_len, kernels=kernels)
        stop_ids = end_of_text_ids(loaded, tokenizer)
        vocabulary = Vocabulary.from_tokenizer(tokenizer, target.vocab_size, stop_ids)
        spell = _speller(tokenizer)
        context = ProposerContext(
            vocabulary=vocabulary,
            encode=spell,
            tokenizer=tokenizer,
            target=loaded,
            config=config,
            num_slots=num_slots,
            max_model_len=max_model_len,
            device=target.device,
            dtype=target.dtype,
            draft=draft,
        )
        name = resolve_auto(proposer, context)
        return cls(
            model=loaded,
            tokenizer=tokenizer,
            config=config,
            proposer_name=name,
            max_model_len=max_model_len,
            vocabulary=vocabulary,
            spell=spell,
            encoder=PromptEncoder(tokenizer, target.vocab_size, max_model_len),
            grammars=RequestGrammars.build(config, vocabulary, tokenizer),
            engine=Engine(target, build_proposer(name, context), config),
        )


def _loaded(model: Any, load: dict[str, Any]) -> Any:
    if isinstance(model, str | Path):
        return load_model(model, **load)
    for name, value in load.items():
        fix = "the model is loaded already: load it that way, or pass its folder or hub id"
        raise ConfigError(name, value, fix)
    return model


def _bundled_draft(proposer: str) -> str:
    """What the bundled target drafts with, by the names in a proposer's spec."""
    heads = [name for name in re.split("[:+]", proposer) if name in BUNDLED_HEADS]
    return bundled_asset(heads[0] if heads else "draft")


def _speller(tokenizer: Any) -> Callable[[str], list[int]]:
    """Text to token ids, without special tokens around it."""
    return lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _tokenizer(model: Any, options: Options) -> Any:
    tokenizer = options.tokenizer
    if tokenizer is not None:
        return load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    if not isinstance(model, str | Path):
        return load_tokenizer(model.config.name_or_path)
    names = ("revision", "trust_remote_code")  # of the same repository
    return load_tokenizer(model, **{n: options.load[n] for n in names if n in options.load})
