"""``guided-spec train``: prompts and a target in, a draft out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import typer
from rich.table import Table
from transformers import HfArgumentParser

from guided_spec.cli.console import failures_as_messages, stdout
from guided_spec.errors import ConfigError
from guided_spec.training.options import TrainOptions
from guided_spec.training.registry import algorithm_names, find_algorithm

__all__ = ["train"]

PROGRAM = "guided-spec train"
DESCRIPTION = "Train a draft for a target model, export it, and decode held-out documents with it."


class _Parsed(NamedTuple):
    options: TrainOptions
    algorithm_options: dict[str, Any]


def train(context: typer.Context) -> None:
    """Train a draft for a target model; --help lists the options, --algorithm adds its own."""
    with failures_as_messages():
        parsed = _parse(context.args)
        # Only here: it imports accelerate, and --help does not need it.
        from guided_spec.training.run import train as run_training

        report = run_training(parsed.options, parsed.algorithm_options)
    if os.environ.get("RANK", "0") == "0":
        _print(report)


def _parse(arguments: Sequence[str]) -> _Parsed:
    """argparse's own messages, with exit code 2, for what it cannot read."""
    name = _algorithm_name(arguments)
    kinds: list[Any] = [TrainOptions] if name is None else [TrainOptions, _config_class(name)]
    parser = HfArgumentParser(
        kinds,
        prog=PROGRAM,
        description=DESCRIPTION,
        epilog=_epilog(name),
        allow_abbrev=False,
    )
    options, *rest = parser.parse_args_into_dataclasses(
        args=list(arguments), look_for_args_file=False, return_remaining_strings=True
    )
    if rest[-1]:
        parser.error(f"unknown: {' '.join(rest[-1])}")
    own = rest[0]
    return _Parsed(options, {each.name: getattr(own, each.name) for each in fields(own)})


def _algorithm_name(arguments: Sequence[str]) -> str | None:
    finder = HfArgumentParser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    finder.add_argument("--algorithm", nargs="?")
    found: str | None = finder.parse_known_args(list(arguments))[0].algorithm
    return found


def _config_class(name: str) -> type:
    kind: type = find_algorithm(name).config_class
    taken = {each.name for each in fields(TrainOptions)}
    both = [each.name for each in fields(kind) if each.name in taken]
    if both:
        fix = f"its options {', '.join(both)} are also options of {PROGRAM}: rename its own"
        raise ConfigError("algorithm", name, fix)
    return kind


def _epilog(name: str | None) -> str:
    if name is not None:
        return f"The options of {name} follow those of all algorithms."
    return f"Algorithms: {', '.join(algorithm_names())}. Name one to see its own options too."


def _print(report: Any) -> None:
    measured = {**report.metrics, **{f"held-out {n}": v for n, v in report.heldout.items()}}
    rows = {
        "draft": f"{report.draft} ({report.layout})",
        "steps": f"{report.steps}",
        "tokens per second": f"{report.tokens_per_second:.0f}",
        **{name.replace("_", " "): f"{value:.4f}" for name, value in measured.items()},
    }
    if report.decoded is not None:
        rows["decoded tokens per forward"] = f"{report.decoded['acceptance_length']:.2f}"
        rows["decoded and valid"] = f"{report.decoded['valid']:.0%}"
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    stdout().print(table)
