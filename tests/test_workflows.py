"""What runs on a forge: the workflows are valid, and run the commands that the pages give."""

from __future__ import annotations

import json
import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

yaml: Any = pytest.importorskip("yaml")  # has no types of its own

ROOT = Path(__file__).resolve().parent.parent
FORGE = ROOT / ".github"
WORKFLOWS = sorted((FORGE / "workflows").glob("*.yml"))
FORMS = sorted((FORGE / "ISSUE_TEMPLATE").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read(name: str) -> dict[str, Any]:
    found = yaml.safe_load((FORGE / "workflows" / name).read_text())
    assert isinstance(found, dict)
    return found


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_workflows_and_forms_are_valid() -> None:
    pytest.importorskip("check_jsonschema")
    schemas = files("check_jsonschema") / "builtin_schemas" / "vendor"
    for kind, paths in (("github-workflows", WORKFLOWS), ("github-issue-forms", FORMS)):
        schema = json.loads((schemas / f"{kind}.json").read_text())
        for path in paths:
            if path.name != "config.yml":
                # YAML 1.1 reads the key "on" as True.
                found = {
                    {True: "on"}.get(k, k): v for k, v in yaml.safe_load(path.read_text()).items()
                }
                jsonschema.validate(found, schema)


def test_a_pull_request_runs_what_the_pages_say_on_every_python() -> None:
    jobs = read("test.yml")["jobs"]
    for page in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text()
        assert all(command in text for command in commands(jobs["quick"])), page
    classifiers = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert jobs["quick"]["strategy"]["matrix"]["python"] == classifiers
    checks = (ROOT / ".ci" / "run").read_text()
    assert all(command in checks for command in commands(jobs["style"])[1:])


def test_every_test_runs_each_night() -> None:
    jobs = read("nightly.yml")["jobs"]
    assert commands(jobs["full"]) == [".ci/run"]
    assert '-m "not gpu and not sweep"' in (ROOT / ".ci" / "run").read_text()


def test_a_release_stores_no_token() -> None:
    """Only the job that publishes may ask for an identity, and it runs no code of ours."""
    workflow = read("release.yml")
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert commands(workflow["jobs"]["publish"]) == []
    assert "permissions" not in workflow["jobs"]["build"]
    assert all("secrets." not in path.read_text() for path in WORKFLOWS)
    assert (FORGE / "workflows" / "release.yml").read_text().count("CHANGELOG.md") == 1
