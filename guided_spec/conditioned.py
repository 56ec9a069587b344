"""Texts drawn from the model's distribution conditioned on a grammar: research, one text at a time.

A mask gives to the legal tokens, at each place, what the model gave to the illegal ones there. So
a beginning that the grammar allows and the model rarely finishes in it comes too often. Here whole
texts are weighed: "Grammar-Aligned Decoding", Park et al. 2024, arXiv 2405.21047, defines the law.

The way is a race, as in "A* Sampling", Maddison et al. 2014, arXiv 1411.0030: every sequence of
tokens arrives after an exponential time whose rate is its probability, and the first one in the
grammar wins. A beginning arrives with the first of its sequences; one of its tokens arrives with
it, and the others, which have no memory, later by times of their own. So only beginnings that
come before the winner are read.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guided_spec.errors import ConfigError, GrammarStateError, NoTokenLeftError
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.masks.constraint import Fork
from guided_spec.ops.bitmask import unpack_bitmask
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.ops.sampling.noise import Stream, exponential_noise, noise_key
from guided_spec.ops.sampling.warp import Sampling, warp
from guided_spec.types import SamplingParams

_READ = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "grammar")


class ConditionedText(NamedTuple):
    """token_ids: the one that ends the text is the last. num_read: contexts the model has read."""

    token_ids: tuple[int, ...]
    num_read: int


def sample_conditioned(  # noqa: PLR0913 - all of a request, and a bound
    next_logits: Callable[[tuple[int, ...]], Tensor],
    grammar: CompiledGrammar,
    vocabulary: Vocabulary,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    most_read: int = 4096,
) -> ConditionedText:
    """Draw a text: what the model would write, given that it is in the grammar.

    A text is a sequence of tokens with the stop token behind it. Its probability is proportional
    to the product of the model's for each of its tokens, without a mask, over all sequences that
    the grammar's masks allow and that take at most ``max_tokens`` tokens. Temperature and filters
    are part of the model: what ``top_p`` drops among all tokens has probability 0, even where no
    legal token is left so. The text depends on prompt, grammar and seed, and on nothing else.

    next_logits: output tokens so far to the logits [V] of the next one; the prompt is before them.
    grammar: compiled for ``vocabulary``, such as ``Guide.prepare`` has it.
    params: with a seed and a temperature above 0; fields that are not about either, about filters
        or ``max_tokens`` stay at their defaults.
    most_read: contexts that the model may read. The less of its probability the grammar holds, the
        more are needed; the number of beginnings in the grammar is always enough.

    Raises ConfigError for other params, and where ``most_read`` contexts do not decide;
    NoTokenLeftError where the model gives no text of the grammar any probability.
    """
    _require(params)
    assert params.seed is not None
    key = noise_key(params.seed, prompt_ids, params.grammar)
    race = _Race(grammar, vocabulary, params, key)
    while (path := race.next()) is not None:
        if path and path[-1] in race.stops:
            return ConditionedText(path, race.num_read)
        if race.num_read == most_read:
            fix = "does not decide: the model rarely writes such texts; ask for them in the prompt"
            raise ConfigError("most_read", most_read, fix)
        race.enter(next_logits(path))
    raise NoTokenLeftError(
        f"the model gives no text of the grammar within max_tokens={params.max_tokens} any "
        "probability: raise max_tokens, or keep more tokens by top_k, top_p and min_p"
    )


class _Siblings(NamedTuple):
    """Legal tokens behind ``path``, as they arrive. times, logprobs: logarithms, float64 [N]."""

    path: tuple[int, ...]
    token_ids: list[int]
    times: list[float]
    logprobs: list[float]


class _Race:
    """Beginnings by their times of arrival. stops: tokens that end a text.

    num_read: beginnings whose tokens have entered.
    """

    def __init__(
        self, grammar: CompiledGrammar, vocabulary: Vocabulary, params: SamplingParams, key: int
    ) -> None:
        self.stops = frozenset(vocabulary.stop_token_ids)
        self.num_read = 0
        self._fork = Fork(grammar.new_matcher(), grammar.excluded)
        self._size, self._key, self._most = vocabulary.vocab_size, key, params.max_tokens
        self._bitmask = torch.zeros(1, num_mask_words(vocabulary.vocab_size), dtype=torch.int32)
        self._sampling = Sampling.stack([params], [key], torch.device("cpu"))
        self._path: tuple[int, ...] = ()
        self._time, self._logprob = -math.inf, 0.0
        self._waiting: list[tuple[float, int, int, _Siblings]] = []

    def next(self) -> tuple[int, ...] | None:
        """The beginning that arrives next, the empty one first; None where no other does."""
        if not self.num_read:
            return ()
        if not self._waiting:
            return None
        self._time, number, at, row = heapq.heappop(self._waiting)
        if at + 1 < len(row.times):
            heapq.heappush(self._waiting, (row.times[at + 1], number, at + 1, row))
        self._path, self._logprob = (*row.path, row.token_ids[at]), row.logprobs[at]
        return self._path

    def enter(self, logits: Tensor) -> None:
        """Let the tokens behind the beginning of ``next`` in. logits: of the model, [V]."""
        self.num_read += 1
        probs = warp(logits.cpu().view(1, 1, -1)[..., : self._size], self._sampling)
        with np.errstate(divide="ignore"):  # log(0) is what a token of no probability has
            logprobs = np.log(probs.flatten().double().numpy()) + self._logprob
            waits = np.log(self._noise()) - logprobs
            first = waits.min()
            if not np.isfinite(first):
                return
            later = waits + np.log1p(-np.exp(first - waits))  # than the first one
        legal = self._legal() & np.isfinite(waits)
        ids = np.flatnonzero(legal)
        times = np.logaddexp(self._time, later[ids])
        order = np.argsort(times, kind="stable")
        ids = ids[order]
        if len(ids):
            row = _Siblings(self._path, ids.tolist(), times[order].tolist(), logprobs[ids].tolist())
            heapq.heappush(self._waiting, (row.times[0], self.num_read, 0, row))

    def _noise(self) -> NDArray[np.float64]:
        """Float64 [V], exponential(1), the beginning's own."""
        seeds = torch.tensor([noise_key(self._key, self._path)])
        noise = exponential_noise(seeds, torch.zeros_like(seeds), Stream.SAMPLE, self._size)
        return noise.flatten().double().numpy()

    def _legal(self) -> NDArray[np.bool_]:
        """Bool [V]: tokens behind the beginning; the last one of a budget is a stop token."""
        path = self._path
        if self._fork.advance(path) < len(path):
            raise GrammarStateError(f"the matcher refuses a token that its mask allows: {path}")
        self._fork.matcher.fill_next_token_bitmask(self._bitmask, 0)
        legal: NDArray[np.bool_] = unpack_bitmask(self._bitmask, self._size)[0].numpy().copy()
        if len(self._path) == self._most - 1:
            ends = np.zeros_like(legal)
            ends[sorted(self.stops)] = True
            legal &= ends
        return legal


def _require(params: SamplingParams) -> None:
    default = SamplingParams()
    for field in fields(params):
        value = getattr(params, field.name)
        if field.name not in _READ and value != getattr(default, field.name):
            fix = "must stay at its default: conditioned sampling does not read it"
            raise ConfigError(field.name, value, fix)
    if params.temperature == 0:
        fix = "must be above 0: a greedy text is in the grammar or has no probability"
        raise ConfigError("temperature", params.temperature, fix)
    if params.seed is None:
        raise ConfigError("seed", params.seed, "must be an int: the text is a function of it")
