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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from guided_spec.grammar.pipeline import GrammarCompileQueue
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.integrations.host_drafter import HostDrafter, HostRequest, HostTexts
from guided_spec.integrations.vllm.plugin import around_drafting, install
from guided_spec.integrations.vllm.reasoning import REASONING, ReasoningSpan
from guided_spec.integrations.vllm.requests import VllmGrammars
from guided_spec.integrations.vllm.shadows import ShadowConstraints

__all__ = ["PATCHES", "GuidedProposer", "show_requests"]


class GuidedProposer:
    """Drafts on the host, without a model; vLLM makes it by its dotted name.

    vllm_config: vLLM's VllmConfig. ``num_speculative_tokens`` of its speculative config, 1 to 64,
        is the longest draft.

    Raises ConfigError for another version of vLLM or a longer draft, and ModelError for a tokenizer
    that cannot be read.
    """

    def __init__(self, vllm_config: Any) -> None:
        install("GuidedProposer", PATCHES)
        self._grammars = VllmGrammars(vllm_config)
        num_draft = vllm_config.speculative_config.num_speculative_tokens
        num_requests = vllm_config.scheduler_config.max_num_seqs
        self._max_len = vllm_config.model_config.max_model_len
        vocabulary, tokenizer = self._grammars.vocabulary, self._grammars.tokenizer
        self._drafter = HostDrafter(vocabulary, tokenizer, num_draft, num_requests)
        self._shadows = ShadowConstraints(GrammarCompileQueue(self._grammars, max_workers=1))
        self._asked: dict[str, _Asked] = {}
        self._texts = HostTexts()
        self._names: Sequence[str] = ()
        self._requests: Mapping[str, Any] = {}

    def load_model(self, target_model: Any) -> None:
        """Nothing: there is no model. vLLM's runner for CPUs asks every drafter."""
        del target_model

    def see(self, names: Sequence[str], requests: Mapping[str, Any]) -> None:
        """Take note of the requests of the next ``propose``.

        names: of the batch's requests, in its order. requests: all that the runner knows, by name;
            what is kept for others is dropped.
        """
        self._names, self._requests = names, requests
        ended = [name for name in self._asked if name not in requests]
        self._forget(ended)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft behind the tokens that vLLM has just committed.

        sampled_token_ids: [B] the new tokens of each request; empty while its prompt is read.
        num_tokens_no_spec: [>= B] the length of each request's text.
        token_ids_cpu: [>= B, max_model_len] the texts.
        slot_mappings: not used; vLLM passes it to every proposer.

        Returns [B] drafts, each of ``num_speculative_tokens`` at most; empty where there is none.
        """
        del slot_mappings
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        running = {
            at: self._look_at(at, token_ids_cpu[at], int(num_tokens_no_spec[at]))
            for at, new in enumerate(sampled_token_ids)
            if new and at < len(self._names) and int(num_tokens_no_spec[at]) < self._max_len
        }
        self._release()
        if running:
            found = self._drafter.draft([*running.values()])
            for at, draft in zip(running, found, strict=True):
                drafts[at] = draft
        return drafts

    def _look_at(self, at: int, row: Any, length: int) -> HostRequest:
        name = self._names[at]
        request = self._requests[name]
        params = request.sampling_params
        prompt_length, asked = request.num_prompt_tokens, self._asked.get(name)
        if asked is None or asked.params is not params:
            self._forget([name])  # of another request under the same name
            asked = self._asked[name] = self._read_off(params, row[:prompt_length].tolist())
        slot, text = self._texts.follow(name, length, lambda start, end: row[start:end].tolist())
        constraint = None
        if asked.spec is not None:
            self._shadows.prepare(slot, asked.spec, asked.stops)
            start = prompt_length if asked.span is None else asked.span.start_in(text)
            if start is not None:
                constraint = self._shadows.follow(slot, asked.spec, text, start, stops=asked.stops)
        return HostRequest(slot, text, prompt_length, self._max_len - length, constraint)

    def _read_off(self, params: Any, prompt: Sequence[int]) -> _Asked:
        spec = self._grammars.spec_of(params)
        if spec is None:
            return _Asked(params, None, frozenset(), None)
        stops, span = self._grammars.stops_of(params), self._grammars.span_of(params, prompt)
        return _Asked(params, spec, stops, span)

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._asked.pop(name, None)
        self._texts.forget(names)
        self._release()

    def _release(self) -> None:
        ended = self._texts.take_ended()
        self._drafter.release(ended)
        for slot in ended:
            self._shadows.forget(slot)


class _Asked(NamedTuple):
    """What is kept of a request while it runs: read off once, since a schema may be long."""

    params: Any
    spec: GrammarSpec | None
    stops: frozenset[int]
    span: ReasoningSpan | None


def show_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around the runner's ``propose_draft_token_ids``: a guided proposer learns who is asking."""

    @functools.wraps(original)
    def propose_draft_token_ids(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.drafter, GuidedProposer):
            self.drafter.see(self.input_batch.req_ids, self.requests)
        return original(self, *args, **kwargs)

    return propose_draft_token_ids


PATCHES = (around_drafting(show_requests), *REASONING)
