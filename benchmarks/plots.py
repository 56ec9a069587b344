"""Plots of measured figures: ``python -m benchmarks.plots docs/figures``.

Each JSON file of the folder is one ``Figure``; its plot is written beside it, or to ``--output``,
as SVG. The file says by which command, on which machine and with which versions it was measured.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from guided_spec.cli.console import failures_as_messages, stdout
from guided_spec.errors import ConfigError
from guided_spec.evaluate.plots import Figure, draw


def read_figure(path: Path) -> Figure:
    """The figure in a JSON file, as ``write_figure`` wrote it.

    Raises ConfigError, with the file's name, when it holds no figure.
    """
    try:
        return Figure(**json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        names = ", ".join(field.name for field in dataclasses.fields(Figure))
        raise ConfigError("figure", path.name, f"{error}; its keys are {names}") from error


def draw_all(folder: Path, output: Path) -> list[Path]:
    """The plots of all figures in ``folder``, written to ``output``.

    Raises ConfigError when there is none, or one cannot be read.
    """
    sources = sorted(folder.glob("*.json"))
    if not sources:
        raise ConfigError("folder", str(folder), "has no .json file; name a folder of figures")
    output.mkdir(parents=True, exist_ok=True)
    plots = [output / f"{source.stem}.svg" for source in sources]
    for source, plot in zip(sources, plots, strict=True):
        draw(read_figure(source), plot)
    return plots


def main(
    folder: Annotated[Path, typer.Argument(help="Figures, one JSON file each.")],
    output: Annotated[Path | None, typer.Option(help="Where plots go; else beside them.")] = None,
) -> None:
    """Draw every figure of a folder as SVG."""
    with failures_as_messages():
        for path in draw_all(folder, output or folder):
            stdout().print(str(path))


if __name__ == "__main__":
    typer.run(main)
