"""Grammar-constrained speculative decoding for PyTorch.

Every public name is here. A name is imported when it is first used, so that ``import guided_spec``
alone loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from guided_spec.config import EngineConfig
    from guided_spec.core import DecodeBatch, Proposer, ProposerContext, from_propose
    from guided_spec.engine.chat import ChatCompletion, ChatOutput
    from guided_spec.engine.llm import LLM
    from guided_spec.engine.outputs import (
        ChoiceOutput,
        Chunk,
        Completion,
        RequestOutput,
        RequestStats,
        RoutedExperts,
    )
    from guided_spec.errors import (
        BudgetTooSmallError,
        ConfigError,
        GrammarCompileError,
        GrammarDeadEndError,
        GrammarError,
        GrammarStateError,
        GrammarTooSlowError,
        GrammarWorkerError,
        GuidedSpecError,
        ModelError,
        NoTokenLeftError,
        OtherProcessError,
        PromptError,
        PromptTooLongError,
        RequestCancelledError,
        RequestError,
        TextCutShortError,
        TrainingStoppedError,
        UnknownOptionError,
        UnknownProposerError,
        UnsatisfiableGrammarError,
        UnsupportedSchemaError,
        VocabularyMismatchError,
    )
    from guided_spec.grammar.backends.guarded import check_grammar_backend
    from guided_spec.grammar.backends.registry import GRAMMAR_BACKENDS, register_grammar_backend
    from guided_spec.grammar.protocol import CompiledGrammar, GrammarBackend, GrammarMatcher
    from guided_spec.grammar.spec import GrammarSpec
    from guided_spec.grammar.tools.format import ToolCall
    from guided_spec.grammar.vocabulary import Vocabulary
    from guided_spec.integrations.transformers.generate import generate
    from guided_spec.integrations.transformers.processor import GrammarLogitsProcessor
    from guided_spec.masks.lookahead import Lookahead
    from guided_spec.ops.sampling.rejection import rejection_sample
    from guided_spec.proposers import PROPOSERS, register_proposer
    from guided_spec.step import commit, speculative_step
    from guided_spec.types import (
        Accepted,
        Draft,
        Noise,
        SamplingParams,
        TokenLogprobs,
        TopLogprob,
    )

__all__ = [
    "GRAMMAR_BACKENDS",
    "LLM",
    "PROPOSERS",
    "Accepted",
    "BudgetTooSmallError",
    "ChatCompletion",
    "ChatOutput",
    "ChoiceOutput",
    "Chunk",
    "CompiledGrammar",
    "Completion",
    "ConfigError",
    "DecodeBatch",
    "Draft",
    "EngineConfig",
    "GrammarBackend",
    "GrammarCompileError",
    "GrammarDeadEndError",
    "GrammarError",
    "GrammarLogitsProcessor",
    "GrammarMatcher",
    "GrammarSpec",
    "GrammarStateError",
    "GrammarTooSlowError",
    "GrammarWorkerError",
    "GuidedSpecError",
    "Lookahead",
    "ModelError",
    "NoTokenLeftError",
    "Noise",
    "OtherProcessError",
    "PromptError",
    "PromptTooLongError",
    "Proposer",
    "ProposerContext",
    "RequestCancelledError",
    "RequestError",
    "RequestOutput",
    "RequestStats",
    "RoutedExperts",
    "SamplingParams",
    "TextCutShortError",
    "TokenLogprobs",
    "ToolCall",
    "TopLogprob",
    "TrainingStoppedError",
    "UnknownOptionError",
    "UnknownProposerError",
    "UnsatisfiableGrammarError",
    "UnsupportedSchemaError",
    "Vocabulary",
    "VocabularyMismatchError",
    "check_grammar_backend",
    "commit",
    "from_propose",
    "generate",
    "register_grammar_backend",
    "register_proposer",
    "rejection_sample",
    "speculative_step",
]

__version__: str

_NAMES = {
    "config": "EngineConfig",
    "core": "DecodeBatch Proposer ProposerContext from_propose",
    "engine.chat": "ChatCompletion ChatOutput",
    "engine.llm": "LLM",
    "engine.outputs": "ChoiceOutput Chunk Completion RequestOutput RequestStats RoutedExperts",
    "grammar.backends.guarded": "check_grammar_backend",
    "grammar.backends.registry": "GRAMMAR_BACKENDS register_grammar_backend",
    "grammar.protocol": "CompiledGrammar GrammarBackend GrammarMatcher",
    "grammar.spec": "GrammarSpec",
    "grammar.tools.format": "ToolCall",
    "grammar.vocabulary": "Vocabulary",
    "integrations.transformers": "GrammarLogitsProcessor generate",
    "masks.lookahead": "Lookahead",
    "ops.sampling.rejection": "rejection_sample",
    "proposers": "PROPOSERS register_proposer",
    "step": "commit speculative_step",
    "types": "Accepted Draft Noise SamplingParams TokenLogprobs TopLogprob",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("guided-spec")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'errors')}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
