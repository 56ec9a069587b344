"""The requests of one vLLM worker that asked for a grammar, and the tokens they have committed.

The grammars that are enforced live in the scheduler's process. What is kept here follows the tokens
that this worker sampled, in steps that draft and in those that do not; it is given up where it
stops to fit.

A worker never sees the scheduler's grammars, but what each request asked for. That is compiled here
by vLLM's own xgrammar backend with the same settings, so what is forced here is forced there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import logging
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guided_spec.errors import GrammarStateError
from guided_spec.grammar.backends.xgrammar import XGrammarGrammar
from guided_spec.grammar.pipeline import GrammarCompileQueue
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarKind, GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.integrations.host_drafter import HostRequest
from guided_spec.integrations.patches import Patch
from guided_spec.integrations.vllm.reasoning import REASONING, Bounds, Reasoning, ReasoningSpan
from guided_spec.masks.constraint import Constraint

_logger = logging.getLogger("vllm.guided_spec")
_KINDS: dict[str, GrammarKind] = {
    "JSON": "json_schema",
    "JSON_OBJECT": "json_object",
    "REGEX": "regex",
    "CHOICE": "choice",
    "GRAMMAR": "ebnf",
    "STRUCTURAL_TAG": "structural_tag",
}
_OPTIONS = {kind: option for option, kind in _KINDS.items()}
_ANY_OBJECT = '{"type": "object"}'


class VllmGrammars:
    """A grammar backend: vLLM's xgrammar backend under one VllmConfig.

    config: vLLM's configuration, which names the model, its tokenizer and the whitespace style.

    Raises ModelError for a tokenizer that cannot be read.
    """

    def __init__(self, config: Any) -> None:
        tokenizers = importlib.import_module("vllm.tokenizers")
        backend = importlib.import_module("vllm.v1.structured_output.backend_xgrammar")
        self._types = importlib.import_module("vllm.v1.structured_output.backend_types")
        self._request = importlib.import_module("vllm.v1.structured_output.request")
        self.tokenizer = tokenizers.cached_tokenizer_from_config(model_config=config.model_config)
        vocab_size = config.model_config.get_vocab_size()
        self._backend = backend.XgrammarBackend(
            config, tokenizer=self.tokenizer, vocab_size=vocab_size
        )
        takes = inspect.signature(self._backend.compile_grammar).parameters
        self._ends_by_request = "stop_token_ids" in takes
        any_grammar = self._compile_own(GrammarSpec.json_object())
        self.vocabulary = Vocabulary.from_tokenizer(
            self.tokenizer, vocab_size, any_grammar.tokenizer_info.stop_token_ids
        )
        outputs = config.structured_outputs_config
        self._any_whitespace = not outputs.disable_any_whitespace
        self.reasoning = Reasoning.of(config, self.tokenizer)

    def spec_of(self, sampling_params: Any) -> GrammarSpec | None:
        """What a request's text must match, from its first token on or behind ``span_of``.

        None for a free request, and for a grammar that another backend than xgrammar enforces.
        """
        params = getattr(sampling_params, "structured_outputs", None)
        if params is None or params.all_constraints_none():
            return None
        if params._backend != "xgrammar":
            return None
        option, source = self._request.get_structured_output_key(params)
        kind = _KINDS[option.name]
        is_json = kind in ("json_schema", "json_object")
        return GrammarSpec(kind, source, any_whitespace=is_json and self._any_whitespace)

    def span_of(self, sampling_params: Any, prompt: Sequence[int]) -> ReasoningSpan | None:
        """The reasoning that a request's grammar begins behind; None where there is none."""
        return None if self.reasoning is None else self.reasoning.span(sampling_params, prompt)

    def stops_of(self, sampling_params: Any) -> frozenset[int]:
        """The tokens that end a request's text, where those are not the vocabulary's.

        From 0.28 on vLLM's grammars end with the stop tokens of the request.
        """
        if not self._ends_by_request:
            return frozenset()
        stops = frozenset(sampling_params.all_stop_token_ids)
        return frozenset() if stops == {*self.vocabulary.stop_token_ids} else stops

    def compile(self, spec: GrammarSpec) -> XGrammarGrammar:
        """``spec`` as vLLM compiles it. Raises whatever vLLM's backend raises."""
        compiled = self._compile_own(spec)
        style = self._compile_style(spec) if spec.any_whitespace else None
        excluded = frozenset() if spec.kind == "structural_tag" else self.vocabulary.without_bytes
        return XGrammarGrammar(compiled, style, excluded)

    def _compile_own(self, spec: GrammarSpec) -> Any:
        option = getattr(self._types.StructuredOutputOptions, _OPTIONS[spec.kind])
        return self._backend.compile_grammar(option, spec.source).ctx

    def _compile_style(self, spec: GrammarSpec) -> Any:
        """The same values with ``", "`` and ``": "``: where whitespace is free, one guess at it."""
        source = spec.source if spec.kind == "json_schema" else _ANY_OBJECT
        return self._backend.compiler.compile_json_schema(source, any_whitespace=False)


