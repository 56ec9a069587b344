"""Which experts a forward chose, for those who train on what was sampled.

A stock model hands the experts of each token to a module of experts, as integers. A forward that is
to record them is given an ``ExpertRecorder``; all other forwards are as they would be without.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from guided_spec.ops.host import Download

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What modules of experts call the argument after their states.
EXPERT_IDS = {"top_k_index", "router_indices", "selected_experts", "expert_ids"}
PROBE = (1, 2, 3, 5)  # token ids
DTYPE = torch.int16


class ExpertLayers(NamedTuple):
    """The layers of a decoder that choose experts.

    layers: [L] their indices, ascending; () where the model has none, or none that can be recorded.
    modules: [L] the experts of each. top_k: experts of a token, in each of the layers.
    """

    layers: tuple[int, ...] = ()
    modules: tuple[nn.Module, ...] = ()
    top_k: int = 0

    def __bool__(self) -> bool:
        return bool(self.layers)

    @classmethod
    @torch.inference_mode()
    def of(cls, model: PreTrainedModel) -> ExpertLayers:
        """Those of a model of transformers, which reads a few tokens where it has any."""
        from guided_spec.models.target import find_decoder  # with all code of models

        decoder: Any = find_decoder(model)
        found = {}
        for at, layer in enumerate(getattr(decoder, "layers", ())):
            modules = [one for one in layer.modules() if _takes_expert_ids(one)]
            if len(modules) > 1:
                return cls()
            if modules:
                found[at] = modules[0]
        if not found:
            return cls()
        known = cls(tuple(found), tuple(found.values()))
        recorder = ExpertRecorder(known)
        try:
            with recorder.attached():
                decoder(input_ids=torch.tensor([PROBE], device=model.device), use_cache=False)
        except Exception:  # of every class: a model that needs more runs, but is not recorded
            return cls()
        top_k = recorder.common_top_k(len(PROBE))
        return cls() if top_k is None else known._replace(top_k=top_k)


def _takes_expert_ids(module: nn.Module) -> bool:
    # A process that has some of the experts alone numbers those from 0.
    if getattr(module, "_is_expert_parallel", False):
        return False
    names = [*inspect.signature(type(module).forward).parameters]
    return len(names) == 4 and names[2] in EXPERT_IDS  # noqa: PLR2004 - self, states, ids, shares


class ExpertRecorder:
    """Collects the experts that one forward chose, by one call of the model or several.

    layers: of the model. rows: int16 [N, L * top_k] once the forward has run, on its device: of
    each token, padding included, layer after layer, in the order of the router.
    """

    def __init__(self, layers: ExpertLayers) -> None:
        self._layers = layers
        self._chosen: dict[nn.Module, list[Tensor]] = {}
        self.rows: Tensor | None = None

    def put(self, experts: nn.Module, expert_ids: Tensor) -> None:
        """What a router has chosen for one of the modules: integers [..., top_k]."""
        self._chosen.setdefault(experts, []).append(expert_ids)

    def fill(self) -> None:
        """Put what one module got for those that were not called, of layers that are left out."""
        for experts in self._layers.modules:
            self._chosen.setdefault(experts, next(iter(self._chosen.values())))

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, calls of the stock modules are recorded."""

        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            named = [value for name, value in kwargs.items() if name in EXPERT_IDS]
            self.put(module, named[0] if named else args[1])

        with ExitStack() as stack:
            for module in self._layers.modules:
                stack.enter_context(module.register_forward_pre_hook(see, with_kwargs=True))
            yield

    def join(self) -> None:
        """Make ``rows`` of what was put, if anything was; nothing waits for the device."""
        chosen = self._flat()
        if chosen:
            self.rows = torch.cat([one.to(chosen[0].device) for one in chosen], -1).to(DTYPE)

    def cut(self, num_rows: int, width: int) -> None:
        """Keep the first ``width`` tokens of each of as many padded rows."""
        assert self.rows is not None, "the forward comes before"
        self.rows = self.rows.unflatten(0, (num_rows, -1))[:, :width].flatten(0, 1)

    def common_top_k(self, num_tokens: int) -> int | None:
        """Experts of a token; None where layers differ, or what was put is something else."""
        chosen = self._flat()
        (rows, top_k), *others = {tuple(one.shape) for one in chosen} or {(0, 0)}
        are_all = len(chosen) == len(self._layers.modules) and not others and rows == num_tokens
        are_ids = all(one.dtype in (torch.int32, torch.int64) for one in chosen)
        return top_k if are_all and are_ids else None

    def _flat(self) -> list[Tensor]:
        """[L] of [N, top_k], of the modules that were called."""
        pieces = [self._chosen[one] for one in self._layers.modules if one in self._chosen]
        return [torch.cat([one.reshape(-1, one.shape[-1]) for one in rows]) for rows in pieces]


@contextmanager
def recording_experts(recorder: ExpertRecorder | None) -> Iterator[None]:
    """Inside runs a forward, of which ``recorder``, if there is one, has the experts afterwards."""
    with nullcontext() if recorder is None else recorder.attached():
        yield
    if recorder is not None:
        recorder.join()


class RoutedRows(NamedTuple):
    """What one forward recorded, on its way to the host.

    experts: int16 [N, L * top_k]. slots, starts, counts: of its rows, see ``SlotInputs``. begins:
    where each row begins in N.
    """

    experts: Download
    slots: Sequence[int]
    starts: Sequence[int]
    counts: Sequence[int]
    begins: Sequence[int]

    @classmethod
    def of(
        cls,
        recorder: ExpertRecorder | None,
        rows: tuple[Sequence[int], Sequence[int], Sequence[int]],
        width: int | None = None,
    ) -> RoutedRows | None:
        """What a forward has left in ``recorder``; None where there is none.

        rows: slots, starts and counts. width: of padded rows; None for a line, where one row
        follows the other.
        """
        if recorder is None or recorder.rows is None:
            return None
        counts = rows[2] if width is None else [width] * len(rows[2])
        # Copied at once: the next forward overwrites them.
        return cls(Download(recorder.rows), *rows, [*accumulate(counts, initial=0)][:-1])

    def pick(self, indices: Sequence[int]) -> RoutedRows:
        """Some of its rows, in another order."""
        return RoutedRows(self.experts, *([part[at] for at in indices] for part in self[1:]))
