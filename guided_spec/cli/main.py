"""The ``guided-spec`` command and its sub-commands.

Nothing here or in the commands' modules loads torch: what a command needs for its work is imported
when it works, so that ``--help`` and completion respond at once.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import guided_spec
from guided_spec.cli.bench import bench
from guided_spec.cli.check import check
from guided_spec.cli.console import failures_as_messages
from guided_spec.cli.eval import evaluate
from guided_spec.cli.generate import generate
from guided_spec.cli.serve import serve
from guided_spec.cli.stitch import stitch
from guided_spec.cli.trace import trace
from guided_spec.cli.train import TrainCommand, train
from guided_spec.cli.words import option_names

AS_JSON, COMMAND = "guided_spec.as_json", "guided_spec.command"


class Program(TyperGroup):
    """Reports what any of its commands raises: as a message, or as JSON where they print that."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Here too for a command line that its command cannot read.
        ctx.meta[AS_JSON] = "--json" in args
        ctx.meta[COMMAND] = next((word for word in args if word in self.commands), None)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        command = self.commands.get(ctx.meta[COMMAND])
        if isinstance(command, TrainCommand):
            command = command.plain()
        options = {} if command is None else option_names(command)
        with failures_as_messages(options, as_json=ctx.meta[AS_JSON]):
            return super().invoke(ctx)


app = typer.Typer(
    name="guided-spec",
    cls=Program,
    help="Text that matches a JSON schema, a regex or a grammar, by speculative decoding.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its boxes cut long names off at 80 columns
)
app.command()(generate)
app.command()(trace)
app.command()(check)
app.command()(bench)
app.command()(serve)
app.command(cls=TrainCommand)(train)
app.command(name="eval")(evaluate)
app.command()(stitch)


def _print_version(wanted: bool) -> None:  # noqa: FBT001  # typer calls it so
    if wanted:
        typer.echo(f"guided-spec {guided_spec.__version__}")
        raise typer.Exit


@app.callback()
def program(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """The options that come before a command."""


if __name__ == "__main__":
    guided_spec.cli.run()
