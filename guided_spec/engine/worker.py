"""The thread an engine runs in, so that any number of callers can share it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from guided_spec.engine.engine import Engine
from guided_spec.engine.request import Job, Request
from guided_spec.engine.runner import Load, Wanted
from guided_spec.engine.setup import Options, Setup
from guided_spec.errors import ConfigError, GuidedSpecError

__all__ = ["EngineWorker", "start"]


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
        self._built: Future[Setup] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(build,), name="guided-spec-engine", daemon=True
        )
        self._thread.start()
        self.setup = self._built.result()

    def require(self, job: Job) -> None:
        """Nothing: this engine does all that a job can ask for."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; they report through their own callbacks. Raises after ``close``."""
        with self._wake:
            if self._is_closed:
                raise GuidedSpecError("this LLM is closed; make a new one")
            self._incoming.extend(requests)
            self._wake.notify()

    @property
    def load(self) -> Load:
        """As of now; what the engine has ended in its current step may still be among them."""
        engine = self.setup.engine
        return Load(
            num_slots=engine.num_slots,
            running=engine.num_slots - engine.num_free_slots,
            waiting=engine.num_waiting + len(self._incoming),
            num_blocks=engine.num_blocks,
            used_blocks=engine.num_blocks - engine.num_free_blocks,
        )

    def close(self) -> None:
        """Cancel what runs and end the thread. May be called more than once."""
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

    def _take_incoming(self, engine: Engine) -> bool:
        """Wait for work; False when the worker is closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._is_closed or self._incoming or engine.has_work)
            while self._incoming:
                engine.add(self._incoming.popleft())
            return not self._is_closed
