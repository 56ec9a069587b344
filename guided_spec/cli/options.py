"""The options that commands share, as dataclasses: a model with its draft, a text, a report.

``with_options`` makes a command of a function that takes such dataclasses: each field is an option.
"""

from __future__ import annotations

import inspect
import json
import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import typer

from guided_spec.bundled import READER
from guided_spec.cli import collect_again
from guided_spec.cli.console import print_json, stderr
from guided_spec.cli.words import grammar_option
from guided_spec.config import THREADS
from guided_spec.errors import ConfigError, reason_of
from guided_spec.evaluate.plots import Figure, Origin, draw_all, require_matplotlib
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.proposers import require_proposer
from guided_spec.training.options import read_device_map
from guided_spec.types import SamplingParams

if TYPE_CHECKING:  # this loads torch
    from guided_spec.engine.llm import LLM

STDIN = "-"
OWN, VLLM = "guided_spec", "vllm"  # engines
Proposer = Annotated[str | None, typer.Option(help="Drafting method; chain:a+b combines several.")]
ModelNames = Annotated[
    list[str] | None,
    typer.Option("--served-model-name", help="Model name in requests; can be repeated."),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--lora-modules",
        metavar="NAME=PATH",
        help="LoRA adapter, by the name that requests give as model; can be repeated.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model runs, and what drafts for it."""

    model: Annotated[str | None, typer.Option(help="Hub id or folder.")] = None
    draft: Annotated[str | None, typer.Option(help="Draft model or head: hub id, folder.")] = None
    num_draft_tokens: Annotated[int, typer.Option("--num-draft-tokens", "-k")] = 5
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16.")] = None
    device_map: Annotated[
        str | None,
        typer.Option(help="Spread the model over devices: auto, or a JSON map."),
    ] = None
    max_batch_size: Annotated[
        int | None, typer.Option(help="Maximum concurrent sequences. [16, or vLLM's default]")
    ] = None
    max_model_len: Annotated[
        int | None, typer.Option(help="Maximum tokens of prompt and output.")
    ] = None
    kv_memory_bytes: Annotated[
        int | None, typer.Option(help="Memory for the KV cache. [by free memory]")
    ] = None
    kv_dtype: Annotated[
        str | None, typer.Option(help="Of keys and values: auto, or fp8 for half the memory.")
    ] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False

    def load(self, **others: Any) -> LLM:
        """The model; others: further arguments of ``LLM``.

        Raises ConfigError for a device map that cannot be read, and what ``LLM`` raises.
        """
        from guided_spec.engine.llm import LLM

        llm = LLM(**self.arguments(**others))
        collect_again()
        return llm

    def load_for_texts(self, **others: Any) -> LLM:
        """As ``load``, where nothing is measured: the bundled model computes in one thread.

        It is so small that threads wait for each other: with two, a batch of texts took a tenth
        longer and half more of the processors.
        """
        if self.model in (None, READER) and THREADS not in os.environ:
            import torch

            torch.set_num_threads(1)
        return self.load(**others)

    def for_pictures(self, pictures: list[Path] | None) -> ModelOptions:
        """With pictures and no model, the bundled one that reads them."""
        return replace(self, model=READER) if pictures and self.model is None else self

    def arguments(self, **others: Any) -> dict[str, Any]:
        """Arguments of ``LLM``: those that are not None. others: further ones.

        Raises ConfigError for a device map that cannot be read.
        """
        if self.device is not None and self.device_map is not None:
            raise ConfigError("--device-map", self.device_map, "cannot go with --device: pass one")
        device_map = None if self.device_map is None else read_device_map(self.device_map)
        own = {"device_map": device_map, "trust_remote_code": self.trust_remote_code or None}
        given = asdict(self) | own | others
        return {name: value for name, value in given.items() if value is not None}


def read_loras(given: list[str] | None, model_names: Collection[str]) -> dict[str, str]:
    """The values of ``--lora-modules``: folders or hub ids by name. Raises ConfigError.

    model_names: what requests call the model itself, which no adapter may be called.
    """
    loras: dict[str, str] = {}
    for text in given or ():
        name, _, path = text.partition("=")
        if not name or not path:
            raise ConfigError("--lora-modules", text, "must be NAME=PATH, a folder or a hub id")
        if name in loras:
            raise ConfigError("--lora-modules", text, f"{name} is there already: rename one")
        if name in model_names:
            raise ConfigError("--lora-modules", name, "the model is called so: rename one")
        loras[name] = path
    return loras


def read_engine_options(text: str | None) -> dict[str, Any]:
    """The value of ``--engine-options``. Raises ConfigError."""
    try:
        options = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError("--engine-options", text, f"is not valid JSON: {error}") from error
    if not isinstance(options, dict):
        raise ConfigError("--engine-options", text, "must be a JSON object")
    return options


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """One text: its prompt, its grammar, and how it is sampled."""

    prompt: Annotated[str | None, typer.Argument(help="Prompt; - reads standard input.")] = None
    schema: Annotated[
        Path | None, typer.Option(help="JSON schema file; - reads standard input.")
    ] = None
    regex: Annotated[str | None, typer.Option(help="Regular expression.")] = None
    choice: Annotated[list[str] | None, typer.Option(help="One option; can be repeated.")] = None
    grammar: Annotated[Path | None, typer.Option(help="EBNF file, or a .lark file.")] = None
    after: Annotated[
        str | None, typer.Option(help="Free text until this marker, then the grammar.")
    ] = None
    max_tokens: Annotated[int, typer.Option(help="Maximum output tokens.")] = 256
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    top_k: Annotated[int, typer.Option(help="0 keeps all tokens.")] = 0
    top_p: Annotated[float, typer.Option(help="1 keeps all tokens.")] = 1.0
    min_p: Annotated[float, typer.Option(help="0 keeps all tokens.")] = 0.0
    seed: Annotated[int | None, typer.Option(help="Random seed, for reproducible sampling.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; can be repeated.")] = None
    on_short: Annotated[
        str, typer.Option(help="If --max-tokens cuts the text short: return or error.")
    ] = "return"
    chat: Annotated[bool, typer.Option("--chat", help="Send it as a chat message.")] = False
    image: Annotated[
        list[Path] | None, typer.Option(help="Picture of a chat message; can be repeated.")
    ] = None

    def params(self) -> SamplingParams:
        """How to sample, under the grammar that was asked for.

        Raises ConfigError when there are two grammars, two of these are standard input, or a file
        cannot be read.
        """
        given = {"PROMPT": self.prompt, "--schema": self.schema, "--grammar": self.grammar}
        asking = [name for name, value in given.items() if str(value) == STDIN]
        if len(asking) > 1:
            fix = f"is standard input, which {asking[0]} reads already; name a file"
            raise ConfigError(asking[1], STDIN, fix)
        spec = self._grammar()
        if spec is not None:
            from guided_spec.grammar.document import SpecDocument

            document = SpecDocument(spec)
            document.require_readable()  # before a model is loaded
            if spec.kind in ("ebnf", "lark"):
                from guided_spec.grammar.backends.xgrammar import require_parsed

                require_parsed(document)
        if self.after is not None:
            if not self.after:
                raise ConfigError("--after", self.after, "must not be empty; leave it out")
            if spec is None:
                raise ConfigError("--after", self.after, "needs a grammar; give one")
            spec = spec.after(self.after)
        names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "on_short")
        chosen: dict[str, Any] = {name: getattr(self, name) for name in names}
        return SamplingParams(**chosen, stop=tuple(self.stop or ()), grammar=spec)

    def text(self) -> str:
        """The prompt itself; of ``-``, standard input without the end of its last line.

        Raises ConfigError if there is none, unless there are pictures.
        """
        if self.prompt is None and self.image:
            return ""
        if self.prompt is None:
            raise ConfigError("PROMPT", None, "give the text to continue; - is standard input")
        if self.prompt != STDIN:
            return self.prompt
        return read_text("PROMPT", Path(self.prompt)).removesuffix("\n").removesuffix("\r")

    def message(self, text: str) -> Any:
        """``text`` as a prompt of ``LLM``. Raises ConfigError for a picture that is no file."""
        for one in self.image or ():  # before a model is loaded
            if not one.exists() or one.is_dir():
                raise ConfigError("--image", str(one), "cannot be read: it is no file")
        if self.image:
            pictures = [{"type": "image", "image": str(one)} for one in self.image]
            words = [{"type": "text", "text": text}] if text else []
            return [{"role": "user", "content": [*pictures, *words]}]
        return [{"role": "user", "content": text}] if self.chat else text

    def _grammar(self) -> GrammarSpec | None:
        """None for free text. A file is EBNF unless its name ends in ``.lark``."""
        names = ("schema", "regex", "choice", "grammar")
        given = [name for name in names if getattr(self, name) not in (None, [])]
        if len(given) > 1:
            first, second = given[:2]
            value, fix = getattr(self, second), f"cannot go with --{first}: choose one grammar"
            shown = value if isinstance(value, list) else str(value)
            raise ConfigError(f"--{second}", shown, fix)
        if given:
            grammar_option.set(f"--{given[0]}={str(getattr(self, given[0]))!r}")
        if self.schema is not None:
            return GrammarSpec.json_schema(read_text("--schema", self.schema))
        if self.regex is not None:
            return GrammarSpec.regex(self.regex)
        if self.choice:
            return GrammarSpec.choice(self.choice)
        if self.grammar is not None:
            text = read_text("--grammar", self.grammar)
            is_lark = self.grammar.suffix == ".lark"
            return GrammarSpec.lark(text) if is_lark else GrammarSpec.ebnf(text)
        return None


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What is measured with, and where the figures go in addition to stdout."""

    max_tokens: Annotated[int, typer.Option(help="Maximum output tokens per request.")] = 256
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    seed: Annotated[int, typer.Option(help="For sampling.")] = 0
    output: Annotated[Path | None, typer.Option(help="Also write a JSON list here.")] = None
    plot: Annotated[Path | None, typer.Option(help="Write SVG plots into this folder.")] = None

    def params(self) -> SamplingParams:
        """The sampling parameters of every request.

        Raises ConfigError for a report or plots that could not be written.
        """
        # Before anything runs.
        if self.output is not None:
            require_writable("--output", self.output)
        if self.plot is not None:
            require_matplotlib("--plot", str(self.plot))
        sampling: Any = {"max_tokens": self.max_tokens, "seed": self.seed}
        return SamplingParams(**sampling, temperature=self.temperature)

    def keep(
        self,
        report: list[dict[str, Any]],
        figures: Callable[[list[dict[str, Any]], Origin], Mapping[str, Figure]],
        *,
        as_json: bool,
    ) -> None:
        """Write the report, and its plots into a folder; to stdout only ``as_json``."""
        if self.output is not None:
            write_text("--output", self.output, json.dumps(report, indent=2) + "\n")
        if self.plot is not None:
            origin = Origin.here(shlex.join(["guided-spec", *sys.argv[1:]]))
            for path in draw_all(figures(report, origin), self.plot):
                stderr().print(str(path))
        for record in report if as_json else ():
            print_json(record)


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """``function`` as typer takes it: the fields of a dataclass instead of the parameter."""
    hints = get_type_hints(function, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            parameters += parameters_of(hints[name])
        else:
            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(kind=keyword, annotation=hints[name]))

    def run(**values: Any) -> None:
        own = {name: values[name] for name in hints if name in values}
        function(**own, **{name: pick(hints[name], values) for name in groups})

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def parameters_of(config: type) -> Iterator[inspect.Parameter]:
    """One a field, with its default; with its type, or that and the help text in its metadata."""
    hints = get_type_hints(config, include_extras=True)
    for each in fields(config):
        kind = hints[each.name]
        if get_origin(kind) is not Annotated:
            # A switch that is off has no second name to turn it off.
            names = [f"--{each.name.replace('_', '-')}"] if each.default is False else []
            kind = Annotated[kind, typer.Option(*names, help=each.metadata["help"])]
        keyword = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(each.name, keyword, default=_default(each), annotation=kind)


def _default(each: Field[Any]) -> Any:
    if each.default_factory is not MISSING:
        return each.default_factory()
    return inspect.Parameter.empty if each.default is MISSING else each.default


def pick(config: Any, values: Mapping[str, Any]) -> Any:
    """A ``config`` of those of ``values`` that are its fields."""
    return config(**{each.name: values[each.name] for each in fields(config)})


def proposer_list(text: str, *, others: Collection[str] = ()) -> list[str]:
    """Names with commas between them, each perhaps with a draft, as in ``ngram,auto=FOLDER``.

    others: names that are no proposer's. Raises UnknownProposerError for any other such name,
    before those that come first have run.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        spec = name.partition("=")[0]
        if spec not in others:
            require_proposer(spec)
    return names


def require_writable(option: str, path: Path) -> None:
    """Raise ConfigError for a file that cannot be made, before any work would be lost."""
    if not path.parent.is_dir():
        raise ConfigError(option, str(path), "is in no folder that exists; make it first")
    if path.is_dir():
        raise ConfigError(option, str(path), "must be a file that can be written, not a folder")


def write_text(option: str, path: Path, text: str) -> None:
    """Write a file. Raises ConfigError naming the option."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fix = f"must be a file that can be written ({reason_of(error)})"
        raise ConfigError(option, str(path), fix) from error


def read_json(option: str, path: Path) -> Any:
    """The file's JSON value. Raises ConfigError naming the option."""
    try:
        return json.loads(read_text(option, path))
    except ValueError as error:
        raise ConfigError(option, str(path), f"is not JSON: {error}") from error


def read_text(option: str, path: Path) -> str:
    """The file's text; ``-`` is standard input. Raises ConfigError naming the option."""
    try:
        if str(path) == STDIN:
            return sys.stdin.buffer.read().decode("utf-8")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(option, str(path), f"cannot be read: {reason_of(error)}") from error
