"""A backend that does to its process what a compiler with a defect might do."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from guided_spec.errors import UnsupportedSchemaError
from guided_spec.grammar.spec import GrammarSpec

if TYPE_CHECKING:  # they load torch, and every new worker imports this module
    from guided_spec.grammar.protocol import CompiledGrammar, GrammarMatcher
    from guided_spec.grammar.vocabulary import Vocabulary

NO_VOCABULARY = cast("Vocabulary", None)

_PAD = "[ab]{1,300}"


def large(what: str) -> GrammarSpec:
    """A spec that is large at sight and makes the backend do ``what``."""
    return GrammarSpec.regex(what + _PAD)


class Compiled:
    """Nothing, compiled."""

    excluded: frozenset[int] = frozenset()
    memory_size_bytes = 0

    def new_matcher(self) -> GrammarMatcher:
        raise NotImplementedError

    def new_style_matcher(self) -> None:
        return None


def _perish(what: str) -> None:
    """Be killed: for "perish" always, for the path of a file once, which is gone then."""
    if what == "perish":
        os.kill(os.getpid(), signal.SIGKILL)
    if what.startswith("/"):
        with suppress(FileNotFoundError):
            os.unlink(what)
            os.kill(os.getpid(), signal.SIGKILL)


class HostileBackend:
    """Does what the source begins with, and remembers it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.compiled: list[str] = []

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        what = spec.source.removesuffix(_PAD)
        self.compiled.append(what)
        _perish(what)
        match what:
            case "hang":
                time.sleep(1_000)
            case "spin":
                while True:
                    pass
            case "exit":
                os._exit(3)
            case "crash":
                ctypes.string_at(0)
            case "swell":
                _ = [bytearray(2**24) for _ in range(10_000)]
            case "fault":
                raise KeyError("a defect")
            case "refuse":
                raise UnsupportedSchemaError("not that")
        return Compiled()
