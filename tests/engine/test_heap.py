"""What a process that serves one model does with the interpreter."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest

from guided_spec.engine.process import frozen_heap, short_turns


class Node:
    """Refers to itself: only the collector frees it."""

    def __init__(self) -> None:
        self.own = self


def test_only_new_objects_are_looked_at() -> None:
    old = weakref.ref(Node())
    with frozen_heap():
        assert old() is None  # collected before
        assert gc.get_freeze_count() > 1000
        new = weakref.ref(Node())
        gc.collect()
        assert new() is None
    assert gc.get_freeze_count() == 0


def test_what_fails_inside_thaws_it() -> None:
    with pytest.raises(ZeroDivisionError), frozen_heap():
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0


def test_turns_are_short_inside_alone() -> None:
    before = sys.getswitchinterval()
    with short_turns():
        assert sys.getswitchinterval() == pytest.approx(0.001)
    assert sys.getswitchinterval() == pytest.approx(before)
