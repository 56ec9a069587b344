"""The grammars of LMDeploy's requests: compiled off its thread, and advanced with their texts."""

from __future__ import annotations

import asyncio
import importlib
import logging
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guided_spec.errors import (
    ConfigError,
    GrammarCompileError,
    GrammarDeadEndError,
    GuidedSpecError,
    ModelError,
)
from guided_spec.grammar.pipeline import (
    GrammarCompileQueue,
    GrammarPipeline,
    PendingGrammar,
)
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead
from guided_spec.masks.rows import MaskRows, row_allows
from guided_spec.ops.bitmask import apply_token_bitmask
from guided_spec.ops.mask_words import first_tokens, num_mask_words

_CPU = torch.device("cpu")


class GrammarProcessor:
    """What LMDeploy gets instead of a matcher.

    pending, compiled: the grammar, being compiled. num_draft: K, the length of every draft.

    Drafting advances a fork and fills its rows; verification needs the same rows and fills only the
    last one; ``commit`` alone moves the original. LMDeploy puts other requests into the batch
    between the two, so each request has rows of its own.
    """

    def __init__(self, pending: PendingGrammar, vocab_size: int, num_draft: int = 0) -> None:
        self._pending = pending  # waits until this is dropped
        self.compiled = pending.future
        self._vocab_size = vocab_size
        self._num_draft = max(num_draft, 1)  # a row is used only where a token may come next
        self._rows: MaskRows | None = None
        self._constraint: Constraint | None = None
        self._ahead: Lookahead | None = None
        self._num_read = 0
        self.row = 0  # in the batch that asked last
        self.has_ended = False

    @property
    def constraint(self) -> Constraint:
        """The grammar and the committed text; waits for the compile.

        Raises what the compile raised: GrammarCompileError and its kinds.
        """
        if self._constraint is None:
            try:
                self._constraint = Constraint(self.compiled.result())
            except GuidedSpecError:
                raise
            except Exception as error:
                raise GrammarCompileError(f"the grammar could not be compiled: {error}") from error
        return self._constraint

    @property
    def is_broken(self) -> bool:
        """Whether the grammar did not compile. Such a request ends at its first commit."""
        try:
            _ = self.constraint
        except GuidedSpecError:
            return True
        return False

    def is_terminated(self) -> bool:
        """Whether nothing is masked any more: the text is complete, or the request has failed."""
        return self.has_ended

    def fork(self) -> DraftProcessor:
        """Begin a draft after the committed text; LMDeploy calls it before it drafts."""
        if not self.is_broken:
            self.begin()
        return DraftProcessor(self)

    def next_row(self) -> NDArray[np.int32] | None:
        """int32 [W] on the host: mask after the committed text. None: nothing is masked.

        Read only, and only up to the next call of any method. Forgets the draft: LMDeploy drops
        the drafts of a request that it puts off and computes again.
        """
        if self.has_ended or self.is_broken:
            return None
        return self.begin().peek(0)

    def draft_row(self) -> NDArray[np.int32] | None:
        """``next_row`` after the draft so far; also None where the draft has ended."""
        return None if self._ahead is None else self._ahead.peek(0)

    def draft(self, token_id: int) -> int:
        """Append one drafted token; returns the token that the draft gets.

        An illegal token becomes the only legal one where there is just one: a drafter that scores a
        part of the vocabulary may not know it. Otherwise it stays, the draft is cut there, and the
        verifier refuses it.
        """
        if self._ahead is None:
            return token_id
        row = self._ahead.peek(0)
        if row is not None and not row_allows(row, token_id):
            legal = first_tokens(row, 2)
            token_id = legal[0] if len(legal) == 1 else token_id
        self._ahead.extend([[token_id]])
        self._num_read += 1
        return token_id

    def end_draft(self, token_ids: Sequence[int]) -> None:
        """Advance the lookahead by the tokens of the draft that it has not read yet."""
        assert self._ahead is not None
        self._ahead.extend([list(token_ids[len(self._ahead.drafted[0]) :])])
        self._num_read = len(token_ids)

    def missing(self, num_draft: int) -> bool:
        """Whether ``verify_rows`` needs the draft's tokens."""
        return not self.has_ended and not self.is_broken and self._num_read != num_draft

    def verify_rows(self, num_draft: int, token_ids: Sequence[int] | None) -> Tensor | None:
        """int32 [K + 1, W] on the host: the masks of every target row; None where there is none.

        token_ids: the K draft tokens; None where ``draft`` has got all of them.
        """
        if self.has_ended or self.is_broken:
            return None
        if token_ids is not None and self._num_read != num_draft:
            self.begin(num_draft).extend([list(token_ids)])
            self._num_read = num_draft
        assert self._ahead is not None
        rows = self._ahead.finish(num_draft)
        return None if rows is None else rows[0]

    def commit(self, token_ids: Sequence[int]) -> list[int]:
        """Advance the original by accepted tokens; returns those up to the end of the text.

        Raises GrammarDeadEndError where no token is legal next, GrammarStateError where the grammar
        refuses one, and what the compile raised. The processor is then out of use: ``has_ended``.
        """
        if self.has_ended:
            return []
        self._num_read = 0
        self._ahead = None
        try:
            taken = self.constraint.commit(token_ids)
        except GuidedSpecError as error:
            self.has_ended = True
            if self._is_dead_end(token_ids):
                raise GrammarDeadEndError("no token of the vocabulary is legal here") from error
            raise
        self.has_ended = self.constraint.is_terminated
        return taken

    def begin(self, num_draft: int = 0) -> Lookahead:
        """Start a draft after the committed text; a proposer's draft is closed by ``end_draft``."""
        if self._rows is None or self._rows.depths <= max(num_draft, self._num_draft):
            self._num_draft = max(num_draft, self._num_draft)
            with torch.inference_mode(mode=False):  # other threads fill them, outside that mode
                self._rows = MaskRows(1, self._num_draft + 1, self._vocab_size, _CPU)
        self._num_read = 0
        self._ahead = Lookahead.fork([self.constraint], self._rows, [self._num_draft])
        return self._ahead

    def _is_dead_end(self, token_ids: Sequence[int]) -> bool:
        """Whether the committed text, with the legal ones of these tokens, cannot continue."""
        if self._constraint is None or self._rows is None:
            return False
        ahead = Lookahead.fork([self._constraint], self._rows, [len(token_ids)])
        ahead.extend([list(token_ids)])
        depth = len(ahead.drafted[0])
        ahead.finish(depth)
        return not self._rows.words(0, depth).any()


