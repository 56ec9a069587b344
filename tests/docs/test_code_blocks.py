"""What the documentation shows is what happens: every block runs and prints what the page says."""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import EXAMPLES, PAGES, README, ROOT, Block, read_blocks

SHELL = """\
set -euo pipefail
guided-spec() { "$PYTHON" -m guided_spec.cli.main "$@"; }
"""
# Installing and developing: these change the machine or are what runs this test.
NOT_RUN = ("cd", "git", "mypy", "pip", "pre-commit", "pytest", "python3 -m", "ruff", ".ci/run")


def test_blocks_of_a_page() -> None:
    page = """
```python
print(1)
```

```text
1
```

<!-- not run: needs a GPU -->
```bash
guided-spec bench
```
Prose, then a block that is nobody's output.

```text
figure
```
"""
    assert read_blocks(page) == [
        Block("python", "print(1)\n", 3, output="1\n"),
        Block("bash", "guided-spec bench\n", 12, reason="needs a GPU"),
        Block("text", "figure\n", 17),
    ]


def test_readme_shows_a_program_and_its_output() -> None:
    assert README.is_file(), "README.md is missing"
    blocks = read_blocks(README.read_text())
    shown = [b for b in blocks if b.language == "python" and b.output is not None]
    assert shown, "README.md has no python block followed by its output"


def test_readme_installs_as_the_checks_do() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    install = re.search(r"python3 -m pip install torch.*", script)
    assert install is not None
    assert install[0] in README.read_text(), f"README.md does not say: {install[0]}"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_do_what_they_show(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    namespace: dict[str, Any] = {"__name__": "__page__"}
    for block in read_blocks(page.read_text()):
        place = f"{page.name}:{block.line}"
        if block.reason is not None:
            continue
        if block.language == "python":
            check_output(run_python(block, namespace, place), block, place)
        elif block.language == "bash" and is_run(block, place):
            check_output(run_bash(block, place), block, place)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, str(example)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip(), "an example shows something"


def run_python(block: Block, namespace: dict[str, Any], place: str) -> str:
    printed = io.StringIO()
    # Blank lines in front, so that a traceback names the line of the page.
    source = "\n" * (block.line - 1) + block.code
    with contextlib.redirect_stdout(printed):
        # Not with the __future__ of this file: the page has its own.
        exec(compile(source, place, "exec", dont_inherit=True), namespace)
    return printed.getvalue()


def is_run(block: Block, place: str) -> bool:
    """Blocks that call guided-spec run whole; others may hold what is in NOT_RUN only."""
    lines = [line for line in block.code.splitlines() if line.strip() and line[0] != "#"]
    if any(line.startswith("guided-spec ") for line in lines):
        return True
    unknown = [line for line in lines if not line.startswith(NOT_RUN)]
    assert not unknown, f"{place}: write why this is not run: <!-- not run: reason -->"
    return False


def run_bash(block: Block, place: str) -> str:
    environment = os.environ | {
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "100",
        "NO_COLOR": "1",
    }
    run = subprocess.run(
        ["bash", "-c", SHELL + block.code],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, f"{place}: exit {run.returncode}\n{run.stdout}\n{run.stderr}"
    return run.stdout


def check_output(printed: str, block: Block, place: str) -> None:
    """``...`` in the page stands for any text, such as the digits of a time."""
    if block.output is None:
        return
    wanted, got = (_without_padding(text) for text in (block.output, printed))
    matches = doctest.OutputChecker().check_output(wanted, got, doctest.ELLIPSIS)
    assert matches, f"{place} prints\n{got}\nbut the page shows\n{wanted}"


def _without_padding(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines()) + "\n"