class ShadowConstraint:
    """The constraint of one running request, of which only the committed tokens are known.

    It may lag behind, or be lost: the request then goes on without it, and vLLM's log says why.

    future: its grammar, which is compiled in the background. stops: as of
    ``VllmGrammars.stops_of``.
    """

    def __init__(
        self, future: Future[CompiledGrammar], stops: frozenset[int] = frozenset()
    ) -> None:
        self._future = future
        self._stops = stops
        self._constraint: Constraint | None = None
        self._is_lost = False

    def follow(self, text: Sequence[int], start: int = 0, *, waits: bool) -> Constraint | None:
        """Where the grammar stands at the end of the committed tokens.

        text: these are all from ``start`` on; of them only what is new is read. waits: whether to
        wait for the grammar.

        None while its grammar compiles, once its text is complete, and after it was lost: when the
        grammar does not compile or refuses a token. Text that does not go on from what came before
        is followed from its beginning.
        """
        if self._is_lost or not (waits or self._future.done()):
            return None
        if (failure := self._future.exception()) is not None:
            self._lose(failure)
            return None
        constraint = self._constraint
        if constraint is None or not _continues(constraint.committed, text, start):
            grammar = self._future.result()
            if self._stops and isinstance(grammar, XGrammarGrammar):
                excluded = grammar.excluded - self._stops
                grammar = replace(grammar, stops=tuple(self._stops), excluded=excluded)
            constraint = self._constraint = Constraint(grammar)
        try:
            constraint.commit(text[start + len(constraint.committed) :])
        except GrammarStateError as error:
            self._lose(error)
            return None
        return None if constraint.is_terminated else constraint

    def again(self) -> ShadowConstraint:
        """The same request's, whose text is read from its beginning."""
        return ShadowConstraint(self._future, self._stops)

    def _lose(self, error: BaseException) -> None:
        self._is_lost = True
        _logger.warning("guided_spec: a request's grammar is not followed any more: %s", error)


def _continues(committed: Sequence[int], text: Sequence[int], start: int) -> bool:
    """Whether ``text`` may continue ``committed`` from ``start`` on; looks at its end only."""
    last = len(committed) - 1
    return len(text) - start > last and (last < 0 or text[start + last] == committed[last])


MOST_NOTED = 64  # steps without a draft whose tokens may stay on the device


