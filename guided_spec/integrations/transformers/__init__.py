"""transformers' own generate, run by this engine: see ``generate``."""

from __future__ import annotations

from guided_spec.integrations.transformers.generate import generate, release
from guided_spec.integrations.transformers.processor import GrammarLogitsProcessor

__all__ = ["GrammarLogitsProcessor", "generate", "release"]
