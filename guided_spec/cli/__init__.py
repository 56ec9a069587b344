"""The command line: ``guided-spec generate``, ``trace``, ``serve`` and the others."""

from __future__ import annotations

import errno
import gc
import os
import sys
from pathlib import Path

from guided_spec.home import leave

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
INTERRUPTED = 130  # as shells have it
NEEDED = ("rich", "typer")
# Commands whose imports may take longer than their work, and one that should end at once. Until
# ``collect_again`` nothing is collected.
QUICK = ("check", "generate", "serve", "trace")


def run() -> None:
    """What the ``guided-spec`` script calls; one sentence where the extra ``cli`` is missing."""
    _open_streams()
    try:
        from guided_spec.cli.main import app
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in NEEDED:
            raise
        sentence = f"guided-spec needs {missing}: pip install 'guided-spec[cli]'"
        raise SystemExit(sentence) from None
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    is_quick = command in QUICK
    if is_quick:  # nothing that torch imports is garbage
        gc.disable()
    try:
        app()
    except SystemExit as end:
        if is_quick and isinstance(end.code, int):
            leave(end.code)
        raise
    except OSError as error:
        if error.errno not in NO_ROOM or error.filename is not None:
            raise
        sys.stderr.write(f"the output cannot be written: {error.strerror}\n")
        # What is still to be written would fail once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if is_quick:
            leave(1)
        raise SystemExit(1) from None


def _open_streams() -> None:
    """Outputs that were closed before the command began take everything, and keep nothing."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115  # to the end
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115


def collect_again() -> None:
    """What is new is collected again, once what a short command needs is loaded."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
