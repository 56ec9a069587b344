"""Putting an engine together: model, tokenizer, slots, proposer, grammars."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from guided_spec.config import EngineConfig
from guided_spec.engine.engine import Engine
from guided_spec.engine.memory import slots_that_fit
from guided_spec.engine.prompt import PromptEncoder
from guided_spec.errors import ConfigError
from guided_spec.grammar.backends import require_grammar_backend
from guided_spec.grammar.request_grammars import RequestGrammars
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.models.causal_lm import CausalLM
from guided_spec.models.loading import end_of_text_ids, load_model, load_tokenizer
from guided_spec.proposers import build_proposer
from guided_spec.proposers.auto import resolve_auto
from guided_spec.proposers.context import ProposerContext

__all__ = ["Options", "Setup", "bundled_asset"]

LARGEST_DEFAULT_CONTEXT = 4096


def bundled_asset(name: str) -> str:
    """The path of what comes with the package: ``target``, ``draft`` or ``heldout.jsonl``."""
    return str(files("guided_spec") / "assets" / name)


@dataclass(frozen=True, slots=True)
class Options:
    """How to load the model, and the engine's settings.

    tokenizer: a hub id, a folder or a loaded tokenizer; None takes the model's own.
    load: keyword arguments of ``guided_spec.models.loading.load_model``: device, dtype, device_map,
        tp_plan, attn_implementation, revision, trust_remote_code.
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
            load={name: options[name] for name in cls.LOAD_NAMES if name in options},
            config=EngineConfig(**{n: v for n, v in options.items() if n in engine_names}),
        )


@dataclass(slots=True)
class Setup:
    """Everything an ``LLM`` is made of."""

    model: Any
    draft: Any
    tokenizer: Any
    config: EngineConfig
    proposer_name: str
    max_model_len: int
    vocabulary: Vocabulary
    encoder: PromptEncoder
    grammars: RequestGrammars
    engine: Engine

    @classmethod
    def build(cls, model: Any, proposer: str | None, draft: Any, options: Options) -> Setup:
        """Load what has to be loaded and put the engine together."""
        require_grammar_backend("grammar_backend", options.config.grammar_backend)
        if model is None:
            model = bundled_asset("target")
            draft = bundled_asset("draft") if draft is None else draft
        loaded = load_model(model, **options.load) if isinstance(model, str | Path) else model
        tokenizer = _tokenizer(model, options.tokenizer)
        config = options.config
        max_model_len = _max_model_len(loaded, config)
        target = _target(loaded, config, max_model_len)
        stop_ids = end_of_text_ids(loaded, tokenizer)
        vocabulary = Vocabulary.from_tokenizer(tokenizer, target.vocab_size, stop_ids)
        context = ProposerContext(
            vocabulary=vocabulary,
            encode=lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
            tokenizer=tokenizer,
            target=loaded,
            config=config,
            num_slots=target.num_slots,
            max_model_len=max_model_len,
            device=target.device,
            dtype=target.dtype,
            draft=draft,
        )
        name = resolve_auto(proposer or "chain:grammar_forced+auto", context)
        return cls(
            model=loaded,
            draft=draft,
            tokenizer=tokenizer,
            config=config,
            proposer_name=name,
            max_model_len=max_model_len,
            vocabulary=vocabulary,
            encoder=PromptEncoder(tokenizer, target.vocab_size, max_model_len),
            grammars=RequestGrammars.build(config, vocabulary, tokenizer),
            engine=Engine(target, build_proposer(name, context), config),
        )


def _target(model: Any, config: EngineConfig, max_length: int) -> CausalLM:
    num_slots = slots_that_fit(model, config, max_length)
    return CausalLM(model, num_slots=num_slots, max_length=max_length, kernels=config.kernels)


def _tokenizer(model: Any, tokenizer: Any) -> Any:
    if tokenizer is None:
        tokenizer = model if isinstance(model, str | Path) else model.config.name_or_path
    return load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer


def _max_model_len(model: Any, config: EngineConfig) -> int:
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    wanted = config.max_model_len
    if wanted is None:
        return min(limit or LARGEST_DEFAULT_CONTEXT, LARGEST_DEFAULT_CONTEXT)
    if limit is not None and wanted > limit:
        raise ConfigError("max_model_len", wanted, f"the model's context is {limit}; pass less")
    return wanted
