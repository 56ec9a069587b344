"""Grammars that repeat something more than 128 times: compiled where vLLM's compiler gives up.

xgrammar 0.2.8 with its rule cache, which vLLM turns on, does not compile an automaton with larger
counts: ``^[a-z]{129}$`` in a schema, or the characters of a string with ``maxLength``. Without the
cache it does. Here what failed so is compiled once more, by compilers without it, which remember
whole grammars.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import xgrammar

from guided_spec.grammar.backends.xgrammar import CACHE_BUG
from guided_spec.integrations.patches import Patch
from guided_spec.integrations.vllm.plugin import count

_PLACE = "guided_spec_compilers"
_MOST_REMEMBERED = 256


class Remembering:
    """An xgrammar compiler without its caches; whole grammars are remembered.

    compiler: one with them, for the same tokens.
    """

    def __init__(self, compiler: xgrammar.GrammarCompiler) -> None:
        info = compiler.compile_grammar('root ::= "a"').tokenizer_info
        own = xgrammar.GrammarCompiler(info, max_threads=8, cache_enabled=False)
        remember = functools.lru_cache(maxsize=_MOST_REMEMBERED)
        self.compile_json_schema = remember(own.compile_json_schema)
        self.compile_grammar = remember(own.compile_grammar)
        self.compile_regex = remember(own.compile_regex)
        self.compile_lark = remember(own.compile_lark)
        self.compile_structural_tag = own.compile_structural_tag  # tags may come as lists


def compile_again(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``XgrammarBackend.compile_grammar``: what its compilers fail at is compiled anew."""

    @functools.wraps(original)
    def compile_grammar(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except RuntimeError as error:
            if CACHE_BUG not in str(error):
                raise
        count("counts")
        if _PLACE not in vars(self):
            setattr(self, _PLACE, _without_cache(self))
        return original(getattr(self, _PLACE), *args, **kwargs)

    return compile_grammar


def _without_cache(backend: Any) -> Any:
    """A copy of ``backend`` whose xgrammar compilers have no rule cache."""
    other = copy.copy(backend)
    for name, value in vars(backend).items():
        if isinstance(value, xgrammar.GrammarCompiler):
            setattr(other, name, Remembering(value))
    return other


PATCHES = (
    Patch(
        "vllm.v1.structured_output.backend_xgrammar",
        "XgrammarBackend.compile_grammar",
        "self request_type grammar_spec ...",
        compile_again,
    ),
    Patch("vllm.v1.structured_output.backend_xgrammar", "XgrammarBackend", attributes="compiler"),
)
PARTS = {"": PATCHES}
