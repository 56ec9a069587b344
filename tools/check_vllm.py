"""Whether a release of vLLM still fits: ``python -m tools.check_vllm VERSION|FOLDER ...``.

Prints a Markdown table with a row for each release, and below it what a release lacks. A version is
downloaded as a wheel with pip; a folder has vLLM's package in it. vLLM is not imported.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from guided_spec.integrations.patches import OneOf, Patch, probe
from guided_spec.integrations.vllm.llm import PARTS as ENGINE
from guided_spec.integrations.vllm.plugin import FEATURES, ON_RAY, label
from guided_spec.integrations.vllm.proposer import PATCHES


def lacks(root: Path) -> dict[str, str]:
    """For each part of the plugin what a release lacks for it, empty where it is on.

    root: the folder with vLLM's package in it. Raises FileNotFoundError where there is none.
    """
    if not (root / "vllm" / "__init__.py").is_file():
        raise FileNotFoundError(root / "vllm" / "__init__.py")
    parts: dict[str, Sequence[Patch | OneOf]] = {"drafter": PATCHES}
    for feature, module in FEATURES.items():
        wanted = importlib.import_module(module).PARTS
        parts |= {label(feature, part): patches for part, patches in wanted.items()}
    parts |= {label("engine", part): patches for part, patches in ENGINE.items()}
    parts["on Ray"] = ON_RAY
    return {part: probe(root, wanted).lack for part, wanted in parts.items()}


def table(found: dict[str, dict[str, str]]) -> str:
    """``found``: what ``lacks`` says, for each release by its name."""
    parts = [*next(iter(found.values()))]
    lines = [f"| vLLM | {' | '.join(parts)} |", "|---" * (len(parts) + 1) + "|"]
    for name, one in found.items():
        states = " | ".join("off" if one[part] else "on" for part in parts)
        lines.append(f"| {name} | {states} |")
    reasons = [
        f"{name}, {part}: {lack}"
        for name, one in found.items()
        for part, lack in one.items()
        if lack
    ]
    return "\n".join([*lines, *([""] if reasons else []), *reasons])


def main(releases: list[str]) -> int:
    """Returns 1 if one of the releases lacks something."""
    found: dict[str, dict[str, str]] = {}
    for release in releases:
        if Path(release).is_dir():
            found[Path(release).name] = lacks(Path(release))
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
            subprocess.run([*command, f"vllm=={release}"], check=True)
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder, [n for n in archive.namelist() if n.endswith(".py")])
            found[release] = lacks(Path(folder))
    sys.stdout.write(table(found) + "\n")
    return int(any(lack for one in found.values() for lack in one.values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.check_vllm")
    parser.add_argument("releases", nargs="+", metavar="VERSION|FOLDER")
    sys.exit(main(parser.parse_args().releases))