class GrammarRequests:
    """Running requests by vLLM's names for them.

    config: vLLM's VllmConfig. With tensor parallelism a grammar is waited for where it is first
        needed: every rank must draft the same tokens, and so have it from the same step on.

    Raises ModelError for a tokenizer that cannot be read.
    """

    def __init__(self, config: Any) -> None:
        self._grammars = VllmGrammars(config)
        self._queue = GrammarCompileQueue(self._grammars, max_workers=1)
        self._waits = config.parallel_config.tensor_parallel_size > 1
        self._asked: dict[str, _Asked] = {}
        self._noted: list[_Noted] = []
        self._new_slots = itertools.count()
        self._release: Callable[[Sequence[int]], None] | None = None

    @property
    def grammars(self) -> VllmGrammars:
        """What compiles them, with the vocabulary and the tokenizer."""
        return self._grammars

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens of the masks."""
        return self._grammars.vocabulary.vocab_size

    def add(
        self,
        name: str,
        sampling_params: Any,
        output: Iterable[int],
        prompt: Sequence[int] = (),
    ) -> None:
        """A request begins, or goes on after it was preempted, behind its ``output`` tokens.

        prompt: its tokens; empty where it was passed as embeddings.
        """
        self._forget(name)
        text, slot = [*prompt, *output], next(self._new_slots)
        asked = self._asked[name] = _Asked(sampling_params, output, text, len(prompt), slot)
        spec = self._grammars.spec_of(sampling_params)
        if spec is not None:
            stops = self._grammars.stops_of(sampling_params)
            asked.shadow = ShadowConstraint(self._queue.submit(spec), stops)
            asked.span = self._grammars.span_of(sampling_params, prompt)

    def restate(self, name: str, output: Sequence[int]) -> None:
        """The output of a request that was added, as vLLM knows it; what was missed is made up for.

        Only what is new is read, where the output still ends as it did.
        """
        self._drop_noted(name)
        asked = self._asked[name]
        asked.stated = output
        text, start = asked.text, asked.prompt_length
        known = len(text) - start
        if known > len(output) or (known and text[-1] != output[known - 1]):
            del text[start:]
            asked.shadow = asked.shadow and asked.shadow.again()
            asked.span = asked.span and asked.span.again()
        text.extend(output[len(text) - start :])

    def knows(self, name: str, sampling_params: Any) -> bool:
        """Whether this very request was added."""
        asked = self._asked.get(name)
        return asked is not None and asked.sampling_params is sampling_params

    def is_stated(self, name: str, output: Iterable[int]) -> bool:
        """Whether this very list was the last to be added or stated for a request."""
        return self._asked[name].stated is output

    def any_grammar(self, names: Iterable[str]) -> bool:
        """Whether one of the requests asked for a grammar."""
        asked = map(self._asked.get, names)
        return any(one is not None and one.shadow is not None for one in asked)

    def note(self, names: Sequence[str], token_ids: Tensor, num_tokens: Tensor) -> None:
        """Take note of what a step sampled: tokens [B, <= K + 1] on the device, and how many each.

        Nothing waits for the device, except now and then while nothing is drafted. Tokens outside
        of the vocabulary are none.
        """
        if self.any_grammar(names):
            counts = num_tokens.view(-1, 1).to(token_ids.dtype)
            packed = torch.cat([counts, token_ids], 1)  # a copy: vLLM may use its memory again
            if len(self._noted) == MOST_NOTED:
                self._record()
            self._noted.append(_Noted([*names], packed))

    def commit(self, names: Sequence[str]) -> list[Constraint | None]:
        """[B] where each request's grammar stands behind all that was noted; waits for it.

        None for a free request, one that still reasons, one without tokens in the last step that
        was noted (its prompt is still read), and one whose grammar is not compiled yet, is
        complete, or does not fit its tokens.
        """
        written = self._record()
        return [
            self._follow(name, waits=self._waits) if name in written else None for name in names
        ]

    def stand(self, names: Iterable[str]) -> list[Constraint | None]:
        """[B] where each request's grammar stands behind all that was noted; waits for both.

        None for a free request, one that still reasons, and one whose grammar is complete or does
        not fit its tokens.
        """
        self._record()
        return [self._follow(name, waits=True) for name in names]

    def begins_in(self, name: str, draft: Sequence[int]) -> Beginning | None:
        """Where the grammar of a request would begin if it wrote this draft, behind ``stand``.

        None where the draft does not end its reasoning, and for a request that does not reason.
        """
        asked = self._asked[name]
        if asked.shadow is None or asked.span is None or asked.is_over or asked.start is not None:
            return None
        bounds = asked.span.bounds(list(asked.text), list(draft))
        if bounds.masks > len(draft):
            return None
        constraint = asked.shadow.follow(asked.text, len(asked.text), waits=True)
        return None if constraint is None else Beginning(constraint, bounds)

    def at_hand(self, name: str) -> Constraint | None:
        """As ``stand``; None also where that would wait for the device, or for a grammar."""
        return None if self._noted else self._follow(name, waits=self._waits)

    def on_host(
        self,
        names: Sequence[str],
        constraints: Sequence[Constraint | None],
        limits: Sequence[int],
    ) -> list[HostRequest]:
        """[B] as a drafter on the host sees them, behind what was recorded.

        constraints: [B] where they stand. limits: [B] draft tokens at most; 0 for one that is not
        drafted for, whose text is empty.
        """
        found = []
        for name, constraint, limit in zip(names, constraints, limits, strict=True):
            if not limit:
                found.append(HostRequest(-1, (), 0, 0, None))
                continue
            one = self._asked[name]
            found.append(HostRequest(one.slot, one.text, one.prompt_length, limit, constraint))
        return found

    def at_end(self, release: Callable[[Sequence[int]], None]) -> None:
        """Whom to tell the slot of a request that ends or begins anew."""
        self._release = release

    def keep(self, names: Container[str]) -> None:
        """Forget every request that is not among ``names``."""
        for name in [name for name in self._asked if name not in names]:
            self._forget(name)

    def _record(self) -> set[str]:
        """Append what was noted; returns the requests that got tokens in the last step."""
        noted, self._noted = self._noted, []
        written = set[str]()
        for names, packed in noted:
            written.clear()
            for name, (count, *token_ids) in zip(names, packed.tolist(), strict=True):
                new = [
                    token for token in token_ids[: max(0, count)] if 0 <= token < self.vocab_size
                ]
                if name in self._asked and new:
                    self._asked[name].text.extend(new)
                    written.add(name)
        return written

    def _follow(self, name: str, *, waits: bool) -> Constraint | None:
        asked = self._asked[name]
        if asked.shadow is None or asked.is_over or (start := asked.start) is None:
            return None
        return asked.shadow.follow(asked.text, start, waits=waits)

    def _forget(self, name: str) -> None:
        asked = self._asked.pop(name, None)
        if asked is not None and self._release is not None:
            self._release([asked.slot])
        self._drop_noted(name)

    def _drop_noted(self, name: str) -> None:
        for noted in self._noted:
            noted.names[:] = [None if other == name else other for other in noted.names]
        self._noted = [noted for noted in self._noted if any(noted.names)]


class Beginning(NamedTuple):
    """A grammar at its start, and where in a draft it begins."""

    constraint: Constraint
    bounds: Bounds


class _Noted(NamedTuple):
    """What a step sampled, int [B, 1 + width]: how many tokens, and these.

    names: None for a request whose tokens are known in another way.
    """

    names: list[str | None]
    packed: Tensor


@dataclass(slots=True)
class _Asked:
    """sampling_params, stated: vLLM's own. The identity of the first tells a request from a later
    one of its name, that of the second a text that goes on from one that was set anew.

    text: prompt and output, the first ``prompt_length`` tokens the prompt. slot: unlike any other.
    shadow: None for free text. span: the reasoning in front of the grammar's part of the output;
    None where there is none.
    """

    sampling_params: Any
    stated: Iterable[int]
    text: list[int]
    prompt_length: int
    slot: int
    shadow: ShadowConstraint | None = None
    span: ReasoningSpan | None = None

    @property
    def start(self) -> int | None:
        """Where in the text the grammar begins; None inside of the reasoning."""
        return self.prompt_length if self.span is None else self.span.start_in(self.text)

    @property
    def is_over(self) -> bool:
        """Whether there are more tokens than were asked for. The scheduler drops those behind, for
        which it has no masks: steps that were on their way already may sample anything there."""
        most = self.sampling_params.max_tokens
        return most is not None and len(self.text) - self.prompt_length > most


_PLACE = "guided_spec_requests"  # on what they belong to, so that the two go together


def follow_requests(owner: Any, config: Any) -> GrammarRequests:
    """The requests of a worker, noted from now on; hang on a drafter or a model runner.

    Raises ModelError as ``GrammarRequests`` does.
    """
    requests = GrammarRequests(config)
    setattr(owner, _PLACE, requests)
    return requests


def requests_of(*owners: Any) -> GrammarRequests | None:
    """What hangs on the first of these that has any; None where none has."""
    found = (getattr(owner, _PLACE, None) for owner in owners)
    return next((one for one in found if one is not None), None)


def note_sampled_v1(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around the older runner's ``_sample``: who asked for what, and the tokens that they got.

    The runner calls it in every step, and a drafter only where the texts fit it.
    """

    @functools.wraps(original)
    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        result = original(self, logits, spec_decode_metadata)
        requests = requests_of(getattr(self, "drafter", None), self)
        if requests is not None:
            names = self.input_batch.req_ids
            note_states(self, requests)
            token_ids = result.sampled_token_ids
            is_dropped = self.discard_request_mask.gpu[: len(names)]
            counts = torch.where(is_dropped, 0, token_ids.shape[1])
            requests.note(names, token_ids[: len(names)], counts)
        return result

    return _sample


