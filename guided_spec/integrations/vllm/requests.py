"""The requests of one vLLM worker that asked for a grammar, and the tokens they have committed.

The grammars that are enforced live in the scheduler's process. Those here are advanced by tokens
that this worker sampled, in steps with and without drafts, and dropped once they no longer fit.

A worker never sees the scheduler's grammars, but what each request asked for. That is compiled here
by vLLM's own xgrammar backend with the same settings, so what is forced here is forced there.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guided_spec.errors import GrammarStateError
from guided_spec.grammar.pipeline import GrammarCompileQueue, PendingGrammar
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.tables.tabled import TabledGrammar, table_bytes
from guided_spec.integrations.host_drafter import HostRequest
from guided_spec.integrations.patches import Patch
from guided_spec.integrations.vllm.backend import (
    GRAMMARS,
    TabledGrammars,
    VllmGrammars,
    ending_with,
)
from guided_spec.integrations.vllm.drafts.tabled_requests import TabledRequests
from guided_spec.integrations.vllm.ranks import LATER, NEVER, OneRank, Ranks
from guided_spec.integrations.vllm.reasoning import REASONING, Bounds, ReasoningSpan
from guided_spec.masks.constraint import Constraint
from guided_spec.ops.host import Download

_logger = logging.getLogger("vllm.guided_spec")


class ShadowConstraint:
    """The constraint of one running request, of which only the committed tokens are known.

    It may lag, or be lost: the request then continues without it, and vLLM's log says why.

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

    def update(self, text: Sequence[int], start: int = 0, *, waits: bool) -> Constraint | None:
        """Advance the grammar to the end of the committed tokens and return its constraint.

        text: these are all from ``start`` on; of them only what is new is read. waits: whether to
        wait for the grammar.

        None while its grammar compiles, once its text is complete, and after it was lost: when the
        grammar does not compile or refuses a token. Text that does not go on from what came before
        is read from its beginning.
        """
        if self._is_lost or not (waits or self._future.done()):
            return None
        if (failure := self._future.exception()) is not None:
            self._lose(failure)
            return None
        constraint = self._constraint
        if constraint is None or not _continues(constraint.committed, text, start):
            constraint = self._constraint = Constraint(self._grammar())
        try:
            constraint.commit(text[start + len(constraint.committed) :])
        except GrammarStateError as error:
            self._lose(error)
            return None
        return None if constraint.is_terminated else constraint

    @property
    def tabled(self) -> TabledGrammar | None:
        """Its grammar, where it has a table or may get one."""
        future = self._future
        if self._stops or future.cancelled() or future.exception() is not None:
            return None
        grammar = future.result()
        return grammar if isinstance(grammar, TabledGrammar) else None

    @property
    def is_compiled(self) -> bool:
        """Whether its grammar is, or has failed to."""
        return self._future.done()

    def _grammar(self) -> CompiledGrammar:
        """The grammar by which the host reads the text.

        No table, also where there is one: ranks that share a model have theirs at different times,
        and a table that was made of the printed grammar may forbid a little more, or less.
        """
        grammar = self._future.result()
        if self._stops:
            return ending_with(grammar, self._stops)
        if isinstance(grammar, TabledGrammar):
            grammar.count_text()
            return grammar.inner
        return grammar

    def again(self) -> ShadowConstraint:
        """A constraint of the same request that reads its text from the beginning."""
        return ShadowConstraint(self._future, self._stops)

    def _lose(self, error: BaseException) -> None:
        self._is_lost = True
        _logger.warning("guided_spec: a request's grammar is not followed any more: %s", error)


def _continues(committed: Sequence[int], text: Sequence[int], start: int) -> bool:
    """Whether ``text`` may continue ``committed`` from ``start`` on; looks at its end only."""
    last = len(committed) - 1
    return len(text) - start > last and (last < 0 or text[start + last] == committed[last])


