"""vLLM's own grammars, compiled a second time where the drafts are made.

vLLM keeps its grammars in the scheduler's process; a worker never sees one. It does see what each
request asked for. Here that is compiled by vLLM's own xgrammar backend, with the same settings, so
what is forced here is forced there.
"""

from __future__ import annotations

import importlib
from typing import Any

from guided_spec.grammar.spec import GrammarKind, GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.grammar.xgrammar import XGrammarGrammar

__all__ = ["VllmGrammars"]

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
        any_grammar = self._compile_own(GrammarSpec.json_object())
        self.vocabulary = Vocabulary.from_tokenizer(
            self.tokenizer, vocab_size, any_grammar.tokenizer_info.stop_token_ids
        )
        self._without_bytes = frozenset(
            token for token, data in enumerate(self.vocabulary.token_bytes) if not data
        ) - {*self.vocabulary.stop_token_ids}
        outputs = config.structured_outputs_config
        self._any_whitespace = not outputs.disable_any_whitespace
        # A grammar that binds behind reasoning: where that ends, only the scheduler knows.
        self._is_late = bool(outputs.reasoning_parser) and not outputs.enable_in_reasoning

    def spec_of(self, sampling_params: Any) -> GrammarSpec | None:
        """What a request's text must match from its first token on.

        None for a free request, for a grammar that binds behind reasoning, and for one that another
        backend than xgrammar enforces.
        """
        params = getattr(sampling_params, "structured_outputs", None)
        if params is None or params.all_constraints_none() or self._is_late:
            return None
        if params._backend != "xgrammar":
            return None
        option, source = self._request.get_structured_output_key(params)
        kind = _KINDS[option.name]
        is_json = kind in ("json_schema", "json_object")
        return GrammarSpec(kind, source, any_whitespace=is_json and self._any_whitespace)

    def compile(self, spec: GrammarSpec) -> XGrammarGrammar:
        """``spec`` as vLLM compiles it. Raises whatever vLLM's backend raises."""
        compiled = self._compile_own(spec)
        style = self._compile_style(spec) if spec.any_whitespace else None
        excluded = frozenset() if spec.kind == "structural_tag" else self._without_bytes
        return XGrammarGrammar(compiled, style, excluded)

    def _compile_own(self, spec: GrammarSpec) -> Any:
        option = getattr(self._types.StructuredOutputOptions, _OPTIONS[spec.kind])
        return self._backend.compile_grammar(option, spec.source).ctx

    def _compile_style(self, spec: GrammarSpec) -> Any:
        """The same values with ``", "`` and ``": "``: where whitespace is free, one guess at it."""
        source = spec.source if spec.kind == "json_schema" else _ANY_OBJECT
        return self._backend.compiler.compile_json_schema(source, any_whitespace=False)
