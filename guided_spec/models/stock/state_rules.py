"""Rules by which stock layers fold tokens into a state, recorded so that fewer tokens can stay.

A token that is folded into a state cannot be removed. So the call of a rule is recorded, and run
once more from the state before it, with the tokens that do not stay made to leave the state as it
is. For that a rule needs an argument that scales what a token does:

* the gated delta rule (Yang, Kautz and Hatamizadeh, "Gated delta networks", 2024; Qwen3-Next,
  Qwen3.5) and Kimi's (KDA, Kimi Linear, 2025): decay 0, in the log, and step 0;
* Mamba-2's scan (Dao and Gu, "Transformers are SSMs", 2024; Nemotron-H, Granite 4, Bamba, Zamba 2):
  a time step of 0;
* Mamba's (Gu and Dao, "Mamba", 2023; Mamba, Falcon Mamba, Jamba): likewise. transformers' begins at
  zeros, so that ``selective_scan`` takes its place.

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

import torch
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
    of the function that does the same and computes less. function: runs in place of the module's
    own, where that cannot begin at a state.
    """

    name: str
    single: str | None
    without: Callable[[Call, Tensor, Tensor | None], Call]
    fitted: Callable[[Call], Call]
    function: Callable[..., tuple[Tensor, Tensor]] | None = None


def _delta_without(call: Call, dropped: Tensor, before: Tensor | None) -> Call:
    args, kwargs = call
    changed = {}
    for name in ("g", "beta"):  # [B, T, heads, ...]
        more = kwargs[name].dim() - dropped.dim()
        changed[name] = kwargs[name].masked_fill(dropped[(..., *[None] * more)], 0)
    return args, {**kwargs, **changed, "initial_state": before, "output_final_state": True}


def _time_steps(steps: Tensor, bias: Tensor | None, *, softplus: bool) -> Tensor:
    """What scales the tokens in Mamba's scans. bias: of the shape of ``steps``, or fits it."""
    if bias is not None:
        steps = steps + bias.to(steps.dtype)
    return functional.softplus(steps) if softplus else steps


def _scan_without(call: Call, dropped: Tensor, before: Tensor | None) -> Call:
    (states, steps, *others), kwargs = call
    steps = _time_steps(steps, kwargs.get("dt_bias"), softplus=bool(kwargs.get("dt_softplus")))
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


def selective_scan(  # noqa: PLR0913  # transformers calls it so
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Mamba's scan from any state: h_t = exp(dt A) h_(t-1) + dt B x_t, and y_t = C h_t + D x_t.

    hidden_states x, dt, z: [batch, d, T]. A: float32 [d, n]. B, C: [batch, n, T]. delta_bias, D:
    float32 [d]. z gates y by SiLU. initial_state: float32 [batch, d, n]; None: zeros.

    Returns y [batch, d, T] and the state after all tokens, float32 [batch, d, n]. The arguments are
    those of transformers' function, and each operation is rounded as there.
    """
    bias = None if delta_bias is None else delta_bias[:, None]
    dt = _time_steps(dt, bias, softplus=delta_softplus)
    decays = torch.exp(A[None, :, None, :] * dt[..., None])
    added = dt[..., None] * B.transpose(1, 2)[:, None].float() * hidden_states[..., None].float()
    state = added.new_zeros(added[:, :, 0].shape) if initial_state is None else initial_state
    read = []
    for at in range(hidden_states.shape[2]):
        state = decays[:, :, at] * state + added[:, :, at]
        read.append(torch.matmul(state.to(hidden_states.dtype), C[:, :, at, None])[..., 0])
    outputs = torch.stack(read, -1)
    if D is not None:
        outputs = outputs + hidden_states * D[None, :, None]
    return outputs if z is None else outputs * functional.silu(z), state


def _selective_without(call: Call, dropped: Tensor, before: Tensor | None) -> Call:
    (states, steps, *others), kwargs = call
    bias = kwargs.get("delta_bias")
    bias = None if bias is None else bias[:, None]
    steps = _time_steps(steps, bias, softplus=bool(kwargs.get("delta_softplus")))
    changed = {"delta_bias": None, "delta_softplus": False, "initial_state": before}
    return (states, steps.masked_fill(dropped[:, None], 0), *others), {**kwargs, **changed}


def _selective_fitted(call: Call) -> Call:
    args, kwargs = call
    return args, {**kwargs, "initial_state": _thread.before}


RULES = (
    StateRule(
        *("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
        *(_delta_without, _delta_fitted),
    ),
    StateRule("chunk_kimi_delta_attention", None, _delta_without, _delta_fitted),
    StateRule("mamba2_chunk_scan", None, _scan_without, _scan_fitted),
    StateRule(
        *("mamba_selective_scan", None, _selective_without, _selective_fitted, selective_scan),
    ),
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
    """What this thread records.

    calls: of rules; None while it records none. before: the state of the layer whose rule comes
    next, for rules that do not get it; None: there is none yet.
    """

    calls: list[RecordedCall] | None = None
    before: Tensor | None = None


_thread = _Recorded()
_install_lock = threading.Lock()


@contextmanager
def recording() -> Iterator[None]:
    """While it is open, this thread's calls of rules are recorded."""
    _thread.calls = []
    try:
        yield
    finally:
        _thread.calls = _thread.before = None


def show_state(before: Tensor | None) -> None:
    """The state of the layer whose rule is called next in this thread."""
    _thread.before = before


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
            "rules, Mamba and Mamba-2 only (Qwen3.5, Kimi Linear, Jamba, Nemotron-H, Granite 4)"
        )
    with _install_lock:
        for module, rule in found:
            _install(module, rule)
    return any(rule.single is None for _, rule in found)


def _install(module: dict[str, Any], rule: StateRule) -> None:
    if getattr(module[rule.name], "_is_recordable", False):
        return
    again = rule.function or module[rule.name]
    for name in (rule.name, rule.single):
        if name is not None:
            runs = again if name == rule.name else None
            module[name] = _recordable(module[name], rule, again, runs)


def _recordable(
    function: Callable[..., Any],
    rule: StateRule,
    again: Callable[..., Any],
    runs: Callable[..., Any] | None,
) -> Callable[..., Any]:
    """``function``, whose calls are recorded as ones of ``again``.

    runs: what runs then with the fitted call; None: the function itself, with its own.
    """

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if _thread.calls is None:
            return function(*args, **kwargs)
        fitted = rule.fitted((args, kwargs))
        _thread.calls.append(RecordedCall(rule, again, fitted))
        return function(*args, **kwargs) if runs is None else runs(*fitted[0], **fitted[1])

    recorded._is_recordable = True  # type: ignore[attr-defined]
    return recorded
