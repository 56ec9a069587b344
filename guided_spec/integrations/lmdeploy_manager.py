"""The grammars of LMDeploy's requests: compiled off the engine's thread, kept by turn."""

from __future__ import annotations

import asyncio
import importlib
import logging
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from guided_spec.errors import ConfigError, GuidedSpecError, ModelError
from guided_spec.grammar.auto_backend import build_backend
from guided_spec.grammar.compiler import GrammarCompileQueue
from guided_spec.grammar.limits import GrammarLimits
from guided_spec.grammar.pipeline import GrammarPipeline
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.integrations.lmdeploy_place import Place
from guided_spec.ops.bitmask import apply_token_bitmask, num_mask_words

__all__ = [
    "TURN",
    "GuidedManager",
    "compile_ahead",
    "fit_bitmask",
    "model_stop_ids",
    "response_spec",
]

TURN = "guided_spec_turn"
"""The key of ``session_ctx`` under which the agent's patch says which turn of a session it is."""

_logger = logging.getLogger("lmdeploy")
_managers: weakref.WeakSet[GuidedManager] = weakref.WeakSet()


class GuidedManager:
    """Stands where LMDeploy's ``GuidedDecodingManager`` stood, with and without speculation.

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
        self._places: dict[Any, dict[Any, tuple[Any, Place]]] = {}
        self._queue: GrammarCompileQueue | None = None
        stop_ids = model_stop_ids(tokenizer) if stop_token_ids is None else stop_token_ids
        try:
            self.vocabulary = Vocabulary.from_tokenizer(tokenizer, self.vocab_size, stop_ids)
        except ModelError as error:
            self.error = error
        else:
            pipeline = GrammarPipeline(
                build_backend("auto", self.vocabulary),
                GrammarLimits(),
                make=partial(build_backend, "auto"),
            )
            self._queue = GrammarCompileQueue(pipeline)
        _managers.add(self)

    @property
    def stop_token_id(self) -> int:
        """The token that ends a request whose grammar has failed."""
        return self.vocabulary.stop_token_ids[0] if self.error is None else 0

    def submit(self, response_format: Mapping[str, Any]) -> Future[CompiledGrammar]:
        """The future of this format's grammar; never blocks, and holds whatever is wrong."""
        failed: Future[CompiledGrammar] = Future()
        try:
            if self._queue is None:
                raise self.error or ModelError("the grammars of this model are closed")
            return self._queue.submit(response_spec(response_format))
        except GuidedSpecError as error:
            failed.set_exception(error)
        return failed

    def get_processors(
        self, session_ctx: Sequence[Mapping[str, Any]], response_formats: Sequence[Any]
    ) -> dict[int, Place]:
        """The places of the guided rows of a batch, by row.

        A place is kept for one turn of one session, and the next turn gets a new one. Where nobody
        says which turn it is, a place is kept for as long as the format stays the same.
        """
        places = {
            row: self._place(session_ctx[row], response_formats[row])
            for row in _guided_rows(response_formats)
        }
        for row, place in places.items():
            place.row = row
        return places

    async def compiled(self, session_ctx: Any, response_formats: Any) -> None:
        """Wait for the grammars of a batch without holding up the event loop."""
        if session_ctx and response_formats:
            for place in self.get_processors(session_ctx, response_formats).values():
                await _finished(place.compiled)

    def remove_processor(self, session_id: Any) -> None:
        """Forget a session that has ended."""
        self._places.pop(session_id, None)

    def clear(self) -> None:
        """Forget all sessions."""
        self._places.clear()

    def take_stops(self) -> dict[int, int]:
        """Rows of the last step whose text is over, and the column of its last token."""
        stops, self.stops = self.stops, {}
        return stops

    def commit(self, row: int, place: Place, token_ids: Sequence[int]) -> bool:
        """Move a place over the accepted tokens of its row; False when the request has failed.

        A failure is logged and ends that request alone, at its first token of this step.
        """
        try:
            taken = place.commit(token_ids)
        except GuidedSpecError as error:
            _logger.error("guided_spec: a request ends: %s: %s", type(error).__name__, error)
            self.stops[row] = 0
            return False
        if place.has_ended and taken:
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

    def is_terminated(self, processor: Place) -> bool:
        """Whether nothing is masked any more."""
        return processor.is_terminated()

    def fill_bitmap(self, processor: Place, guided_bitmask: Tensor, index: int) -> None:
        """Write what may come next into one row."""
        row = processor.next_row()
        if row is not None:
            guided_bitmask.numpy()[index] = row  # LMDeploy calls it outside inference mode

    def apply_batched_bitmap(self, logits: Tensor, guided_bitmask: Tensor) -> None:
        """Illegal tokens of logits [B, V] to -inf, in place."""
        bitmask = fit_bitmask(guided_bitmask, logits.shape[-1]).to(logits.device)
        logits.copy_(apply_token_bitmask(logits, bitmask))

    def accept_token(self, processor: Place, token: int) -> None:
        """Commit one token; a refusal ends the request, see ``take_stops``."""
        self.commit(processor.row, processor, [token])

    def _place(self, context: Mapping[str, Any], response_format: Mapping[str, Any]) -> Place:
        session = self._places.setdefault(context["session_id"], {})
        turn = context.get(TURN)
        key = repr(response_format) if turn is None else turn  # the format of a turn is fixed
        known, place = session.get(context["seq_id"], (None, None))
        if place is None or known != key:
            place = Place(self.submit(response_format), self.vocab_size, self.num_draft)
            session[context["seq_id"]] = (key, place)
        return place


async def compile_ahead(response_format: Any) -> None:
    """Compile a request's grammar for every model of this process, before the engine sees it.

    Raises GrammarCompileError (UnsupportedSchemaError where not all of a schema can be enforced),
    ConfigError for a format of an unknown kind, ModelError where grammars are not to be had. Where
    this process runs no model, because workers do, nothing happens.
    """
    if _guided_rows([response_format]):
        futures = [manager.submit(response_format) for manager in list(_managers)]
        for future in futures:
            await _finished(future)
            future.result()


def response_spec(response_format: Mapping[str, Any]) -> GrammarSpec:
    """LMDeploy's ``response_format`` as a grammar with the whitespace that LMDeploy allows: any.

    A JSON schema may stand in a wrapper, as OpenAI's does, or by itself. Raises ConfigError.
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
        _ = waiting.cancelled() or waiting.exception()  # asyncio warns of what nobody looks at


def _guided_rows(response_formats: Sequence[Any]) -> list[int]:
    return [
        row
        for row, response_format in enumerate(response_formats)
        if isinstance(response_format, Mapping) and response_format.get("type", "text") != "text"
    ]
