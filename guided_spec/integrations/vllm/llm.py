"""``LLM(engine="vllm")``: requests of this package, run by vLLM's AsyncLLM with the plugin on.

A request's grammar is rewritten and compiled here first, within limits, as for this package's own
engine; vLLM gets its text (``grammars``). Its sampling settings are translated (``sampling``), its
tokens come back and become text here: stop strings, markers, echoes and statistics are those of
``Request``. Each text under a grammar is followed once more, by the grammar as vLLM compiles it:
one that leaves it ends with GrammarStateError.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError as CompileCancelledError
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from transformers import GenerationConfig

from guided_spec.config import EngineConfig
from guided_spec.engine.outputs import Load, RequestStats
from guided_spec.engine.prompt import PromptEncoder
from guided_spec.engine.request import Job, Request, State
from guided_spec.engine.runner import Wanted
from guided_spec.errors import (
    BudgetTooSmallError,
    ConfigError,
    GrammarStateError,
    GuidedSpecError,
    ModelError,
    RequestCancelledError,
    RequestError,
)
from guided_spec.grammar.pipeline import RequestGrammars
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.integrations.patches import Patch, probe
from guided_spec.integrations.vllm import counts, sampling
from guided_spec.integrations.vllm.arguments import Arguments, read_arguments, require_own_start
from guided_spec.integrations.vllm.backend import GRAMMARS, VllmGrammars
from guided_spec.integrations.vllm.drafts.lookup import has_lookup
from guided_spec.integrations.vllm.grammars import GrammarText, HandedGrammar, grammars_for_vllm
from guided_spec.integrations.vllm.plugin import (
    VARIABLE,
    install,
    installed_root,
    installed_version,
    require_plugin,
)
from guided_spec.models.tokenizer import load_tokenizer
from guided_spec.step import Committed

METRICS = "per_request_spec_decode_metrics"  # an argument of newer releases
PROCESSES = "VLLM_WORKER_MULTIPROC_METHOD"  # how vLLM starts its engine and its workers


@dataclass(slots=True)
class VllmModel:
    """What ``LLM.model`` is under vLLM: weights are in other processes.

    engine: vLLM's AsyncLLM; it belongs to an event loop of this package. None once it is closed: it
    would be shut down again where Python ends, and fail there. config: of transformers.
    generation_config: of transformers; None where the model has none.
    """

    engine: Any
    config: Any
    generation_config: Any


@dataclass(slots=True)
class VllmSetup:
    """A ``LoadedModel`` run by vLLM. facts: of its sampling. num_blocks: of keys and values.

    reports_drafts: whether vLLM says of each request what was drafted for it.
    handed: vLLM's view of a grammar.
    """

    model: VllmModel
    tokenizer: Any
    config: EngineConfig
    proposer_name: str
    max_model_len: int
    vocabulary: Vocabulary
    spell: Callable[[str], list[int]]
    encoder: PromptEncoder
    grammars: RequestGrammars
    facts: sampling.SamplingFacts
    num_slots: int
    about: str
    num_blocks: int
    reports_drafts: bool
    handed: VllmGrammars


def start(wanted: Wanted) -> VllmRunner:
    """vLLM with the plugin, ready.

    Raises ConfigError where vLLM is not installed, does not fit, or does not take the arguments,
    and ModelError for what it raises while it loads.
    """
    require_plugin()
    root = installed_root()
    assert root is not None
    lack = probe(root, PATCHES).lack or probe(root, counts.PATCHES).lack
    if lack:
        fix = f"vLLM {installed_version()} does not fit: {lack}; install another release"
        raise ConfigError("engine", "vllm", fix)
    utils: Any = importlib.import_module("vllm.engine.arg_utils")
    known = {field.name for field in fields(utils.AsyncEngineArgs)}
    arguments = read_arguments(wanted, known, has_lookup=has_lookup(root))
    require_own_start(arguments)
    if METRICS in known and arguments.engine["speculative_config"] is not None:
        arguments.engine.setdefault(METRICS, "detailed")
    return VllmRunner(arguments)


class VllmRunner:
    """vLLM's engine, and a thread with the event loop that it is spoken to from.

    Raises ConfigError and ModelError, as ``start`` does.
    """

    def __init__(self, arguments: Arguments) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="guided-spec-vllm", daemon=True)
        self._tasks = dict[Request, asyncio.Task[None]]()
        self._names = (f"guided-spec-{number}" for number in itertools.count())
        self._lock = threading.Lock()
        self._is_closed = False
        self._ending: asyncio.Task[None] | None = None  # held: a loop forgets its tasks
        self._thread.start()
        try:
            self.setup = self._run(_build(arguments))
        except BaseException:
            self._stop()
            raise
        self._engine = self.setup.model.engine

    @property
    def load(self) -> Load:
        """How busy it is, as far as this process knows: of blocks none is counted as used."""
        unended = sum(request.state is not State.FINISHED for request in list(self._tasks))
        num_slots = self.setup.num_slots
        running = min(unended, num_slots)
        return Load(num_slots, running, unended - running, self.setup.num_blocks, 0)

    def require(self, job: Job) -> None:
        """Raise ConfigError for what vLLM would not honour."""
        sampling.require_honoured(job, self.setup.facts)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; they report from the thread of the event loop. Raises after ``close``."""
        for request in requests:
            request.on_cancel = self._cancel_soon
        with self._lock:
            if self._is_closed:
                raise GuidedSpecError("this LLM is closed; make a new one")
            self._loop.call_soon_threadsafe(self._begin, requests)

    def close(self) -> None:
        """Cancel what runs and end vLLM's processes."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            return
        if threading.current_thread() is self._thread:  # a callback, or the garbage collector
            self._ending = self._loop.create_task(self._end())
            self._ending.add_done_callback(lambda _: self._stop())
            return
        self._run(self._end())
        self._stop()

    def _run_loop(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """In the event loop, from another thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _cancel_soon(self, request: Request) -> None:
        with suppress(RuntimeError):  # the loop is closed, and all requests have ended
            self._loop.call_soon_threadsafe(self._cancel, request)

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _begin(self, requests: Sequence[Request]) -> None:
        for request in requests:
            task = self._loop.create_task(self._serve(request))
            self._tasks[request] = task
            task.add_done_callback(partial(self._forget, request))
            if request.is_cancelled:
                task.cancel()

    def _forget(self, request: Request, task: asyncio.Task[None]) -> None:
        self._tasks.pop(request)
        if task.cancelled():  # here, for one that is cancelled before it begins runs no code
            request.fail(RequestCancelledError("the request was cancelled"))

    def _cancel(self, request: Request) -> None:
        if request in self._tasks:
            self._tasks[request].cancel()

    async def _end(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._engine.shutdown()
        self._engine = self.setup.model.engine = None

    async def _serve(self, request: Request) -> None:
        """One sample, from its grammar to its end."""
        try:
            await self._write(request)
        except GuidedSpecError as error:
            request.fail(error)
        except CompileCancelledError as error:
            raise asyncio.CancelledError from error
        except Exception as error:  # vLLM's classes differ between releases
            request.fail(RequestError(f"vLLM ended the request: {error or type(error).__name__}"))

    async def _write(self, request: Request) -> None:
        job, handed = request.job, await _grammar(request.job)
        params = _params(self.setup, job, None if handed is None else handed.text)
        if handed is not None:
            _require_budget(job, handed)
            request.bind(handed.ending_with(self.setup.handed.stops_of(params)))
        prompt: dict[str, Any] = {"prompt_token_ids": list(job.prompt_ids)}
        if job.params.cache_salt is not None:
            prompt["cache_salt"] = job.params.cache_salt
        request.state = State.DECODE
        request.stats.start()
        if job.params.seed is None:
            request.stats.seed = 0  # vLLM draws it and does not report it
        async with aclosing(self._engine.generate(prompt, params, next(self._names))) as outputs:
            async for output in outputs:
                _take(request, output, self.setup)
                if request.state is State.FINISHED and not output.finished:
                    return  # a stop string, or an error: vLLM would write on
        request.fail(RequestError("vLLM ended the request without a word"))


async def _grammar(job: Job) -> HandedGrammar | None:
    """None for free text. Raises why it does not compile."""
    if job.grammar is None:
        return None
    if not job.grammar.done():  # a known one costs no turn of the event loop
        # Shielded: other requests wait for the same grammar.
        await asyncio.shield(asyncio.wrap_future(job.grammar))
    handed = job.grammar.result()
    assert isinstance(handed, HandedGrammar)
    return handed


def _require_budget(job: Job, handed: HandedGrammar) -> None:
    """Raise BudgetTooSmallError, as our own engine does, for texts that are all too long."""
    budget = min(job.params.max_tokens, job.max_length - len(job.prompt_ids))
    if handed.least > budget and job.params.complete is not False:
        raise BudgetTooSmallError(job.params.max_tokens, handed.least, budget)


def _params(setup: VllmSetup, job: Job, text: GrammarText | None) -> Any:
    """A text that is not read as it comes is asked for at its end, in one piece."""
    in_parts = job.is_streamed or bool(job.params.stop)
    return sampling.to_vllm(job, text, setup.vocabulary, in_parts=in_parts)


def _take(request: Request, output: Any, setup: VllmSetup) -> None:
    """What vLLM has written since the last time; its last word too."""
    (completion,) = output.outputs
    token_ids = list(completion.token_ids)
    request.stats.cached_tokens = output.num_cached_tokens or request.stats.cached_tokens
    if completion.finish_reason is not None:
        _count(request.stats, completion, len(request.text.output_ids) + len(token_ids), setup)
    logprobs = sampling.read_logprobs(token_ids, completion.logprobs, request.job.params.logprobs)
    error = None
    constraint = request.text.constraint
    if constraint is not None:
        try:
            token_ids = constraint.commit(token_ids)
        except GrammarStateError as refused:
            token_ids, error = [], refused
    request.append(Committed(token_ids, 0, error), logprobs)
    if request.state is State.FINISHED or not output.finished:
        return
    match completion.finish_reason:
        case "stop" | "length" as reason:
            request.finish(reason)
        case "abort":
            request.fail(RequestCancelledError("vLLM aborted the request"))
        case reason:
            request.fail(RequestError(f"vLLM ended the request with {reason!r}; its log says why"))


def _count(stats: RequestStats, completion: Any, num_tokens: int, setup: VllmSetup) -> None:
    """Drafts by position and steps, where vLLM tells them or there are none."""
    if not setup.facts.drafts:
        stats.steps = num_tokens
    elif setup.reports_drafts and completion.spec_decode_metrics is not None:
        found = completion.spec_decode_metrics
        for drafted, accepted in zip(found.per_step_drafted, found.per_step_accepted, strict=True):
            stats.count_step(drafted, accepted, [])
        stats.steps = num_tokens - sum(found.per_step_accepted)


async def _build(arguments: Arguments) -> VllmSetup:
    """In the event loop: vLLM's client belongs to the one in which it was made."""
    utils: Any = importlib.import_module("vllm.engine.arg_utils")
    configs: Any = importlib.import_module("vllm.config")
    engines: Any = importlib.import_module("vllm.v1.engine.async_llm")
    given = dict(arguments.engine)
    outputs = given.pop("structured_outputs_config")
    # A process that has imported xgrammar has asked for a CUDA device, and its forks have none.
    method = os.environ.get(PROCESSES, "spawn")
    variables = {VARIABLE: ",".join(arguments.features), PROCESSES: method}
    with _environment(variables), _loading():
        outputs = configs.StructuredOutputsConfig(**outputs)
        args = utils.AsyncEngineArgs(**given, structured_outputs_config=outputs)
        engine = engines.AsyncLLM.from_engine_args(args)
    try:
        with _loading():
            return _describe(engine, arguments)
    except BaseException:
        engine.shutdown()
        raise


def _describe(engine: Any, arguments: Arguments) -> VllmSetup:
    """What this package has to know of an engine."""
    config, given = engine.vllm_config, arguments.engine
    model_config = config.model_config
    names = ("revision", "trust_remote_code")  # of the same repository
    source: dict[str, Any] = {name: given[name] for name in names if name in given}
    tokenizer = load_tokenizer(given.get("tokenizer", given["model"]), **source)
    generation = _generation_config(given["model"], source)
    install("engine='vllm'", counts.PATCHES)  # where grammars are compiled in this process
    handed = VllmGrammars(config)
    size, length = model_config.get_vocab_size(), model_config.max_model_len
    stops = _end_ids(model_config.hf_config, generation, tokenizer, handed)
    vocabulary = Vocabulary.from_tokenizer(tokenizer, size, stops)
    num_slots = config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size
    own = replace(arguments.config, max_model_len=length, max_batch_size=num_slots)
    drafts, masks = given["speculative_config"] is not None, "drafts" in arguments.features
    mode = str(model_config.logprobs_mode)
    return VllmSetup(
        model=VllmModel(engine, model_config.hf_config, generation),
        tokenizer=tokenizer,
        config=own,
        proposer_name=arguments.proposer,
        max_model_len=length,
        vocabulary=vocabulary,
        spell=lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
        encoder=PromptEncoder(tokenizer, size, length),
        grammars=grammars_for_vllm(own, vocabulary, tokenizer, handed),
        facts=sampling.SamplingFacts(drafts, masks, mode, len(stops)),
        num_slots=num_slots,
        about=f"{model_config.model!r}, proposer={arguments.proposer!r}, engine='vllm'",
        num_blocks=config.cache_config.num_gpu_blocks or 0,
        reports_drafts=given.get(METRICS) == "detailed",
        handed=handed,
    )


def _generation_config(model: str, source: Mapping[str, Any]) -> Any:
    with suppress(OSError):  # there is none
        return GenerationConfig.from_pretrained(model, **source)
    return None


def _end_ids(config: Any, generation: Any, tokenizer: Any, handed: VllmGrammars) -> Sequence[int]:
    """What ends a text: what the model and the tokenizer name, and vLLM's grammars."""
    found = set(handed.vocabulary.stop_token_ids)
    for source in (generation, config, config.get_text_config(decoder=True), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return sorted(found)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Processes that are started meanwhile keep the variables; this one gets its own back."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _loading() -> Iterator[None]:
    try:
        yield
    except GuidedSpecError:
        raise
    except (TypeError, ValueError) as error:  # of vLLM's configuration, pydantic's among them
        raise ConfigError("engine", "vllm", f"vLLM refuses its arguments: {error}") from error
    except Exception as error:
        raise ModelError(f"vLLM does not start: {error}; its log says why") from error


PATCHES = (
    *GRAMMARS,
    *sampling.PATCHES,
    Patch("vllm.engine.arg_utils", "AsyncEngineArgs",
          attributes="model tokenizer revision trust_remote_code dtype max_model_len max_num_seqs"
          " max_num_batched_tokens enable_prefix_caching kv_cache_memory_bytes"
          " kv_cache_dtype tensor_parallel_size pipeline_parallel_size data_parallel_size"
          " speculative_config structured_outputs_config"),
    Patch("vllm.v1.engine.async_llm", "AsyncLLM.from_engine_args", "cls engine_args ..."),
    Patch("vllm.v1.engine.async_llm", "AsyncLLM.generate",
          "self prompt sampling_params request_id ..."),
    Patch("vllm.v1.engine.async_llm", "AsyncLLM.shutdown", "self ..."),
    Patch("vllm.v1.engine.async_llm", "AsyncLLM", attributes="vllm_config"),
    Patch("vllm.outputs", "RequestOutput", attributes="outputs finished num_cached_tokens"),
    Patch("vllm.outputs", "CompletionOutput", attributes="token_ids logprobs finish_reason"),
    Patch("vllm.config.model", "ModelConfig", attributes="hf_config max_model_len logprobs_mode"),
)  # fmt: skip
PARTS = {"": PATCHES}
