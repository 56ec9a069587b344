"""``guided-spec serve --engine vllm``: the command that starts vLLM's server with the plugin."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from guided_spec.engine.runner import Wanted
from guided_spec.errors import ConfigError
from guided_spec.integrations.vllm.arguments import read_arguments
from guided_spec.integrations.vllm.drafts.lookup import has_lookup
from guided_spec.integrations.vllm.plugin import (
    FEATURES,
    VARIABLE,
    installed_root,
    require_plugin,
)

_PROGRAM = ("-m", "vllm.entrypoints.cli.main", "serve")
_KEY_VARIABLE = "VLLM_API_KEY"


class Place(NamedTuple):
    """Where the server is, what requests call the model, and the keys that they must bring."""

    host: str
    port: int
    names: Sequence[str] = ()
    api_keys: Sequence[str] = ()


class ServeCommand(NamedTuple):
    """arguments: behind the interpreter. variables: of the environment, beside this one's."""

    arguments: list[str]
    variables: dict[str, str]


def serve_command(wanted: Wanted, place: Place) -> ServeCommand:
    """vLLM's server for what is ``wanted``; options that it does not know are refused by itself.

    Schemas that cannot be enforced are answered with 400, and JSON has no free whitespace unless
    ``structured_outputs_config`` says otherwise.

    Raises ConfigError for what does not translate.
    """
    found = read_arguments(wanted, None, has_lookup=has_lookup(installed_root()))
    engine = dict(found.engine)
    outputs = {"disable_any_whitespace": True, **engine.pop("structured_outputs_config")}
    engine |= {"structured_outputs_config": outputs, "host": place.host, "port": place.port}
    if place.names:
        engine["served_model_name"] = list(place.names)
    features = [name for name in FEATURES if name in (*found.features, "schemas")]
    variables = {VARIABLE: ",".join(features)}
    if len(place.api_keys) > 1:
        fix = "vLLM takes one from the environment: pass one"
        raise ConfigError("--api-key", f"{len(place.api_keys)} keys", fix)
    if place.api_keys:  # not among the arguments, which other users of the machine can read
        variables[_KEY_VARIABLE] = place.api_keys[0]
    model = engine.pop("model")
    return ServeCommand([*_PROGRAM, model, *_flags(engine)], variables)


def run(command: ServeCommand) -> NoReturn:
    """Become vLLM's server. Raises ConfigError where vLLM or the plugin is missing."""
    require_plugin()
    program = [sys.executable, *command.arguments]
    os.execve(sys.executable, program, {**os.environ, **command.variables})


def _flags(engine: Mapping[str, Any]) -> Iterator[str]:
    """vLLM's options on a command line, as its parser reads them."""
    for name, value in engine.items():
        flag = name.replace("_", "-")
        match value:
            case None:
                pass
            case bool():
                yield f"--{flag}" if value else f"--no-{flag}"
            case dict():
                yield from (f"--{flag}", json.dumps(value))
            case list() | tuple():
                yield from (f"--{flag}", *map(str, value))
            case _:
                yield from (f"--{flag}", str(value))
