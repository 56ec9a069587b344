"""What ``/v1/responses`` answers, in OpenAI's shapes."""

from __future__ import annotations

from typing import Any, Literal

from guided_spec.server.endpoints.replies import Reply

__all__ = [
    "CallItem",
    "IncompleteDetails",
    "InputDetails",
    "ItemStatus",
    "MessageItem",
    "OutputDetails",
    "OutputItem",
    "OutputText",
    "ReasoningItem",
    "ReasoningText",
    "ResponseEvent",
    "ResponseReply",
    "ResponseUsage",
]

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Reply):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(Reply):
    """The text of reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class MessageItem(Reply):
    """What the model says."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class ReasoningItem(Reply):
    """What it wrote before. It has no summary."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus
    summary: list[Any] = []
    content: list[ReasoningText]


class CallItem(Reply):
    """One call. arguments: JSON text."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = MessageItem | ReasoningItem | CallItem


class InputDetails(Reply):
    """cached_tokens: of the prompt, found in the prefix cache; nobody pays for writing there."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Reply):
    """reasoning_tokens: those of chunks that held reasoning."""

    reasoning_tokens: int


class ResponseUsage(Reply):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Reply):
    """Why the text has no end."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseReply(Reply):
    """The answer, whole or so far. What the request said is repeated."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    background: Literal[False] = False
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, Any] | None
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None


class ResponseEvent(Reply):
    """One event of a stream; each type has some of the fields."""

    absent = frozenset(
        {"response", "item", "part", "item_id", "output_index", "content_index", "delta", "text"}
        | {"arguments", "name", "logprobs"}
    )

    type: str
    sequence_number: int
    response: ResponseReply | None = None
    item: OutputItem | None = None
    part: OutputText | ReasoningText | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None
    name: str | None = None
    logprobs: list[Any] | None = None
