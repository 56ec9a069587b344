"""The ``guided-spec`` command and its sub-commands."""

from __future__ import annotations

import typer

from guided_spec.cli.bench import bench_app
from guided_spec.cli.check import check
from guided_spec.cli.generate import generate
from guided_spec.cli.proposers import proposers
from guided_spec.cli.train import train

__all__ = ["app"]

app = typer.Typer(
    name="guided-spec",
    help="Text that matches a JSON schema, a regex or a grammar, by speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(proposers)
app.command()(check)
app.add_typer(bench_app, name="bench")
# argparse reads its options: which there are depends on the algorithm.
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)(train)


if __name__ == "__main__":
    app()
