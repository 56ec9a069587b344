"""What is alive in an engine that has nothing to do: objects, slots, threads, bytes."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
import xgrammar

from benchmarks.soak.proposer import TurnTaking
from guided_spec.core import DecodeBatch
from guided_spec.engine.llm import LLM
from guided_spec.engine.request import Request
from guided_spec.engine.runner import EngineWorker
from guided_spec.grammar.backends.llguidance import LLGuidanceMatcher
from guided_spec.grammar.text.state import TextState
from guided_spec.masks.constraint import Constraint, Fork
from guided_spec.masks.lookahead import Lookahead

_OF_A_REQUEST = {
    Request: "requests",
    Constraint: "constraints",
    Fork: "forks",
    xgrammar.GrammarMatcher: "matchers of xgrammar",
    LLGuidanceMatcher: "matchers of llguidance",
    TextState: "texts of grammars",
    Lookahead: "lookaheads",
    DecodeBatch: "batches",
}
_TENSOR_SLACK = 16  # caches that are filled once something is asked for the first time
_THREAD_SLACK = 8  # the pools that fill masks, which begin once there are many rows
_PATIENCE = 10.0  # seconds until a thread has ended what it was at
_STATM = Path("/proc/self/statm")
_TASKS = Path("/proc/self/task")


class Census(NamedTuple):
    """Counts of one moment.

    alive: objects that belong to one request or step, by kind. busy_slots: of the engine.
    held_slots: those for which the proposers have not been told that their requests ended.
    threads: Python's; native_threads: all of the process, 0 where that is not known.
    cached_bytes: of compiled grammars; cache_limit: what they may take.
    resident_bytes: of the process, 0 where that is not known.
    """

    alive: dict[str, int]
    busy_slots: int
    held_slots: int
    tensors: int
    threads: int
    native_threads: int
    cached_bytes: int
    cache_limit: int
    resident_bytes: int


def take_census(llm: LLM, proposer: TurnTaking, others: Counter[type]) -> Census:
    """Wait until the engine has nothing to do, and count.

    others: what was alive before this engine was made, not counted: the program may have more.
    """
    worker, queue = llm._runner, llm._grammars
    assert isinstance(worker, EngineWorker)
    engine = worker.setup.engine
    deadline = time.monotonic() + _PATIENCE
    while engine.has_work and time.monotonic() < deadline:
        time.sleep(0.005)
    found = count_alive() - others
    while any(found[kind] for kind in _OF_A_REQUEST) and time.monotonic() < deadline:
        time.sleep(0.05)  # the engine's thread may be on its way out of its last step
        found = count_alive() - others
    return Census(
        alive={name: found[kind] for kind, name in _OF_A_REQUEST.items()},
        busy_slots=engine.load.running,
        held_slots=len(proposer.held),
        tensors=found[torch.Tensor],
        threads=threading.active_count(),
        native_threads=len(os.listdir(_TASKS)) if _TASKS.exists() else 0,
        cached_bytes=queue.cached_bytes,
        cache_limit=queue.cache_bytes,
        resident_bytes=_resident_bytes(),
    )


def find_leaks(before: Census, after: Census, growth: int) -> list[str]:
    """What there is more of than there may be.

    before: after a warm-up. growth: resident bytes that may come on top.
    """
    rows = [(f"{name} alive", count, 0) for name, count in after.alive.items()]
    rows += [
        ("busy slots", after.busy_slots, 0),
        ("slots that proposers hold", after.held_slots, 0),
        ("tensors", after.tensors, before.tensors + _TENSOR_SLACK),
        ("threads", after.threads, before.threads + _THREAD_SLACK),
        ("native threads", after.native_threads, before.native_threads + _THREAD_SLACK),
        ("bytes of cached grammars", after.cached_bytes, after.cache_limit),
        ("resident bytes", after.resident_bytes, before.resident_bytes + growth),
    ]
    return [f"{count} {name}, at most {most}" for name, count, most in rows if count > most]


def count_alive() -> Counter[type]:
    """Objects of this process, by type: those that a census counts."""
    gc.collect()
    kinds = {*_OF_A_REQUEST, torch.Tensor}
    return Counter(kind for each in gc.get_objects() if (kind := type(each)) in kinds)


def _resident_bytes() -> int:
    if not _STATM.exists():
        return 0
    return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
