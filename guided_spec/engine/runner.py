"""What runs the requests of an ``LLM``: the engine of this package, or another one, by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from guided_spec.config import EngineConfig
from guided_spec.engine.prompt import PromptEncoder
from guided_spec.engine.request import Job, Request
from guided_spec.errors import ConfigError
from guided_spec.grammar.pipeline import RequestGrammars
from guided_spec.grammar.vocabulary import Vocabulary

__all__ = ["ENGINES", "Load", "LoadedModel", "Runner", "Wanted", "start_engine"]

ENGINES = {
    "guided_spec": "guided_spec.engine.worker:start",
    "vllm": "guided_spec.integrations.vllm.llm:start",
}
"""Of each engine, where the function is that takes what is ``Wanted`` and returns a ``Runner``."""


class Wanted(NamedTuple):
    """The arguments of an ``LLM``. engine_options: those that are the other engine's own."""

    model: Any
    proposer: str | None
    draft: Any
    options: Mapping[str, Any]
    engine_options: Mapping[str, Any]


class Load(NamedTuple):
    """How busy an engine is.

    running: samples that hold a slot, of ``num_slots``. waiting: those that do not yet, for want of
        a slot or of their grammar.
    used_blocks: of keys and values that texts hold, of ``num_blocks``; slots on a stock model.
    """

    num_slots: int
    running: int
    waiting: int
    num_blocks: int
    used_blocks: int


class LoadedModel(Protocol):
    """What is known once an engine is ready.

    model: as ``LLM.model`` shows it; it has a ``generation_config``.
    spell: text to token ids, without special tokens around it.
    """

    @property
    def model(self) -> Any: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def config(self) -> EngineConfig: ...
    @property
    def proposer_name(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocabulary(self) -> Vocabulary: ...
    @property
    def spell(self) -> Callable[[str], list[int]]: ...
    @property
    def encoder(self) -> PromptEncoder: ...
    @property
    def grammars(self) -> RequestGrammars: ...


class Runner(Protocol):
    """An engine at work. Its methods may be called from any thread."""

    @property
    def setup(self) -> LoadedModel:
        """The model that it runs."""

    @property
    def load(self) -> Load:
        """How busy it is."""

    def require(self, job: Job) -> None:
        """Raise ConfigError for a job that asks for what this engine cannot do.

        job: without its grammar, which need not be compiled for that.
        """

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; they report through their own callbacks. Raises after ``close``."""

    def close(self) -> None:
        """Cancel what runs and end. May be called more than once."""


def start_engine(name: str, wanted: Wanted) -> Runner:
    """Load the model into the engine of that name. Raises ConfigError and ModelError."""
    if name not in ENGINES:
        raise ConfigError("engine", name, f"must be one of {', '.join(ENGINES)}")
    module, _, start = ENGINES[name].partition(":")
    runner: Runner = getattr(importlib.import_module(module), start)(wanted)
    return runner
