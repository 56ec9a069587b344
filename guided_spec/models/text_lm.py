"""A causal LM by its stock modules and its own cache: one text after another.

Any model that transformers can continue with a cache runs so: states of any kind, chunks, positions
that the model counts by itself. What a text's cache holds is never changed: a forward feeds a copy.
If tokens of it are rejected, the copy is dropped, and the accepted ones are read again in front of
the next ones. So nothing has to know how a state goes back. A model that takes no cache, or writes
other texts behind its own, reads the whole text for each token.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from guided_spec.models.lora.slot_adapters import reading_adapters
from guided_spec.models.slot_lm import WithoutBlocks
from guided_spec.models.stock.routed import ExpertLayers, ExpertRecorder, recording_experts
from guided_spec.models.stock.slot_trial import (
    CheckedEmbeddings,
    errors_naming,
    refusal,
    require_close,
)
from guided_spec.models.stock.slots import LogitsKind, SlotInputs, SlotOutput
from guided_spec.models.target import capture_hidden, find_decoder
from guided_spec.models.transformers_version import cache_keyword, cache_of

MOST_UNREAD = 16  # tokens that are read again in front of others; more are read by themselves

Feeding = Literal["together", "one by one", "whole texts"]
"""How several tokens follow a cache. Some models take one at a time then, some have no cache."""


class KeptText(NamedTuple):
    """A text in a slot; not to be changed.

    past: the model's cache of its first tokens; None where nothing is read. unread: the tokens
    after these. length: tokens of the text.
    """

    past: Any = None
    unread: tuple[int, ...] = ()
    length: int = 0

    def with_unread(self, token_ids: Sequence[int]) -> KeptText:
        """With tokens that are read later."""
        kept = (*self.unread, *token_ids)
        return KeptText(self.past, kept, self.length + len(token_ids))


class _Fed(NamedTuple):
    """What a forward fed to a slot. after: the cache behind all of it; None without one."""

    slot: int
    before: KeptText
    token_ids: list[int]
    after: Any

    def kept(self, count: int) -> KeptText:
        """The text after the first ``count`` tokens."""
        if self.after is not None and count == len(self.token_ids):
            return KeptText(self.after, (), self.before.length + count)
        return self.before.with_unread(self.token_ids[:count])


class TextLM(WithoutBlocks):
    """A ``CausalLM`` that calls the model for each text of a forward.

    reason: why its texts are not in one forward. feeding: found by a trial. Raises ModelError where
    it would write other texts than by itself.
    """

    is_packed = False
    has_linear_state = True  # what a model of any kind keeps may not go back

    @torch.inference_mode()
    def __init__(
        self, model: PreTrainedModel, num_slots: int, max_length: int, reason: str
    ) -> None:
        super().__init__(model, num_slots, max_length)
        self.reason = reason
        self._call: Any = model
        self._takes_count = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._texts = [KeptText()] * num_slots
        self._fed: list[_Fed] = []
        self.feeding: Feeding = "together"
        token, state = _Trial(self).run()
        # Until the commit there are two caches of a text: before the forward, and behind it.
        self.kv_bytes_per_token, self.state_bytes_per_slot = 2 * token, 2 * state
        self.expert_layers = ExpertLayers.of(model)

    @property
    def runs_as(self) -> str:
        """What computes, in words."""
        end = " and without a cache" if self.feeding == "whole texts" else ""
        return f"stock modules, one text at a time{end}"

    @torch.inference_mode()
    def forward(
        self,
        inputs: SlotInputs,
        *,
        logits: LogitsKind = "all",
        hidden_layers: tuple[int, ...] = (),
        recorder: ExpertRecorder | None = None,
    ) -> SlotOutput:
        """One call of the model for each row; see ``CausalLM.forward``."""
        rows = inputs.token_ids.tolist()
        self._fed, found, experts = [], [], []
        for slot, start, count, row in zip(
            inputs.slots, inputs.starts, inputs.counts, rows, strict=True
        ):
            text = self._texts[slot] if start else KeptText()
            assert text.length == start, "a text continues where it ended"
            own = None if recorder is None else ExpertRecorder(self.expert_layers)
            with reading_adapters(self.adapters, [slot]), recording_experts(own):
                text = self._caught_up(text)
                scores, states, after = self._read(text, row[:count], logits, hidden_layers)
            self._fed.append(_Fed(slot, text, row[:count], after))
            found.append((scores, states))
            # What was read in front of them is known since they were first read.
            experts.append(None if own is None or own.rows is None else own.rows[-count:])
        width = 1 if logits == "last" else len(rows[0])
        padded = _padded(experts, len(rows[0]))
        if recorder is not None and padded is not None:
            recorder.rows = padded.flatten(0, 1)
        return SlotOutput(
            _padded([scores for scores, _ in found], width),
            _padded([states for _, states in found], len(rows[0])),
        )

    @torch.inference_mode()
    def commit(self, keep: Sequence[int], counts: Sequence[int]) -> None:
        """Keep the texts' first tokens; a cache behind others is dropped."""
        del counts  # what was fed is known
        for fed, count in zip(self._fed, keep, strict=True):
            self._texts[fed.slot] = fed.kept(count)
        self._fed = []

    def release(self, slots: Sequence[int]) -> None:
        """Drop what is kept of these texts."""
        for slot in slots:
            self._texts[slot] = KeptText()

    def copy_slot(self, source: int, destinations: Sequence[int], length: int) -> None:
        """Let ``destinations`` continue the text of ``source``."""
        assert self._texts[source].length == length, "a text is copied as it is"
        for slot in destinations:
            self._texts[slot] = self._texts[source]

    def save_states(self, slots: Sequence[int]) -> list[KeptText]:
        """The texts of ``slots``, one each."""
        return [self._texts[slot] for slot in slots]

    def load_states(self, slots: Sequence[int], saved: Sequence[Any]) -> None:
        """Put back what ``save_states`` gave."""
        for slot, text in zip(slots, saved, strict=True):
            self._texts[slot] = text

    def _caught_up(self, text: KeptText) -> KeptText:
        """The text, with its unread tokens read if they are many."""
        if len(text.unread) <= MOST_UNREAD or self.feeding == "whole texts":
            return text
        past = self._run(_copied(text.past), list(text.unread), 1, ()).past
        return KeptText(past, (), text.length)

    def _read(
        self, text: KeptText, token_ids: list[int], logits: LogitsKind, layers: tuple[int, ...]
    ) -> tuple[Tensor | None, Tensor | None, Any]:
        """(logits [n, V], hidden states [T, L * H], the cache behind) of tokens after ``text``."""
        if not token_ids:
            return None, None, None
        wanted = {"all": len(token_ids), "last": 1, "none": 0}[logits]
        found = self._run(_copied(text.past), [*text.unread, *token_ids], max(wanted, 1), layers)
        states = [one[-len(token_ids) :] for one in found.states]
        joined = torch.cat([one.to(self.device) for one in states], -1) if states else None
        return found.logits[-wanted:] if wanted else None, joined, found.past

    def _run(
        self, past: Any, token_ids: list[int], num_scored: int, layers: tuple[int, ...]
    ) -> _Found:
        """Feed tokens after ``past``, which is changed, to one text."""
        if past is None or self.feeding != "one by one" or len(token_ids) == 1:
            return self._call_once(past, token_ids, num_scored, layers)
        found = []
        for token in token_ids:
            found.append(self._call_once(past, [token], 1, layers))
            past = found[-1].past
        states = [torch.cat(parts) for parts in zip(*(one.states for one in found), strict=True)]
        return _Found(torch.cat([one.logits for one in found]), states, past)

    def _call_once(
        self, past: Any, token_ids: list[int], num_scored: int, layers: tuple[int, ...]
    ) -> _Found:
        options: dict[str, Any] = {} if past is None else cache_keyword(self.model, past)
        if self._takes_count:
            options["logits_to_keep"] = num_scored
        ids = torch.tensor([token_ids], device=self.device)
        is_kept = self.feeding != "whole texts"
        with capture_hidden(find_decoder(self.model), layers) as captured:
            output = self._call(input_ids=ids, use_cache=is_kept, **options)
        after = cache_of(output) if is_kept else None
        if is_kept and after is None:
            raise refusal(self.model, "it keeps its past in a form of its own, and takes no cache")
        return _Found(output.logits[0, -num_scored:], [one[0] for one in captured], after)


