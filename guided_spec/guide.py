"""What an engine keeps to run guided steps: texts with grammars, and the batches made of them.

``Guide.open`` gives a request its grammar, ``Guide.batch`` makes the record that
``speculative_step`` and ``commit`` take, ``GuidedText.append`` keeps what was committed. The
scheduler, the model and its KV cache are the engine's own; see docs/add_an_engine.md.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from guided_spec.config import EngineConfig
from guided_spec.core import DecodeBatch
from guided_spec.errors import BudgetTooSmallError, ConfigError, GuidedSpecError, PromptError
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.home import Home, Homebound
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.rows import MaskRows, default_table_bytes
from guided_spec.ops.sampling.adjust import (
    Adjustments,
    RuleTable,
    TokenRules,
    Words,
    check_token_ids,
    spell_bad_words,
)
from guided_spec.ops.sampling.logprobs import LogprobsPlan
from guided_spec.ops.sampling.noise import request_key
from guided_spec.ops.sampling.warp import Sampling
from guided_spec.step import Committed
from guided_spec.types import MAX_SEED, SamplingParams, Verifier

if TYPE_CHECKING:  # these load transformers
    from transformers import PreTrainedModel

    from guided_spec.grammar.completion.completion import EndingsCache


@dataclass(slots=True, eq=False)
class GuidedText:
    """One request's text as it grows. Made by ``begin``; ``Guide.open`` does so.

    slot: the key under which a proposer keeps state of it.
    tokens: prompt and output so far. prompt_length: how many of them are the prompt.
    max_length: prompt and output tokens at most.
    seed: ``params.seed``, or one that was drawn.
    constraint: its state in the grammar; None for free text.
    rules: the biases, bans and penalties of ``params``.
    stop_ids: the tokens that end it. grammar_ends: those that end a text of a grammar.
    noise_key: see ``guided_spec.ops.sampling.noise.request_key``.
    prefill: the same for all texts whose prompts were read as one, see ``DecodeBatch``.
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
    grammar_ends: tuple[int, ...]
    noise_key: int
    prefill: Hashable = field(default_factory=object)
    ended: Literal["stop", "length", "error"] | None = None
    error: GuidedSpecError | None = None

    @classmethod
    def begin(  # noqa: PLR0913 - what is asked for, and of which engine
        cls,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        vocabulary: Vocabulary,
        *,
        max_length: int,
        seed: int,
        bad_words: Words = (),
        verifier: Verifier = "rejection",
    ) -> GuidedText:
        """A text after a prompt, without a slot and without its grammar.

        max_length: prompt and output tokens at most, if ``params`` do not say less.
        bad_words: the token sequences that ``params.bad_words`` stand for.
        verifier: of its steps; its noise follows from it.
        """
        own, ends = frozenset(params.stop_token_ids), frozenset(vocabulary.stop_token_ids)
        is_free = params.grammar is None
        banned_early = own if is_free and params.ignore_eos else own | ends
        return cls(
            slot=-1,
            tokens=list(prompt_ids),
            prompt_length=len(prompt_ids),
            max_length=min(max_length, len(prompt_ids) + params.max_tokens),
            params=params,
            seed=seed,
            constraint=None,
            rules=TokenRules(params, bad_words, tuple(sorted(banned_early))),
            stop_ids=own if params.ignore_eos else own | ends,
            grammar_ends=tuple(vocabulary.stop_token_ids),
            noise_key=request_key(seed, prompt_ids, params, verifier),
        )

    @property
    def output_ids(self) -> list[int]:
        """The tokens after the prompt, the one that ended the text among them."""
        return self.tokens[self.prompt_length :]

    @property
    def draft_limit(self) -> int:
        """Draft tokens that may be of use: one more token always follows the accepted ones."""
        if self.constraint is not None and self.constraint.has_row:
            return 0  # what its grammar does takes long: a draft would need more rows
        return self.max_length - len(self.tokens) - 1

    @property
    def source(self) -> Hashable:
        """Equal for texts of which one may be drafted from another: grammar and cache salt."""
        return self.params.grammar, self.params.cache_salt

    def bind(self, grammar: CompiledGrammar, endings: EndingsCache | None) -> None:
        """Constrain the text to a grammar.

        endings: how texts of grammars end, to end this one in time; None never does.

        Raises BudgetTooSmallError where no text is known that is short enough.
        """
        params, budget = self.params, self.max_length - self.prompt_length
        is_required = params.complete is True
        # Where ``min_tokens`` bans the end up to the last token, no text ends in time.
        may_end = is_required or (params.complete is None and params.min_tokens < budget)
        if endings is not None and may_end:
            refusal: BudgetTooSmallError | None = None
            try:
                grammar = endings.bound(grammar, budget, is_required=is_required)
            except BudgetTooSmallError as error:  # the budget may be what the context left
                refusal = BudgetTooSmallError(params.max_tokens, error.least, budget)
            if refusal is not None:  # raised out here: the other's frames would live as long as it
                raise refusal
        self.constraint = Constraint(grammar, self.grammar_ends)

    def append(
        self, committed: Committed, is_stopped: Callable[[int], bool] | None = None
    ) -> list[int]:
        """Take the row that ``commit`` gave this text; returns the tokens that are now part of it.

        is_stopped: called with each token, but one that ends the text anyway; whether the text ends
            there, at a stop string perhaps.

        Tokens after one that ends the text are dropped, by its constraint too. Sets ``ended`` and
        ``error``.
        """
        start = len(self.tokens)
        reason = self._take(committed.token_ids, is_stopped)
        if self.constraint is not None:
            taken = len(self.tokens) - start
            self.constraint.take_back(len(committed.token_ids) - taken)
        if reason is not None:
            self.end(reason)
        elif committed.error is not None:
            self.end("error", committed.error)
        return self.tokens[start:]

    def end(
        self, reason: Literal["stop", "length", "error"], error: GuidedSpecError | None = None
    ) -> None:
        """The text has ended; does nothing if it has already.

        Where nothing else went wrong it has ended with an error if its grammar refuses it.
        """
        if self.ended is not None:
            return
        if self.constraint is not None:
            failure = self.constraint.catch_up()  # in any case: it counts where the budget cut rows
            error = error or failure
        self.ended, self.error = reason if error is None else "error", error

    def _take(
        self, token_ids: Sequence[int], is_stopped: Callable[[int], bool] | None
    ) -> Literal["stop", "length"] | None:
        """Append tokens up to one that ends the text; returns why it does.

        The grammar has accepted all of them, so its state only says whether the last one ends it.
        """
        last = len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            self.tokens.append(token_id)
            is_over = token_id in self.stop_ids or (index == last and self._is_complete())
            if is_over or (is_stopped is not None and is_stopped(token_id)):
                return "stop"
            if len(self.tokens) >= self.max_length:
                return "length"
        return None

    def _is_complete(self) -> bool:
        return self.constraint is not None and self.constraint.is_terminated


