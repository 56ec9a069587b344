"""Gated-delta layers (Qwen3-Next, Qwen3.5) with a state a slot that can stop at any token.

Such a layer folds every token into one state, so a rejected token cannot be cut off behind it. The
layer records its delta-rule call instead, and ``commit`` runs that call once more from the state
before the forward with decay 0 (in the log) and step 0 for the tokens that do not stay: these then
leave the state as it is. Padding is handled the same way.

The recording wraps two functions of the model's modeling module, once, by ``record_delta_rules``;
they behave as before outside ``recording``.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

from guided_spec.errors import ModelError
from guided_spec.models.step_plan import StepPlan

__all__ = ["SavedState", "SlotLinearLayer", "record_delta_rules", "recording"]

CHUNK_RULE = "torch_chunk_gated_delta_rule"
STEP_RULE = "torch_recurrent_gated_delta_rule"

_install_lock = threading.Lock()
_thread = threading.local()


class SavedState(NamedTuple):
    """Copies of the states of some slots: conv [n, channels, kernel], recurrent [n, ...]."""

    conv: Tensor
    recurrent: Tensor


class DeltaCall(NamedTuple):
    """One recorded call of a delta rule, and the rule that can run it again."""

    rule: Callable[..., tuple[Tensor, Tensor]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class SlotLinearLayer(LinearAttentionLayer):
    """The convolution window and the recurrent state of one layer, for every slot."""

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self.record_past = True  # keeps single tokens off the path that updates states in place
        self._num_slots = num_slots
        self._conv: Tensor | None = None  # [num_slots, channels, kernel]
        self._recurrent: Tensor | None = None  # [num_slots, heads, k_dim, v_dim]
        self._plan: StepPlan | None = None
        self._window: Tensor | None = None  # [B, channels, kernel + T]
        self._call: DeltaCall | None = None
        self._final: Tensor | None = None  # the recurrent state behind all T tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all slots' states."""
        return sum(b.nbytes for b in (self._conv, self._recurrent) if b is not None)

    def begin(self, plan: StepPlan) -> None:
        """Show transformers the states of the batch's slots; new texts start from zeros."""
        self._plan, self._window, self._call, self._final = plan, None, None, None
        if self._conv is None or self._recurrent is None:
            return
        if plan.fresh:
            # By way of the CPU: a tensor made on a GPU from a list would wait for the GPU.
            fresh = torch.tensor(plan.fresh).to(self._conv.device, non_blocking=True)
            self._conv.index_fill_(0, fresh, 0)
            self._recurrent.index_fill_(0, fresh, 0)
        # A copy: a kernel may work in place, and the state before the forward is needed again.
        self.recurrent_states[0] = plan.gather(self._recurrent).clone()
        self.conv_states[0] = plan.gather(self._conv)
        self.has_previous_state[0] = True

    def update_conv_state(
        self,
        conv_states: Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """[B, channels, kernel + T]: the window before the new columns, then the columns."""
        if state_idx != 0 or conv_kernel_size is None:
            raise ModelError("a linear-attention layer with several convolutions is not supported")
        if self._conv is None:
            shape = (self._num_slots, conv_states.shape[1], conv_kernel_size)
            self._conv = conv_states.new_zeros(shape)
            self.is_conv_states_initialized[0] = True
        assert self._plan is not None, "begin() comes before the forward"
        self._window = torch.cat([self._plan.gather(self._conv), conv_states], -1)
        return self._window

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Keep the state behind all T tokens, and the call that led to it, until ``commit``."""
        calls: list[DeltaCall] = getattr(_thread, "calls", None) or []
        if state_idx != 0 or len(calls) != 1 or not {"g", "beta"} <= calls[0].kwargs.keys():
            raise ModelError("a linear-attention layer of another kind than the gated delta rule")
        if self._recurrent is None:
            shape = (self._num_slots, *recurrent_states.shape[1:])
            self._recurrent = recurrent_states.new_zeros(shape)
            self.is_recurrent_states_initialized[0] = True
        self._call, self._final = calls.pop(), recurrent_states
        return recurrent_states

    def commit(self, keep: Tensor | None) -> None:
        """Store the states behind the first ``keep`` [B] (on the CPU) tokens; None: behind all."""
        assert self._plan is not None, "begin() comes before commit()"
        if self._window is None or self._final is None:
            return
        assert self._conv is not None
        assert self._recurrent is not None
        kernel = self._conv.shape[-1]
        if keep is None:
            conv, recurrent = self._window[..., -kernel:], self._final
        else:
            on_device = keep.to(self._window.device, non_blocking=True)
            columns = on_device[:, None] + torch.arange(kernel, device=on_device.device)
            columns = columns.unsqueeze(1).expand(-1, self._window.shape[1], -1)
            conv, recurrent = self._window.gather(2, columns), self._replay(on_device)
        self._plan.scatter(self._conv, conv)
        self._plan.scatter(self._recurrent, recurrent.to(self._recurrent.dtype))
        self._window = self._call = self._final = None

    def save(self, slots: Sequence[int]) -> SavedState:
        """A copy of the states of ``slots``."""
        conv, recurrent = self._states()
        rows = torch.tensor(list(slots), device=conv.device)
        return SavedState(conv.index_select(0, rows), recurrent.index_select(0, rows))

    def load(self, slots: Sequence[int], saved: SavedState) -> None:
        """Put copies made by ``save`` into ``slots``."""
        conv, recurrent = self._states()
        rows = torch.tensor(list(slots), device=conv.device)
        conv.index_copy_(0, rows, saved.conv)
        recurrent.index_copy_(0, rows, saved.recurrent)

    def _states(self) -> tuple[Tensor, Tensor]:
        assert self._conv is not None, "the first forward allocates the states"
        assert self._recurrent is not None
        return self._conv, self._recurrent

    def _replay(self, keep: Tensor) -> Tensor:
        """The recurrent state behind the first ``keep`` [B] tokens of the recorded call."""
        assert self._call is not None
        assert self._plan is not None
        assert self._recurrent is not None
        rule, args, kwargs = self._call
        decay, step = kwargs["g"], kwargs["beta"]  # [B, T, heads]
        dropped = torch.arange(decay.shape[1], device=keep.device) >= keep[:, None]
        before = {
            "g": decay.masked_fill(dropped.unsqueeze(2), 0),
            "beta": step.masked_fill(dropped.unsqueeze(2), 0),
            "initial_state": self._plan.gather(self._recurrent).clone(),
            "output_final_state": True,
        }
        return rule(*args, **{**kwargs, **before})[1]


@contextmanager
def recording() -> Iterator[None]:
    """While it is open, this thread's delta-rule calls are recorded for ``SlotLinearLayer``."""
    _thread.calls = []
    try:
        yield
    finally:
        _thread.calls = None


def record_delta_rules(model: nn.Module) -> None:
    """Make the delta rules of the model's modeling modules recordable; does it once a module.

    Raises ModelError when its linear-attention layers do not use the gated delta rule.
    """
    names = {type(module).__module__ for module in model.modules()}
    found = [sys.modules[name] for name in names if hasattr(sys.modules.get(name), CHUNK_RULE)]
    if not found:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise ModelError(
            f"model_type={kind!r}: layers of type 'linear_attention' are supported for the gated "
            "delta rule only (Qwen3-Next, Qwen3.5)"
        )
    with _install_lock:
        for module in found:
            replay = getattr(module, CHUNK_RULE)
            if getattr(replay, "_is_recordable", False):
                continue
            for name in (CHUNK_RULE, STEP_RULE):
                setattr(module, name, _recordable(getattr(module, name), replay))


def _recordable(
    rule: Callable[..., tuple[Tensor, Tensor]], replay: Callable[..., tuple[Tensor, Tensor]]
) -> Callable[..., tuple[Tensor, Tensor]]:
    @functools.wraps(rule)
    def recorded(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        calls = getattr(_thread, "calls", None)
        if calls is not None:
            calls.append(DeltaCall(replay, args, kwargs))
        return rule(*args, **kwargs)

    recorded._is_recordable = True  # type: ignore[attr-defined]
    return recorded
