"""An LLM in a process of its own, next to a server of many clients.

An interpreter runs one thread at a time: in the server's process the engine would wait while the
server works for its clients. Messages go through a pipe, with a thread at each end; those that
arrive together are sent together. Arrays of pictures, up to hundreds of megabytes, are not copied
into messages: the thread sends them from where they are.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import logging
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple, Unpack
from weakref import WeakValueDictionary

from guided_spec.bundled import named_model
from guided_spec.engine import PROGRAM
from guided_spec.engine.chat import Chat, ChatOptions, ChatRequest
from guided_spec.engine.chats.picture_reader import PictureReader
from guided_spec.engine.llm import LLM
from guided_spec.engine.options import Options, find_tokenizer
from guided_spec.engine.outputs import (
    Chunk,
    Completion,
    Failures,
    Load,
    Manner,
    OnError,
    Params,
    RequestStats,
    achunks,
    match_params,
)
from guided_spec.engine.prompt import Message, Prompt, PromptEncoder, Prompts, split_prompts
from guided_spec.engine.request import Request, State
from guided_spec.errors import ConfigError, GuidedSpecError, ModelError
from guided_spec.grammar.isolation import Interpreter, start_interpreter
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.home import Home, Homebound, leave
from guided_spec.models.pictures.picture import Picture, PicturePrompt, Sight
from guided_spec.ops.sampling.adjust import Words
from guided_spec.types import SamplingParams

logger = logging.getLogger(__name__)

_STOP_SECONDS = 30.0  # to end by itself, once nobody needs it
_TURN_SECONDS = 0.001
_FEW = 64  # requests of which the ended ones may stay a while
_LOAD_SECONDS = 0.1  # between two looks at how busy the engine is
_LOGGER = "guided_spec"
PIECE_BYTES = 2**20  # bytes that are sent at once: what receives them holds up its interpreter


class _Start(NamedTuple):
    """The first message. arguments: of ``LLM``. level: of the log."""

    arguments: dict[str, Any]
    level: int


class _Ready(NamedTuple):
    """What is known once the model is loaded. shown: model, proposer, device and memory.

    sight: whether and how it reads pictures.
    """

    vocabulary: Vocabulary
    max_model_len: int
    default_params: SamplingParams
    load: Load
    shown: str
    sight: Sight


class _Failed(NamedTuple):
    """A request that ``LLM.submit`` refused, or the start itself as number 0."""

    number: int
    error: GuidedSpecError


class _Asked(NamedTuple):
    """A request. number: that its chunks bear. The rest: as ``LLM.submit`` takes it."""

    number: int
    prompts: list[Prompt]
    params: list[SamplingParams]
    manner: Manner
    words: list[Words | None]


class _Head(NamedTuple):
    """A message, behind which its arrays come. sizes: of each, in bytes."""

    message: bytes
    sizes: list[int]


class _Cancelled(NamedTuple):
    number: int


class _Reported(NamedTuple):
    """chunk: without what the other side knows: the grammar, and the answer except its length."""

    number: int
    chunk: Chunk
    answer_length: int


class EngineProcess(Homebound):
    """What a server needs of an ``LLM``, which runs in another process.

    The arguments are those of ``LLM``, but a model and a draft are named, not loaded.

    tokenizer, vocabulary, max_model_len, default_params, loras: as those of ``LLM``.
    load: as it was a tenth of a second ago. ended: done when the process has ended, with a
        ModelError if ``close`` was not called; all requests fail then.
    interpreter: one that ``start_interpreter`` has started with ``PROGRAM``: it imports what it
        needs while its parent does. None starts one.

    Close it, or use it as a context manager. Raises what ``LLM`` raises.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        interpreter: Interpreter | None = None,
        **arguments: Any,
    ) -> None:
        self.home = Home("EngineProcess")
        options = Options.from_dict(
            {n: v for n, v in arguments.items() if n not in ("proposer", "draft")}
        )
        for name, value in (("model", model), ("draft", arguments.get("draft"))):
            if value is not None and not isinstance(value, str | Path):
                fix = "a process of its own loads it: pass a hub id or a folder"
                raise ConfigError(name, type(value).__name__, fix)
        level = logging.getLogger(_LOGGER).getEffectiveLevel()
        start = _Start({"model": model, **arguments}, level)
        self._child = _Child(start, interpreter or start_interpreter(PROGRAM))
        try:
            ready = self._child.await_ready()
            named, processor = named_model(model), options.processor
            reader = PictureReader.load(named, ready.sight, processor, options.load)
            self.tokenizer = find_tokenizer(named, options, reader)
        except BaseException:
            self._child.close()
            raise
        self.vocabulary = ready.vocabulary
        self.max_model_len = ready.max_model_len
        self.default_params = ready.default_params
        self.ended = self._child.ended
        self._shown, self.loras = ready.shown, tuple(options.loras)
        size = ready.vocabulary.vocab_size
        self._encoder = PromptEncoder(self.tokenizer, size, ready.max_model_len, reader)
        self._chat = Chat(self.tokenizer, self.vocabulary, self._encoder)

    def __repr__(self) -> str:
        """That of its ``LLM``: model, proposer, device and memory."""
        return self._shown

    @property
    def load(self) -> Load:
        """How many samples run and wait."""
        self.home.require()
        return self._child.load

    @property
    def sight(self) -> Sight:
        """Whether and how the model reads pictures."""
        return self._encoder.sight

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids. Raises PromptError."""
        return self._encoder.encode(prompt)

    def prepare_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatRequest:
        """The prompt and the parameters of a conversation; see ``LLM.prepare_chat``."""
        options["params"] = options.get("params") or self.default_params
        return self._chat.request(messages, tools, options)

    async def astream(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        on_error: OnError = "raise",
        trace: bool = False,
    ) -> AsyncGenerator[Chunk, None]:
        """Yield every chunk of every sample as it arrives, see ``LLM.astream``."""
        self.home.require()
        failures = Failures.at_any_time(on_error)
        manner = Manner(is_streamed=True, is_traced=trace)
        listed = split_prompts(prompts)
        matched = match_params(self.default_params if params is None else params, len(listed))
        # Here: the thread that takes requests in over there is one for all of them.
        words = await self._encoder.bad_words_aside(matched)
        submit = partial(self._child.submit, words=words)
        stream = achunks(submit, listed, matched, failures, manner)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                yield chunk

    def close(self) -> None:
        """Cancel what runs and end the process. May be called more than once; not by a fork."""
        if self.home.is_here:
            self._child.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Outbox:
    """Sends messages in order from a thread of its own, since a pipe may be full."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[list[bytes | memoryview]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="guided-spec-outbox", daemon=True)
        self._thread.start()

    def put(self, message: Any) -> None:
        """Raises what pickling it raises. Its arrays may not change until they are sent."""
        file, found = io.BytesIO(), list[pickle.PickleBuffer]()
        ForkingPickler(file, 5, True, found.append).dump(message)  # noqa: FBT003
        sent, arrays = file.getvalue(), [one.raw() for one in found]
        if arrays:
            sent = pickle.dumps(_Head(sent, [one.nbytes for one in arrays]))
        pieces = [
            one[at : at + PIECE_BYTES] for one in arrays for at in range(0, len(one), PIECE_BYTES)
        ]
        self._queue.put([sent, *pieces])

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # there is nobody any more, as the reader finds too
            while True:
                for piece in self._queue.get():
                    self._connection.send_bytes(piece)
                del piece  # with its array