class _Stacked(NamedTuple):
    """What the texts of a batch ask for: the same for as long as they run together.

    rules, logprobs: None when nobody has any.
    """

    texts: tuple[GuidedText, ...]
    sampling: Sampling
    rules: RuleTable | None
    logprobs: LogprobsPlan | None
    sources: tuple[Hashable, ...]


class Batches:
    """Makes the batch of each step out of the texts that decode in it.

    config: its draft lengths and its verifier. num_slots: texts of a batch at most.
    """

    def __init__(
        self, config: EngineConfig, num_slots: int, vocab_size: int, device: torch.device
    ) -> None:
        depths, room = config.longest_draft + 1, config.device_table_bytes
        room = default_table_bytes(device) if room is None else room
        self._rows = MaskRows(num_slots, depths, vocab_size, device, room)
        self._config, self._vocab_size, self._device = config, vocab_size, device
        # Of the last two batches: they may take turns.
        self._stacked = deque[_Stacked](maxlen=2)

    def make(self, texts: Sequence[GuidedText], num_draft_tokens: int) -> DecodeBatch:
        """The batch of ``texts``, in the order of their slots; see ``DecodeBatch``."""
        stacked = self._stack(tuple(texts))
        contexts = tuple(text.tokens for text in texts)
        prompt_lengths = tuple(text.prompt_length for text in texts)
        return DecodeBatch(
            slots=tuple(text.slot for text in texts),
            contexts=contexts,
            prompt_lengths=prompt_lengths,
            constraints=tuple(text.constraint for text in texts),
            limits=tuple(text.draft_limit for text in texts),
            sampling=stacked.sampling,
            mask_rows=self._rows,
            num_draft_tokens=num_draft_tokens,
            vocab_size=self._vocab_size,
            device=self._device,
            policies=tuple(text.params.draft_policy for text in texts),
            verifier=self._config.verifier,
            adjustments=Adjustments.stack(stacked.rules, contexts, prompt_lengths),
            logprobs=stacked.logprobs,
            prefills=tuple(text.prefill for text in texts),
            sources=stacked.sources,
        )

    def synchronize(self) -> None:
        """Wait for what still fills mask rows of a step that raised."""
        self._rows.synchronize()

    def forget_ended(self) -> None:
        """Let go of batches with texts that have ended."""
        left = [one for one in self._stacked if all(text.ended is None for text in one.texts)]
        self._stacked = deque(left, maxlen=self._stacked.maxlen)

    def _stack(self, texts: tuple[GuidedText, ...]) -> _Stacked:
        found = next((one for one in self._stacked if one.texts == texts), None)
        if found is None:
            params, device = [text.params for text in texts], self._device
            found = _Stacked(
                texts,
                Sampling.stack(params, [text.noise_key for text in texts], device),
                RuleTable.stack([text.rules for text in texts], self._vocab_size, device),
                LogprobsPlan.stack(params, device),
                tuple(text.source for text in texts),
            )
            self._stacked.append(found)
        return found


class Guide(Homebound):
    """Opens texts with grammars, and makes the batches that a step takes.

    vocabulary: the target's tokens. tokenizer: the target's, of Hugging Face.
    config: of its fields ``num_draft_tokens``, ``max_forced_tokens``, ``max_batch_size``,
        ``max_model_len``, ``compile_threads``, ``verifier`` and the ``grammar_*`` count; None is
        ``EngineConfig()``.
    device: where the target's logits are.

    Used by one thread; grammars are compiled in others, which a fork does not have: there, and for
    a copy, OtherProcessError is raised. Raises ConfigError and ModelError.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        tokenizer: Any,
        config: EngineConfig | None = None,
        *,
        device: torch.device,
    ) -> None:
        from guided_spec.grammar.pipeline import RequestGrammars  # only here: it loads transformers

        self.home = Home("Guide")
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
        from guided_spec.models.tokenizer import end_of_text_ids

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
        self.home.require()
        markers, queue, *_ = self._grammars
        return queue.submit(markers.bind(params.grammar, prompt_ids))

    def open(
        self, slot: int, prompt_ids: Sequence[int], params: SamplingParams | None = None
    ) -> GuidedText:
        """A text that begins with a prompt; waits for its grammar.

        slot: in [0, ``max_batch_size``), not that of another open text.
        prompt_ids: at least one.
        params: ``stop``, ``n``, ``echo`` and ``lora`` are left to the engine.

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
            verifier=self.config.verifier,
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