def note_states(runner: Any, requests: GrammarRequests) -> None:
    """The requests of the older runner's step whose tokens are not among their outputs yet.

    With asynchronous scheduling the runner has placeholders in its lists, and forgets some of them
    where a penalty asks for tokens: only what was noted tells the text. A request that comes back
    gets a new list, with all its tokens.
    """
    requests.keep(runner.requests)
    for name in runner.input_batch.req_ids:
        state = runner.requests[name]
        output = state.output_token_ids
        if not requests.knows(name, state.sampling_params):
            requests.add(name, state.sampling_params, output, state.prompt_token_ids or ())
        elif not (runner.use_async_scheduling and requests.is_stated(name, output)):
            requests.restate(name, output)


def note_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around the new runner's ``add_requests``: who asked for which grammar."""

    @functools.wraps(original)
    def add_requests(self: Any, scheduler_output: Any) -> Any:
        result = original(self, scheduler_output)
        requests = requests_of(self.speculator, self)
        if requests is not None:
            states = self.req_states
            requests.keep(states.req_id_to_index)
            for new in scheduler_output.scheduled_new_reqs:
                prompt_len = int(states.prompt_len.np[states.req_id_to_index[new.req_id]])
                prompt, output = (
                    new.prefill_token_ids[:prompt_len],
                    new.prefill_token_ids[prompt_len:],
                )
                requests.add(new.req_id, new.sampling_params, output, prompt)
        return result

    return add_requests


