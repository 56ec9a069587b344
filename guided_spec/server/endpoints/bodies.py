"""What clients send: OpenAI's requests, with vLLM's additions.

A field that is not here is refused by name, because ignoring it might change the text. A field that
is null asks for nothing: many clients send those that their users left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticKnownError

from guided_spec.types import (
    MAX_BAD_WORD,
    MAX_BAD_WORDS,
    MAX_STOP_LETTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
)


def _require_few(most: int) -> BeforeValidator:
    """Refuses a longer object before its items are read."""

    def require(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > most:
            context = {"field_type": "Object", "max_length": most, "actual_length": len(given)}
            raise PydanticKnownError("too_long", context)
        return given

    return BeforeValidator(require)


def _no_truth(given: Any) -> Any:
    """Refuses true and false, also in a list, which pydantic takes for 1 and 0."""
    if isinstance(given, bool) or (isinstance(given, list) and bool in set(map(type, given))):
        raise PydanticKnownError("float_type")
    return given


Whole = Annotated[int, BeforeValidator(_no_truth)]
Number = Annotated[float, BeforeValidator(_no_truth)]
# The first item that is wrong ends the reading of a list: errors cost more than items. Each of the
# short ones costs every step of the engine something, and so every other client.
_First = Field(fail_fast=True)
_Stop = Annotated[str, Field(max_length=MAX_STOP_LETTERS)]
Stops = Annotated[list[_Stop], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
_StopTokens = Annotated[
    list[int], Field(max_length=MAX_STOP_TOKENS, fail_fast=True), BeforeValidator(_no_truth)
]
_BadWord = Annotated[str, Field(max_length=MAX_BAD_WORD)]
_BadWords = Annotated[list[_BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)]
_AllTexts = Annotated[list[str], _First]
_AllTokens = Annotated[list[int], _First, BeforeValidator(_no_truth)]
Objects = Annotated[list[dict[str, Any]], _First]
Metadata = Annotated[dict[str, str], _require_few(64)]


class Strict(BaseModel):
    """Refuses fields that it does not have. What is null is as if it were left out."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """What other bodies call a field, and its name here."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        asked = {name: value for name, value in given.items() if value is not None}
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name in asked if name not in known]
        for name in unknown[1:]:  # one is refused, and says so
            del asked[name]
        return asked


class StreamOptions(Strict):
    """OpenAI's ``stream_options``. The second field is accepted and changes nothing."""

    include_usage: bool = False
    include_obfuscation: bool = False


class StructuredOutputs(Strict):
    """vLLM's ``structured_outputs``: one of these."""

    json_: Any = Field(None, alias="json")
    regex: str | None = None
    choice: _AllTexts | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


class _Body(Strict):
    """What all requests for texts have in common. The last group changes nothing."""

    model: str | None = None
    stream: bool | None = None
    temperature: Number | None = None
    top_p: Number | None = None

    # Ours: "error" refuses a text that was ended early to fit.
    on_short: Literal["error", "return"] | None = None

    user: str | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = None


_OF_SAMPLING = {
    **{"format": "response_format", "json_schema": "response_format", "text": "response_format"},
    **{"max_output_tokens": "max_tokens", "schema": "response_format", "stop_sequences": "stop"},
}


class SamplingBody(_Body):
    """What chats and completions have in common. ``metadata`` changes nothing."""

    stream_options: StreamOptions | None = None
    n: Whole | None = Field(None, ge=1)
    max_tokens: Whole | None = Field(None, ge=1)
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    logit_bias: Annotated[dict[int, Number], _require_few(1024)] | None = None
    seed: Whole | None = None
    stop: _Stop | Stops | None = None

    # vLLM's
    top_k: Whole | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: Whole | None = None
    ignore_eos: bool | None = None
    stop_token_ids: _StopTokens | None = None
    allowed_token_ids: _AllTokens | None = None
    bad_words: _BadWords | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: _AllTexts | None = None
    guided_grammar: str | None = None
    cache_salt: str | None = Field(None, max_length=1024)

    # Ours: every step of the texts, as records or as rows of HTML.
    trace: Literal["json", "html"] | None = None

    metadata: Metadata | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream is to say how many tokens it took."""
        return self.stream_options is not None and self.stream_options.include_usage


class TextPart(Strict):
    """A part of a text."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class Prediction(Strict):
    """OpenAI's ``prediction``: a hint for speed, and nothing else."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], _First]


class ChatBody(SamplingBody):
    """The body of ``POST /v1/chat/completions``."""

    elsewhere = {
        **{"function_call": "tool_choice", "functions": "tools", "reasoning": "reasoning_effort"},
        **{"input": "messages", "prompt": "messages", "system": "messages"},
        **_OF_SAMPLING,
    }
    messages: Objects = Field(min_length=1)
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Whole | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Whole | None = Field(None, ge=0, le=20)
    reasoning_effort: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    modalities: Annotated[list[Literal["text"]], _First] | None = None
    prediction: Prediction | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(SamplingBody):
    """The body of ``POST /v1/completions``."""

    elsewhere = {
        **_OF_SAMPLING,
        **{"input": "prompt", "messages": "prompt", "text": "prompt"},
    }
    prompt: str | _AllTexts | _AllTokens | Annotated[list[_AllTokens], _First]
    echo: bool | None = None
    logprobs: Whole | None = Field(None, ge=0, le=20)
    best_of: Whole | None = None


class TokenizeBody(Strict):
    """``POST /tokenize``: a prompt as completions take it, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = Field(None, min_length=1)
    tools: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class ReasoningOptions(Strict):
    """OpenAI's ``reasoning``. effort: what the chat template gets as ``reasoning_effort``.

    There is no summary here: the reasoning itself is shown. What follows asks for the usual.
    """

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    mode: Literal["standard"] | None = None
    context: Literal["auto"] | None = None


_Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponsesBody(_Body):
    """``POST /v1/responses``. The last two are accepted and change nothing.

    background: false at most; see ``responses.ResponseHandler``.
    """

    elsewhere = {
        **{"messages": "input", "prompt": "input", "system": "instructions"},
        **{"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"},
        **{"max_new_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort"},
        **{"response_format": "text.format", "verbosity": "text.verbosity"},
    }
    input: str | Objects
    instructions: str | None = None
    max_output_tokens: Whole | None = Field(None, ge=1)
    text: dict[str, Any] | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    metadata: Metadata | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    truncation: Literal["disabled"] | None = None

    include: Annotated[list[_Included], _First] | None = None
    stream_options: StreamOptions | None = None
