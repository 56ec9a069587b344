"""Sharing of prompts between requests, so that each is read once."""

from __future__ import annotations

from collections.abc import Mapping

from guided_spec.engine.request import Request, State
from guided_spec.engine.scheduler import Scheduler
from guided_spec.models.causal_lm import CausalLM
from guided_spec.models.hidden_states import HiddenStates
from guided_spec.models.packed.blocks import BLOCK


class Prefixes:
    """Copies prompts between requests of the same prompt, and prefixes from the prefix cache.

    layers: hidden states that the proposer reads. uses_cache: as configured.

    Attributes: takes: whether there is a prefix cache for this model and proposer.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        model: CausalLM,
        states: HiddenStates,
        layers: tuple[int, ...],
        *,
        uses_cache: bool,
    ) -> None:
        self._scheduler, self._model, self._states = scheduler, model, states
        # A head needs every token's hidden states, unless blocks hold its own state too (``lag``).
        blocks = model.blocks if model.shares_prefixes else None
        self.takes = uses_cache and blocks is not None and (not layers or blocks.lag > 0)
        # Keys and values of the prompt stay where they are, a linear state and the hidden states
        # that a proposer takes do not.
        self._moves_on = model.has_linear_state or bool(layers)

    def take(self, request: Request, reads: Mapping[int, int]) -> bool:
        """Take what other texts left of the request's prompt, if nothing of it is read yet.

        reads: tokens that requests have read once what runs now has ended, by their numbers.

        False where another request is about to leave tokens that it can use: it looks again in the
        next step. Else prompts that share a prefix and come together would be read once each.
        """
        text = request.text
        if request.num_cached == 0 and self.takes:
            salt, known, routes = text.params.kin, request.named[:-1], request.routes
            if routes is not None:  # others read what it takes: their experts are not known
                known = known[: routes.length]
            found = self._model.start(text.slot, known, salt)
            if routes is None and self._is_coming(request, found.known + BLOCK, reads):
                return False
            for span in reversed(request.spans):  # what is in one may depend on all of it
                if span.start < found.taken < span.stop:
                    found = self._model.start(text.slot, known[: span.start], salt)
            request.num_cached = found.taken
            if request.is_new:  # else it finds its own text, which had to go for others
                request.stats.cached_tokens = max(request.stats.cached_tokens, found.taken)
        return True

    def remember(self, request: Request, length: int) -> None:
        """Keep the first ``length`` tokens of the text for others."""
        if self.takes:
            self._model.remember(request.text.slot, request.named, length)

    def is_awaited(self, request: Request) -> bool:
        """Whether another request takes this one's prompt once it is read."""
        return request.can_be_taken and any(
            other.num_cached == 0 and other.has_prompt_of(request)
            for other in self._scheduler.sharing_prompt(request)
            if other is not request and other.state is State.PREFILL
        )

    def is_shared(self, request: Request) -> bool:
        """Whether the request takes its prompt from another one, now or once that is read."""
        if request.num_cached > 0:
            return False
        for other in self._scheduler.sharing_prompt(request):
            if other is request or other.is_begun or not request.has_prompt_of(other):
                continue
            if (
                other.state is State.PREFILL
                and other.is_new
                and (other.num_cached > 0 or other.text.slot < request.text.slot)
            ):
                return True
            stays = other.state is State.DECODE and not self._moves_on
            if stays or other.state is State.SCORE:
                return self._share(other, request)
        return False

    def hand_on(self, source: Request) -> None:
        """Copy a prompt that was just read to the requests that wait for it."""
        for request in self._scheduler.sharing_prompt(source) if source.can_be_taken else ():
            is_waiting = request.state is State.PREFILL and request.num_cached == 0
            if is_waiting and request.has_prompt_of(source):
                self._share(source, request)

    def _share(self, source: Request, request: Request) -> bool:
        """Copy a prompt; False where memory is short: the request then reads it itself.

        Or where it asks for experts that are not yet known.
        """
        length = source.text.prompt_length - 1
        if not self._model.can_copy(length):
            return False
        if request.routes is not None:
            if source.routes is None or source.routes.length < length:  # they come with its step
                return False
            request.routes.copy(source.routes, length)
        self._model.copy_slot(source.text.slot, [request.text.slot], length)
        self._states.copy(source.text.slot, request.text.slot, request.fed)
        request.num_cached, request.text.prefill = length, source.text.prefill
        request.state = request.after_prompt
        return True

    def _is_coming(self, request: Request, length: int, reads: Mapping[int, int]) -> bool:
        """Whether a text that has only begun holds or now reads ``length`` tokens of the prompt.

        A head reads what the target has read once its text decodes, or a step later. Until then a
        block may exist that is not shared yet.
        """
        return length < len(request.text.tokens) and any(
            (other.state is State.PREFILL or other.stats.steps <= 1)
            and other.state in (State.PREFILL, State.DECODE)
            and max(other.num_cached, reads.get(other.number, 0)) >= length
            and _begin_with_shared_prefix(request, other, length)
            for other in self._scheduler.running()
        )


def _begin_with_shared_prefix(one: Request, other: Request, length: int) -> bool:
    """Whether two texts may share and have the same first ``length`` tokens."""
    if other.text.params.kin != one.text.params.kin:
        return False
    last = slice(length - BLOCK, length)  # where prompts that differ do so most often
    return other.named[last] == one.named[last] and (other.named[:length] == one.named[:length])