class _Found(NamedTuple):
    """Of one call. logits: [n, V]. states: [T, H] of each layer. past: the cache behind."""

    logits: Tensor
    states: list[Tensor]
    past: Any


def _copied(past: Any) -> Any:
    """A copy whose use leaves ``past`` as it is.

    Keys and values of all positions are joined with new ones, so that they need no copy.
    """
    if type(past) is not DynamicCache:
        return copy.deepcopy(past)
    copied = copy.copy(past)
    copied.layers = [
        copy.copy(layer) if type(layer) is DynamicLayer else copy.deepcopy(layer)
        for layer in past.layers
    ]
    return copied


def _padded(rows: Sequence[Tensor | None], width: int) -> Tensor | None:
    """[B, width, X] of rows [n, X]; None where there are none."""
    known = [row for row in rows if row is not None]
    if not known:
        return None
    padded = known[0].new_zeros(len(rows), width, known[0].shape[-1])
    for at, row in enumerate(rows):
        if row is not None:
            padded[at, : len(row)] = row
    return padded


STRIDE = 7  # between the ids of tokens
LONGER = 160  # tokens; some models hash keys by chance once there are chunks of them
PIECES = ((3, 1), (2, 0), (1, 2), (2, 0), (1, 0))  # tokens that stay, and others after them


