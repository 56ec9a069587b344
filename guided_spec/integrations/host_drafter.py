"""Drafts on the host for another engine's requests: texts and grammars in, token lists out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from guided_spec.config import EngineConfig
from guided_spec.core import DecodeBatch, ProposerContext
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead
from guided_spec.masks.rows import MaskRows
from guided_spec.ops.sampling.warp import Sampling
from guided_spec.proposers import build_proposer
from guided_spec.types import SamplingParams

PROPOSER = "chain:grammar_forced+ngram"
CHECKED = 8  # tokens at the end of a text that are compared to see whether it is still the same
_CPU = torch.device("cpu")


class HostRequest(NamedTuple):
    """A request that is drafted for.

    slot: by which the proposer knows it, unlike that of any other request. text: prompt and output
    tokens. prompt_length: how many of them are the prompt. limit: draft tokens at most.
    constraint: its grammar at the end of the text; None for free text.
    """

    slot: int
    text: Sequence[int]
    prompt_length: int
    limit: int
    constraint: Constraint | None


class HostText(NamedTuple):
    """A request's prompt and output; only its owner changes it. slot: as of ``HostRequest``."""

    slot: int
    token_ids: list[int]


class HostTexts:
    """The texts of another engine's requests as they grow: a step reads only what is new.

    release: called with the slots of texts that have ended, such as ``HostDrafter.release``.
    """

    def __init__(self, release: Callable[[Sequence[int]], None]) -> None:
        self._release = release
        self._texts: dict[Hashable, HostText] = {}
        self._new_slots = itertools.count()

    def update(
        self, name: Hashable, length: int, read: Callable[[int, int], list[int]]
    ) -> HostText:
        """Read the new tokens of a request's text, now ``length`` tokens long, and return it.

        read: returns its tokens from one position to another. A text that no longer ends as it did
        is read again from its beginning, and gets another slot.
        """
        text, known = self._texts.get(name), 0
        if text is not None:
            known = len(text.token_ids)
            start = max(0, known - CHECKED)
            if known > length or read(start, known) != text.token_ids[start:]:
                known = 0
        return self.write(name, known, read(known, length) if known < length else ())

    def write(self, name: Hashable, start: int | None, token_ids: Sequence[int]) -> HostText:
        """Put tokens after the first ``start`` of a request's text, None: after all of them.

        A text that held more gets another slot, since the state of a slot assumes a growing text.
        """
        text = self._texts.get(name)
        if text is None or (start is not None and start < len(text.token_ids)):
            kept = [] if text is None else text.token_ids[:start]
            self.forget([name])
            text = self._texts[name] = HostText(next(self._new_slots), kept)
        text.token_ids.extend(token_ids)
        return text

    def forget(self, names: Iterable[Hashable]) -> None:
        """The requests have ended; one that is not known is no error."""
        known = [self._texts.pop(name) for name in names if name in self._texts]
        self._release([text.slot for text in known])

    def __getitem__(self, name: Hashable) -> HostText:
        return self._texts[name]

    def __iter__(self) -> Iterator[Any]:
        return iter([*self._texts])


class HostDrafter:
    """Forced text and prompt lookup under each request's grammar; needs no model.

    The drafts are a function of texts and grammars alone, so that processes which see the same
    requests draft the same tokens.

    num_draft: tokens of a draft, 1 to 64. num_requests: of one call, at most. proposer: one that
    needs no model.

    Raises ConfigError for a longer draft.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        tokenizer: Any,
        num_draft: int,
        num_requests: int,
        proposer: str = PROPOSER,
    ) -> None:
        self._num_draft = num_draft
        self._vocab_size = vocabulary.vocab_size
        self._rows = MaskRows(num_requests, num_draft + 1, vocabulary.vocab_size, _CPU)
        context = ProposerContext(
            vocabulary=vocabulary,
            encode=lambda text: [*tokenizer.encode(text, add_special_tokens=False)],
            tokenizer=tokenizer,
            target=None,
            config=EngineConfig(num_draft_tokens=num_draft, max_forced_tokens=num_draft),
            num_slots=num_requests,
            max_model_len=1,  # no KV cache of the proposer's own depends on it
            device=_CPU,
            dtype=torch.float32,
        )
        self._proposer = build_proposer(proposer, context)

    def draft(self, requests: Sequence[HostRequest]) -> list[list[int]]:
        """One draft for each request, in their order; empty where there is nothing to draft."""
        drafts: list[list[int]] = [[] for _ in requests]
        asking = (at for at, request in enumerate(requests) if request.limit > 0)
        order = sorted(asking, key=lambda at: requests[at].slot)
        if not order:
            return drafts
        batch = self.batch([requests[at] for at in order])
        lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
        self._proposer.begin(batch, lookahead).finish()
        for at, drafted in zip(order, lookahead.drafted, strict=True):
            drafts[at] = [*drafted]
        return drafts

    def extend(self, batch: DecodeBatch, lookahead: Lookahead) -> None:
        """Draft after the tokens that ``lookahead`` holds of each request of a batch, in its order.

        A step may do so several times with one batch.
        """
        self._proposer.begin(batch, lookahead).finish()

    def release(self, slots: Sequence[int]) -> None:
        """Forget what is kept of requests that have ended."""
        self._proposer.release(slots)

    def batch(self, requests: Sequence[HostRequest]) -> DecodeBatch:
        """The requests of one step as a proposer sees them."""
        greedy = [SamplingParams(temperature=0.0)] * len(requests)
        return DecodeBatch(
            slots=tuple(request.slot for request in requests),
            contexts=tuple(request.text for request in requests),
            prompt_lengths=tuple(request.prompt_length for request in requests),
            constraints=tuple(request.constraint for request in requests),
            limits=tuple(min(self._num_draft, request.limit) for request in requests),
            sampling=Sampling.stack(greedy, [0] * len(requests), _CPU),
            mask_rows=self._rows,
            num_draft_tokens=self._num_draft,
            vocab_size=self._vocab_size,
            device=_CPU,
        )
