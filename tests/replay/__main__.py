"""Records the cases anew: ``python -m tests.replay``, or one of them: ``--only NAME``."""

from __future__ import annotations

import os
from typing import Annotated

import typer


def main(
    only: Annotated[str | None, typer.Option(help="One case by its name.")] = None,
) -> None:
    """Write ``tests/replay/records``, and say which records changed and how."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tests.replay.cases import CASES  # only here: it imports transformers, which reads these
    from tests.replay.record import CaseRecord, first_difference, path_of
    from tests.replay.recorder import record_case

    names = [case.name for case in CASES]
    if only is not None and only not in names:
        raise typer.BadParameter(f"must be one of {', '.join(names)}", param_hint="--only")
    for case in CASES:
        if only not in (None, case.name):
            continue
        path, found = path_of(case.name), record_case(case)
        change: object = "new"
        if path.exists():
            change = first_difference(CaseRecord.from_json(path.read_text("utf-8")), found)
        path.parent.mkdir(exist_ok=True)
        path.write_text(found.to_json(), "utf-8")
        typer.echo(f"{case.name}: {'as before' if change is None else change}")


if __name__ == "__main__":
    typer.run(main)
