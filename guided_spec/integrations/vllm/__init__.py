"""The plugin for vLLM: see ``plugin``."""

from __future__ import annotations

from guided_spec.integrations.vllm.plugin import register

__all__ = ["register"]