class DraftProcessor:
    """A processor while its draft is being made: what LMDeploy takes for a forked matcher."""

    def __init__(self, processor: GrammarProcessor) -> None:
        self._processor = processor

    def next_row(self) -> NDArray[np.int32] | None:
        """int32 [W] on the host: mask after the draft so far. None: nothing is masked."""
        return self._processor.draft_row()

    def draft(self, token_id: int) -> int:
        """Advance the draft by its next token, see ``GrammarProcessor.draft``."""
        return self._processor.draft(token_id)


TURN = "guided_spec_turn"
"""The key of ``session_ctx`` under which the agent's patch says which turn of a session it is."""

_logger = logging.getLogger("lmdeploy")
_managers: weakref.WeakSet[GuidedManager] = weakref.WeakSet()


class GuidedManager:
    """Replaces LMDeploy's ``GuidedDecodingManager``, with and without speculation.

    stop_token_ids: the tokens that end a text; None takes the model's own, from its tokenizer and
        its generation config.

    Never raises for a tokenizer that cannot be read: LMDeploy would then leave grammars out in
    silence. Every guided request fails instead, with the reason.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int | None, stop_token_ids: Sequence[int] | None = None
    ) -> None:
        # Tokens past the model's own vocabulary may be generated all the same, LMDeploy says.
        self.vocab_size = max(vocab_size or 0, len(tokenizer))
        self.tokenizer = tokenizer
        self.num_draft = 0
        self.stops: dict[int, int] = {}
        self.error: ModelError | None = None
        self._processors: dict[Any, dict[Any, tuple[Any, GrammarProcessor]]] = {}
        self._queue: GrammarCompileQueue | None = None
        stop_ids = model_stop_ids(tokenizer) if stop_token_ids is None else stop_token_ids
        try:
            self.vocabulary = Vocabulary.from_tokenizer(tokenizer, self.vocab_size, stop_ids)
        except ModelError as error:
            self.error = error
        else:
            pipeline = GrammarPipeline.of("auto", self.vocabulary)
            self._queue = GrammarCompileQueue(pipeline, close_backend=pipeline.close)
        _managers.add(self)

    @property
    def stop_token_id(self) -> int:
        """The token that ends a request whose grammar has failed."""
        return self.vocabulary.stop_token_ids[0] if self.error is None else 0

    def ask(self, response_format: Mapping[str, Any]) -> PendingGrammar:
        """The pending grammar of a response format; never blocks, and holds any error."""
        try:
            if self._queue is None:
                raise self.error or ModelError("the grammars of this model are closed")
            return self._queue.ask(response_spec(response_format))
        except GuidedSpecError as error:
            return PendingGrammar.failed(error)

    def get_processors(
        self, session_ctx: Sequence[Mapping[str, Any]], response_formats: Sequence[Any]
    ) -> dict[int, GrammarProcessor]:
        """The processors of the guided rows of a batch, by row.

        One is kept for one turn of one session, and the next turn gets a new one. Where nobody says
        which turn it is, it is kept for as long as the format stays the same.
        """
        processors = {
            row: self._processor(session_ctx[row], response_formats[row])
            for row in _guided_rows(response_formats)
        }
        for row, processor in processors.items():
            processor.row = row
        return processors

    async def compiled(self, session_ctx: Any, response_formats: Any) -> None:
        """Wait for the grammars of a batch without holding up the event loop."""
        if session_ctx and response_formats:
            for processor in self.get_processors(session_ctx, response_formats).values():
                await _finished(processor.compiled)

    def remove_processor(self, session_id: Any) -> None:
        """Forget a session that has ended."""
        self._processors.pop(session_id, None)

    def clear(self) -> None:
        """Forget all sessions."""
        self._processors.clear()

    def take_stops(self) -> dict[int, int]:
        """Rows of the last step whose text is over, and the column of its last token."""
        stops, self.stops = self.stops, {}
        return stops

    def commit(self, row: int, processor: GrammarProcessor, token_ids: Sequence[int]) -> bool:
        """Move a processor over the accepted tokens of its row; False when the request has failed.

        A failure is logged and ends that request alone, at its first token of this step.
        """
        try:
            taken = processor.commit(token_ids)
        except GuidedSpecError as error:
            _logger.error("guided_spec: a request ends: %s: %s", type(error).__name__, error)
            self.stops[row] = 0
            return False
        if processor.has_ended and taken:
            self.stops[row] = len(taken) - 1
        return True

    def close(self) -> None:
        """End the compile threads."""
        _managers.discard(self)
        if self._queue is not None:
            self._queue.close()

    # What LMDeploy's ``FusedLogitsProcessor`` calls where nothing is drafted.

    def allocate_batched_bitmap(self, batch_size: int) -> Tensor:
        """int32 [B, W] on the host, all ones."""
        return torch.full((batch_size, num_mask_words(self.vocab_size)), -1, dtype=torch.int32)

    def is_terminated(self, processor: GrammarProcessor) -> bool:
        """Whether nothing is masked any more."""
        return processor.is_terminated()

    def fill_bitmap(self, processor: GrammarProcessor, guided_bitmask: Tensor, index: int) -> None:
        """Write what may come next into one row."""
        row = processor.next_row()
        if row is not None:
            guided_bitmask.numpy()[index] = row  # LMDeploy calls it outside inference mode

    def apply_batched_bitmap(self, logits: Tensor, guided_bitmask: Tensor) -> None:
        """Set illegal tokens of logits [B, V] to -inf, in-place."""
        bitmask = fit_bitmask(guided_bitmask, logits.shape[-1]).to(logits.device)
        logits.copy_(apply_token_bitmask(logits, bitmask))

    def accept_token(self, processor: GrammarProcessor, token: int) -> None:
        """Commit one token; a refusal ends the request, see ``take_stops``."""
        self.commit(processor.row, processor, [token])

    def _processor(
        self, context: Mapping[str, Any], response_format: Mapping[str, Any]
    ) -> GrammarProcessor:
        session = self._processors.setdefault(context["session_id"], {})
        turn = context.get(TURN)
        key = repr(response_format) if turn is None else turn  # the format of a turn is fixed
        known, processor = session.get(context["seq_id"], (None, None))
        if processor is None or known != key:
            processor = GrammarProcessor(self.ask(response_format), self.vocab_size, self.num_draft)
            session[context["seq_id"]] = (key, processor)
        return processor


async def compile_ahead(response_format: Any) -> None:
    """Compile a request's grammar for every model of this process, before the engine sees it.

    Raises GrammarCompileError (UnsupportedSchemaError where not all of a schema can be enforced),
    ConfigError for a format of an unknown kind, ModelError where grammars are not to be had. Where
    this process runs no model, because workers do, nothing happens.
    """
    if _guided_rows([response_format]):
        pending = [manager.ask(response_format) for manager in list(_managers)]
        try:
            for one in pending:
                await _finished(one.future)
                one.future.result()
        finally:
            for one in pending:
                one.release()


def response_spec(response_format: Mapping[str, Any]) -> GrammarSpec:
    """LMDeploy's ``response_format`` as a grammar with the whitespace that LMDeploy allows: any.

    A JSON schema may be in a wrapper, as OpenAI's is, or by itself. Raises ConfigError.
    """
    match response_format.get("type"):
        case "json_object":
            return GrammarSpec.json_object(any_whitespace=True)
        case "json_schema":
            schema = response_format.get("json_schema")
            if isinstance(schema, Mapping):
                inner = [schema[key] for key in ("json_schema", "schema") if key in schema]
                schema = inner[0] if inner else schema
            return GrammarSpec.json_schema(schema, any_whitespace=True)
    spec = GrammarSpec.from_response_format(response_format)
    if spec is None:
        raise ConfigError("response_format.type", "text", "has no grammar")
    return spec


def model_stop_ids(tokenizer: Any) -> list[int]:
    """The end-of-text tokens of a model: its tokenizer's, and its generation config's."""
    utils = importlib.import_module("lmdeploy.utils")
    config = utils.get_hf_gen_cfg(tokenizer.name_or_path) or {}
    more = config.get("eos_token_id")
    found = [tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])]
    return list(dict.fromkeys(int(token_id) for token_id in found if token_id is not None))


def fit_bitmask(bitmask: Tensor, vocab_size: int) -> Tensor:
    """int32 [..., W] with as many words as ``vocab_size`` logits need: padding is forbidden."""
    missing = num_mask_words(vocab_size) - bitmask.shape[-1]
    return torch.nn.functional.pad(bitmask, (0, missing)) if missing > 0 else bitmask


async def _finished(future: Future[Any]) -> None:
    """Wait for a future that others share: neither its failure nor our own end touches it."""
    if not future.done():
        waiting = asyncio.wrap_future(future)
        await asyncio.wait([waiting])
        _ = waiting.cancelled() or waiting.exception()  # asyncio warns of results that are not read


def _guided_rows(response_formats: Sequence[Any]) -> list[int]:
    return [
        row
        for row, response_format in enumerate(response_formats)
        if isinstance(response_format, Mapping) and response_format.get("type", "text") != "text"
    ]
