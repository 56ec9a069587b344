"""``guided-spec serve``: an HTTP server with OpenAI's interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from socket import socket
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from guided_spec.cli import collect_again
from guided_spec.cli.console import Verbose, stderr, working
from guided_spec.cli.options import (
    OWN,
    VLLM,
    Adapters,
    ModelNames,
    ModelOptions,
    Proposer,
    read_engine_options,
    read_loras,
    with_options,
)
from guided_spec.errors import ConfigError
from guided_spec.kinds import require_one_of
from guided_spec.server.limits import ServerLimits

if TYPE_CHECKING:  # this loads torch
    from guided_spec.grammar.isolation import Interpreter
    from guided_spec.server.service import ServerSettings

_PACKAGES = ("fastapi", "httptools", "prometheus_client", "starlette", "uvicorn")
_KEY_VARIABLE = "GUIDED_SPEC_API_KEY"

Key = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        envvar=_KEY_VARIABLE,
        show_default=False,
        help="Required of clients; can be repeated, or separated by spaces in the variable.",
    ),
]

Host = Annotated[
    list[str] | None,
    typer.Option("--allowed-host", help="Allowed Host header; can be repeated, * for any."),
]


@with_options
def serve(
    load: ModelOptions,
    proposer: Proposer = None,
    *,
    host: Annotated[str, typer.Option(help="0.0.0.0 listens on all networks.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free port.")] = 8000,
    served_model_name: ModelNames = None,
    lora_modules: Adapters = None,
    api_key: Key = None,
    allowed_host: Host = None,
    limits: ServerLimits,
    engine: Annotated[str, typer.Option(help="guided_spec, or vllm for vLLM's own server.")] = OWN,
    engine_options: Annotated[str | None, typer.Option(help="JSON object of vLLM options.")] = None,
    _verbose: Verbose = False,
) -> None:
    """Serve a model over HTTP, for OpenAI's clients.

    Without --model the bundled model is served. Only this machine can reach it, unless --host says
    otherwise.
    """
    names, keys = tuple(served_model_name or [load.model or "bundled"]), tuple(api_key or ())
    memory = ("max_batch_size", "max_model_len", "kv_memory_bytes", "kv_dtype")
    arguments = {"proposer": proposer, **{name: getattr(load, name) for name in memory}}
    arguments["loras"] = read_loras(lora_modules, names) or None
    require_one_of("--engine", engine, SERVERS)
    site = Site(host, port, names, keys, tuple(allowed_host or ()), limits)
    SERVERS[engine](load, arguments, site, engine_options)


class Site(NamedTuple):
    """Where a server is and who may use it. limits: of this package's own."""

    host: str
    port: int
    names: tuple[str, ...]
    keys: tuple[str, ...]
    allowed_hosts: tuple[str, ...]
    limits: ServerLimits


def _serve_own(
    load: ModelOptions, others: dict[str, Any], site: Site, engine_options: str | None
) -> None:
    if engine_options is not None:
        fix = "they are another engine's, as --engine vllm's; leave them out"
        raise ConfigError("--engine-options", engine_options, fix)
    arguments = load.arguments(**others)
    with bound(site) as sockets, engine_interpreter() as interpreter:
        _require_packages()
        from guided_spec.server.service import ServerSettings

        own: dict[str, Any] = {"model_names": site.names, "api_keys": site.keys}
        own["allowed_hosts"] = site.allowed_hosts
        settings = ServerSettings(**own, **asdict(site.limits))
        _serve({**arguments, "interpreter": interpreter}, settings, site.host, sockets)


@contextmanager
def bound(site: Site) -> Iterator[list[socket]]:
    """Sockets at the address, before anything is loaded."""
    from guided_spec.server.listening import bind, close

    sockets = bind(site.host, site.port)
    try:
        yield sockets
    finally:
        close(sockets)


@contextmanager
def engine_interpreter() -> Iterator[Interpreter]:
    """The engine's process: both import torch at the same time. It ends if anything is raised."""
    from guided_spec.engine import PROGRAM
    from guided_spec.grammar.isolation import start_interpreter

    started = start_interpreter(PROGRAM)
    try:
        yield started
    except BaseException:
        started.process.kill()
        started.process.wait()
        started.connection.close()
        raise


def _serve_vllm(
    load: ModelOptions, others: dict[str, Any], site: Site, engine_options: str | None
) -> None:
    """Replace this program by vLLM's server; its limits are its own."""
    from guided_spec.engine.runner import Wanted
    from guided_spec.integrations.vllm.arguments import run, serve_command

    if (loras := others.pop("loras")) is not None:
        fix = "adapters of requests need --engine guided_spec; leave it out"
        raise ConfigError("--lora-modules", [*loras], fix)
    if site.allowed_hosts:
        fix = "vLLM's server has no such option: leave it out"
        raise ConfigError("--allowed-host", list(site.allowed_hosts), fix)
    for field in fields(site.limits):
        name, value = field.name, getattr(site.limits, field.name)
        if value != field.default and (name, value) != ("playground", False):
            raise ConfigError(name, value, "vLLM's server has no such option: leave it out")
    given = load.arguments(**others)
    model, proposer, draft = (given.pop(name, None) for name in ("model", "proposer", "draft"))
    wanted = Wanted(model, proposer, draft, given, read_engine_options(engine_options))
    address: dict[str, Any] = {"host": site.host, "port": site.port}
    run(serve_command(wanted, **address, names=site.names, api_keys=site.keys))


SERVERS: dict[str, Callable[[ModelOptions, dict[str, Any], Site, str | None], None]] = {
    OWN: _serve_own,
    VLLM: _serve_vllm,
}


def _require_packages() -> None:
    try:
        import guided_spec.server.app  # noqa: F401
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _PACKAGES:
            raise
        fix = f"it needs {missing}: pip install 'guided-spec[serve]'"
        raise ConfigError("command", "serve", fix) from None


def start_lines(llm: str, settings: ServerSettings, host: str, port: int) -> Iterator[str]:
    """What the server says before it starts: its model, its address, its playground.

    llm: as it shows itself. port: 0 is not known yet.
    """
    yield f"{llm} as {', '.join(settings.model_names)}"
    if port:
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        yield f"OpenAI's clients: base_url {url}/v1; Anthropic's: {url}"
        if settings.playground:
            yield f"playground: {url}/"


def _serve(
    arguments: dict[str, Any], settings: ServerSettings, host: str, sockets: list[socket]
) -> None:
    """arguments: of ``EngineProcess``."""
    from guided_spec.engine.process import EngineProcess, frozen_heap
    from guided_spec.server.app import serve as run_server
    from guided_spec.server.listening import listen

    with working("loading the model"):
        llm = EngineProcess(**arguments)
    collect_again()
    listen(sockets)  # who reads the address may connect at once
    port = sockets[0].getsockname()[1]
    for line in start_lines(repr(llm), settings, host, port):
        stderr().print(line)
    with llm, frozen_heap():
        run_server(llm, settings, host, port, until=llm.ended, sockets=sockets)
        if llm.ended.done():
            llm.ended.result()  # raises why
