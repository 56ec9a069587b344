"""A text that ends, or is not wanted any more, holds no keys and values."""

from __future__ import annotations

import threading
import time

from guided_spec.engine.llm import LLM
from guided_spec.types import SamplingParams
from tests.engine.conftest import Spy
from tests.tiny_llm import make_llm

LONG = SamplingParams(max_tokens=150, ignore_eos=True)
SHORT = SamplingParams(max_tokens=3)
A_WHILE = 10.0  # seconds: a text is reported a moment before its slot is empty


def used_blocks_at_last(llm: LLM) -> int:
    end = time.monotonic() + A_WHILE
    while llm.load.used_blocks and time.monotonic() < end:
        time.sleep(0.005)
    return llm.load.used_blocks


def test_a_client_that_leaves_gives_its_blocks_back(spy: Spy) -> None:
    spy.permits = threading.Semaphore(2)
    with make_llm("llama", "spy", kernels="packed") as llm:
        stream = llm.stream(["A", "B"], LONG)
        next(stream)
        assert llm.load.used_blocks == 2
        stream.close()  # type: ignore[attr-defined]  # what leaving the loop does
        spy.open()
        llm.generate("A", SHORT)
        assert used_blocks_at_last(llm) == 0
