"""The container file and the examples of ``examples/serve``, checked unrun."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jsonschema.validators import validator_for

from tests.docs.pages import README, ROOT
from tests.server.test_pages import options

EXAMPLES = ROOT / "examples" / "serve"
UNIT = EXAMPLES / "guided-spec.service"
COMPOSE = EXAMPLES / "compose.yaml"
DOCKERFILE = ROOT / "Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


yaml: Any = pytest.importorskip("yaml")


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, each on one line, without comments."""
    text = re.sub(r"(?m)^#.*\n", "", DOCKERFILE.read_text())
    lines = [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip()]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def argument(name: str) -> str:
    (value,) = [rest.partition("=")[2] for word, rest in instructions() if rest.startswith(name)]
    return value


@pytest.mark.parametrize("path", [UNIT, COMPOSE, DOCKERFILE], ids=lambda path: path.name)
def test_options_are_those_of_the_command(path: Path) -> None:
    (line,) = [
        one for one in path.read_text().splitlines() if re.match(r"ExecStart|CMD|\s+command:", one)
    ]
    used = re.findall(r"--[a-z-]+", line)
    assert used
    assert {*used} <= {*options()}


def test_the_image_holds_what_the_package_is_built_from() -> None:
    """And the torch that is tested; and it starts the command, as somebody who is not root."""
    copied = [word for kind, rest in instructions() if kind == "COPY" for word in rest.split()[:-1]]
    project, build = PROJECT["project"], PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = ["pyproject.toml", project["readme"], *project["license-files"], *build["packages"]]
    assert sorted(copied) == sorted(needed)
    assert all((ROOT / name).exists() for name in copied)
    tested = re.findall(r"torch==([\d.]+)", README.read_text() + (ROOT / ".ci/run").read_text())
    assert {*tested} == {argument("TORCH=")}
    last = dict(instructions())
    assert json.loads(last["ENTRYPOINT"]) == [*project["scripts"]]
    assert last["USER"] == "guided"
    extras = re.findall(r'pip install .*"\.\[(\w+)\]"', DOCKERFILE.read_text())
    assert extras == ["serve"]
    python, flag, code = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    assert (python, flag) == ("python", "-c")
    compile(code, "HEALTHCHECK", "exec")
    port = options()["--port"].default
    assert f":{port}/health" in code
    assert last["EXPOSE"] == str(port)


def test_the_compose_file_follows_its_specification() -> None:
    vendored = pytest.importorskip("check_jsonschema")
    folder = files(vendored) / "builtin_schemas" / "vendor"
    schema = json.loads((folder / "compose-spec.json").read_text(encoding="utf-8"))
    validator = validator_for(schema)(schema)
    found: Any = yaml.safe_load(COMPOSE.read_text())
    validator.validate(found)
    found["services"]["guided-spec"]["imagee"] = "x"
    assert not validator.is_valid(found)


def test_compose_builds_this_image_and_lets_it_drain() -> None:
    found: Any = yaml.safe_load(COMPOSE.read_text())
    (service,) = found["services"].values()
    assert (EXAMPLES / service["build"]["context"] / "Dockerfile").resolve() == DOCKERFILE
    assert service["build"]["args"].keys() <= {rest.partition("=")[0] for _, rest in instructions()}
    drain = float(service["command"][service["command"].index("--drain-seconds") + 1])
    assert drain < float(service["stop_grace_period"].removesuffix("s"))
    assert all(each.startswith("127.0.0.1:") for each in service["ports"])
    assert {volume.partition(":")[0] for volume in service["volumes"]} == {*found["volumes"]}


def test_the_unit_is_sound(tmp_path: Path) -> None:
    """systemd has nothing to say of it, where its command exists; and it drains in its time."""
    text = UNIT.read_text()
    drain, limit = re.search(r"--drain-seconds (\d+)", text), re.search("TimeoutStopSec=(.*)", text)
    assert drain is not None
    assert limit is not None
    assert int(drain[1]) < int(limit[1])
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    copy = tmp_path / UNIT.name
    copy.write_text(text.replace("/opt/guided-spec/bin/guided-spec", sys.executable))
    run = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    copy.write_text(text.replace("TimeoutStopSec", "TimeoutStopSeconds"))
    run = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True)
    assert "TimeoutStopSeconds" in run.stderr
