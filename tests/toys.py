"""Small stand-ins over twelve tokens: a grammar, a target and a drafter, exact and on the CPU."""

from __future__ import annotations

import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from guided_spec.config import EngineConfig
from guided_spec.core import DecodeBatch, DraftInFlight, ProposerContext, TargetOutput
from guided_spec.grammar.protocol import GrammarMatcher, Matcher
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead
from guided_spec.masks.rows import MaskRows
from guided_spec.ops.sampling.warp import Sampling
from guided_spec.proposers.host_masks import draft_autoregressively
from guided_spec.types import Draft, SamplingParams

TEXTS = (b"a", b"b", b"c", b"d", b"{", b"}", b'"', b":", b",", b"1", b"0", b"")
VOCAB_SIZE = len(TEXTS)
EOS = VOCAB_SIZE - 1
VOCABULARY = Vocabulary(TEXTS, (EOS,), VOCAB_SIZE)
CPU = torch.device("cpu")
EVERYTHING = frozenset(range(VOCAB_SIZE))

Rule = Callable[[tuple[int, ...]], frozenset[int]]
"""The tokens that may follow a prefix; the end-of-text token among them where it may end."""


def hashed_rule(seed: int, share: float = 0.4, longest: int = 12) -> Rule:
    """Another set of legal tokens after every prefix, never an empty one; ends by ``longest``."""

    @cache
    def rule(prefix: tuple[int, ...]) -> frozenset[int]:
        if len(prefix) >= longest:
            return frozenset({EOS})
        dice = random.Random(zlib.crc32(repr((seed, prefix)).encode()))
        one = dice.randrange(EOS)
        return frozenset({one} | {t for t in range(VOCAB_SIZE) if dice.random() < share})

    return rule


def text_rule(texts: Iterable[bytes], vocabulary: Vocabulary = VOCABULARY) -> Rule:
    """Exactly one of ``texts``, in any split into tokens."""
    options = tuple(texts)

    def rule(prefix: tuple[int, ...]) -> frozenset[int]:
        done = b"".join(vocabulary.token_bytes[token] for token in prefix)
        legal = {
            token
            for token, data in enumerate(vocabulary.token_bytes)
            if data and any(text.startswith(done + data) for text in options)
        }
        return frozenset(legal | ({vocabulary.stop_token_ids[0]} if done in options else set()))

    return rule


