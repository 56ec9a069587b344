"""Where a request's reasoning ends, so that its grammar begins: as vLLM's scheduler finds it.

With a reasoning parser, and without ``enable_in_reasoning``, a grammar of vLLM's binds from the
token after the reasoning on. vLLM's parser says where that is, and it may depend on what the front
end said of the request. Only the scheduler gets that; here it is written where workers read it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from guided_spec.integrations.patches import OneOf, Patch

_REPORTED = "guided_spec_reasoning"  # in the extra_args of a request's SamplingParams
_MANAGER = "vllm.v1.structured_output"


class Bounds(NamedTuple):
    """Positions in a list of tokens, one more than its length if the reasoning continues after it.

    grammar: the first token that the grammar reads. masks: the first that it forbids some of. The
    two differ where a token of the grammar's own ends the reasoning: it was drawn freely.
    """

    grammar: int
    masks: int


class Reasoning:
    """The parser of one VllmConfig; ``of`` gives None where grammars bind from the start.

    Raises whatever vLLM raises for a parser that it does not know.
    """

    def __init__(self, config: Any, tokenizer: Any) -> None:
        outputs = config.structured_outputs_config
        parsers: Any = importlib.import_module("vllm.reasoning").ReasoningParserManager
        if outputs.reasoning_parser_plugin:
            parsers.import_reasoning_parser(outputs.reasoning_parser_plugin)
        self._parser = parsers.get_reasoning_parser(outputs.reasoning_parser)
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, config: Any, tokenizer: Any) -> Reasoning | None:
        outputs = config.structured_outputs_config
        if not outputs.reasoning_parser or outputs.enable_in_reasoning:
            return None
        return cls(config, tokenizer)

    def span(self, sampling_params: Any, prompt: Sequence[int]) -> ReasoningSpan | None:
        """The reasoning of a request; None where it has ended already."""
        has_ended, options = (sampling_params.extra_args or {}).get(_REPORTED, (None, None))
        parser = self._parser(tokenizer=self._tokenizer, **(options or {}))
        if has_ended is None:
            has_ended = parser.is_reasoning_end([*prompt])
        return None if has_ended else ReasoningSpan(parser, [*prompt])


class ReasoningSpan:
    """The reasoning of one request, as it is written.

    parser: vLLM's, of this request. prompt: its tokens.
    """

    def __init__(self, parser: Any, prompt: Sequence[int]) -> None:
        self._parser = parser
        self._prompt = prompt
        self._read = len(prompt)
        self._start: int | None = None

    def start_in(self, text: Sequence[int]) -> int | None:
        """Where in a text, prompt and output, the grammar begins; None while it has not ended.

        A text continues that of the last call: only its new tokens are read.
        """
        if self._start is None and len(text) > self._read:
            before, new = list(text[: self._read]), list(text[self._read :])
            found = self.bounds(before, new).grammar
            if found <= len(new):
                self._start = self._read + found
            self._read = len(text)
        return self._start

    def again(self) -> ReasoningSpan:
        """A span of the same request that reads its output from the beginning."""
        return ReasoningSpan(self._parser, self._prompt)

    def bounds(self, before: list[int], tokens: list[int]) -> Bounds:
        """Where in ``tokens``, which come after the text ``before``, the reasoning ends."""
        manager: Any = importlib.import_module(_MANAGER).StructuredOutputManager
        if hasattr(manager, "should_advance"):
            return self._bounds_by_token(before, tokens)
        request = SimpleNamespace(
            all_token_ids=before,
            prompt_token_ids=self._prompt,
            structured_output_request=SimpleNamespace(reasoning_ended=False),
        )
        own = SimpleNamespace(enable_in_reasoning=False, _get_reasoner=lambda _: self._parser)
        if hasattr(manager, "_get_constraint_bounds"):
            return Bounds(*manager._get_constraint_bounds(own, request, tokens))
        start = manager._get_constraint_start(own, request, tokens)
        return Bounds(start, start)

    def _bounds_by_token(self, before: list[int], tokens: list[int]) -> Bounds:
        """Older releases ask the parser token by token, where they fill a step's masks."""
        end, text = len(tokens) + 1, [*before, *tokens]
        if not self._parser.is_reasoning_end_streaming(text, tokens):
            return Bounds(end, end)
        for at, token in enumerate(tokens):
            part = text[: len(before) + at + 1]
            if self._parser.is_reasoning_end_streaming(part, [token]):
                return Bounds(at + 1, at + 1)
        return Bounds(end - 1, end - 1)


def report_reasoning(original: Callable[..., None]) -> Callable[..., None]:
    """Around ``StructuredOutputManager.grammar_init``: pass on what the scheduler knows."""

    @functools.wraps(original)
    def grammar_init(self: Any, request: Any) -> None:
        asked = request.structured_output_request
        if asked is not None and self.reasoner_cls is not None:
            params = request.sampling_params
            known = (asked.reasoning_ended, asked.reasoning_parser_kwargs)
            params.extra_args = {**(params.extra_args or {}), _REPORTED: known}
        original(self, request)

    return grammar_init


REPORTS = (
    Patch(_MANAGER, "StructuredOutputManager.grammar_init", "self request", report_reasoning),
    Patch(_MANAGER, "StructuredOutputManager", attributes="reasoner_cls"),
    Patch("vllm.v1.structured_output.request", "StructuredOutputRequest",
          attributes="reasoning_ended reasoning_parser_kwargs"),
    Patch("vllm.sampling_params", "SamplingParams", attributes="extra_args"),
)  # fmt: skip
REASONING = (
    Patch("vllm.reasoning.abs_reasoning_parsers", "ReasoningParser",
          attributes="is_reasoning_end is_reasoning_end_streaming"),
    Patch("vllm.reasoning.abs_reasoning_parsers", "ReasoningParserManager",
          attributes="get_reasoning_parser import_reasoning_parser"),
    OneOf((
        (Patch(_MANAGER, "StructuredOutputManager.should_advance", "self request ..."),),
        (Patch(_MANAGER, "StructuredOutputManager._get_constraint_bounds",
               "self request spec_tokens ..."),),
        (Patch(_MANAGER, "StructuredOutputManager._get_constraint_start",
               "self request spec_tokens ..."),),
    )),
)  # fmt: skip
