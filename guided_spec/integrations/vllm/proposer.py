"""A proposer for vLLM's ``custom_class``: text that the grammar forces, and prompt lookup.

    speculative_config={
        "method": "custom_class",
        "model": "guided_spec.integrations.vllm.proposer.GuidedProposer",
        "num_speculative_tokens": 8,
    }

vLLM hands a proposer token ids and nothing else. Which requests they belong to, and what grammar
these asked for, is known to the model runner that calls it; one function of the runner is wrapped
to say so. vLLM verifies the drafts with its own masks: whatever is drafted, its output is that of
the same requests without drafts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from guided_spec.errors import ConfigError
from guided_spec.integrations.host_drafter import HostDrafter
from guided_spec.integrations.vllm.backend import GRAMMARS
from guided_spec.integrations.vllm.plugin import around_drafting, install
from guided_spec.integrations.vllm.reasoning import REASONING, REPORTS
from guided_spec.integrations.vllm.requests import STATES_V1, GrammarRequests, note_states


class GuidedProposer:
    """Drafts on the host, without a model; vLLM makes it by its dotted name.

    vllm_config: vLLM's VllmConfig. ``num_speculative_tokens`` of its speculative config, 1 to 64,
        is the longest draft.

    Raises ConfigError for another version of vLLM, pipeline ranks or a longer draft, and ModelError
    for a tokenizer that cannot be read.
    """

    def __init__(self, vllm_config: Any) -> None:
        stages = vllm_config.parallel_config.pipeline_parallel_size
        if stages > 1:  # vLLM's first rank would fail at the first request
            fix = "vLLM has no custom_class over pipeline ranks: pass 1, or another method"
            raise ConfigError("pipeline_parallel_size", stages, fix)
        install("GuidedProposer", PATCHES)
        self._requests = GrammarRequests(vllm_config)
        self._num_draft: int = vllm_config.speculative_config.num_speculative_tokens
        self._max_len: int = vllm_config.model_config.max_model_len
        of, num_requests = self._requests.grammars, vllm_config.scheduler_config.max_num_seqs
        self._drafter = HostDrafter(of.vocabulary, of.tokenizer, self._num_draft, num_requests)
        self._requests.at_end(self._drafter.release)
        self._names: Sequence[str] = ()

    def load_model(self, target_model: Any) -> None:
        """Nothing: there is no model. vLLM's runner for CPUs asks every drafter."""
        del target_model

    def see(self, runner: Any) -> None:
        """Take note of the requests of the next ``propose``; those that have ended are dropped."""
        note_states(runner, self._requests)
        self._names = runner.input_batch.req_ids

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft after the tokens that vLLM has just committed.

        sampled_token_ids: [B] the new tokens of each request; empty while its prompt is read.
        num_tokens_no_spec: [>= B] the length of each request's text.
        token_ids_cpu, slot_mappings: not used; vLLM passes them to every proposer.

        Returns [B] drafts, each of ``num_speculative_tokens`` at most; empty where there is none.
        """
        del token_ids_cpu, slot_mappings
        names = self._names[: len(sampled_token_ids)]
        rooms = [self._max_len - int(length) for length in num_tokens_no_spec[: len(names)]]
        limits = [
            min(self._num_draft, max(0, room)) if new else 0
            for new, room in zip(sampled_token_ids, rooms, strict=False)
        ]
        constraints = [
            self._requests.at_hand(name) if limit else None
            for name, limit in zip(names, limits, strict=True)
        ]
        drafts = self._drafter.draft(self._requests.on_host(names, constraints, limits))
        return [*drafts, *([] for _ in sampled_token_ids[len(names) :])]


def show_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around the runner's ``propose_draft_token_ids``: a guided proposer learns who is asking."""

    @functools.wraps(original)
    def propose_draft_token_ids(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.drafter, GuidedProposer):
            self.drafter.see(self)
        return original(self, *args, **kwargs)

    return propose_draft_token_ids


PATCHES = (
    around_drafting(show_requests),
    *GRAMMARS,
    *REASONING,
    *REPORTS,
    *STATES_V1,
)
