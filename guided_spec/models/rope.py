"""What a configuration says of its rotary embedding, before its module is asked."""

from __future__ import annotations

from typing import Any

STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # the same for texts of any length
GROWING_ROPE = ("dynamic", "longrope")  # depend on the longest text of a batch


def has_static_rope(config: Any, length: int | None = None) -> bool:
    """Whether all texts of up to ``length`` tokens have the same rotation, in all layers.

    length: None for any.
    """
    return all(
        one.get("rope_type", "default") in STATIC_ROPE or _is_short(one, config, length)
        for one in _ropes(config)
    )


def has_whole_rope(config: Any) -> bool:
    """Whether whole heads are rotated, in all layers."""
    return all(one.get("partial_rotary_factor", 1.0) == 1.0 for one in _ropes(config))


def growing_rope(text_config: Any) -> tuple[str, int | None]:
    """The kind of an embedding that grows and up to where it does not; None for other kinds."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "")
    return kind, _limit(parameters, text_config) if kind in GROWING_ROPE else None


def _is_short(rope: dict[str, Any], config: Any, length: int | None) -> bool:
    kind = rope.get("rope_type", "default")
    return kind in GROWING_ROPE and length is not None and length <= _limit(rope, config)


def _limit(rope: dict[str, Any], config: Any) -> int:
    """Tokens of a text up to which the rotation does not depend on it."""
    limit: int = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    return limit


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The parameters of the rotary embedding, or those of each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [one for one in rope.values() if isinstance(one, dict)] or [rope]
