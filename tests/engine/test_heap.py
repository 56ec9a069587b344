"""The garbage collector while something is timed."""

from __future__ import annotations

import gc
import weakref

import pytest

from guided_spec.engine.process import frozen_heap


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
