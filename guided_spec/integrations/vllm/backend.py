"""vLLM's grammar backend, as one of this package: what it compiles is what vLLM enforces."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from guided_spec.grammar.backends.xgrammar import XGrammarBackend, XGrammarGrammar
from guided_spec.grammar.completion.rules import source_of
from guided_spec.grammar.isolation import Workers
from guided_spec.grammar.limits import GrammarLimits, TableLimits
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarKind, GrammarSpec
from guided_spec.grammar.tables.tabled import TabledGrammar, TableMaker
from guided_spec.grammar.tables.token_table import TokenTable
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.integrations.patches import Patch
from guided_spec.integrations.vllm.reasoning import Reasoning, ReasoningSpan

_KINDS: dict[str, GrammarKind] = {
    "JSON": "json_schema",
    "JSON_OBJECT": "json_object",
    "REGEX": "regex",
    "CHOICE": "choice",
    "GRAMMAR": "ebnf",
    "STRUCTURAL_TAG": "structural_tag",
}
_OPTIONS = {kind: option for option, kind in _KINDS.items()}
_ANY_OBJECT = '{"type": "object"}'


class VllmGrammars:
    """A grammar backend: vLLM's xgrammar backend under one VllmConfig.

    config: vLLM's configuration, which names the model, its tokenizer and the whitespace style.

    Raises ModelError for a tokenizer that cannot be read.
    """

    def __init__(self, config: Any) -> None:
        tokenizers = importlib.import_module("vllm.tokenizers")
        backend = importlib.import_module("vllm.v1.structured_output.backend_xgrammar")
        self._types = importlib.import_module("vllm.v1.structured_output.backend_types")
        self._request = importlib.import_module("vllm.v1.structured_output.request")
        self.tokenizer = tokenizers.cached_tokenizer_from_config(model_config=config.model_config)
        vocab_size = config.model_config.get_vocab_size()
        self._backend = backend.XgrammarBackend(
            config, tokenizer=self.tokenizer, vocab_size=vocab_size
        )
        takes = inspect.signature(self._backend.compile_grammar).parameters
        self._ends_by_request = "stop_token_ids" in takes
        any_grammar = self._compile_own(GrammarSpec.json_object())
        self.vocabulary = Vocabulary.from_tokenizer(
            self.tokenizer, vocab_size, any_grammar.tokenizer_info.stop_token_ids
        )
        outputs = config.structured_outputs_config
        self._any_whitespace = not outputs.disable_any_whitespace
        self.reasoning = Reasoning.of(config, self.tokenizer)

    def spec_of(self, sampling_params: Any) -> GrammarSpec | None:
        """What a request's text must match, from its first token on or after ``span_of``.

        None for a free request, and for a grammar that another backend than xgrammar enforces.
        """
        params = getattr(sampling_params, "structured_outputs", None)
        if params is None or params.all_constraints_none():
            return None
        if params._backend != "xgrammar":
            return None
        option, source = self._request.get_structured_output_key(params)
        kind = _KINDS[option.name]
        is_json = kind in ("json_schema", "json_object")
        return GrammarSpec(kind, source, any_whitespace=is_json and self._any_whitespace)

    def span_of(self, sampling_params: Any, prompt: Sequence[int]) -> ReasoningSpan | None:
        """The reasoning after which a request's grammar begins; None where there is none."""
        return None if self.reasoning is None else self.reasoning.span(sampling_params, prompt)

    def stops_of(self, sampling_params: Any) -> frozenset[int]:
        """The tokens that end a request's text, where those are not the vocabulary's.

        From 0.28 on vLLM's grammars end with the stop tokens of the request.
        """
        if not self._ends_by_request:
            return frozenset()
        stops = frozenset(sampling_params.all_stop_token_ids)
        return frozenset() if stops == {*self.vocabulary.stop_token_ids} else stops

    def compile(self, spec: GrammarSpec) -> XGrammarGrammar:
        """``spec`` as vLLM compiles it. Raises whatever vLLM's backend raises."""
        compiled = self._compile_own(spec)
        style = self._compile_style(spec) if spec.any_whitespace else None
        excluded = frozenset() if spec.kind == "structural_tag" else self.vocabulary.without_bytes
        return XGrammarGrammar(compiled, style, excluded)

    def _compile_own(self, spec: GrammarSpec) -> Any:
        option = getattr(self._types.StructuredOutputOptions, _OPTIONS[spec.kind])
        return self._backend.compile_grammar(option, spec.source).ctx

    def _compile_style(self, spec: GrammarSpec) -> Any:
        """The same values with ``", "`` and ``": "``: where whitespace is free, one guess at it."""
        source = spec.source if spec.kind == "json_schema" else _ANY_OBJECT
        return self._backend.compiler.compile_json_schema(source, any_whitespace=False)


TEXTS_BEFORE_A_TABLE = 1  # of a grammar: what comes again gets one


class TabledGrammars:
    """Compiled grammars with tables, which another process makes of the rules xgrammar prints."""

    def __init__(self, grammars: VllmGrammars) -> None:
        self.vocabulary = grammars.vocabulary
        self._grammars = grammars
        self._workers = Workers(XGrammarBackend, grammars.vocabulary)
        self._maker = TableMaker(self._make, TEXTS_BEFORE_A_TABLE)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile ``spec``; the grammar has a table once there is one."""
        return self._maker.attach(spec, self._grammars.compile(spec))

    def _make(self, spec: GrammarSpec, part: CompiledGrammar) -> TokenTable:
        del spec
        printed = GrammarSpec("ebnf", source_of(part).text)
        table = self._workers.make_table(printed, GrammarLimits(), TableLimits())
        _ = table.fingerprint  # read now, in the maker's thread: a worker's step must not wait
        return table


def ending_with(grammar: CompiledGrammar, stops: frozenset[int]) -> CompiledGrammar:
    """``grammar`` with other tokens that end a text, and without a table."""
    inner = grammar.inner if isinstance(grammar, TabledGrammar) else grammar
    assert isinstance(inner, XGrammarGrammar)
    return replace(inner, stops=tuple(sorted(stops)), excluded=inner.excluded - stops)


GRAMMARS = (
    Patch("vllm.sampling_params", "StructuredOutputsParams",
          attributes="_backend all_constraints_none"),
    Patch("vllm.sampling_params", "SamplingParams", attributes="all_stop_token_ids"),
    Patch("vllm.v1.structured_output.request", "get_structured_output_key", "params"),
    Patch("vllm.v1.structured_output.backend_xgrammar", "XgrammarBackend.compile_grammar",
          "self request_type grammar_spec ..."),
    Patch("vllm.v1.structured_output.backend_xgrammar", "XgrammarBackend", attributes="compiler"),
)  # fmt: skip
