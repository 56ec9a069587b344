"""Rules by which stock layers fold tokens into a state, recorded so that fewer tokens can stay.

A token that is folded into a state cannot be removed. So the call of a rule is recorded, and run
once more from the state before it, with the tokens that do not stay made to leave the state as it
is. For that a rule needs an argument that scales what a token does:

* the gated delta rule (Yang, Kautz and Hatamizadeh, "Gated delta networks", 2024; Qwen3-Next,
  Qwen3.5) and Kimi's (KDA, Kimi Linear, 2025): decay 0, in the log, and step 0;
* Mamba-2's scan (Dao and Gu, "Transformers are SSMs", 2024; Nemotron-H, Granite 4, Bamba, Zamba 2):
  a time step of 0.

The rules are functions of the model's modeling module, which ``record_rules`` wraps, once a module;
they behave as before outside ``recording``. Tested with transformers 5.17 to 5.24, of which the
earlier ones have fewer.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from guided_spec.errors import ModelError

LEAST_CHUNK = 16  # tokens, which matrix units take at least

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a rule by place, and by name."""


class StateRule(NamedTuple):
    """A rule by the name of its function.

    single: the name of that for one token; None where it does not return the state, so that a
    forward needs two tokens at least. without: (call, dropped [B, T], the state before or None) to
    the call in which the dropped tokens do nothing. It returns (outputs, state). fitted: to a call
    of the function that does the same and computes less.
    """

    name: str
    single: str | None
    without: Callable[[Call, Tensor, Tensor | None], Call]
    fitted: Callable[[Call], Call]


def _delta_without(call: Call, dropped: Tensor, before: Tensor | None) -> Call:
    args, kwargs = call
    changed = {}
    for name in ("g", "beta"):  # [B, T, heads, ...]
        more = kwargs[name].dim() - dropped.dim()
        changed[name] = kwargs[name].masked_fill(dropped[(..., *[None] * more)], 0)
    return args, {**kwargs, **changed, "initial_state": before, "output_final_state": True}


def _scan_without(call: Call, dropped: Tensor, before: Tensor | None) -> Call:
    (states, steps, *others), kwargs = call
    if kwargs.get("dt_bias") is not None:
        steps = steps + kwargs["dt_bias"].to(steps.dtype)
    if kwargs.get("dt_softplus"):
        steps = functional.softplus(steps)
    low, high = kwargs.get("dt_limit", (0.0, float("inf")))
    steps = steps.clamp(low, high).masked_fill(dropped.unsqueeze(2), 0)  # [B, T, heads]
    changed = {
        **{"dt_bias": None, "dt_softplus": False, "dt_limit": (0.0, float("inf"))},
        **{"initial_states": before, "return_final_states": True},
    }
    return (states, steps, *others), {**kwargs, **changed}


def _fitted(call: Call, most: int, least: int) -> Call:
    """With chunks of ``most`` tokens, or so many fewer that a few tokens are not filled up."""
    args, kwargs = call
    wanted = 1 << (args[0].shape[1] - 1).bit_length()
    return args, {**kwargs, "chunk_size": min(most, max(wanted, least))}


def _delta_fitted(call: Call) -> Call:
    return _fitted(call, call[1].get("chunk_size", 64), 1)


def _scan_fitted(call: Call) -> Call:
    return _fitted(call, call[1]["chunk_size"], LEAST_CHUNK)


RULES = (
    StateRule(
        *("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
        *(_delta_without, _delta_fitted),
    ),
    StateRule("chunk_kimi_delta_attention", None, _delta_without, _delta_fitted),
    StateRule("mamba2_chunk_scan", None, _scan_without, _scan_fitted),
)


class RecordedCall(NamedTuple):
    """One call of a rule. function: that runs it again."""

    rule: StateRule
    function: Callable[..., tuple[Tensor, Tensor]]
    call: Call

    def state(self, dropped: Tensor, before: Tensor | None) -> Tensor:
        """The state [B, ...] behind the tokens that are not ``dropped`` [B, T]."""
        args, kwargs = self.rule.without(self.call, dropped, before)
        return self.function(*args, **kwargs)[1]


class _Recorded(threading.local):
    """The calls that this thread records; None while it records none."""

    calls: list[RecordedCall] | None = None


_thread = _Recorded()
_install_lock = threading.Lock()


@contextmanager
def recording() -> Iterator[None]:
    """While it is open, this thread's calls of rules are recorded."""
    _thread.calls = []
    try:
        yield
    finally:
        _thread.calls = None


def take_recorded() -> RecordedCall:
    """The only call since the last one was taken. Raises ModelError if there is another number."""
    calls = _thread.calls or []
    if len(calls) != 1:
        raise ModelError("a layer with a state of a kind whose rule is not known")
    return calls.pop()


def record_rules(model: nn.Module) -> bool:
    """Make the rules of the model's modeling modules recordable; does it once a module.

    Returns whether a forward needs two tokens at least. Raises ModelError where no layer has a rule
    that is known.
    """
    names = {type(module).__module__ for module in model.modules()}
    modules = [vars(sys.modules[name]) for name in names if name in sys.modules]
    found = [(module, rule) for module in modules for rule in RULES if rule.name in module]
    if not found:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise ModelError(
            f"model_type={kind!r}: layers of type 'linear_attention' are supported for gated delta "
            "rules and Mamba-2 only (Qwen3.5, Kimi Linear, Nemotron-H, Granite 4)"
        )
    with _install_lock:
        for module, rule in found:
            _install(module, rule)
    return any(rule.single is None for _, rule in found)


def _install(module: dict[str, Any], rule: StateRule) -> None:
    again = module[rule.name]
    if getattr(again, "_is_recordable", False):
        return
    for name in (rule.name, rule.single):
        if name is not None:
            module[name] = _recordable(module[name], rule, again)


def _recordable(
    function: Callable[..., Any], rule: StateRule, again: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if _thread.calls is not None:
            fitted = rule.fitted((args, kwargs))
            _thread.calls.append(RecordedCall(rule, again, fitted))
            if function is again:
                args, kwargs = fitted
        return function(*args, **kwargs)

    recorded._is_recordable = True  # type: ignore[attr-defined]
    return recorded
