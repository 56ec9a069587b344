"""What runs the requests of an ``LLM``: this package's engine in a thread, or another by name."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pkgutil import resolve_name
from typing import Any, NamedTuple, Protocol

from guided_spec.config import EngineConfig
from guided_spec.engine.engine import Engine
from guided_spec.engine.options import Options
from guided_spec.engine.outputs import Load
from guided_spec.engine.prompt import PromptEncoder
from guided_spec.engine.request import Job, Request
from guided_spec.engine.setup import Setup
from guided_spec.errors import ConfigError, GuidedSpecError
from guided_spec.grammar.pipeline import RequestGrammars
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.kinds import require_one_of

ENGINES = {
    "guided_spec": "guided_spec.engine.runner:start",
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


class LoadedModel(Protocol):
    """What is known once an engine is ready.

    model: as ``LLM.model`` shows it; it has a ``generation_config``.
    spell: text to token ids, without special tokens around it.
    about: model, proposer, device and memory in words.
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
    @property
    def about(self) -> str: ...


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
    require_one_of("engine", name, ENGINES)
    if not isinstance(wanted.engine_options, Mapping):
        raise ConfigError("engine_options", wanted.engine_options, "must be a dict of its options")
    runner: Runner = resolve_name(ENGINES[name])(wanted)
    return runner


def start(wanted: Wanted) -> EngineWorker:
    """The engine of this package, ready. Raises ConfigError and ModelError."""
    for name, value in wanted.engine_options.items():
        fix = "engine_options are for another engine, as engine='vllm'; leave them out here"
        raise ConfigError(f"engine_options[{name!r}]", value, fix)
    model, proposer, draft = wanted.model, wanted.proposer, wanted.draft
    options = Options.from_dict(dict(wanted.options))
    return EngineWorker(lambda: Setup.build(model, proposer, draft, options))


class EngineWorker:
    """Builds an engine in its own thread, steps it while it has work, sleeps while it has none.

    build: loads the model and all the rest; what it returns is ``setup``, what it raises is raised
        here. It runs in the thread too, because torch keeps a pool of CPU threads for every thread
        that computes, and two pools on a few cores slow each other down by a third.
    """

    def __init__(self, build: Callable[[], Setup]) -> None:
        self._incoming: deque[Request] = deque()
        self._wake = threading.Condition()
        self._is_closed = False
        self._ended: Load | None = None  # the last load, once there is no engine
        self._built: Future[Setup] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(build,), name="guided-spec-engine", daemon=True
        )
        self._thread.start()
        self.setup = self._built.result()
        target = self.setup.engine.model
        self._has_experts = bool(target.expert_layers)
        self._model_type = target.config.model_type
        self._loras = () if target.adapters is None else target.adapters.names

    def require(self, job: Job) -> None:
        """Raise ConfigError for an adapter that is not known, and experts of a model without."""
        if job.params.lora is not None:
            if not self._loras:
                fix = "this LLM has no adapters: pass loras={name: folder} where it is made"
                raise ConfigError("lora", job.params.lora, fix)
            require_one_of("lora", job.params.lora, self._loras)
        if job.params.return_routed_experts and not self._has_experts:
            fix = f"a {self._model_type} has no routers that can be recorded; leave it out"
            raise ConfigError("return_routed_experts", job.params.return_routed_experts, fix)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; they report through their own callbacks. Raises after ``close``."""
        with self._wake:
            if self._is_closed:
                raise GuidedSpecError("this LLM is closed; make a new one")
            self._incoming.extend(requests)
            self._wake.notify()

    @property
    def load(self) -> Load:
        """As of the engine, and with what it has not seen yet."""
        with self._wake:
            load = self._ended or self.setup.engine.load
        return load._replace(waiting=load.waiting + len(self._incoming))

    def close(self) -> None:
        """Cancel what runs, end the thread, let go of the engine. May be called more than once."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self, build: Callable[[], Setup]) -> None:
        try:
            setup = build()
        except BaseException as error:  # the caller is waiting for it
            self._built.set_exception(error)
            return
        engine = setup.engine
        self._built.set_result(setup)
        while self._take_incoming(engine):
            try:
                engine.step()
            except Exception as error:  # a bug of ours: nobody may wait for ever
                engine.fail(engine, error)
        engine.cancel_all()
        with self._wake:  # the keys and values of texts go with the engine
            self._ended = engine.load
            del setup.engine

    def _take_incoming(self, engine: Engine) -> bool:
        """Wait for work; False when the worker is closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._is_closed or self._incoming or engine.has_work)
            while self._incoming:
                engine.add(self._incoming.popleft())
            return not self._is_closed
