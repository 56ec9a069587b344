"""Forced text and prompt lookup in vLLM's new model runner, without a model.

vLLM from 0.32 on has an n-gram drafter there, which looks up on the device what followed the last
tokens before. With the feature ``forced`` requests under a grammar are drafted on the host instead,
from their texts and grammars, and the result is put into vLLM's draft. So the new runner stays,
which does not support ``custom_class``; a step waits for its tokens where one of its requests has a
grammar. Free requests keep vLLM's drafts.

Masks alone bring nothing here: what is looked up is cut at its first illegal token in any case.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from guided_spec.integrations.host_drafter import HostDrafter
from guided_spec.integrations.patches import Patch, probe
from guided_spec.integrations.vllm.plugin import FORCED, log, requested, warn
from guided_spec.integrations.vllm.requests import track_requests
from guided_spec.ops.host import to_device

_PLACE = "guided_spec_lookup"  # on the speculator


class Lookup:
    """The drafts of one speculator's requests under a grammar.

    speculator: vLLM's NgramGPUSpeculator. Raises ModelError for a tokenizer that cannot be read,
    and ConfigError for more than 64 draft tokens.
    """

    def __init__(self, speculator: Any) -> None:
        config = speculator.vllm_config
        self._requests = track_requests(speculator, config)
        of = self._requests.grammars
        self._num_draft: int = speculator.num_speculative_steps
        size = config.scheduler_config.max_num_seqs
        self._drafter = HostDrafter(of.vocabulary, of.tokenizer, self._num_draft, size)
        self._requests.at_end(self._drafter.release)
        log(f"{type(speculator).__name__} drafts under grammars")

    def put(self, names: Sequence[str], draft: Tensor) -> None:
        """Put the drafts of a batch into ``draft``, int64 [B, K] on the device.

        What was sampled has been noted. After a shorter draft vLLM's own tokens remain.
        """
        if not self._requests.any_grammar(names):
            return
        constraints = self._requests.commit(names)
        limits = [0 if constraint is None else self._num_draft for constraint in constraints]
        if not any(limits):
            return
        found = self._drafter.draft(self._requests.on_host(names, constraints, limits))
        width = draft.shape[1]
        given = to_device([[*row, *[-1] * (width - len(row))] for row in found], draft.device)
        draft.copy_(torch.where(given < 0, draft, given))


def guide_lookup(original: Callable[..., None]) -> Callable[..., None]:
    """Around the speculator's ``__init__``: it has no ``load_model``."""

    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, device: Any, req_states: Any) -> None:
        original(self, vllm_config, device, req_states)
        is_wanted = FORCED in requested()
        setattr(self, _PLACE, Lookup(self) if is_wanted else None)
        if not is_wanted:
            warn(f"{type(self).__name__} drafts as without this package: ask for {FORCED}")

    return __init__


def propose_lookup(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around the speculator's ``propose``: one step."""

    @functools.wraps(original)
    def propose(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        draft = original(self, input_batch, *args, **kwargs)
        lookup: Lookup | None = getattr(self, _PLACE)
        if lookup is not None and not kwargs.get("dummy_run", False):
            lookup.put(input_batch.req_ids, draft)
        return draft

    return propose


def has_lookup(root: Path | None) -> bool:
    """Whether vLLM has this drafter, and its new runner can run.

    root: the folder with vLLM's package in it; None where there is none.
    """
    has_triton = importlib.util.find_spec("triton") is not None
    is_on = has_triton and os.environ.get(_RUNNER) != "0"
    return root is not None and is_on and not probe(root, LOOKUP_PATCHES).lack


_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # vLLM takes the new runner where it is not set
_MODULE = "vllm.v1.worker.gpu.spec_decode.ngram.speculator"
_CLASS = "NgramGPUSpeculator"
LOOKUP_PATCHES = (
    Patch(_MODULE, f"{_CLASS}.__init__", "self vllm_config device req_states", guide_lookup),
    Patch(_MODULE, f"{_CLASS}.propose", "self input_batch ...", propose_lookup),
    Patch(_MODULE, _CLASS, attributes="num_speculative_steps vllm_config"),
)
