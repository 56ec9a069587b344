"""What bounds a client of the server: the command's options and the server's settings, in one."""

from __future__ import annotations

from dataclasses import dataclass

from guided_spec.config import option
from guided_spec.models.pictures.picture import Sight

TEXT_BYTES = 4 * 2**20  # of a body
_PICTURES_BYTES = 32 * 2**20  # a file of 20 MiB has 27 in base64


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimits:
    """Each field is an option of ``guided-spec serve``; ``ServerSettings`` says what it does."""

    tool_format: str | None = option("Tool calls' format; by default the template's.", default=None)
    max_queue: int = option("Requests that may wait for a slot.", default=64)
    max_samples: int = option("Maximum n of a request.", default=16)
    max_body_bytes: int | None = option("Maximum size of a request body.", default=None)
    head_seconds: float = option("Timeout for receiving headers.", default=10.0)
    body_seconds: float = option("Timeout for receiving a body.", default=30.0)
    write_seconds: float = option("Timeout for a client that stops reading.", default=30.0)
    max_schema_bytes: int = option("Maximum size of a schema or grammar.", default=256 * 2**10)
    max_prompt_tokens: int | None = option("Maximum tokens of a prompt.", default=None)
    max_output_tokens: int | None = option("Maximum tokens of an output.", default=None)
    store_responses: int = option(
        "Responses kept for previous_response_id; 0 keeps none.", default=0
    )
    store_seconds: float = option("How long a response is kept.", default=3600.0)
    store_bytes: int = option("Maximum size of all kept responses.", default=64 * 2**20)
    max_connections: int = option("Maximum open connections.", default=1000)
    drain_seconds: float = option("Time for running requests to finish on SIGTERM.", default=60.0)
    playground: bool = option("Serve a web page for trying requests, at /.", default=True)

    def body_bytes(self, sight: Sight) -> int:
        """``max_body_bytes`` for a model: where that is open, more for one that reads pictures."""
        own = TEXT_BYTES if sight.refusal is not None else _PICTURES_BYTES
        return self.max_body_bytes or own
