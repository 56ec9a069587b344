"""What bounds a client of the server: the command's options and the server's settings, in one."""

from __future__ import annotations

from dataclasses import dataclass

from guided_spec.config import option


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimits:
    """Each field is an option of ``guided-spec serve``; ``ServerSettings`` says what it does."""

    tool_format: str | None = option("If the template tells none.", default=None)
    max_queue: int = option("Texts that may wait for a slot.", default=64)
    max_samples: int = option("Texts of one request.", default=16)
    max_body_bytes: int = option("Of a request.", default=4 * 2**20)
    head_seconds: float = option("In which headers must have come.", default=10.0)
    body_seconds: float = option("In which a body must have come.", default=30.0)
    write_seconds: float = option("In which a client must read on.", default=30.0)
    max_schema_bytes: int = option("Of a schema or grammar.", default=256 * 2**10)
    max_prompt_tokens: int | None = option("Of one prompt.", default=None)
    max_output_tokens: int | None = option("Of one text.", default=None)
    store_responses: int = option("Kept for previous_response_id; 0 is none.", default=0)
    store_seconds: float = option("For which a response is kept.", default=3600.0)
    store_bytes: int = option("Of all that are kept.", default=64 * 2**20)
    max_connections: int = option("Open at the same time.", default=1000)
    drain_seconds: float = option("For what runs, on SIGTERM.", default=60.0)
    playground: bool = option("A page to try things on, at /.", default=True)
