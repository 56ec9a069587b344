"""Guided speculative decoding inside LMDeploy's PyTorch engine: see ``plugin``."""

from __future__ import annotations

from guided_spec.integrations.lmdeploy.plugin import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
