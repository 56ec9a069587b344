"""Runs the notebooks of docs/notebooks from the repository's root and writes their outputs.

    python -m tools.site.notebooks

What a cell writes to stderr, as progress, is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
SECONDS = 600


def executed(path: Path) -> Any:
    """The notebook with fresh outputs. Raises CellExecutionError where a cell raises."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=SECONDS, resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
    notebook.metadata.pop("language_info", None)
    return notebook


def shown(notebook: Any) -> Iterator[str]:
    """What each cell of code shows, as text, but for those with the tag ``varies``: their figures
    depend on the machine."""
    for cell in notebook.cells:
        if cell.cell_type == "code" and "varies" not in cell.metadata.get("tags", ()):
            yield "".join(one.get("text") or one["data"]["text/plain"] for one in cell.outputs)


def main() -> None:
    """Write all notebooks anew."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for path in NOTEBOOKS:
        nbformat.write(executed(path), path)


if __name__ == "__main__":
    main()