def receive(connection: Connection) -> Any:
    """What an outbox has sent."""
    message = connection.recv()
    if not isinstance(message, _Head):
        return message
    arrays = [bytearray(size) for size in message.sizes]
    for array in arrays:
        at = 0
        while at < len(array):
            at += connection.recv_bytes_into(array, at)
    return pickle.loads(message.message, buffers=arrays)  # noqa: S301  # of our own parent


class _Submission:
    """A request in the other process: whom its chunks go to, and what has not ended of it."""

    def __init__(self, asked: _Asked, report: Callable[[Chunk], None], outbox: Outbox) -> None:
        self._number = asked.number
        self._grammars = [params.grammar for params in asked.params]
        self._report = report
        self._outbox = outbox
        self._texts = dict[tuple[int, int], str]()  # of samples, as far as they have come
        self.unended = {(at, i) for at, one in enumerate(asked.params) for i in range(one.n)}

    def cancel(self) -> None:
        """All samples of the request."""
        if self.unended:
            self._outbox.put(_Cancelled(self._number))

    def take(self, chunk: Chunk, answer_length: int) -> None:
        """A chunk as ``_Reported`` has it."""
        grammar, completion = self._grammars[chunk.prompt_index], chunk.completion
        sample = (chunk.prompt_index, chunk.sample_index)
        if completion is None:
            text = self._texts[sample] = self._texts.get(sample, "") + chunk.text
            answer = text[len(text) - answer_length :]  # a suffix of the text
        else:
            completion = completion._replace(grammar=grammar)
            answer = completion.answer
            self.unended.discard(sample)
            self._texts.pop(sample, None)
        self._report(chunk._replace(grammar=grammar, completion=completion, answer=answer))

    def fail(self, error: GuidedSpecError) -> None:
        """End what has not ended."""
        for prompt, sample in sorted(self.unended):
            failed = Completion("", [], "error", error, RequestStats())
            self.take(Chunk(prompt, sample, "", failed), 0)


