"""The plugin for SGLang: see ``plugin``."""

from __future__ import annotations

from guided_spec.integrations.sglang.plugin import register

__all__ = ["register"]
