"""The command line answers at once: what it loads, completion, and the extra that it needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from guided_spec.cli import console, run
from guided_spec.cli.main import app
from tests.docs.pages import ROOT

HEAVY = ("fastapi", "llguidance", "torch", "transformers", "uvicorn", "xgrammar")
LIGHT_MODULES = (
    *("guided_spec", "guided_spec.errors", "guided_spec.types", "guided_spec.config"),
    *("guided_spec.grammar.spec", "guided_spec.grammar.backends.registry", "guided_spec.proposers"),
    *("guided_spec.training.options", "guided_spec.training.registry"),
)
LIGHT_COMMANDS = (
    *("--help", "--version", "generate --help", "trace --help", "check --help", "train --help"),
    *(f"train --algorithm {name} --help" for name in ("draft_model", "eagle", "eagle3", "mtp")),
    *("bench --help", "serve --help", "stitch --help", "eval --help"),
)

# What takes seconds, and is not needed where an LLM is imported, or for tokenizers and schemas.
MODEL_CODE = ("sympy", "torch._dynamo", "torch.distributed.tensor", "transformers.modeling_utils")
SCHEMA = ROOT / "examples" / "contact.schema.json"

# The arguments are lines; prints what each of them has loaded, as JSON.
LOADED = """
import contextlib, importlib, io, json, sys
heavy, kind, names = json.loads(sys.argv[1])
loaded = {}
for name in names:
    if kind == "module":
        importlib.import_module(name)
    else:
        from guided_spec.cli.main import app
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            app(name.split())
    loaded[name] = sorted(set(heavy) & set(sys.modules))
print(json.dumps(loaded))
"""


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("kind", "names", "heavy"),
    [
        ("command", LIGHT_COMMANDS, HEAVY),
        ("module", LIGHT_MODULES, (*HEAVY, "numpy", "rich", "typer")),
        (
            "module",
            ("guided_spec.engine.llm", "guided_spec.guide"),
            (*MODEL_CODE, "accelerate", "llguidance", "transformers", "triton", "xgrammar"),
        ),
        ("command", (f"check {SCHEMA}",), (*MODEL_CODE, "triton")),
        # The server's own process: the engine is in another one.
        ("module", ("guided_spec.engine.process", "guided_spec.server.app"), MODEL_CODE),
    ],
    ids=["commands", "modules", "an LLM", "check", "a server"],
)
def test_what_is_loaded(kind: str, names: tuple[str, ...], heavy: tuple[str, ...]) -> None:
    asked = json.dumps([heavy, kind, names])
    found = subprocess.run(
        [sys.executable, "-c", LOADED, asked], capture_output=True, text=True, check=True
    )
    assert json.loads(found.stdout) == {name: [] for name in names}


# Prints which of these happen: the end of the command, its exit functions, modules taken apart.
ENDING = """
import atexit, gc, sys, threading
import guided_spec.cli, guided_spec.cli.main
class Module:
    def __del__(self):
        sys.__stdout__.write("apart ")
apart = Module()
def work():
    threading.main_thread().join()
    print("thread", end=" ")
def command():
    print("loading", gc.isenabled(), end=" ")
    guided_spec.cli.collect_again()
    print("working", gc.isenabled(), end=" ")
    sys.exit(3)
guided_spec.cli.main.app = command
atexit.register(print, "exit", end=" ")
if sys.argv.pop():
    threading.Thread(target=work).start()
guided_spec.cli.run()
"""


@pytest.mark.parametrize(
    ("command", "thread", "happened"),
    [
        ("generate", "", "loading False working True exit"),
        ("check", "", "loading False working True exit"),
        ("generate", "a thread that works", "loading False working True thread exit apart"),
        ("serve", "", "loading False working True exit"),
        ("train", "", "loading True working True exit apart"),
    ],
)
def test_a_short_command_ends_at_once(command: str, thread: str, happened: str) -> None:
    asked = [sys.executable, "-c", ENDING, command, thread]
    ended = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert (ended.stdout.strip(), ended.returncode) == (happened, 3), ended.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device")
@pytest.mark.parametrize("arguments", ["--version", "--help", "check missing.json --json"])
def test_output_that_cannot_be_written_is_told(arguments: str) -> None:
    script = "import sys; from guided_spec.cli import run; run()"
    with Path("/dev/full").open("w") as full:
        asked = [sys.executable, "-c", script, *arguments.split()]
        ended = subprocess.run(asked, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = "the output cannot be written: No space left on device\n"
    assert (ended.stderr, ended.returncode) == (said, 1)


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_an_output_that_was_closed_is_no_error(
    monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    """As by ``2>&-``: Python has None in its place."""
    monkeypatch.setattr(sys, "argv", ["guided-spec"])
    monkeypatch.setattr(sys, closed, None)
    writes = {"stdout": console.stdout, "stderr": console.stderr}[closed]
    monkeypatch.setattr("guided_spec.cli.main.app", lambda: writes().print("text"))
    run()
    {"stdout": sys.stdout, "stderr": sys.stderr}[closed].close()


def test_ctrl_c_while_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting:
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "guided_spec.cli.main", Interrupting())
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 130


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("guided-spec trai", "train"),
        ("guided-spec generate --temp", "--temperature"),
        ("guided-spec train --algorithm eagle3 --sharding f", "fsdp"),
    ],
)
def test_completion(words: str, completed: str) -> None:
    asked = {
        "_GUIDED_SPEC_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    result = CliRunner().invoke(app, [], prog_name="guided-spec", env=asked)
    assert result.stdout.split() == [completed]


@pytest.mark.parametrize("module", ["rich.console", "typer"])
def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for name in ("main", "console"):
        monkeypatch.delitem(sys.modules, f"guided_spec.cli.{name}")
    with pytest.raises(SystemExit) as caught:
        run()
    # A message as the code is printed to stderr, with exit code 1.
    assert caught.value.code == (
        f"guided-spec needs {module.partition('.')[0]}: pip install 'guided-spec[cli]'"
    )


def test_a_fault_of_our_own_is_not_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "guided_spec.cli.console", None)
    monkeypatch.delitem(sys.modules, "guided_spec.cli.main")
    with pytest.raises(ModuleNotFoundError, match=r"guided_spec\.cli\.console"):
        run()