class GrammarRequests:
    """Running requests by vLLM's names for them.

    config: vLLM's VllmConfig. With tensor parallelism a grammar is waited for where it is first
        needed: every rank must draft the same tokens, and so have it from the same step on.
    has_tables: whether grammars get tables, for ``use_tables``.

    What is recorded of the texts, and when, depends on no clock: ranks do the same in each step.

    Raises ModelError for a tokenizer that cannot be read.
    """

    def __init__(self, config: Any, *, has_tables: bool = False) -> None:
        self._grammars = VllmGrammars(config)
        backend = TabledGrammars(self._grammars) if has_tables else self._grammars
        self._queue = GrammarCompileQueue(backend, max_workers=1, size_of_more=table_bytes)
        self._waits = config.parallel_config.tensor_parallel_size > 1
        # With asynchronous scheduling vLLM begins a step before it has seen what the last ones
        # sampled, as many as there are pipeline ranks. It has seen all before: nothing waits there.
        self._num_ahead = config.parallel_config.pipeline_parallel_size
        self._asked: dict[str, _Asked] = {}
        self._noted: list[_Noted] = []
        self._tabled: TabledRequests | None = None
        self._ranks: Ranks = OneRank()
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
        """A request begins, or resumes after a preemption, after its ``output`` tokens.

        Call ``begin_tables`` after it, once for all that begin. prompt: its tokens; empty where it
        was passed as embeddings.
        """
        self._forget(name)
        text, slot = [*prompt, *output], next(self._new_slots)
        asked = _Asked(sampling_params, output, text, len(prompt), len(text), slot)
        self._asked[name] = asked
        spec = self._grammars.spec_of(sampling_params)
        if spec is not None:
            stops = self._grammars.stops_of(sampling_params)
            asked.pending = self._queue.ask(spec)
            asked.shadow = ShadowConstraint(asked.pending.future, stops)
            asked.span = self._grammars.span_of(sampling_params, prompt)

    def begin_tables(self, names: Iterable[str]) -> None:
        """From now on, those of these requests that can on all ranks advance in their tables.

        What they committed has been recorded, or they have begun just now. All ranks ask about the
        same ones: whether a rank has a table does not count there.
        """
        tabled = self._tabled
        if tabled is None:
            return
        names = [name for name in names if self._may_use_table(name)]
        if not names:
            return
        marks = self._ranks.agree([self._begin_table(name, tabled) for name in names])
        for name, mark in zip(names, marks, strict=True):
            self._asked[name].may_use_table = mark != NEVER
            if mark <= LATER:
                tabled.forget(name)

    def restate(self, name: str, output: Sequence[int]) -> None:
        """The output of a request that was added, as vLLM knows it; what was missed is made up for.

        Only what is new is read, where the output still ends as it did.
        """
        self._drop_noted(name)
        if self._tabled is not None:  # it begins again after the stated tokens
            self._tabled.forget(name)
        asked = self._asked[name]
        asked.stated = output
        text, start = asked.text, asked.prompt_length
        known, sure = len(text) - start, max(asked.sure - start - 1, 0)
        if known > len(output) or text[start + sure :] != list(output[sure:known]):
            del text[start:]
            asked.shadow = asked.shadow and asked.shadow.again()
            asked.span = asked.span and asked.span.again()
            asked.may_use_table = True
        text.extend(output[len(text) - start :])
        asked.sure = len(text)

    def knows(self, name: str, sampling_params: Any) -> bool:
        """Whether this very request was added."""
        asked = self._asked.get(name)
        return asked is not None and asked.sampling_params is sampling_params

    def is_stated(self, name: str, output: Iterable[int]) -> bool:
        """Whether this very list was the last to be added or stated for a request."""
        return self._asked[name].stated is output

    def use_tables(self, tabled: TabledRequests, ranks: Ranks) -> None:
        """Let requests whose grammars have tables advance in them from now on.

        ranks: those that do so in the same steps.
        """
        self._tabled, self._ranks = tabled, ranks

    def any_grammar(self, names: Iterable[str]) -> bool:
        """Whether one of the requests asked for a grammar."""
        asked = map(self._asked.get, names)
        return any(one is not None and one.shadow is not None for one in asked)

    def any_on_host(self, names: Iterable[str]) -> bool:
        """Whether one of the requests asked for a grammar and does not use its table."""
        return self.any_grammar(name for name in names if not self._is_tabled(name))

    def note(self, names: Sequence[str], token_ids: Tensor, num_tokens: Tensor) -> None:
        """Take note of what a step sampled: tokens [B, <= K + 1] on the device, and how many each.

        Nothing waits for this step. Tokens outside of the vocabulary are none.
        """
        if not self.any_grammar(names):
            return
        if self._tabled is not None:
            self._tabled.commit(names, token_ids, num_tokens)
        while len(self._noted) > self._num_ahead:
            self._record_first()
        counts = num_tokens.view(-1, 1).to(token_ids.dtype)
        packed = torch.cat([counts, token_ids], 1)  # a copy: vLLM may use its memory again
        self._noted.append(_Noted([*names], Download(packed)))

    def commit(self, names: Sequence[str]) -> list[Constraint | None]:
        """[B] each request's constraint after all noted tokens; waits for these.

        None for a free request, one that still reasons, one without tokens in the last step that
        was noted (its prompt is still read), and one whose grammar is not compiled yet, is
        complete, or does not fit its tokens; and for one that uses its table, now or from now on.
        """
        written = self._record()
        self.begin_tables(name for name in names if name in written)
        is_here = [name in written and not self._is_tabled(name) for name in names]
        return [
            self._update(name, waits=self._waits) if is_one else None
            for name, is_one in zip(names, is_here, strict=True)
        ]

    def stand(self, names: Iterable[str]) -> list[Constraint | None]:
        """[B] each request's constraint after all noted tokens; waits for these and the grammars.

        None for a free request, one that still reasons, and one whose grammar is complete or does
        not fit its tokens.
        """
        self._record()
        return [self._update(name, waits=True) for name in names]

    def begins_in(self, name: str, draft: Sequence[int]) -> Beginning | None:
        """Where the grammar of a request would begin if it wrote this draft; after ``stand``.

        None where the draft does not end its reasoning, and for a request that does not reason.
        """
        asked = self._asked[name]
        if asked.shadow is None or asked.span is None or asked.is_over or asked.start is not None:
            return None
        bounds = asked.span.bounds(list(asked.text), list(draft))
        if bounds.masks > len(draft):
            return None
        constraint = asked.shadow.update(asked.text, len(asked.text), waits=True)
        return None if constraint is None else Beginning(constraint, bounds)

    def at_hand(self, name: str) -> Constraint | None:
        """The request's constraint after all noted tokens; None if that would wait for a grammar.

        vLLM has seen what was sampled for the request, as it has to fill the masks of a step.
        """
        while any(name in noted.names for noted in self._noted):
            self._record_first()
        return self._update(name, waits=self._waits)

    def on_host(
        self,
        names: Sequence[str],
        constraints: Sequence[Constraint | None],
        limits: Sequence[int],
    ) -> list[HostRequest]:
        """[B] the requests for a drafter on the host, after all that was recorded.

        constraints: [B], at the ends of their texts. limits: [B] draft tokens at most; 0 for one
        that is not drafted for, whose text is empty.
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
        """Set the function that is called with the slot of a request that ends or begins again."""
        self._release = release

    def keep(self, names: Container[str]) -> None:
        """Forget every request that is not among ``names``."""
        for name in [name for name in self._asked if name not in names]:
            self._forget(name)

    def _record(self) -> set[str]:
        """Append what was noted; returns the requests that got tokens in the last step."""
        written = set[str]()
        while self._noted:
            written = self._record_first()
        return written

    def _record_first(self) -> set[str]:
        """Append what was noted first; returns the requests that got tokens in that step."""
        names, packed = self._noted.pop(0)
        written = set[str]()
        for name, (count, *token_ids) in zip(names, packed.wait().tolist(), strict=True):
            new = [token for token in token_ids[: max(0, count)] if 0 <= token < self.vocab_size]
            if name in self._asked and new:
                self._asked[name].text.extend(new)
                written.add(name)
                if self._tabled is not None:
                    self._tabled.read(name, new)
        return written

    def _is_tabled(self, name: str) -> bool:
        return self._tabled is not None and name in self._tabled

    def _may_use_table(self, name: str) -> bool:
        """Whether a request may begin to use its table, as far as all ranks know."""
        asked = self._asked.get(name)
        if (
            asked is None
            or asked.shadow is None
            or not asked.may_use_table
            or self._is_tabled(name)
        ):
            return False
        return asked.start is not None and not asked.is_over

    def _begin_table(self, name: str, tabled: TabledRequests) -> int:
        """Begin on this rank, if it can; returns its mark for the other ranks, see ``Ranks``."""
        asked = self._asked[name]
        assert asked.shadow is not None
        if not asked.shadow.is_compiled:
            return LATER
        grammar = asked.shadow.tabled
        if grammar is None or grammar.reason is not None:
            return NEVER
        return (
            LATER
            if grammar.table is None
            else tabled.begin(name, grammar.table, asked.text[asked.start :])
        )

    def _update(self, name: str, *, waits: bool) -> Constraint | None:
        asked = self._asked[name]
        if asked.shadow is None or asked.is_over or (start := asked.start) is None:
            return None
        return asked.shadow.update(asked.text, start, waits=waits)

    def _forget(self, name: str) -> None:
        asked = self._asked.pop(name, None)
        if asked is not None and asked.pending is not None:
            asked.pending.release()
        if asked is not None and self._release is not None:
            self._release([asked.slot])
        if self._tabled is not None:
            self._tabled.forget(name)
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

    names: None for a request whose tokens are known from elsewhere.
    """

    names: list[str | None]
    packed: Download


