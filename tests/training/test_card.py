"""A draft that is pushed to the hub: huggingface_hub's own client against a stand-in for it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from guided_spec.errors import ConfigError
from guided_spec.training.run import train
from tests.training.toy_algorithm import make_options, write_documents, write_target


@dataclass
class Hub:
    """What it was told. refuses: a part of the paths that it answers with 403."""

    created: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    tokens: set[str | None] = field(default_factory=set)
    refuses: str = "nothing"
    address: str = ""

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return {"url": f"{self.address}/org/draft"}
        if path == "/api/models/org/draft/preupload/main":
            names = [each["path"] for each in json.loads(body)["files"]]
            return {"files": [{"path": n, "uploadMode": "regular"} | KEEP for n in names]}
        if path == "/api/models/org/draft/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return {"commitOid": "1", "commitUrl": f"{self.address}/org/draft/commit/1"}
        return {"errors": [], "warnings": []}  # of the model card's header


KEEP = {"shouldIgnore": False, "oid": None}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    told = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # noqa: N802 (the name it is called by)
            body = self.rfile.read(int(self.headers["Content-Length"]))
            told.tokens.add(self.headers["Authorization"])
            is_refused = told.refuses in self.path
            answer = {} if is_refused else told.answer(self.path.partition("?")[0], body)
            self.send_response(403 if is_refused else 200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        told.address = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", told.address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield told
        server.shutdown()


@pytest.fixture
def sources(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "target").mkdir()
    target = write_target(tmp_path / "target")
    return target, write_documents(tmp_path / "documents.jsonl", 12)


@pytest.mark.slow
def test_a_draft_is_pushed(hub: Hub, sources: tuple[str, str], tmp_path: Path) -> None:
    output = tmp_path / "head"
    settings: dict[str, Any] = {
        "push_to_hub": "org/draft",
        "hub_private": True,
        "max_steps": 2,
        "save_every": 1,
    }
    report = train(make_options(*sources, output, **settings), {})
    assert report.pushed == f"{hub.address}/org/draft"
    assert hub.tokens == {"Bearer hf_secret"}
    assert [repo["visibility"] for repo in hub.created] == ["private"]
    plots = [f"plots/{path.name}" for path in (output / "plots").iterdir()]
    assert sorted(hub.files) == sorted(["README.md", "model.safetensors", "training.json", *plots])
    assert all(hub.files[name] == (output / name).read_bytes() for name in hub.files)
    assert (output / "checkpoints").is_dir()


def test_what_cannot_be_pushed_is_not_trained(
    hub: Hub, sources: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(name: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            train(make_options(*sources, tmp_path / "head", push_to_hub=name), {})

    hub.refuses = "create"
    refused("org/draft", "push_to_hub='org/draft': cannot be made: .*403")
    refused("org/two/parts", "push_to_hub='org/two/parts': is not a repository name")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    refused("org/draft", "push_to_hub='org/draft': needs a token of the hub that may write")
    assert not (tmp_path / "head" / "logs").exists()


def test_a_draft_that_was_not_pushed_is_kept(
    hub: Hub, sources: tuple[str, str], tmp_path: Path
) -> None:
    output, hub.refuses = tmp_path / "head", "commit"
    with pytest.raises(ConfigError, match="was not pushed: .*the draft is in .*head, push it by"):
        train(make_options(*sources, output, push_to_hub="org/draft", max_steps=1), {})
    assert (output / "model.safetensors").is_file()
