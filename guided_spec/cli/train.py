"""``guided-spec train``: prompts and a target in, a draft out."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from typer.core import TyperCommand

from guided_spec.cli.console import Json, Verbose, print_json, print_table
from guided_spec.cli.options import parameters_of, pick
from guided_spec.errors import ConfigError
from guided_spec.training.options import BEST, TrainOptions
from guided_spec.training.registry import algorithm_names, find_config

if TYPE_CHECKING:  # it loads torch
    from guided_spec.training.run import TrainingReport

OPTION = "--algorithm"


def train() -> None:
    """Train a draft for a target model.

    It is exported, and held-out documents are decoded with it.
    """


class TrainCommand(TyperCommand):
    """A command whose options are those of its ``--algorithm`` too."""

    def plain(self) -> Any:
        """The command with the options that all algorithms share."""
        return _command(None)

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """The context of the command with all these options, which is run instead of this one."""
        # Completion has no seconds to import an algorithm.
        name = None if extra.get("resilient_parsing") else _named_algorithm(args)
        return _command(name).make_context(info_name, args, parent, **extra)


def _named_algorithm(args: Sequence[str]) -> str | None:
    found = None
    for index, argument in enumerate(args):
        name, is_joined, value = argument.partition("=")
        if name == OPTION and is_joined:
            found = value
        elif name == OPTION and index + 1 < len(args):
            found = args[index + 1]
    return found


def _command(algorithm: str | None) -> Any:
    """What typer makes of a function that has a parameter for each field of the dataclasses."""
    config = None if algorithm is None else _config_class(algorithm)

    def run(*, as_json: bool, _verbose: bool, **values: Any) -> None:
        own = {each.name: values[each.name] for each in ([] if config is None else fields(config))}
        _train(pick(TrainOptions, values), own, as_json=as_json)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = list(parameters_of(TrainOptions))
    if config is not None:
        parameters += parameters_of(config)
    for name, kind in (("as_json", Json), ("_verbose", Verbose)):
        parameters.append(inspect.Parameter(name, keyword, default=False, annotation=kind))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    single = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    single.command(help=inspect.getdoc(train), epilog=_epilog(algorithm))(run)
    return typer.main.get_command(single)


def _config_class(name: str) -> type:
    kind = find_config(name)
    taken = {each.name for each in fields(TrainOptions)}
    both = [each.name for each in fields(kind) if each.name in taken]
    if both:
        fix = f"its options {', '.join(both)} are also options of guided-spec train: rename its own"
        raise ConfigError("algorithm", name, fix)
    return kind


def _epilog(name: str | None) -> str:
    if name is not None:
        return f"The options of {name} follow those of all algorithms."
    return f"Algorithms: {', '.join(algorithm_names())}. Name one to see its own options too."


def _train(options: TrainOptions, own: dict[str, Any], *, as_json: bool) -> None:
    from guided_spec.training.run import train as run_training

    report = run_training(options, own)
    if os.environ.get("RANK", "0") == "0":
        print_json(asdict(report)) if as_json else _print(report)


def _print(report: TrainingReport) -> None:
    # Both are named by their text: what the documents say is often easier to draft than what the
    # target writes.
    written = "the target's own answers" if report.options["regenerate"] else "the documents"
    estimate = f"tokens per forward, estimated on {written}"
    rows = {
        "draft": f"{report.draft} ({report.layout})",
        "steps": f"{report.steps}",
        "tokens per second": f"{report.tokens_per_second:.0f}",
    }
    if report.peak_cuda_bytes and report.expected_cuda_bytes:
        peak, expected = report.peak_cuda_bytes / 2**30, report.expected_cuda_bytes / 2**30
        rows["peak memory of the device"] = f"{peak:.1f} GiB, expected {expected:.1f} GiB"
    for shown, metrics in (("", report.metrics), ("held-out ", report.heldout)):
        for name, mean in metrics.items():
            label = estimate if name == "acceptance_length" else name.replace("_", " ")
            rows[shown + label] = f"{mean:.4f}"
    if 0 < report.best_step < report.steps:
        rows["best draft"] = f"{report.draft}/{BEST} (step {report.best_step})"
    if report.pushed is not None:
        rows["pushed to"] = report.pushed
    if report.decoded is not None:
        decoded = "held-out tokens per forward, decoded: the target's own text"
        rows[decoded] = f"{report.decoded['acceptance_length']:.2f}"
        rows["decoded and valid"] = f"{report.decoded['valid']:.0%}"
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    print_table(table)
