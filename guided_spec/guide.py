"""What an engine keeps to run guided steps: texts with grammars, and the batches made of them.

``Guide.open`` gives a request its grammar, ``Guide.batch`` makes the record that
``speculative_step`` and ``commit`` take, ``GuidedText.append`` keeps what was committed. The
scheduler, the model and its KV cache are the engine's own; see docs/add_an_engine.md.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from guided_spec.config import EngineConfig
from guided_spec.core import Batches, DecodeBatch
from guided_spec.errors import ConfigError, GuidedSpecError, PromptError
from guided_spec.grammar.constraint import Constraint
from guided_spec.grammar.pipeline import RequestGrammars
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.models.loading import end_of_text_ids
from guided_spec.ops.noise import noise_key
from guided_spec.ops.token_ids import check_token_ids, spell_bad_words
from guided_spec.ops.token_rules import TokenRules
from guided_spec.step import Committed
from guided_spec.types import MAX_SEED, SamplingParams

__all__ = ["Guide", "GuidedText"]


@dataclass(slots=True, eq=False)
class GuidedText:
    """One request's text as it grows. Made by ``Guide.open``.

    slot: the key under which a proposer keeps state of it.
    tokens: prompt and output so far. prompt_length: how many of them are the prompt.
    max_length: prompt and output tokens at most.
    seed: ``params.seed``, or one that was drawn.
    constraint: its place in the grammar; None for free text.
    rules: the biases, bans and penalties of ``params``.
    stop_ids: the tokens that end it.
    noise_key: of ``seed``, prompt and grammar; see ``guided_spec.ops.noise``.
    ended: why it has ended, None while it has not. error: what went wrong, where that is "error".
    """

    slot: int
    tokens: list[int]
    prompt_length: int
    max_length: int
    params: SamplingParams
    seed: int
    constraint: Constraint | None
    rules: TokenRules
    stop_ids: frozenset[int]
    noise_key: int
    ended: Literal["stop", "length", "error"] | None = None
    error: GuidedSpecError | None = None

    @property
    def output_ids(self) -> list[int]:
        """The tokens behind the prompt, the one that ended the text among them."""
        return self.tokens[self.prompt_length :]

    @property
    def draft_room(self) -> int:
        """Draft tokens that may be of use: one more token always follows the accepted ones."""
        return self.max_length - len(self.tokens) - 1

    @property
    def prefill(self) -> int:
        """No other open text has it: each prompt is read for one text, see ``DecodeBatch``."""
        return self.slot

    def append(self, committed: Committed) -> list[int]:
        """Take the row that ``commit`` gave this text; returns the tokens that are now part of it.

        Tokens behind one that ends the text are dropped. Sets ``ended`` and ``error``.
        """
        start = len(self.tokens)
        for token_id in committed.token_ids:
            self.tokens.append(token_id)
            if token_id in self.stop_ids:
                self.ended = "stop"
                break
        if self.constraint is not None and self.constraint.is_terminated:
            self.ended = "stop"
        if self.ended is None and committed.error is not None:
            self.ended, self.error = "error", committed.error
        if self.ended is None and len(self.tokens) >= self.max_length:
            self.ended = "length"
        if self.ended not in (None, "error") and self.constraint is not None:
            self.error = self.constraint.settle()
            self.ended = self.ended if self.error is None else "error"
        return self.tokens[start:]


class Guide:
    """Opens texts with grammars, and makes the batches that a step takes.

    vocabulary: the target's tokens. tokenizer: the target's, of Hugging Face.
    config: of its fields ``num_draft_tokens``, ``max_forced_tokens``, ``max_batch_size``,
        ``max_model_len``, ``compile_threads``, ``verifier`` and the ``grammar_*`` count; None is
        ``EngineConfig()``.
    device: where the target's logits are.

    Used by one thread; grammars are compiled in others. Raises ConfigError and ModelError.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        tokenizer: Any,
        config: EngineConfig | None = None,
        *,
        device: torch.device,
    ) -> None:
        self.vocabulary = vocabulary
        self.config = config = config or EngineConfig()
        self.device = device
        self._tokenizer = tokenizer
        self._grammars = RequestGrammars.build(config, vocabulary, tokenizer)
        self._batches = Batches(config, config.max_batch_size, vocabulary.vocab_size, device)

    @classmethod
    def for_model(
        cls, model: PreTrainedModel, tokenizer: Any, config: EngineConfig | None = None
    ) -> Guide:
        """For a transformers model: its vocabulary, its end-of-text tokens and its device."""
        size = model.config.get_text_config(decoder=True).vocab_size
        stop_ids = end_of_text_ids(model, tokenizer)
        vocabulary = Vocabulary.from_tokenizer(tokenizer, size, stop_ids)
        return cls(vocabulary, tokenizer, config, device=model.device)

    def prepare(
        self, prompt_ids: Sequence[int], params: SamplingParams
    ) -> Future[CompiledGrammar] | None:
        """Begin to compile a request's grammar, so that ``open`` need not wait; None without one.

        The future fails with what ``open`` would raise.
        """
        if params.grammar is None:
            return None
        markers, queue, _ = self._grammars
        return queue.submit(markers.bind(params.grammar, prompt_ids))

    def open(
        self, slot: int, prompt_ids: Sequence[int], params: SamplingParams | None = None
    ) -> GuidedText:
        """A text that begins with a prompt; waits for its grammar.

        slot: in [0, ``max_batch_size``), not that of another open text.
        prompt_ids: at least one.
        params: ``stop``, ``n`` and ``echo`` are left to the engine.

        Raises ConfigError, PromptError, BudgetTooSmallError, or what is wrong with the grammar:
        they concern this request alone.
        """
        params = params or SamplingParams()
        if not 0 <= slot < self.config.max_batch_size:
            fix = f"must be at least 0 and below max_batch_size={self.config.max_batch_size}"
            raise ConfigError("slot", slot, fix)
        max_length = len(prompt_ids) + params.max_tokens
        if self.config.max_model_len is not None:
            max_length = min(max_length, self.config.max_model_len)
        if not 0 < len(prompt_ids) < max_length:
            fix = f"pass at least one and fewer than max_model_len={self.config.max_model_len}"
            raise PromptError(f"prompt_ids has {len(prompt_ids)} tokens: {fix}")
        stop_ids = frozenset(params.stop_token_ids)
        ends = stop_ids | frozenset(self.vocabulary.stop_token_ids)
        is_free = params.grammar is None
        seed = secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed
        text = GuidedText(
            slot=slot,
            tokens=list(prompt_ids),
            prompt_length=len(prompt_ids),
            max_length=max_length,
            params=params,
            seed=seed,
            constraint=None,
            rules=self._rules(params, stop_ids if is_free and params.ignore_eos else ends),
            stop_ids=stop_ids if params.ignore_eos else ends,
            noise_key=noise_key(seed, prompt_ids, params.grammar),
        )
        self._constrain(text)
        return text

    def batch(
        self, texts: Sequence[GuidedText], num_draft_tokens: int | None = None
    ) -> DecodeBatch:
        """What ``speculative_step`` and ``commit`` take, for one step of texts that go on.

        texts: in the order of their slots. num_draft_tokens: K; None is the config's.

        Raises ConfigError for none, too many, another order, and one that has ended.
        """
        running = tuple(texts)
        if not 0 < len(running) <= self.config.max_batch_size:
            fix = f"pass 1 to {self.config.max_batch_size} texts, as max_batch_size says"
            raise ConfigError("texts", f"{len(running)} of them", fix)
        for text in running:
            if text.ended is not None:
                raise ConfigError("texts", f"slot {text.slot}", "it has ended: leave it out")
        slots = tuple(text.slot for text in running)
        if any(one >= other for one, other in pairwise(slots)):
            raise ConfigError("texts", slots, "put them in the order of their slots, each once")
        largest = self.config.num_draft_tokens
        return self._batches.make(
            running, largest if num_draft_tokens is None else num_draft_tokens
        )

    def close(self) -> None:
        """End the compiling threads. May be called more than once."""
        self._grammars.queue.close()

    @property
    def _size(self) -> int:
        return self.vocabulary.vocab_size

    def _rules(self, params: SamplingParams, ends: frozenset[int]) -> TokenRules:
        check_token_ids(params, self._size)
        words = spell_bad_words(params, self._tokenizer, self._size)
        return TokenRules(params, words, tuple(sorted(ends)))

    def _constrain(self, text: GuidedText) -> None:
        params = text.params
        future = self.prepare(text.tokens, params)
        if future is None:
            return
        grammar = future.result()
        if params.complete is not False:
            budget = text.max_length - text.prompt_length
            endings = self._grammars.endings
            grammar = endings.bound(grammar, budget, is_required=params.complete is True)
        text.constraint = Constraint(grammar, self.vocabulary.stop_token_ids)
