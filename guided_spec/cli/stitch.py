"""``guided-spec stitch``: trained MTP modules put into their target's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from guided_spec.cli.console import Json, Verbose, print_json, stdout


def stitch(
    target: Annotated[Path, typer.Argument(help="Folder of the target's checkpoint.")],
    draft: Annotated[Path, typer.Argument(help="Folder of the trained modules.")],
    output: Annotated[Path, typer.Argument(help="Folder to write: target and modules.")],
    as_json: Json = False,
    _verbose: Verbose = False,
) -> None:
    """Put trained MTP modules into their target's checkpoint.

    Other engines load such modules from there.
    """
    from guided_spec.models.checkpoint import stitch as write

    folder = str(write(target, draft, output))
    print_json({"output": folder}) if as_json else stdout().print(folder)
