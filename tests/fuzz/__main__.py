"""Hunts for inputs that break a promise: ``python -m tests.fuzz --target regex --seconds 60``."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import resource
import tempfile
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

_MOST_BYTES = 6 * 2**30
_FOLLOWED = ["guided_spec.grammar"]


def main(
    target: Annotated[str, typer.Option(help="See NAMES in tests/fuzz/engines.py.")],
    seconds: Annotated[float, typer.Option(help="How long to hunt.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Another one draws other inputs.")] = 0,
    engine: Annotated[str, typer.Option(help="hypothesis or atheris.")] = "hypothesis",
    folder: Annotated[Path | None, typer.Option(help="For findings; a new one by default.")] = None,
) -> None:
    """Prints what was found, shortest input first; exit status 1 if there is anything."""
    if engine == "atheris" and importlib.util.find_spec("atheris") is None:
        raise typer.BadParameter("atheris is not installed: pip install 'guided-spec[fuzz]'")
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, hard))
    warnings.simplefilter("ignore")  # what patterns and schemas of this kind bring about by design
    engines = _load(engine)
    if target not in engines.NAMES:
        raise typer.BadParameter(f"target must be one of {', '.join(engines.NAMES)}")
    place = Path(tempfile.mkdtemp(prefix="fuzz-")) if folder is None else folder
    place.mkdir(parents=True, exist_ok=True)
    typer.echo(f"findings and the input being tried: {place}")
    run = engines.Run(target, seconds, seed, place)
    findings = engines.follow_coverage(run) if engine == "atheris" else engines.draw(run)
    for finding in sorted(findings, key=lambda found: len(found.source)):
        typer.echo(json.dumps(finding._asdict()))
    raise typer.Exit(bool(findings))


def _load(engine: str) -> Any:
    """The module ``engines``; for atheris all that it is to follow is imported by its leave."""
    leave: Any = contextlib.nullcontext()
    if engine == "atheris":
        leave = importlib.import_module("atheris").instrument_imports(include=_FOLLOWED)
    with leave:
        return importlib.import_module("tests.fuzz.engines")


if __name__ == "__main__":
    typer.run(main)