def note_sampled_v2(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around the new runner's ``sample``: the tokens that the target committed."""

    @functools.wraps(original)
    def sample(self: Any, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        result = original(self, hidden_states, input_batch, grammar_output)
        requests = requests_of(self.speculator, self)
        if requests is not None:
            token_ids, num_tokens = result[0].sampled_token_ids, result[1]
            requests.note(input_batch.req_ids, token_ids, num_tokens)
        return result

    return sample


GRAMMARS = (
    Patch("vllm.sampling_params", "StructuredOutputsParams",
          attributes="_backend all_constraints_none"),
    Patch("vllm.sampling_params", "SamplingParams", attributes="all_stop_token_ids"),
    Patch("vllm.v1.structured_output.request", "get_structured_output_key", "params"),
    Patch("vllm.v1.structured_output.backend_xgrammar", "XgrammarBackend.compile_grammar",
          "self request_type grammar_spec ..."),
    Patch("vllm.v1.structured_output.backend_xgrammar", "XgrammarBackend", attributes="compiler"),
)  # fmt: skip
_V1 = "vllm.v1.worker.gpu_model_runner"
_V2 = "vllm.v1.worker.gpu"

# What the requests of each runner are followed by.
STATES_V1 = (
    Patch(_V1, "GPUModelRunner", attributes="input_batch requests use_async_scheduling"),
    Patch("vllm.v1.worker.gpu_input_batch", "CachedRequestState", attributes="prompt_token_ids"),
)
NOTES_V1 = (
    *GRAMMARS,
    *REASONING,
    *STATES_V1,
    Patch(_V1, "GPUModelRunner._sample", "self logits spec_decode_metadata", note_sampled_v1),
    Patch(_V1, "GPUModelRunner", attributes="discard_request_mask"),
)
NOTES_V2 = (
    *GRAMMARS,
    *REASONING,
    Patch(f"{_V2}.states", "RequestState", attributes="req_id_to_index prompt_len"),
    Patch("vllm.v1.core.sched.output", "NewRequestData",
          attributes="req_id sampling_params prefill_token_ids"),
    Patch(f"{_V2}.model_runner", "GPUModelRunner.add_requests", "self scheduler_output",
          note_requests),
    Patch(f"{_V2}.model_runner", "GPUModelRunner.sample",
          "self hidden_states input_batch grammar_output", note_sampled_v2),
    Patch(f"{_V2}.model_runner", "GPUModelRunner", attributes="speculator req_states"),
)  # fmt: skip
