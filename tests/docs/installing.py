"""A page that shows a whole plug-in, done as an installer would: a module and its metadata."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

from tests.docs.pages import read_blocks


class Installed(NamedTuple):
    """The name that the entry point has, and the module it is in."""

    name: str
    module: str


def install(page: str, group: str, folder: Path) -> Installed:
    """Write the page's python block and its entry point of ``group`` into ``folder``."""
    blocks = read_blocks(page)
    project = tomllib.loads(next(b.code for b in blocks if b.language == "toml"))["project"]
    ((name, value),) = project["entry-points"][group].items()
    module = value.partition(":")[0]
    assert f"The whole of `{module}.py`:\n\n```python" in page
    code = next(b.code for b in blocks if b.language == "python")
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    headers = {"Metadata-Version": "2.1", "Name": project["name"], "Version": project["version"]}
    (info / "METADATA").write_text("".join(f"{key}: {text}\n" for key, text in headers.items()))
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    return Installed(name, module)