class _Child:
    """The process as its parent sees it. load: its last word on how busy it is.

    ended: done when the process has ended, with an error unless ``close`` has ended it.
    """

    load: Load

    def __init__(self, start: _Start, interpreter: Interpreter) -> None:
        self.ended: Future[None] = Future()
        self._ready: Future[_Ready] = Future()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._submissions: dict[int, _Submission] = {}
        self._is_closed = False
        self._process, self._connection = interpreter
        self._outbox = Outbox(self._connection)
        self._outbox.put(start)
        self._reader = threading.Thread(target=self._read, name="guided-spec-inbox", daemon=True)
        self._reader.start()

    def await_ready(self) -> _Ready:
        """Until the model is loaded. Raises what its loading raised."""
        return self._ready.result()

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: Params,
        report: Callable[[Chunk], None],
        manner: Manner,
        words: list[Words | None],
    ) -> Sequence[_Submission]:
        """As ``LLM.submit``, with parameters."""
        assert params is not None
        matched = match_params(params, len(prompts))
        asked = _Asked(next(self._numbers), list(prompts), matched, manner, words)
        submission = _Submission(asked, report, self._outbox)
        samples = [submission] * len(submission.unended)
        with self._lock:
            if self._is_closed:
                raise GuidedSpecError("this LLM is closed; make a new one")
            if self.ended.done():
                self.ended.result()  # raises why
            self._submissions[asked.number] = submission
        self._outbox.put(asked)
        return samples

    def close(self) -> None:
        """End the process."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            return
        is_ready = self._ready.done() and self._ready.exception() is None
        if is_ready:
            self._outbox.put(None)
        try:
            self._process.wait(_STOP_SECONDS if is_ready else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reader.join()

    def _read(self) -> None:
        try:
            while True:
                for message in self._connection.recv():
                    self._take(message)
        except (EOFError, OSError):
            pass
        except Exception:  # what cannot be read tells nothing of the requests that wait for it
            logger.exception("a message of the engine's process cannot be read")
            self._process.kill()
        status = self._process.wait()
        self._connection.close()
        fix = "its output says why; start it anew"
        error = ModelError(f"the engine's process has ended with exit status {status}: {fix}")
        with self._lock:
            if not self._ready.done():
                self._ready.set_exception(error)
            if self._is_closed:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(error)
            left, self._submissions = self._submissions, {}
        for submission in left.values():
            submission.fail(error)

    def _take(self, message: Any) -> None:
        match message:
            case _Reported(number, chunk, answer_length):
                submission = self._submissions[number]
                submission.take(chunk, answer_length)
                if not submission.unended:
                    del self._submissions[number]
            case Load():
                self.load = message
            case logging.LogRecord():
                logging.getLogger(message.name).handle(message)
            case _Ready():
                self.load = message.load
                self._ready.set_result(message)
            case _Failed(0, error):
                self._ready.set_exception(error)
            case _Failed(number, error):
                self._submissions.pop(number).fail(error)


def serve() -> None:
    """The process's main program: an LLM, until the parent closes it or goes away."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent decides when it ends
        signal.signal(number, signal.SIG_IGN)
    import guided_spec.engine.runner  # noqa: F401  # the parent may not know yet what to load

    gc.freeze()  # nothing that has been imported is garbage
    gc.enable()
    with Connection(int(sys.argv[1])) as connection:
        try:
            start = receive(connection)
        except (EOFError, OSError):  # the parent has ended before it knew what to load
            leave(0)
            return
        outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        logger = logging.getLogger(_LOGGER)
        logger.setLevel(start.level)
        logger.addHandler(QueueHandler(outgoing))
        logger.propagate = False
        worker = threading.Thread(target=_work, args=(start, connection, outgoing))
        worker.start()
        with contextlib.suppress(OSError):  # the parent has gone: the worker sees it too
            _send_all(connection, outgoing)
        worker.join()
    leave(0)


