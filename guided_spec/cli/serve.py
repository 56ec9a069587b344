"""``guided-spec serve``: an HTTP server with OpenAI's interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from guided_spec.cli.console import Verbose, working
from guided_spec.cli.options import ModelOptions, Proposer, with_options
from guided_spec.errors import ConfigError

if TYPE_CHECKING:  # this loads torch
    from guided_spec.server.settings import ServerSettings

__all__ = ["serve"]

_PACKAGES = ("fastapi", "prometheus_client", "starlette", "uvicorn")
_KEY_VARIABLE = "GUIDED_SPEC_API_KEY"

Name = Annotated[
    list[str] | None,
    typer.Option("--served-model-name", help="What requests call the model; repeat it."),
]
Key = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        envvar=_KEY_VARIABLE,
        show_default=False,
        help="Requests must bring it; repeat it, or separate keys by spaces in the variable.",
    ),
]


@with_options
def serve(
    load: ModelOptions,
    proposer: Proposer = None,
    max_batch_size: Annotated[int, typer.Option(help="Texts that run at once.")] = 16,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of a prompt and text.")] = None,
    host: Annotated[str, typer.Option(help="0.0.0.0 is every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    served_model_name: Name = None,
    api_key: Key = None,
    tool_format: Annotated[str | None, typer.Option(help="If the template tells none.")] = None,
    max_queue: Annotated[int, typer.Option(help="Texts that may wait for a slot.")] = 64,
    max_samples: Annotated[int, typer.Option(help="Texts of one request.")] = 16,
    max_body_bytes: Annotated[int, typer.Option(help="Of a request.")] = 4 * 2**20,
    body_seconds: Annotated[float, typer.Option(help="In which a body must have come.")] = 30.0,
    max_schema_bytes: Annotated[int, typer.Option(help="Of a schema or grammar.")] = 256 * 2**10,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Of one prompt.")] = None,
    max_output_tokens: Annotated[int | None, typer.Option(help="Of one text.")] = None,
    max_connections: Annotated[int, typer.Option(help="Open at the same time.")] = 1000,
    drain_seconds: Annotated[float, typer.Option(help="For what runs, on SIGTERM.")] = 60.0,
    playground: Annotated[bool, typer.Option(help="A page to try things on, at /.")] = True,
    _verbose: Verbose = False,
) -> None:
    """Serve a model over HTTP, for OpenAI's clients.

    Without --model the bundled model is served. Only this machine can reach it, unless --host says
    otherwise.
    """
    _require_packages()
    from guided_spec.server.settings import ServerSettings

    names, keys = tuple(served_model_name or [load.model or "bundled"]), tuple(api_key or ())
    given: dict[str, Any] = {"tool_format": tool_format, "playground": playground}
    given |= {"max_queue": max_queue, "max_samples": max_samples, "body_seconds": body_seconds}
    given |= {"max_body_bytes": max_body_bytes, "max_schema_bytes": max_schema_bytes}
    given |= {"max_connections": max_connections, "drain_seconds": drain_seconds}
    given |= {"max_prompt_tokens": max_prompt_tokens, "max_output_tokens": max_output_tokens}
    settings = ServerSettings(model_names=names, api_keys=keys, **given)
    sizes = {"max_model_len": max_model_len, "max_batch_size": max_batch_size}
    _serve(load, {"proposer": proposer, **sizes}, settings, host, port)


def _require_packages() -> None:
    try:
        import guided_spec.server.app  # noqa: F401
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _PACKAGES:
            raise
        fix = f"it needs {missing}: pip install 'guided-spec[serve]'"
        raise ConfigError("command", "serve", fix) from None


def _serve(
    load: ModelOptions, others: dict[str, Any], settings: ServerSettings, host: str, port: int
) -> None:
    from guided_spec.engine.process import EngineProcess
    from guided_spec.server.app import serve as run_server

    with working("loading the model"):
        llm = EngineProcess(**load.arguments(**others))
    with llm:
        run_server(llm, settings, host, port, until=llm.ended)
        if llm.ended.done():
            llm.ended.result()  # raises why