@dataclass(slots=True)
class _Asked:
    """sampling_params, stated: vLLM's own. The identity of the first tells a request from a later
    one of its name, that of the second a text that goes on from one that was set anew.

    text: prompt and output, the first ``prompt_length`` tokens the prompt, and the first ``sure``
    ones as vLLM stated them. slot: unlike any other.
    may_use_table: False once it is sure that no table holds the text.
    shadow, pending: None for free text. span: the reasoning in front of the grammar's part of the
    output; None where there is none.
    """

    sampling_params: Any
    stated: Iterable[int]
    text: list[int]
    prompt_length: int
    sure: int
    slot: int
    may_use_table: bool = True
    shadow: ShadowConstraint | None = None
    pending: PendingGrammar | None = None
    span: ReasoningSpan | None = None

    @property
    def start(self) -> int | None:
        """Where in the text the grammar begins; None inside of the reasoning."""
        return self.prompt_length if self.span is None else self.span.start_in(self.text)

    @property
    def is_over(self) -> bool:
        """Whether there are more tokens than were asked for. The scheduler drops the rest, for
        which it has no masks: steps already launched may sample anything there."""
        most = self.sampling_params.max_tokens
        return most is not None and len(self.text) - self.prompt_length > most


_PLACE = "guided_spec_requests"  # on what they belong to, so that the two go together


def track_requests(owner: Any, config: Any, *, has_tables: bool = False) -> GrammarRequests:
    """Attach a ``GrammarRequests`` to a drafter or a model runner of a worker, and return it.

    Raises ModelError as ``GrammarRequests`` does.
    """
    requests = GrammarRequests(config, has_tables=has_tables)
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
    added = []
    for name in runner.input_batch.req_ids:
        state = runner.requests[name]
        output = state.output_token_ids
        if not requests.knows(name, state.sampling_params):
            requests.add(name, state.sampling_params, output, state.prompt_token_ids or ())
            added.append(name)
        elif not (runner.use_async_scheduling and requests.is_stated(name, output)):
            requests.restate(name, output)
    requests.begin_tables(added)


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
            requests.begin_tables([new.req_id for new in scheduler_output.scheduled_new_reqs])
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


_V1 = "vllm.v1.worker.gpu_model_runner"
_V2 = "vllm.v1.worker.gpu"

# What requests of each runner are tracked by.
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
