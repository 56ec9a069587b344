"""Servers of one model, each in processes of its own: ours by proposer, and vLLM's."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.gpu.peers import VLLM_METHODS, VllmEnvironment, end_group, vllm_environment
from benchmarks.gpu.vllm_peer import engine_arguments
from guided_spec.errors import ConfigError, GuidedSpecError
from guided_spec.proposers import takes_draft

DEFAULT = "default"  # our proposer, where --proposer does not name one
_VLLM = "vllm"
_LONGEST = 2048  # tokens of a prompt and its text
_READY_SECONDS, _PAUSE, _TAIL = 300.0, 0.2, 1500
_STOP_SECONDS = 20.0  # to finish; vLLM's engine is a process of its own, which ends after that


@dataclass(frozen=True, slots=True)
class Subject:
    """What every server gets.

    model: a folder. draft: the folder of a draft model or EAGLE-3 head; None is the bundled model's
    own at ours, and none at vLLM's. queue: requests that may wait at ours; vLLM's takes any number.
    batch_size: texts that run at once. vllm: where that is.
    """

    model: str
    draft: str | None = None
    device: str = "cpu"
    dtype: str | None = None
    batch_size: int = 16
    queue: int = 1000
    num_draft_tokens: int = 5
    vllm: VllmEnvironment = field(default_factory=VllmEnvironment)

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its text, at all servers."""
        config = json.loads((Path(self.model) / "config.json").read_text(encoding="utf-8"))
        return min(_LONGEST, int(config["max_position_embeddings"]))


class Served(NamedTuple):
    """pid: of a server that runs here; None of one that ran already."""

    url: str
    pid: int | None


@contextmanager
def _leaving_when_told() -> Iterator[None]:
    """SIGTERM ends the block as an exception does, so that no server is left running."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def served(name: str, subject: Subject) -> Iterator[Served]:
    """A server that is ready for requests; it is stopped after the block, also by SIGTERM.

    name: a proposer of ours, ``DEFAULT``, "vllm" or "vllm:METHOD", or the address of a server that
    runs already.

    Raises GuidedSpecError, with the end of its output, for one that does not come up.
    """
    if name.startswith(("http://", "https://")):
        yield Served(name, None)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    kind, _, method = name.partition(":")
    environment = dict(os.environ)
    if kind == _VLLM:
        command = _vllm_command(method or VLLM_METHODS[0], subject)
        environment = vllm_environment(subject.vllm)
    else:
        command = _own_command(name, subject)
    with tempfile.TemporaryDirectory() as scratch, _leaving_when_told():
        folder = subject.vllm.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"serve_{name.translate(str.maketrans(':/+', '___'))}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # so that its own processes can be ended with it
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _await(url, process, name, log)
            yield Served(url, process.pid)
        finally:
            _stop(process)


def _own_command(name: str, subject: Subject) -> list[str]:
    options: dict[str, Any] = {
        "model": subject.model,
        "proposer": None if name == DEFAULT else name,
        "draft": subject.draft if name == DEFAULT or takes_draft(name) else None,
        "num-draft-tokens": subject.num_draft_tokens,
        "device": subject.device,
        "dtype": subject.dtype,
        "max-model-len": subject.longest,
        "max-batch-size": subject.batch_size,
        "max-queue": subject.queue,
        "max-connections": subject.queue + subject.batch_size + 100,
    }
    command = [sys.executable, "-m", "guided_spec.cli.main", "serve", "--no-playground"]
    return command + _flags(options)


def _vllm_command(method: str, subject: Subject) -> list[str]:
    """Of vLLM's own server; its engine is set up as everywhere in these benchmarks."""
    if method not in VLLM_METHODS:
        raise ConfigError("servers", f"{_VLLM}:{method}", f"methods are {', '.join(VLLM_METHODS)}")
    if method == "eagle3" and subject.draft is None:
        raise ConfigError("servers", f"{_VLLM}:{method}", "needs --draft, the folder of its head")
    plan = {
        "model": subject.model,
        "eagle3": subject.draft,
        "method": method,
        "num_draft_tokens": subject.num_draft_tokens,
        "max_model_len": subject.longest,
        "memory_share": subject.vllm.memory_share,
        "cells": [{"batch": subject.batch_size}],
    }
    options = {key.replace("_", "-"): value for key, value in engine_arguments(plan).items()}
    python = subject.vllm.python or sys.executable
    # -P: the folder that this is started in must not hide what vLLM imports.
    command = [python, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    return [*command, "--disable-uvicorn-access-log", *_flags(options)]


def _flags(options: Mapping[str, Any]) -> list[str]:
    """As a command takes them: None and False are left out, records are JSON."""
    flags = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        flags += [f"--{name}", text]
    return flags


def _await(url: str, process: subprocess.Popen[bytes], name: str, log: Path) -> None:
    end = time.monotonic() + _READY_SECONDS
    while not _is_up(url):
        if process.poll() is not None or time.monotonic() > end:
            tail = log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
            raise GuidedSpecError(f"the server {name} did not come up: {tail}")
        time.sleep(_PAUSE)


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
    with suppress(ProcessLookupError):  # nothing of it is left
        end_group(process)
