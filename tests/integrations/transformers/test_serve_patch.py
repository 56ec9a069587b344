"""The patch for ``transformers serve`` applies to its version, and then schemas hold."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).resolve().parents[3]
PATCH = ROOT / "docs" / "upstream" / "transformers-5.23.0-response-format.patch"

pytestmark = [
    pytest.mark.skipif(version("transformers") != "5.23.0", reason="the patch is for 5.23.0"),
    pytest.mark.skipif(shutil.which("patch") is None, reason="patch is not installed"),
]

# The patched package stands before the installed one, which gives the rest of transformers.
ASK = """
import json, sys, time
import httpx
import transformers.cli
transformers.cli.__path__.insert(0, sys.argv[1])
from transformers.cli.serve import Serve
from guided_spec.bundled import bundled_asset

model = str(bundled_asset("target"))
app = Serve(force_model=model, port=int(sys.argv[2]), device="cpu", non_blocking=True)
url = f"http://localhost:{sys.argv[2]}"
while True:
    try:
        httpx.get(f"{url}/health")
        break
    except httpx.ConnectError:
        time.sleep(0.05)
for path, body in json.load(sys.stdin):
    reply = httpx.post(f"{url}{path}", json={"model": model, **body}, timeout=100)
    print(json.dumps([reply.status_code, reply.text]))
app.kill_server()
"""

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TEXT = "Please call Maria Lopez, she is 41."
HOT = {"temperature": 1.5, "seed": 5}
CHAT = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 300, **HOT}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
CHAT_PATH, RESPONSES_PATH = "/v1/chat/completions", "/v1/responses"
FLAT = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}}
BROKEN = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}


@pytest.fixture
def patched(tmp_path: Path) -> Path:
    """A copy of the folder that holds ``serving``, patched."""
    (package,) = transformers.__path__
    folder = tmp_path / "transformers" / "cli"
    shutil.copytree(Path(package) / "cli" / "serving", folder / "serving")
    command = ["patch", "-p2", "--silent", "-d", str(tmp_path), "-i", str(PATCH)]
    subprocess.run(command, check=True)
    return folder


def check(value: str) -> None:
    found = json.loads(value)
    assert found.keys() == {"name", "age", "tags"}
    assert isinstance(found["age"], int)
    assert {*found["tags"]} <= {"a", "b"}


@pytest.mark.slow
def test_schemas_hold(patched: Path, free_port: int) -> None:
    response = {"input": TEXT, "stream": False, "text": FLAT, "max_output_tokens": 300, **HOT}
    asked = [
        (CHAT_PATH, {**CHAT, "response_format": FORMAT}),
        (CHAT_PATH, {**CHAT, "response_format": FORMAT, "stream": True}),
        (RESPONSES_PATH, response),
        (CHAT_PATH, {**CHAT, "response_format": {"type": "grammar"}}),
        (CHAT_PATH, {**CHAT, "response_format": BROKEN}),
        (CHAT_PATH, {**CHAT, "tool_choice": "required"}),
    ]
    run = subprocess.run(
        [sys.executable, "-c", ASK, str(patched), str(free_port)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("[")]
    replies = [json.loads(line) for line in lines]
    assert [status for status, _ in replies] == [200, 200, 200, 400, 400, 400]
    whole, streamed, flat = (text for _, text in replies[:3])
    check(json.loads(whole)["choices"][0]["message"]["content"])
    events = [json.loads(e.removeprefix("data: ")) for e in streamed.split("\n\n") if e]
    check("".join(event["choices"][0]["delta"].get("content", "") for event in events))
    check(json.loads(flat)["output"][0]["content"][0]["text"])
    for (_, text), word in zip(replies[3:], ("grammar", "nonsense", "required"), strict=True):
        assert word in json.loads(text)["detail"]


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def test_it_applies(patched: Path) -> None:
    assert (patched / "serving" / "structured_output.py").is_file()
    assert '"response_format",' not in (patched / "serving" / "chat_completion.py").read_text()
