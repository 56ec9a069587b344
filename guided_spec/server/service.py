"""One model as the endpoints use it: who may be served, what they get, and what is counted."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol, Unpack

from guided_spec.engine.chat import ChatOptions, ChatRequest
from guided_spec.engine.chats.pictures import PictureRules
from guided_spec.engine.chats.template import render_arguments
from guided_spec.engine.outputs import Chunk, Completion, Load, OnError, Params
from guided_spec.engine.prompt import Message, Prompt, Prompts
from guided_spec.errors import ConfigError, PromptError
from guided_spec.grammar.tools.formats import get_tool_format
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.kinds import require_field_kinds
from guided_spec.models.pictures.picture import Sight
from guided_spec.server.admission import Admission, Sample, Slots
from guided_spec.server.faults import ApiError, api_error, invalid_value, require_model
from guided_spec.server.limits import ServerLimits
from guided_spec.server.metrics import Metrics, Tally
from guided_spec.server.picture_room import PictureRoom
from guided_spec.server.spans import current_span
from guided_spec.server.stored import ResponseStore
from guided_spec.server.workers import Workers
from guided_spec.types import SamplingParams, sample_seed


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings(ServerLimits):
    """The server's settings, apart from the engine's; their defaults are those of its limits.

    model_names: what requests may call the model; the first is the one that answers show.
    api_keys: a request must bring one of them; with none, every request is served.
    max_queue: samples that may wait for a slot; a request that would make it more is refused (429).
    max_samples: ``n`` times the prompts of one request, at most.
    allowed_hosts: names that a ``Host`` header may have, "*" for any; with none, all are taken, but
        see ``app.build_server``.
    max_body_bytes: of a request; None is 4 MiB, or 32 MiB for a model that reads pictures.
    head_seconds, body_seconds: in which its headers and then its body must have come.
    write_seconds: after which a client that reads nothing of its response is cut off.
    max_schema_bytes: of one request's schema or grammar, and of its tools together.
    max_prompt_tokens, max_output_tokens: of one sample; None is what the model's context leaves.
    tool_format: form of calls, where the chat template does not show it; see ``TOOL_FORMATS``.
    store_responses: responses that are kept, for ``previous_response_id``; 0 keeps none.
    store_seconds, store_bytes: for how long each, and how much of all; the oldest go first.
    max_connections: open at the same time; further ones are answered with 503.
    drain_seconds: after SIGTERM, in which running and waiting requests may finish.
    playground: whether ``/`` is a page to try things on, and requests may ask for a ``trace``.

    Raises ConfigError for a value out of range.
    """

    model_names: tuple[str, ...] = ("bundled",)
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require_texts("api_keys", self.api_keys)
        require_field_kinds(self)
        _require_texts("model_names", self.model_names)
        _require_texts("allowed_hosts", self.allowed_hosts)
        if self.tool_format is not None:
            get_tool_format(self.tool_format)
        for field in fields(self):
            may_be_none = field.name in ("max_queue", "store_responses")
            value, low = getattr(self, field.name), 0 if may_be_none else 1
            if isinstance(value, int | float) and field.name != "playground" and not value >= low:
                raise ConfigError(field.name, value, f"must be a number of at least {low}")
        if not self.model_names:
            raise ConfigError("model_names", self.model_names, "must hold at least one name")


def _require_texts(name: str, values: object) -> None:
    for value in values if isinstance(values, list | tuple) else (None,):
        if not isinstance(value, str) or not value or not value.isprintable():
            shown = "***" if name == "api_keys" else value  # a key is no part of any message
            fix = "must be a list, each a non-empty str of printable characters"
            raise ConfigError(name, shown, fix)


class ServedModel(Protocol):
    """What a server needs of a model: an ``LLM``, or one in a process of its own."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens as bytes."""

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its text."""

    @property
    def default_params(self) -> SamplingParams:
        """Sampling parameters of the model's own generation config."""

    @property
    def loras(self) -> tuple[str, ...]:
        """The names of its adapters."""

    @property
    def load(self) -> Load:
        """How many samples run and wait."""

    @property
    def sight(self) -> Sight:
        """Whether and how it reads pictures."""

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids. Raises PromptError."""

    def prepare_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatRequest:
        """A conversation as a prompt and its parameters. Raises ConfigError and PromptError."""

    def astream(
        self, prompts: Prompts, params: Params = None, *, on_error: OnError, trace: bool
    ) -> AsyncGenerator[Chunk, None]:
        """The texts as they grow; closing it cancels the rest."""


def _single_samples(params: SamplingParams) -> list[SamplingParams]:
    """Parameters of each sample, with the seeds that the engine gives those of one request."""
    if params.seed is None:
        return [replace(params, n=1)] * params.n
    seeds = [sample_seed(params.seed, index) for index in range(params.n)]
    return [replace(params, n=1, seed=seed) for seed in seeds]


class Service:
    """Shared by all requests of a server; used by one event loop.

    watch: called with each text that has ended.
    """

    def __init__(
        self,
        llm: ServedModel,
        settings: ServerSettings,
        *,
        watch: Callable[[Completion], None] | None = None,
    ) -> None:
        for name in llm.loras:
            if name in settings.model_names:
                raise ConfigError("loras", name, "the model is called so; give it another name")
        self.llm = llm
        self._watch = watch
        self.settings = settings
        self.metrics = Metrics(self._load)
        self.admission = Admission(llm.load.num_slots, settings.max_queue)
        self.workers, self.room = Workers(), PictureRoom()
        self.responses = ResponseStore(
            settings.store_responses, settings.store_seconds, settings.store_bytes
        )
        self._slots = Slots(llm.load.num_slots)
        self.started = int(time.time())
        template = llm.tokenizer.chat_template
        self.template = "".join(template.values()) if isinstance(template, dict) else template or ""
        self._token_names = {token: name for name, token in llm.vocabulary.added_tokens}
        shown = max(map(len, llm.vocabulary.text_bytes))
        self._longest_token = max(shown, *map(len, self._token_names.values()), 1)
        self.template_arguments = render_arguments(llm.tokenizer)

    def _load(self) -> Load:
        load = self.llm.load
        return load._replace(waiting=load.waiting + self._slots.num_waiting)

    @property
    def picture_rules(self) -> PictureRules:
        """What clients may send of pictures: nothing that would have to be fetched."""
        sight = self.llm.sight
        return PictureRules(sight.refusal, takes_files=False, videos=sight.videos)

    @property
    def model_name(self) -> str:
        """What answers call the model."""
        return self.settings.model_names[0]

    @property
    def served_names(self) -> tuple[str, ...]:
        """What requests may name: the model, and its adapters."""
        return (*self.settings.model_names, *self.llm.loras)

    def require_model(self, name: str | None) -> None:
        """Raise ApiError, 404, for a model that is not served."""
        require_model(name, self.served_names)

    def shown_name(self, asked: str | None) -> str:
        """What an answer calls the model that was asked for; an adapter has its own name."""
        return asked if asked is not None and asked in self.llm.loras else self.model_name

    def defaults(self, asked: str | None) -> SamplingParams:
        """What holds where a request for that model says nothing."""
        lora = asked if asked in self.llm.loras else None
        return replace(self.llm.default_params, lora=lora)

    def max_tokens(self, wanted: int | None, param: str) -> int:
        """The output tokens of a sample that asks for so many. Raises ApiError."""
        limit = self.settings.max_output_tokens
        if limit is not None and wanted is not None and wanted > limit:
            message = f"{param}={wanted}: this server writes at most {limit}; ask for less"
            raise invalid_value(message, param)
        return wanted or limit or self.llm.max_model_len

    def require_samples(self, num_samples: int) -> None:
        """Raise ApiError for a request of too many samples."""
        limit = self.settings.max_samples
        if num_samples > limit:
            message = f"n: the request asks for {num_samples} texts, and {limit} is the most"
            raise invalid_value(message, "n")

    def require_length(
        self, length: int, param: str, *, unit: Literal["characters", "tokens"]
    ) -> None:
        """Raise ApiError for a prompt that cannot fit, before it is tokenized."""
        limit, most = self.settings.max_prompt_tokens, self.llm.max_model_len - 1
        reason = f"only {most} tokens fit before the first generated one"
        if limit is not None and limit <= most:
            most, reason = limit, f"this server takes {limit} tokens"
        if length > most * (self._longest_token if unit == "characters" else 1):
            message = f"the prompt has {length} {unit}, and {reason}; send less"
            raise ApiError(400, message, code="context_length_exceeded", param=param)

    async def encode(self, prompts: Sequence[Any], param: str) -> list[list[int]]:
        """The tokens of prompts, off the event loop.

        param: the argument that they came in. Raises ApiError, for prompts that are too long too.
        """
        for prompt in prompts:
            unit: Any = "characters" if isinstance(prompt, str) else "tokens"
            self.require_length(len(prompt), param, unit=unit)
        try:
            encoded = await self.workers.run(lambda: [self.llm.encode(one) for one in prompts])
        except PromptError as error:
            raise api_error(error, param) from error
        for token_ids in encoded:
            self.require_length(len(token_ids), param, unit="tokens")
        return encoded

    async def chunks(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        param: str | None,
        tally: Tally,
        *,
        is_traced: bool,
    ) -> AsyncGenerator[Chunk, None]:
        """Generate, and count it. Closing it frees the slots.

        param: the argument that a grammar came in. is_traced: whether steps are recorded.
        Raises ApiError for a sample that fails.
        """
        current_span().record_params(params)
        single = [params]
        if params.n > 1:  # each is read anew, which takes long where tokens are many
            single = await self.workers.run(lambda: _single_samples(params))

        def start(sample: Sample) -> AsyncGenerator[Chunk, None]:
            prompt, one = prompts[sample.prompt_index], single[sample.sample_index]
            return self.llm.astream([prompt], one, on_error="return", trace=is_traced)

        samples = [Sample(at, i) for at in range(len(prompts)) for i in range(params.n)]
        stream = start(samples[0]) if len(samples) == 1 else self._slots.run(samples, start)
        try:
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    tally.count(chunk)
                    if self._watch is not None and chunk.completion is not None:
                        self._watch(chunk.completion)
                    if chunk.completion is not None and chunk.completion.error is not None:
                        raise api_error(chunk.completion.error, param)
                    yield chunk
        finally:
            current_span().record_outcome(self.model_name, tally)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token shows; its name where it shows nothing."""
        shown = self.llm.vocabulary.text_bytes[token_id]
        return shown or self._token_names.get(token_id, "").encode()

    def ends_text(self, token_id: int) -> bool:
        """Whether the token only says that the text is over."""
        return token_id in self.llm.vocabulary.stop_token_ids
