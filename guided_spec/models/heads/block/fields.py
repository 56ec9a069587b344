"""The kinds of values that a block head's config.json may have; others are refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from guided_spec.errors import ModelError

_SWITCHES = (
    "causal",
    "causal_head",
    "is_causal",
    "lilicorr_enabled",
    "sample_from_anchor",
    "shift_label",
    "sliding_window_non_causal",
    "use_swa",
)
_LISTS = ("aux_hidden_state_layer_ids", "target_layer_ids")
_SECTIONS = ("dflash_config", "transformer_layer_config")


class _Range(NamedTuple):
    """A number that is at least ``low``, or above it; whole or not."""

    low: int = 0
    is_whole: bool = True
    is_above: bool = False

    def __str__(self) -> str:
        what = "a whole number" if self.is_whole else "a number"
        return f"{what} above {self.low}" if self.is_above else f"{self.low} or more, {what}"

    def holds(self, value: object) -> bool:
        kinds = int if self.is_whole else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool) or not math.isfinite(value):
            return False
        return value > self.low if self.is_above else value >= self.low


_COUNT, _SIZE, _FACTOR = _Range(), _Range(1), _Range(is_whole=False)
_NUMBERS = {
    "block_size": _SIZE,
    "conv_group_size": _COUNT,
    "conv_kernel_size": _COUNT,
    "draft_vocab_size": _COUNT,
    "emb_dim": _SIZE,
    "final_logit_softcapping": _FACTOR,
    "gru_hidden_dim": _SIZE,
    "input_embedding_scale": _FACTOR,
    "markov_rank": _COUNT,
    "mask_token_id": _COUNT,
    "output_multiplier": _FACTOR,
    "pure_draft_prefix_len": _COUNT,
    "selector_rank": _COUNT,
    "selector_top_k": _SIZE,
    "swa_window_size": _COUNT,
}
_FRACTIONS = ("mlp_ratio", "vector_eps", "logit_scale")


def require_fields(config: Mapping[str, Any], source: str) -> None:
    """Look at what a section of config.json says; what it leaves out, or has as null, is right.

    Raises ModelError, naming ``source`` and the field, for a value of another kind.
    """
    for name, value in config.items():
        expected = None if value is None else _expected(name, value)
        if expected is not None:
            raise ModelError(
                f"{source}: {name}: expected {expected}, found {value!r:.80}; correct config.json"
            )


def require_numbers(source: str, prefix: str, found: Mapping[str, Any]) -> None:
    """Raise ModelError for sizes of a part that are no numbers above 0, or are left out.

    found: by their names without ``prefix``.
    """
    for name, value in found.items():
        wanted = _Range(is_whole=name not in _FRACTIONS, is_above=True)
        if not wanted.holds(value):
            raise ModelError(f"{source}: {prefix}{name}: expected {wanted}, found {value!r:.80}")


def _expected(name: str, value: object) -> str | None:
    """What a field must be; None where it is that."""
    if name in _NUMBERS:
        return None if _NUMBERS[name].holds(value) else str(_NUMBERS[name])
    if name in _SWITCHES:
        return None if isinstance(value, bool) else "true or false"
    if name in _LISTS:
        is_right = isinstance(value, list) and all(type(one) is int for one in value)
        return None if is_right else "a list of layers"
    if name in _SECTIONS:
        return None if isinstance(value, Mapping) else "an object"
    return None
