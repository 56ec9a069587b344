"""What the server is called, whom it serves, and how much one client may ask of it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from guided_spec.errors import ConfigError
from guided_spec.grammar.tools.formats import get_tool_format

__all__ = ["ServerSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """The server's settings, apart from the engine's.

    model_names: what requests may call the model; the first is the one that answers show.
    api_keys: a request must bring one of them; with none, every request is served.
    max_queue: samples that may wait for a slot; a request that would make it more is refused (429).
    max_samples: ``n`` times the prompts of one request, at most.
    max_body_bytes: of a request. body_seconds: in which it must have come.
    max_schema_bytes: of one request's schema or grammar, and of its tools together.
    max_prompt_tokens, max_output_tokens: of one sample; None is what the model's context leaves.
    tool_format: how calls are written, where the chat template does not tell; see ``TOOL_FORMATS``.
    max_connections: open at the same time; further ones are answered with 503.
    drain_seconds: after SIGTERM, in which running and waiting requests may finish.
    playground: whether ``/`` is a page to try things on, and requests may ask for a ``trace``.

    Raises ConfigError for a value out of range.
    """

    model_names: tuple[str, ...] = ("bundled",)
    api_keys: tuple[str, ...] = ()
    max_queue: int = 64
    max_samples: int = 16
    max_body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    max_schema_bytes: int = 256 * 2**10
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    tool_format: str | None = None
    max_connections: int = 1000
    drain_seconds: float = 60.0
    playground: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                _require_texts(field.name, value)
            elif field.name == "tool_format":
                if value is not None:
                    get_tool_format(value)
            elif field.name == "playground":
                if not isinstance(value, bool):
                    raise ConfigError(field.name, value, "must be True or False")
            elif value is not None:
                _require_number(field.name, value, low=0 if field.name == "max_queue" else 1)
        if not self.model_names:
            raise ConfigError("model_names", self.model_names, "must hold at least one name")


def _require_texts(name: str, values: tuple[object, ...]) -> None:
    for value in values:
        if not isinstance(value, str) or not value or not value.isprintable():
            shown = "***" if name == "api_keys" else value  # a key is no part of any message
            raise ConfigError(name, shown, "each must be a non-empty str of printable characters")


def _require_number(name: str, value: object, *, low: int) -> None:
    kinds = int | float if name.endswith("_seconds") else int
    if isinstance(value, bool) or not isinstance(value, kinds) or not value >= low:
        raise ConfigError(name, value, f"must be a number of at least {low}")
