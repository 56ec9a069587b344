"""Running the application with uvicorn, until a signal."""

from __future__ import annotations

import signal
from types import FrameType

import uvicorn

from guided_spec.engine.llm import LLM
from guided_spec.server.app import build_app
from guided_spec.server.settings import ServerSettings

__all__ = ["build_server", "serve"]


def build_server(llm: LLM, settings: ServerSettings, host: str, port: int) -> uvicorn.Server:
    """A server that is not running yet. port: 0 takes a free one."""
    config = uvicorn.Config(
        build_app(llm, settings),
        host=host,
        port=port,
        log_level="info",
        timeout_graceful_shutdown=int(settings.drain_seconds),
        # uvicorn counts the connection that it refuses too.
        limit_concurrency=settings.max_connections + 1,
        server_header=False,
        ws="none",
    )
    return uvicorn.Server(config)


def serve(llm: LLM, settings: ServerSettings, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Then nobody new is let in, and requests that are running or waiting are finished, up to
    ``settings.drain_seconds``. Call it from the main thread, where signals arrive.
    """
    # uvicorn raises the signal again when it is done, and that is an end as it should be.
    signal.signal(signal.SIGTERM, _exit)
    build_server(llm, settings, host, port).run()


def _exit(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)