class ToyMatcher(Matcher):
    """A ``GrammarMatcher`` that keeps its tokens in a list and asserts that it is used properly."""

    def __init__(self, compiled: ToyCompiled, tokens: Iterable[int] = ()) -> None:
        self.compiled = compiled
        self.tokens = list(tokens)

    def accept_token(self, token_id: int) -> bool:
        assert not self.is_terminated(), "accepted on a terminated matcher"
        assert 0 <= token_id < self.compiled.vocab_size, "a token id outside the vocabulary"
        if token_id in self.compiled.refused or token_id not in self.legal():
            return False
        self.tokens.append(token_id)
        return True

    def fill_next_token_bitmask(self, bitmask: Any, index: int = 0) -> bool:
        assert not self.is_terminated(), "filled from a terminated matcher"
        self.compiled.fills[tuple(self.tokens)] += 1
        legal = self.legal()
        words = [0] * bitmask.shape[1]
        for token in legal:
            words[token // 32] |= 1 << (token % 32)
        row = np.array(words, dtype=np.uint32).view(np.int32)
        bitmask[index] = torch.from_numpy(row) if isinstance(bitmask, Tensor) else row
        return len(legal) < self.compiled.vocab_size

    def fork(self) -> ToyMatcher:
        return ToyMatcher(self.compiled, self.tokens)

    def rollback(self, num_tokens: int) -> None:
        assert 0 <= num_tokens <= len(self.tokens), "rolled back past the start"
        del self.tokens[len(self.tokens) - num_tokens :]

    def is_terminated(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] == self.compiled.eos

    def legal(self) -> frozenset[int]:
        return self.compiled.rule(tuple(self.tokens))


class ToyCompiled:
    """A rule as a compiled grammar.

    fills: how often a mask was filled after each prefix, by any matcher of this grammar.
    refused: tokens that ``accept_token`` refuses although the mask may admit them.
    style: the rule of the style matcher, None for none.
    """

    def __init__(
        self, rule: Rule, vocabulary: Vocabulary = VOCABULARY, style: Rule | None = None
    ) -> None:
        self.rule = rule
        self.vocabulary = vocabulary
        self.style = style
        self.vocab_size = vocabulary.vocab_size
        self.eos = vocabulary.stop_token_ids[0]
        self.fills: Counter[tuple[int, ...]] = Counter()
        self.refused: frozenset[int] = frozenset()
        self.excluded: frozenset[int] = frozenset()
        self.memory_size_bytes = 0

    def new_matcher(self) -> ToyMatcher:
        return ToyMatcher(self)

    def new_style_matcher(self) -> ToyMatcher | None:
        return None if self.style is None else ToyMatcher(ToyCompiled(self.style, self.vocabulary))


class ToyTarget:
    """A target whose logits are a fixed function of the whole context."""

    def __init__(self, seed: int = 0, scale: float = 2.0) -> None:
        self._seed, self._scale = seed, scale
        self._known: dict[tuple[int, ...], Tensor] = {}

    def logits(self, context: Sequence[int]) -> Tensor:
        """[V] logits of the token after ``context``."""
        key = tuple(context)
        if key not in self._known:
            seed = zlib.crc32(repr((self._seed, key)).encode())
            noise = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
            self._known[key] = noise * self._scale
        return self._known[key]

    def verify(self, batch: DecodeBatch, flight: DraftInFlight) -> TargetOutput:
        drafted = flight.draft.token_ids.tolist()
        rows = [
            self.logits((*context, *drafted[row][:place]))
            for row, context in enumerate(batch.contexts)
            for place in range(len(drafted[row]) + 1)
        ]
        return TargetOutput(torch.stack(rows).view(len(batch), -1, VOCAB_SIZE))


class ToyDrafter:
    """A proposer that samples from the masked distribution of a ``ToyTarget`` of its own."""

    aux_hidden_layers: tuple[int, ...] = ()

    def __init__(self, model: ToyTarget) -> None:
        self._model = model

    def propose(self, batch: DecodeBatch, lookahead: Lookahead) -> Draft:
        texts = [
            [*context, *drafted]
            for context, drafted in zip(batch.contexts, lookahead.drafted, strict=True)
        ]

        def logits() -> Tensor:
            return torch.stack([self._model.logits(text) for text in texts])

        def forward(token_ids: Tensor) -> Tensor:
            for text, token in zip(texts, token_ids.tolist(), strict=True):
                text.append(token)
            return logits()

        return draft_autoregressively(logits(), forward, batch, lookahead)

    def release(self, slots: Sequence[int]) -> None:
        del slots


def toy_batch(
    contexts: Sequence[Sequence[int]],
    constraints: Sequence[Constraint | None],
    *,
    k: int = 3,
    limits: Sequence[int] | None = None,
    params: Sequence[SamplingParams] | None = None,
    seeds: Sequence[int] | None = None,
) -> DecodeBatch:
    """A batch of one-token prompts; greedy, with the rows' numbers as seeds, unless told."""
    size = len(contexts)
    limits = [k] * size if limits is None else limits
    params = [SamplingParams()] * size if params is None else params
    depths = max([k, *limits]) + 1
    return DecodeBatch(
        slots=tuple(range(size)),
        contexts=tuple(contexts),
        prompt_lengths=(1,) * size,
        constraints=tuple(constraints),
        limits=tuple(limits),
        sampling=Sampling.stack(params, range(size) if seeds is None else seeds, CPU),
        mask_rows=MaskRows(size, depths, VOCAB_SIZE, CPU),
        num_draft_tokens=k,
        vocab_size=VOCAB_SIZE,
        device=CPU,
    )


def toy_context(**changes: Any) -> ProposerContext:
    """A proposer's context over the toy vocabulary, encoding one byte a token."""
    fields: dict[str, Any] = {
        "vocabulary": VOCABULARY,
        "encode": lambda text: [TEXTS.index(bytes([byte])) for byte in text.encode()],
        "tokenizer": None,
        "target": None,
        "config": EngineConfig(),
        "num_slots": 8,
        "max_model_len": 64,
        "device": CPU,
        "dtype": torch.float32,
    }
    return ProposerContext(**{**fields, **changes})


def chi_square_p_value(counts: Tensor, probs: Tensor) -> float:
    """How likely counts this far from ``probs`` are; impossible outcomes that happened give 0."""
    counts, probs = counts.double().flatten(), probs.double().flatten()
    if counts[probs <= 0].sum() > 0:
        return 0.0
    expected = (probs / probs.sum() * counts.sum())[probs > 0]
    observed = counts[probs > 0]
    rare = expected < 10  # too few for the approximation: one outcome together
    expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    observed = torch.cat([observed[~rare], observed[rare].sum().view(1)])
    kept = expected > 0
    statistic = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = torch.tensor(float(kept.sum()) - 1, dtype=torch.float64)
    p_value = float(torch.special.gammaincc(freedom / 2, statistic / 2))
    return 0.0 if math.isnan(p_value) else p_value


class RowWriter:
    """A matcher that writes one number into all words of a mask row."""

    def __init__(self, value: int) -> None:
        self.value = value

    def fill_next_token_bitmask(self, bitmask: Any, index: int = 0) -> bool:
        np.asarray(bitmask)[index] = self.value
        return True


def row_writer(value: int) -> GrammarMatcher:
    return cast(GrammarMatcher, RowWriter(value))
