"""One head of each kind for the bundled target, trained on the same tokens, and widened with it.

Each is trained by ``guided-spec train`` in a process of its own, all at once. What a run's time
does not suffice for is stopped, and goes on in the next run. The number of tokens is the same in
the end, or there is no head.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.blocks.clock import Clock
from benchmarks.widening.models import write_wide, write_wide_head
from benchmarks.widening.shape import LLAMA_8B, Shape
from guided_spec.bundled import BUNDLED
from guided_spec.training.run import REPORT
from guided_spec.training.trainer import CHECKPOINTS
from tools.bundled_models.heads import write_documents

RUN = "from guided_spec.cli import run; run()"
WAIT = 0.5  # between looks at the processes
GRACE = 25.0  # for one that was told to stop, to write where it stands

CHAIN = {"ttt_steps": 5, "aux_layers": (1, 3, 5), "draft_vocab_size": 2048}
BLOCK = {"ttt_steps": 7, "aux_layers": (1, 3, 5), "anchors": 32}
RECIPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "eagle3": CHAIN,
        "p_eagle": {**BLOCK, "draft_vocab_size": 2048},
        "dflash": BLOCK,
        "dspark": BLOCK,
    }
)
"""Options of the algorithms. Layers are as many as in published heads, which is the default."""


class HeadPlan(NamedTuple):
    """What is trained, and how.

    tokens: of each head, padding included. documents: that are drawn. target, data: None for the
    bundled target and drawn documents. shape: what is widened to. device: None for CUDA where
    there is one. workers: processes of each head that fill masks of documents.
    """

    methods: Sequence[str] = tuple(RECIPES)
    tokens: int = 8_000_000
    batch_tokens: int = 16_384
    documents: int = 30_000
    target: Path | None = None
    data: Path | None = None
    shape: Shape = LLAMA_8B
    learning_rate: float = 1e-3
    device: str | None = None
    workers: int = 3
    recipes: Mapping[str, Mapping[str, Any]] = RECIPES


class TrainedHead(NamedTuple):
    """One head. acceptance_length: tokens per forward, estimated on documents that were kept back.

    problem: why there is none.
    """

    method: str
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    peak_cuda_bytes: int | None = None
    acceptance_length: float | None = None
    problem: str | None = None


def train_heads(
    work: Path, plan: HeadPlan, clock: Clock, report: Callable[[str], None]
) -> list[TrainedHead]:
    """Train what is not there yet, below ``work``; returns a record of each head."""
    missing = [name for name in plan.methods if not _is_trained(work, name)]
    if missing:
        data = plan.data or work / "documents.jsonl"
        if not data.is_file():
            report(f"train: drawing {plan.documents} documents")
            write_documents(data, plan.documents)
        _train_all(work, plan, data, missing, clock, report)
    return [_read(work, name) for name in plan.methods]


def widen(
    work: Path, plan: HeadPlan, clock: Clock, report: Callable[[str], None]
) -> dict[str, Path]:
    """Write the target and all trained heads in the shape of ``plan``; returns the heads' folders.

    What is there already stays, and nothing more is begun once the time is over.
    """
    if not _is_whole(work / "target"):
        report("widen: the target")
        write_wide(work, target=plan.target, shape=plan.shape)
    for name in plan.methods:
        folder = work / "wide" / name
        if _is_trained(work, name) and not _is_whole(folder) and clock.left > 0:
            report(f"widen: {name}")
            write_wide_head(folder, _folder(work, name), target=plan.target, shape=plan.shape)
    return head_folders(work, plan.methods)


def head_folders(work: Path, methods: Sequence[str]) -> dict[str, Path]:
    """The folders of the widened heads that are there."""
    found = {name: work / "wide" / name for name in methods}
    return {name: folder for name, folder in found.items() if _is_whole(folder)}


def _is_whole(folder: Path) -> bool:
    """Whether a model was written: its only file, or the index, which comes after all others."""
    names = ("model.safetensors", "model.safetensors.index.json")
    return any((folder / name).is_file() for name in names)


def _folder(work: Path, name: str) -> Path:
    return work / "small" / name


def _is_trained(work: Path, name: str) -> bool:
    return (_folder(work, name) / REPORT).is_file()


def _read(work: Path, name: str) -> TrainedHead:
    if not _is_trained(work, name):
        log = work / f"{name}.log"
        return TrainedHead(name, problem=f"not trained to its end; {log.name} says how far")
    found = json.loads((_folder(work, name) / REPORT).read_text(encoding="utf-8"))
    kept = ("steps", "tokens", "seconds", "tokens_per_second", "peak_cuda_bytes")
    own: dict[str, Any] = {field: found[field] for field in kept}
    return TrainedHead(name, **own, acceptance_length=found["heldout"].get("acceptance_length"))


def _train_all(
    work: Path,
    plan: HeadPlan,
    data: Path,
    names: Sequence[str],
    clock: Clock,
    report: Callable[[str], None],
) -> None:
    began, running = time.monotonic(), dict[str, subprocess.Popen[bytes]]()
    try:
        for name in names:
            report(f"train: {name}")
            with (work / f"{name}.log").open("ab") as log:
                running[name] = subprocess.Popen(
                    _command(work, plan, data, name), stdout=log, stderr=subprocess.STDOUT
                )
        while running and clock.left > GRACE:
            for name in [name for name, process in running.items() if process.poll() is not None]:
                code = running.pop(name).returncode
                report(f"train: {name} ended with {code} after {time.monotonic() - began:.0f} s")
            time.sleep(WAIT)
    finally:
        for process in running.values():
            process.terminate()
        for name, process in running.items():
            report(f"train: {name} is stopped, to go on in the next run")
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _command(work: Path, plan: HeadPlan, data: Path, name: str) -> list[str]:
    steps = max(1, plan.tokens // plan.batch_tokens)
    options: dict[str, Any] = {
        "algorithm": name,
        "target": plan.target or BUNDLED,
        "data": data,
        "output": _folder(work, name),
        "max_steps": steps,
        "epochs": 1000,  # the steps end it
        "batch_tokens": plan.batch_tokens,
        "learning_rate": plan.learning_rate,
        "clip_norm": 1.0,
        "weight_decay": 0.01,
        "max_length": 512,
        "heldout_share": 0.01,
        "target_dtype": "float32",
        "eval_every": 0,
        "save_every": 0,
        "log_every": max(1, steps // 20),
        "decode_limit": 0,
        "tracker": "none",
        "workers": plan.workers,
        **({} if plan.device is None else {"device": plan.device}),
        **plan.recipes[name],
    }
    flags = ["--resume"] if (_folder(work, name) / CHECKPOINTS).is_dir() else []
    for option, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        for one in values:
            flags += [f"--{option.replace('_', '-')}", str(one)]
    return [sys.executable, "-c", RUN, "train", *flags]