class _Trial:
    """Two short texts by turns, with tokens that do not stay, against the model's own forward."""

    def __init__(self, lm: TextLM) -> None:
        self._lm = lm
        length = min(sum(staying for staying, _ in PIECES), lm.max_length)
        steps = STRIDE * torch.arange(2 * length).view(2, -1)
        self._ids = (lm.vocab_size // 2 + steps) % lm.vocab_size

    def run(self) -> tuple[int, int]:
        """Bytes that a token takes, and a text besides.

        Raises ModelError where the texts would be others; decides how tokens are fed.
        """
        model = self._lm.model
        with CheckedEmbeddings():
            with errors_naming(model, "its own forward of a few tokens failed"):
                ids = self._ids.to(model.device)
                own = [
                    self._lm._call(input_ids=row[None], use_cache=False).logits[0] for row in ids
                ]
            with errors_naming(model, "a forward of more tokens failed"):
                return self._read_pieces(torch.stack(own))

    def _read_pieces(self, own: Tensor) -> tuple[int, int]:
        feedings: tuple[Feeding, ...] = ("together", "one by one", "whole texts")
        for feeding in feedings:
            self._lm.feeding = feeding
            try:
                # By place: how tokens are fed makes the same of them wrong in each text.
                places = self._scores().unbind(1), own.unbind(1)
                require_close(self._lm.model, *places, "with more tokens behind")
                if feeding == "whole texts":
                    self._require_steady()
            except Exception:  # of every class, see ``errors_naming``
                if feeding == feedings[-1]:
                    raise
            else:
                break
        ids = self._ids[0].tolist()
        lengths = (-(-len(ids) // 2), len(ids))
        small, large = (_nbytes(self._lm._run(None, ids[:n], 1, ()).past) for n in lengths)
        token = max(large - small, 0) // max(lengths[1] - lengths[0], 1)
        return token, max(large - lengths[1] * token, 0)

    def _require_steady(self) -> None:
        """Raise ModelError where a longer text's logits change with what comes after it."""
        length = min(LONGER, self._lm.max_length)
        ids = (
            (self._lm.vocab_size // 2 + STRIDE * torch.arange(length)) % self._lm.vocab_size
        ).tolist()
        half = -(-length // 2)
        whole, part = (self._lm._run(None, ids[:n], n, ()).logits[:half] for n in (length, half))
        require_close(self._lm.model, [part], [whole], "of a longer text")

    def _scores(self) -> Tensor:
        """[2, N, V]."""
        texts, at = [KeptText(), KeptText()], 0
        scores: list[list[Tensor]] = [[], []]
        for staying, others in PIECES:
            stays = min(staying, self._ids.shape[1] - at)
            for row in range(2 if stays > 0 else 0):
                kept = self._ids[row, at : at + stays].tolist()
                fed = [*kept, *[0] * others]
                logits, _, after = self._lm._read(texts[row], fed, "all", ())
                assert logits is not None
                scores[row].append(logits[:stays])
                texts[row] = _Fed(0, texts[row], fed, after).kept(stays)
            at += max(stays, 0)
        return torch.stack([torch.cat(parts) for parts in scores])


def _nbytes(part: Any) -> int:
    """Bytes of the tensors in a cache."""
    return sum(tensor.nbytes for tensor in _tensors(part, set()))


def _tensors(part: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif id(part) not in seen:
        seen.add(id(part))
        inside: Any = ()
        if isinstance(part, dict):
            inside = part.values()
        elif isinstance(part, list | tuple):
            inside = part
        elif hasattr(part, "__dict__") and not isinstance(part, type):
            inside = vars(part).values()
        for one in inside:
            yield from _tensors(one, seen)
