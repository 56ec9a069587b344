"""Who sent the request that is being served, as far as its key tells."""

from __future__ import annotations

from contextvars import ContextVar

__all__ = ["CALLER", "cache_salt"]

# A digest of the key; "" without keys. Set for each request before its endpoint runs.
CALLER: ContextVar[str] = ContextVar("caller", default="")


def cache_salt(asked: str | None) -> str | None:
    """The salt of the prefix cache: callers with different keys share no prompts.

    asked: the salt that the request names, which divides one caller's prompts further.
    """
    caller = CALLER.get()
    return f"{caller}:{asked or ''}" if caller else asked
