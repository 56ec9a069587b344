"""LLM, the public face of the engine: its calls."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from concurrent.futures import wait
from contextlib import aclosing
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack, overload

from guided_spec.engine.calls import named_options, read_params
from guided_spec.engine.chat import (
    Chat,
    ChatChunk,
    ChatOptions,
    ChatOutput,
    ChatRequest,
    ChatStream,
)
from guided_spec.engine.choices import Chooser
from guided_spec.engine.outputs import (
    ChoiceOutput,
    Chunk,
    Completion,
    Failures,
    Load,
    Manner,
    OnError,
    Params,
    RequestOutput,
    RequestStats,
    achunks,
    cancel_all,
    match_params,
)
from guided_spec.engine.parallel import SeedSource
from guided_spec.engine.prompt import Message, Prompt, Prompts, split_prompts
from guided_spec.engine.request import Job, Request
from guided_spec.engine.rows.progress import ProgressBar
from guided_spec.engine.rows.row_map import SLOTS_AHEAD, RowMap
from guided_spec.errors import ConfigError, GuidedSpecError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.choice_tree import ChoicePaths
from guided_spec.home import Home, Homebound
from guided_spec.models.pictures.picture import Sight
from guided_spec.ops.sampling.adjust import Words, check_token_ids
from guided_spec.proposers import require_proposer, takes_draft
from guided_spec.trace.record import TraceSource
from guided_spec.types import SamplingParams, sample_seed

if TYPE_CHECKING:  # these load transformers: an LLM does so, not its import
    from guided_spec.engine.runner import Runner
    from guided_spec.grammar.pipeline import GrammarCompileQueue
    from guided_spec.grammar.vocabulary import Vocabulary


class LLM(Homebound):
    """Constrained speculative generation with a Hugging Face causal language model.

    model: a hub id, a folder, or a loaded ``PreTrainedModel``; None or "bundled" takes the bundled
        model, "bundled-reader" the one that reads pictures.
    proposer: who drafts, see ``guided_spec.proposers``. None is ``chain:grammar_forced+auto``, and
        on a CUDA device the EAGLE-3 head alone where ``auto`` finds one. ``auto`` is what fits
        ``draft``, else the MTP layers in the model's checkpoint, else ngram.
    draft: the draft model or head, like ``model``. The bundled model brings its own: "bundled".
    engine: "guided_spec", or "vllm": vLLM runs the requests, see docs/vllm.md.
    engine_options: of another engine, its own options by their names there.
    options: see ``Options``: the engine's settings (``num_draft_tokens`` is K), how to load, and
        ``loras``, the LoRA adapters that requests may name.

    One LLM may be used from many threads and tasks at once: their requests share batches. It is
    closed when it is garbage collected, by ``close``, or as a context manager. It belongs to the
    process that made it, ``home``: forks, pickling and copying raise OtherProcessError.

    Raises ConfigError and ModelError.
    """

    @named_options
    def __init__(
        self,
        model: Any = None,
        proposer: str | None = None,
        num_draft_tokens: int = 5,
        *,
        draft: Any = None,
        engine: str = "guided_spec",
        engine_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        from guided_spec.engine.runner import Wanted, start_engine

        self.home = Home("LLM")
        options["num_draft_tokens"] = num_draft_tokens
        own = {} if engine_options is None else engine_options
        wanted = Wanted(model, proposer, draft, options, own)
        self._runner = start_engine(engine, wanted)
        setup = self._runner.setup
        self.engine = engine
        self.model = setup.model
        self.tokenizer = setup.tokenizer
        self.config = setup.config
        self.proposer = setup.proposer_name
        self.max_model_len = setup.max_model_len
        self.vocabulary = setup.vocabulary
        self._draft, self._loras = draft, dict(options.get("loras") or {})
        self._chooser = Chooser(self._runner)
        self._seeds = SeedSource(self.model)
        self._encoder = setup.encoder
        self._chat = Chat(self.tokenizer, self.vocabulary, self._encoder)
        self._markers, self._grammars, self._endings, _ = setup.grammars
        self._close = self.home.finalize(self, _close, self._runner, self._grammars)

    @named_options
    def generate(  # noqa: PLR0913 - what is asked, in which form, and how it comes
        self,
        prompts: Prompts,
        params: Params | Any = None,
        grammar: Any = None,
        *,
        response_format: Any = None,
        on_error: OnError = "raise",
        progress: bool = False,
        trace: bool = False,
    ) -> list[RequestOutput]:
        """Generate for one prompt or several; returns one output a prompt, in their order.

        params: one for all prompts, or one for each; None is ``default_params``.
        grammar: of all prompts, as ``SamplingParams`` takes it. The two may stand in either order.
        response_format: the grammar as OpenAI writes it.
        on_error: "raise" raises the error of a request that fails before its first token, such as a
            refused schema or a prompt that is too long, and cancels the others; "return" serves
            these, and sets ``finish_reason="error"`` and ``error`` of that one's output. What fails
            later always comes back so, with the text up to there.
        progress: show how many of the requests are done, on stderr.
        trace: record every step of every text, see ``Completion.trace``; slower.

        Raises ConfigError, and with "raise" what a request may fail with, see
        ``guided_spec.errors``.
        """
        failures = Failures.before_the_first_token(on_error)
        collector = _Collector()
        listed = split_prompts(prompts)
        manner = Manner(is_streamed=False, is_traced=trace)
        asked = read_params(params, grammar, response_format, self.default_params)
        with ProgressBar(len(listed), is_shown=progress) as bar:
            for chunk in self._stream(listed, asked, failures, manner):
                collector.add(chunk)
                if chunk.completion is not None:
                    bar.count(chunk.completion)
                    if chunk.sample_index == 0:
                        bar.advance()
        return collector.outputs()

    @named_options
    def map(  # noqa: PLR0913 - as of generate
        self,
        rows: Iterable[Any],
        params: SamplingParams | Any = None,
        grammar: Any = None,
        *,
        prompt: str | None = None,
        response_format: Any = None,
        on_error: OnError = "raise",
        progress: bool = False,
    ) -> Iterator[RequestOutput]:
        """``generate`` for rows without end: they are read as they are needed.

        rows: any iterable of prompts; with ``prompt``, of rows such as dicts. Four for each slot
            are read ahead.
        prompt: with names of columns in braces, as in "Translate {text}"; ``{{`` is a brace.
        params, grammar, on_error, progress: as for ``generate``, of all rows.

        Yields the outputs in the order of the rows, with the row's number as ``prompt_index``.
        Leaving the loop early cancels what is in flight. Raises as ``generate`` does.
        """
        asked: Any = read_params(params, grammar, response_format, self.default_params)
        window = SLOTS_AHEAD * self.load.num_slots
        wanted = RowMap(rows, prompt, asked, window, on_error)
        total = len(rows) if isinstance(rows, Sized) else None
        return wanted.run(self.submit, ProgressBar(total, is_shown=progress))

    @named_options
    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | Any = None,
        **options: Unpack[ChatOptions],
    ) -> ChatOutput:
        """Reply to one conversation; ``messages.append(output.message)`` continues it.

        tools: OpenAI's dicts, typed functions with docstrings, or pydantic model classes. The chat
            template shows them to the model, and the grammar is its family's own form of calls.
        tool_choice: "auto" (the default), "required", "none", a tool's name, or OpenAI's dict.
        parallel_tool_calls: False for one call at most.
        tool_format: the family's form by name, see ``TOOL_FORMATS``; None asks the template.
        response_format: OpenAI's, a GrammarSpec, or a type such as a pydantic model. The reply
        matches it, after any reasoning that the prompt opens; beside tools it is a call instead.
        chat_template_kwargs: what else the template gets, such as ``enable_thinking``, or another
            ``chat_template``.
        params: of the sampling; None is ``default_params``.
        fetch_image: gives the bytes of a picture at an address; without it none is fetched.

        Raises ConfigError, PromptError, and the error of a request that fails.
        """
        request = self.prepare_chat(messages, tools, **options)
        return request.read(self.generate(request.prompt, request.params)[0])

    @named_options
    async def achat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | Any = None,
        **options: Unpack[ChatOptions],
    ) -> ChatOutput:
        """``chat`` for asyncio."""
        request = await asyncio.to_thread(self.prepare_chat, messages, tools, **options)
        return request.read((await self.agenerate(request.prompt, request.params))[0])

    @named_options
    def stream_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | Any = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[ChatChunk]:
        """``chat``, yielding text, reasoning and calls as they are committed.

        Leaving the loop early cancels the rest.
        """
        request = self.prepare_chat(messages, tools, **options)
        streams = [ChatStream(request, sample) for sample in range(request.params.n)]
        for chunk in self.stream(request.prompt, request.params):
            yield streams[chunk.sample_index].feed(chunk)

    @named_options
    async def astream_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | Any = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncIterator[ChatChunk]:
        """``stream_chat`` for asyncio."""
        request = await asyncio.to_thread(self.prepare_chat, messages, tools, **options)
        streams = [ChatStream(request, sample) for sample in range(request.params.n)]
        async with aclosing(self.astream(request.prompt, request.params)) as chunks:
            async for chunk in chunks:
                yield streams[chunk.sample_index].feed(chunk)

    @named_options
    def prepare_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | Any = None,
        **options: Unpack[ChatOptions],
    ) -> ChatRequest:
        """The prompt and the parameters with which ``chat`` calls ``generate``.

        It also reads what ``generate`` returns. Raises ConfigError and PromptError.
        """
        options["params"] = options.get("params") or self.default_params
        return self._chat.request(messages, tools, options)

    @named_options
    def stream(
        self,
        prompts: Prompts,
        params: Params | Any = None,
        grammar: Any = None,
        *,
        response_format: Any = None,
        on_error: OnError = "raise",
        trace: bool = False,
    ) -> Iterator[Chunk]:
        """Generate, yielding text as it is committed; leaving the loop early cancels the rest.

        on_error: "raise" raises the first request's error and cancels the others; "return" leaves
        it to the ``completion`` of that request's last chunk.
        grammar, trace: as for ``generate``.
        """
        failures = Failures.at_any_time(on_error)
        manner = Manner(is_streamed=True, is_traced=trace)
        asked = read_params(params, grammar, response_format, self.default_params)
        return self._stream(split_prompts(prompts), asked, failures, manner)

    def _stream(
        self, prompts: list[Prompt], params: Params, failures: Failures, manner: Manner
    ) -> Iterator[Chunk]:
        chunks: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
        requests = self.submit(prompts, params, chunks.put, manner)
        try:
            for _ in requests:
                while (chunk := chunks.get()).completion is None:
                    yield chunk
                    self.home.require()  # who forks here has nobody to wait for
                failures.look_at(chunk, len(prompts))
                yield chunk
        finally:
            cancel_all(requests)

    @named_options
    async def agenerate(
        self,
        prompts: Prompts,
        params: Params | Any = None,
        grammar: Any = None,
        *,
        response_format: Any = None,
        on_error: OnError = "raise",
        trace: bool = False,
    ) -> list[RequestOutput]:
        """``generate`` for asyncio. Cancelling the task cancels the requests."""
        failures = Failures.before_the_first_token(on_error)
        collector = _Collector()
        listed = split_prompts(prompts)
        manner = Manner(is_streamed=False, is_traced=trace)
        asked = read_params(params, grammar, response_format, self.default_params)
        matched = match_params(asked, len(listed))
        submit = partial(self.submit, words=await self._encoder.bad_words_aside(matched))
        stream = achunks(submit, listed, matched, failures, manner)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                collector.add(chunk)
        return collector.outputs()

    @named_options
    async def astream(
        self,
        prompts: Prompts,
        params: Params | Any = None,
        grammar: Any = None,
        *,
        response_format: Any = None,
        on_error: OnError = "raise",
        trace: bool = False,
    ) -> AsyncGenerator[Chunk, None]:
        """``stream`` for asyncio. Closing it, or cancelling the task, cancels the rest."""
        failures = Failures.at_any_time(on_error)
        listed = split_prompts(prompts)
        manner = Manner(is_streamed=True, is_traced=trace)
        asked = read_params(params, grammar, response_format, self.default_params)
        matched = match_params(asked, len(listed))
        submit = partial(self.submit, words=await self._encoder.bad_words_aside(matched))
        # Closed here: else the requests would run until the garbage collector comes by.
        stream = achunks(submit, listed, matched, failures, manner)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                yield chunk

    @overload
    def choose(
        self,
        prompts: str,
        choices: Any,
        *,
        paths: ChoicePaths = "all",
        lora: str | None = None,
    ) -> ChoiceOutput: ...
    @overload
    def choose(
        self,
        prompts: Prompt | Sequence[Prompt],
        choices: Any,
        *,
        paths: ChoicePaths = "all",
        lora: str | None = None,
    ) -> Any: ...
    @named_options
    def choose(
        self,
        prompts: Prompt | Sequence[Prompt],
        choices: Any,
        *,
        paths: ChoicePaths = "all",
        lora: str | None = None,
    ) -> Any:
        """The probability of each choice after the prompt: a ``ChoiceOutput``, a list for a list.

        choices: distinct strings in a list or a Literal, or an Enum class with strings as values.
        paths: "all" gives the probability with which a text that is sampled at temperature 1, with
            the choices as its grammar and no other setting, is this choice: the sum over all
            tokenizations of it. "canonical" counts the tokenizer's own tokenization alone, and at
            each token renormalizes over the tokens of the choices.
        lora: see ``SamplingParams``.

        The prompt is read once, and the texts only as far as more than one choice begins with them.

        Raises ConfigError, PromptError, and what ended the first prompt that failed.
        """
        self.home.require()
        return self._chooser.choose(prompts, choices, paths, lora)

    @named_options
    async def achoose(
        self,
        prompts: Prompt | Sequence[Prompt],
        choices: Any,
        *,
        paths: ChoicePaths = "all",
        lora: str | None = None,
    ) -> Any:
        """``choose`` for asyncio. Cancelling the task cancels the requests."""
        self.home.require()
        return await self._chooser.achoose(prompts, choices, paths, lora)

    @property
    def default_params(self) -> SamplingParams:
        """What ``params=None`` stands for: ``SamplingParams.from_model`` of this model."""
        return SamplingParams.from_model(self.model)

    @property
    def loras(self) -> tuple[str, ...]:
        """The names of its LoRA adapters, as ``SamplingParams.lora`` takes them."""
        return tuple(self._loras)

    @property
    def sight(self) -> Sight:
        """Whether and how the model reads pictures."""
        return self._encoder.sight

    @property
    def load(self) -> Load:
        """How many samples run and wait, of all callers."""
        self.home.require()
        return self._runner.load

    @named_options
    def with_proposer(self, proposer: str, draft: Any = None, **changes: Any) -> LLM:
        """Another LLM on the same weights, with its own KV cache and thread.

        draft: as for the constructor; None is this one's own, and the bundled model's is what fits
            the proposer. changes: settings of the engine that are to differ, by name.

        The two must not generate at the same time: a model runs in one thread.
        """
        settings = {f.name: getattr(self.config, f.name) for f in fields(self.config)}
        settings["max_model_len"] = self.max_model_len  # although less memory is free by now
        require_proposer(proposer)
        if draft is None and takes_draft(proposer):
            draft = self._draft
        settings |= changes
        settings |= {"engine": self.engine, "tokenizer": self.tokenizer}
        if self._loras:
            settings.setdefault("loras", self._loras)
        if self._encoder.processor is not None:
            settings.setdefault("processor", self._encoder.processor)
        return LLM(self.model, proposer, draft=draft, **settings)

    @named_options
    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids, as ``generate`` would see them. Raises PromptError."""
        return self._encoder.encode(prompt)

    @named_options
    def compile(self, grammars: Iterable[GrammarSpec | Any]) -> None:
        """Compile grammars ahead of the requests that use them; broken ones are left to those.

        grammars: as ``GrammarSpec.of`` takes them. Raises ConfigError for what is no list of these.
        """
        self.home.require()
        if isinstance(grammars, Mapping) or not isinstance(grammars, Iterable):
            raise ConfigError("grammars", grammars, "must be a list of grammars, or of one")
        wait([self._grammars.submit(GrammarSpec.of(grammar)) for grammar in grammars])

    def close(self) -> None:
        """Cancel what runs and free the engine's thread."""
        self._close()

    def __repr__(self) -> str:
        """Model, proposer, device and memory."""
        return f"LLM({self._runner.setup.about})"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: Params,
        report: Callable[[Chunk], None],
        manner: Manner,
        words: Sequence[Words | None] | None = None,
    ) -> list[Request | None]:
        """Queue every sample of every prompt, and return at once: what ``stream`` is made of.

        report: called from the engine's thread with every chunk; it must be quick. One that failed
            at once is reported before this returns, and is None in what this returns.
        words: the bad words of each prompt's parameters in tokens; None where they are not known.

        Raises ConfigError for parameters that do not fit the prompts, and after ``close``.
        """
        self.home.require()
        requests: list[Request | None] = []
        given = self.default_params if params is None else params
        matched = match_params(given, len(prompts))
        source = TraceSource(self.proposer, self.config.verifier) if manner.is_traced else None
        spelled = [None] * len(matched) if words is None else words
        for index, (prompt, param) in enumerate(zip(prompts, matched, strict=True)):
            try:
                job = self._job(prompt, param, spelled[index], source)._replace(
                    prompt_index=index, is_streamed=manner.is_streamed
                )
                requests.extend(_samples(job, self.vocabulary, report))
            except GuidedSpecError as error:
                error.with_traceback(None)  # its frames hold the other requests
                for sample in range(param.n):
                    failed = Completion("", [], "error", error, RequestStats())
                    report(Chunk(index, sample, "", failed))
                    requests.append(None)
        self._runner.submit([request for request in requests if request is not None])
        return requests

    def _job(
        self,
        prompt: Prompt,
        params: SamplingParams,
        words: Words | None,
        traced: TraceSource | None,
    ) -> Job:
        prompt_ids, pictures = self._encoder.read(prompt)
        check_token_ids(params, self.vocabulary.vocab_size)
        words = self._encoder.bad_words(params) if words is None else words
        seed = self._seeds.draw() if params.seed is None else params.seed
        echo = self._prompt_text(prompt, prompt_ids) if params.echo else ""
        job = Job(
            prompt_ids,
            params,
            self.max_model_len,
            seed,
            endings=self._endings,
            echo=echo,
            bad_words=words,
            traced=traced,
            verifier=self.config.verifier,
            pictures=pictures,
        )
        self._runner.require(job)
        if params.grammar is None:
            return job
        spec = self._markers.bind(params.grammar, prompt_ids)
        marker = None if spec.start is None else self._markers.find(spec.start)
        pending = self._grammars.ask(spec)
        return job._replace(marker=marker, grammar=pending.future, pending=pending)

    def _prompt_text(self, prompt: Prompt, prompt_ids: Sequence[int]) -> str:
        text = self._encoder.text(prompt)
        return self.vocabulary.decode(prompt_ids) if text is None else text


def _samples(first: Job, vocabulary: Vocabulary, report: Callable[[Chunk], None]) -> list[Request]:
    """The ``n`` requests of one prompt."""
    samples = [Request(first, vocabulary, report)]
    for index in range(1, first.params.n):
        # Samples differ by their seed; the first one equals the sample of n=1.
        job = first._replace(seed=sample_seed(first.seed, index), sample_index=index)
        if first.pending is not None:
            pending = first.pending.share()
            job = job._replace(grammar=pending.future, pending=pending)
        samples.append(Request(job, vocabulary, report))
    return samples


def _close(runner: Runner, grammars: GrammarCompileQueue) -> None:
    runner.close()
    grammars.close()


class _Collector:
    """Sorts completions by prompt and sample."""

    def __init__(self) -> None:
        self._completions: dict[tuple[int, int], Completion] = {}

    def add(self, chunk: Chunk) -> None:
        if chunk.completion is not None:
            self._completions[chunk.prompt_index, chunk.sample_index] = chunk.completion

    def outputs(self) -> list[RequestOutput]:
        prompts: dict[int, list[Completion]] = {}
        for (prompt, _), completion in sorted(self._completions.items(), key=lambda item: item[0]):
            prompts.setdefault(prompt, []).append(completion)
        return [RequestOutput(index, tuple(group)) for index, group in prompts.items()]