def _send_all(connection: Connection, outgoing: queue.SimpleQueue[Any]) -> None:
    """Up to None. What has come meanwhile is sent together."""
    while True:
        messages = [outgoing.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(outgoing.get_nowait())
        connection.send([message for message in messages if message is not None])
        if None in messages:
            return


def _work(start: _Start, connection: Connection, outgoing: queue.SimpleQueue[Any]) -> None:
    """Load the model and serve requests."""
    try:
        with LLM(**start.arguments) as llm, frozen_heap(), short_turns():
            known = (llm.vocabulary, llm.max_model_len, llm.default_params, llm.load)
            outgoing.put(_Ready(*known, repr(llm), llm.sight))
            with contextlib.suppress(EOFError, OSError):
                _serve(llm, connection, outgoing)
    except GuidedSpecError as error:
        outgoing.put(_Failed(0, error))
    except Exception as error:
        traceback.print_exc()
        outgoing.put(_Failed(0, ModelError(f"the model cannot be loaded: {error!r}")))
    finally:
        outgoing.put(None)


def _serve(llm: LLM, connection: Connection, outgoing: queue.SimpleQueue[Any]) -> None:
    """Serve requests until None arrives or the parent ends."""
    is_over, samples, most = threading.Event(), dict[int, list[Request | None]](), _FEW
    reporter = threading.Thread(target=_report_load, args=(llm, outgoing, is_over), daemon=True)
    reporter.start()
    known: WeakValueDictionary[bytes, Picture] = WeakValueDictionary()
    try:
        while (message := receive(connection)) is not None:
            if isinstance(message, _Cancelled):
                for sample in samples.get(message.number, ()):
                    if sample is not None:
                        sample.cancel()
                continue
            if len(samples) > most:  # not for each request: that is linear in those that run
                samples = {
                    number: left for number, left in samples.items() if any(map(_runs, left))
                }
                most = 2 * len(samples) + _FEW
            report = partial(_report, outgoing, message.number)
            try:
                prompts = [_shared(one, known) for one in message.prompts]
                given = (message.params, report, message.manner, message.words)
                samples[message.number] = llm.submit(prompts, *given)
            except GuidedSpecError as error:
                outgoing.put(_Failed(message.number, error))
            del message, prompts  # their arrays are large
    finally:
        is_over.set()
        reporter.join()


def _shared(prompt: Prompt, known: WeakValueDictionary[bytes, Picture]) -> Prompt:
    """Pictures that another request has, as those of one are that has many samples, are its."""
    if not isinstance(prompt, PicturePrompt):
        return prompt
    pictures = tuple(known.setdefault(one.content, one) for one in prompt.pictures)
    return replace(prompt, pictures=pictures)


def _runs(sample: Request | None) -> bool:
    return sample is not None and sample.state is not State.FINISHED


def _report(outgoing: queue.SimpleQueue[Any], number: int, chunk: Chunk) -> None:
    """Send a chunk from the engine's thread, without long parts that the other side knows."""
    completion = chunk.completion
    if completion is not None:
        completion = completion._replace(grammar=None)
    small = chunk._replace(grammar=None, completion=completion, answer="")
    outgoing.put(_Reported(number, small, len(chunk.answer)))


def _report_load(llm: LLM, outgoing: queue.SimpleQueue[Any], is_over: threading.Event) -> None:
    """Send the load whenever it has changed."""
    last = llm.load
    while not is_over.wait(_LOAD_SECONDS):
        load = llm.load
        if load != last:
            outgoing.put(load)
            last = load


@contextmanager
def short_turns() -> Iterator[None]:
    """Inside, a thread that wants the interpreter waits 1 ms for a busy one, not 5 ms.

    Threads that compile new grammars take it some ten times each, while the engine's is busy. For a
    process that serves one model, once its kernels are loaded: many threads load those.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_TURN_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Inside, the garbage collector looks at new objects only.

    A full run over all that torch and transformers have loaded takes a tenth of a second or more,
    holds up every thread, and comes when it likes. Nothing of before is collected meanwhile:
    for a process that serves one model, and for what is timed.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
