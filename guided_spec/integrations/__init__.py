"""Adapters that bring guided speculative decoding into other libraries."""

from __future__ import annotations

__all__: list[str] = []
