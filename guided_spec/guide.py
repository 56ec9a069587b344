"""What an engine keeps to run guided steps: texts with grammars, and the batches made of them.

``Guide.open`` gives a request its grammar, ``Guide.batch`` makes the record that
``speculative_step`` and ``commit`` take, ``GuidedText.append`` keeps what was committed. The
scheduler, the model and its KV cache are the engine's own; see docs/add_an_engine.md.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel

from guided_spec.config import EngineConfig
from guided_spec.core import Batches, DecodeBatch
from guided_spec.errors import ConfigError, PromptError
from guided_spec.grammar.pipeline import RequestGrammars
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.models.loading import end_of_text_ids
from guided_spec.ops.sampling.adjust import check_token_ids, spell_bad_words
from guided_spec.text import GuidedText
from guided_spec.types import MAX_SEED, SamplingParams

__all__ = ["Guide", "GuidedText"]


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
        size, seed = self.vocabulary.vocab_size, params.seed
        check_token_ids(params, size)
        text = GuidedText.begin(
            prompt_ids,
            params,
            self.vocabulary,
            max_length=self.config.max_model_len or len(prompt_ids) + params.max_tokens,
            seed=secrets.randbelow(MAX_SEED + 1) if seed is None else seed,
            bad_words=spell_bad_words(params, self._tokenizer, size),
        )
        if not 0 < len(prompt_ids) < text.max_length:
            fix = f"pass at least one and fewer than max_model_len={self.config.max_model_len}"
            raise PromptError(f"prompt_ids has {len(prompt_ids)} tokens: {fix}")
        text.slot = slot
        future = self.prepare(prompt_ids, params)
        if future is not None:
            text.bind(future.result(), self._grammars.endings)
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
