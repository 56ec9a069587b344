"""The command line: ``guided-spec generate``, ``trace``, ``serve`` and the others."""

from __future__ import annotations

NEEDED = ("rich", "typer")


def run() -> None:
    """What the ``guided-spec`` script calls; one sentence where the extra ``cli`` is missing."""
    try:
        from guided_spec.cli.main import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in NEEDED:
            raise
        sentence = f"guided-spec needs {missing}: pip install 'guided-spec[cli]'"
        raise SystemExit(sentence) from None
    app()
