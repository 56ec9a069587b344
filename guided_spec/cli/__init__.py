"""The command line: ``guided-spec generate``, ``trace``, ``serve`` and the others."""

from __future__ import annotations

import atexit
import errno
import gc
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
INTERRUPTED = 130  # as shells have it
NEEDED = ("rich", "typer")
SHORT = ("check", "generate", "trace")  # commands whose imports may take longer than their work
UNCOLLECTED = (*SHORT, "serve")  # until ``collect_again``


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
    is_short = command in SHORT
    if command in UNCOLLECTED:  # nothing that torch imports is garbage
        gc.disable()
    try:
        app()
    except SystemExit as end:
        if is_short and isinstance(end.code, int):
            _leave(end.code)
        raise
    except OSError as error:
        if error.errno not in NO_ROOM or error.filename is not None:
            raise
        sys.stderr.write(f"the output cannot be written: {error.strerror}\n")
        # What is still to be written would fail once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if is_short:
            _leave(1)
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


def _leave(code: int) -> None:
    """End the process without taking all modules apart, which costs a second of CPU.

    Returns where Python has to end it: a thread still works, or nobody takes the output.
    """
    if all(one.daemon for one in threading.enumerate() if one is not threading.main_thread()):
        atexit._run_exitfuncs()
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    gc.unfreeze()
