"""A grammar for transformers' own generate, plain or assisted: a logits processor that goes back.

In assisted generation transformers calls the same processor for the assistant and for the model,
over drafts that are then taken back. xgrammar's own processor follows one text, forward only.
transformers passes a logits processor nothing but token ids. So a text is known by its content: by
its prompt, and by the tokens after it that were seen before.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from guided_spec.errors import ConfigError, GrammarDeadEndError
from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.backends.registry import GrammarBackendName
from guided_spec.grammar.pipeline import GrammarPipeline
from guided_spec.grammar.protocol import CompiledGrammar, GrammarBackend
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.markers import Markers
from guided_spec.grammar.text.state import TextState, new_text
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.integrations.transformers.params import Grammars, list_grammars
from guided_spec.models.tokenizer import end_of_text_ids
from guided_spec.ops.bitmask import pack_bitmask, unpack_bitmask
from guided_spec.ops.mask_words import num_mask_words

KEPT_ROWS = 64  # of a text; more than drafts are long


class TrackedText:
    """One text, and the mask rows at its positions.

    compiled: its grammar, None for free text. vocab_size: V of the grammar's vocabulary.
    seen: the tokens after the prompt in the last call, legal or not, and any that are known to come
    after them.
    """

    def __init__(self, compiled: CompiledGrammar | None, vocab_size: int) -> None:
        self.seen: list[int] = []
        self.compiled = compiled
        self._vocab_size = vocab_size
        self._text = new_text(compiled) if compiled else None
        self._rows: dict[int, Tensor] = {}  # by the number of tokens before

    def copy(self) -> TrackedText:
        """An independent copy at the same position."""
        copied = TrackedText(self.compiled, self._vocab_size)
        copied.seen = self.seen.copy()
        copied._rows = self._rows.copy()
        if self._text is not None:
            copied._text = self._text.fork()
        return copied

    def row(self, token_ids: list[int]) -> Tensor | None:
        """int32 [W] on the CPU: the grammar's mask after these tokens; not to be changed.

        None after the end of the text, and after a token that the grammar refuses: one of a draft
        that is about to be rejected, or padding. None for free text.

        Raises GrammarDeadEndError where no token is legal.
        """
        if common_length(self.seen, token_ids) < len(token_ids):
            self.seen = token_ids
        text = self._text
        if text is None:
            return None
        agreed = common_length(text.token_ids, token_ids)
        if agreed == len(token_ids) and agreed in self._rows:
            return self._rows[agreed]  # drafted before, verified now
        text.rollback_to(agreed)
        self._rows = {depth: row for depth, row in self._rows.items() if depth <= agreed}
        if not all(self._accept(text, token) for token in token_ids[agreed:]):
            return None
        return None if text.is_terminated() else self._fill(text)

    def _accept(self, text: TextState, token_id: int) -> bool:
        is_known = 0 <= token_id < self._vocab_size
        return is_known and not text.is_terminated() and text.accept_token(token_id)

    def _fill(self, text: TextState) -> Tensor:
        depth = len(text.token_ids)
        bitmask = torch.zeros(1, num_mask_words(self._vocab_size), dtype=torch.int32)
        text.fill_next_token_bitmask(bitmask, 0)
        if not bitmask.any():
            raise GrammarDeadEndError(f"no token is legal at output position {depth}")
        self._rows[depth] = bitmask[0]
        self._rows.pop(depth - KEPT_ROWS, None)
        return bitmask[0]


class Generation:
    """The texts of one call of generate, as of the last call of the processor.

    prompts: [R] of one width, as the first call saw them.
    grammars: [R] None for free texts. vocab_size: V of their vocabulary.
    """

    def __init__(
        self,
        prompts: Sequence[list[int]],
        grammars: Sequence[CompiledGrammar | None],
        vocab_size: int,
    ) -> None:
        self._width = len(prompts[0])
        self._prompts = prompts
        self._texts = [TrackedText(grammar, vocab_size) for grammar in grammars]

    def holds(self, rows: Sequence[list[int]]) -> bool:
        """Whether rows [R] continue the texts: all their tokens but the last were seen before.

        This holds in every kind of decoding: nothing is sampled after a token that was not seen.
        """
        if len(rows) != len(self._texts):
            return False
        return all(
            row[: self._width] == prompt and self._nearest(at, row).is_known
            for at, (row, prompt) in enumerate(zip(rows, self._prompts, strict=True))
        )

    def mask_rows(self, rows: Sequence[list[int]]) -> list[Tensor | None]:
        """Read rows [R] that ``holds`` admits; returns ``TrackedText.row`` of each.

        Beams are reordered: a row takes over the text that it continues.
        """
        sources = [self._nearest(at, row).source for at, row in enumerate(rows)]
        self._texts = [
            self._texts[source] if source == at else self._texts[source].copy()
            for at, source in enumerate(sources)
        ]
        pairs = zip(self._texts, rows, strict=True)
        return [text.row(row[self._width :]) for text, row in pairs]

    def _nearest(self, at: int, row: list[int]) -> _Nearest:
        """Which text of the same prompt and grammar the row continues: its own if it can."""
        tokens = row[self._width :]
        source, longest = at, common_length(self._texts[at].seen, tokens)
        if longest >= len(tokens) - 1:
            return _Nearest(at, is_known=True)
        for other, text in enumerate(self._texts):
            is_kin = self._prompts[other] == self._prompts[at]
            if is_kin and text.compiled is self._texts[at].compiled:
                length = common_length(text.seen, tokens)
                if length > longest:
                    source, longest = other, length
        return _Nearest(source, is_known=longest >= len(tokens) - 1)


class _Nearest(NamedTuple):
    """source: index of the text. is_known: whether it holds all tokens of the row but the last."""

    source: int
    is_known: bool


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two lists have in common at their beginnings."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(at for at in range(shorter) if one[at] != other[at])


KEPT_GENERATIONS = 4

_backends: weakref.WeakKeyDictionary[Any, dict[object, GrammarBackend]]
_backends = weakref.WeakKeyDictionary()  # by tokenizer: to read a large one takes a second


class GrammarLogitsProcessor(LogitsProcessor):
    """Sets the scores of the tokens that a grammar forbids to -inf.

        model.generate(**inputs, logits_processor=[GrammarLogitsProcessor(grammar, tokenizer)])

    For greedy search, sampling and beams, for batches, and for all assisted generation: assistant
    models, prompt lookup, early exit, MTP layers, DFlash. It gets only token ids, so it identifies
    a text by its content. It may serve one call of generate after another, in one thread.

    Beams are sequences of tokens: where a grammar leaves few texts, several beams may be spellings
    of the same one, so that ``num_return_sequences`` may return a text more than once.

    grammar: for all prompts, or a list with one for each; None there leaves that text free.
    tokenizer: of the model whose text it is, not of an assistant.
    model: names the tokens that end a text besides the tokenizer's own. Recommended.
    stop_token_ids: the tokens that end a text, if they are others: what generate gets as
        ``eos_token_id``.
    backend: see ``EngineConfig.grammar_backend``.

    What is wrong with a grammar is raised here, before the first token: GrammarCompileError and its
    kinds. Raises ConfigError and ModelError too.
    """

    def __init__(
        self,
        grammar: Grammars,
        tokenizer: Any,
        *,
        model: PreTrainedModel | None = None,
        stop_token_ids: Sequence[int] | None = None,
        backend: GrammarBackendName = "auto",
    ) -> None:
        if not callable(getattr(tokenizer, "get_vocab", None)):
            raise ConfigError("tokenizer", tokenizer, "pass the model's tokenizer, loaded")
        self._specs = list_grammars(grammar)
        size = max(tokenizer.get_vocab().values()) + 1
        if model is not None:
            size = model.config.get_text_config(decoder=True).vocab_size
        if stop_token_ids is None:
            stop_token_ids = _end_ids(tokenizer, model)
        inner = _backend(tokenizer, backend, tuple(stop_token_ids), size)
        self._vocabulary: Vocabulary = inner.vocabulary
        self._markers = Markers.from_tokenizer(inner.vocabulary, tokenizer)
        self._backend = GrammarPipeline(inner, markers=self._markers)
        self._compiled: dict[GrammarSpec | None, CompiledGrammar | None] = {None: None}
        for spec in self._specs:
            self._compile(spec)
        ends = torch.zeros(size, dtype=torch.bool)
        ends[list(inner.vocabulary.stop_token_ids)] = True
        self._ends = pack_bitmask(ends)
        self._generations: list[Generation] = []  # the last one used is the first

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [R, X] with illegal tokens at -inf, as a new tensor.

        input_ids: int64 [R, T], the prompts and what follows them, on any device.
        scores: of any width; tokens past the vocabulary are illegal.

        After the end of a text only tokens that end it are legal; the same holds after a token that
        the grammar refuses, and where the scores are too narrow for any token that it allows.

        Raises GrammarDeadEndError where the grammar allows nothing.
        """
        rows = input_ids.tolist()
        found = self._generation(rows).mask_rows(rows)
        size, width = self._vocabulary.vocab_size, scores.shape[1]
        bitmask = torch.stack([self._ends if row is None else row for row in found])
        legal = unpack_bitmask(bitmask.to(scores.device), size)
        if width < size:
            legal = legal[:, :width]
            # An assistant may have fewer tokens than the model.
            is_starved = ~legal.any(1, keepdim=True)
            legal = legal | (is_starved & self._ends_within(width).to(scores.device))
        else:
            legal = torch.nn.functional.pad(legal, (0, width - size))
        is_free = [self._spec(at, len(rows)) is None for at in range(len(rows))]
        if any(is_free):
            legal = legal | torch.tensor(is_free, device=scores.device).unsqueeze(1)
        return scores.masked_fill(~legal, float("-inf"))

    def _generation(self, rows: list[list[int]]) -> Generation:
        """The one that the rows belong to; else they are the prompts of a new one."""
        known = (one for one in self._generations if one.holds(rows))
        generation = next(known, None) or self._start(rows)
        others = [one for one in self._generations if one is not generation]
        self._generations = [generation, *others[: KEPT_GENERATIONS - 1]]
        return generation

    def _start(self, prompts: list[list[int]]) -> Generation:
        number = len(prompts)
        if number % len(self._specs):
            fix = f"pass one, or one for each prompt: {number} rows are to be written"
            raise ConfigError("grammar", f"{len(self._specs)} of them", fix)
        grammars = []
        for at, prompt in enumerate(prompts):
            spec = self._spec(at, number)
            bound = None if spec is None else self._markers.bind(spec, prompt)
            grammars.append(self._compile(bound))
        return Generation(prompts, grammars, self._vocabulary.vocab_size)

    def _spec(self, row: int, num_rows: int) -> GrammarSpec | None:
        """The row's: the samples and beams of a prompt are neighbours."""
        return self._specs[row * len(self._specs) // num_rows]

    def _compile(self, spec: GrammarSpec | None) -> CompiledGrammar | None:
        if spec is not None and spec not in self._compiled:
            self._compiled[spec] = self._backend.compile(spec)
        return self._compiled[spec]

    def _ends_within(self, width: int) -> Tensor:
        """Bool [width]: the tokens that end a text; where none of these is among them, all."""
        ends = unpack_bitmask(self._ends, width)
        return ends if ends.any() else torch.ones_like(ends)


def _end_ids(tokenizer: Any, model: PreTrainedModel | None) -> tuple[int, ...]:
    if model is not None:
        return end_of_text_ids(model, tokenizer)
    own = tokenizer.eos_token_id
    return () if own is None else (own,)


def _backend(
    tokenizer: Any, name: GrammarBackendName, stop_token_ids: tuple[int, ...], size: int
) -> GrammarBackend:
    """Made once for as long as the tokenizer lives."""
    made = _backends.setdefault(tokenizer, {})
    key = (name, stop_token_ids, size, len(tokenizer))
    if key not in made:
        vocabulary = Vocabulary.from_tokenizer(tokenizer, size, stop_token_ids)
        made[key] = BackendChoice(name, vocabulary)
    return made[key]
