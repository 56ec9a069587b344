"""Texts of vLLM that end within ``max_tokens``: whole ones, where a grammar can be ended in time.

vLLM's scheduler fills the masks of a text from a matcher that knows no budget, and cuts the text
off where its tokens are used up. Here that matcher gets one: near the end of the budget its masks
keep to tokens from which the text can still be ended, see ``guided_spec.grammar.completion``. What
drafts after that is cut by the scheduler, as it cuts any illegal draft.

This binds grammars of xgrammar whose rules can be read and whose shortest text fits. It does not
bind a text after reasoning, since the tokens that the reasoning leaves are unknown, nor one with
other forbidden tokens: vLLM forbids these after the mask, which may have left nothing else.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from guided_spec.errors import BudgetTooSmallError, ModelError
from guided_spec.grammar.backends.xgrammar import XGrammarGrammar
from guided_spec.grammar.completion.completion import CompletingGrammar, EndingsCache
from guided_spec.grammar.text.state import TextState
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.integrations.patches import Patch
from guided_spec.integrations.vllm.plugin import ENDINGS, count, warn

ARGUMENT = "guided_spec_endings"  # of a request's extra_args: False leaves it to be cut off
_PLACE = "guided_spec_budgets"  # on vLLM's StructuredOutputManager
_MOST_KNOWN = 256  # grammars, as in ``counts``
_BACKEND = "vllm.v1.structured_output.backend_xgrammar"


class EndingMatcher:
    """What vLLM asks of a matcher, of one with a budget; texts whose masks it narrows are counted.

    inner: vLLM's own, at the start of its grammar.
    """

    def __init__(self, grammar: CompletingGrammar, inner: Any) -> None:
        self._grammar, self._inner = grammar, inner
        self._text = self._new_text()
        self._is_counted = False

    @property
    def stop_token_ids(self) -> list[int]:
        """The tokens that end the text."""
        found: list[int] = self._inner.stop_token_ids
        return found

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False, and no change, where it is refused."""
        return self._text.accept_token(token_id)

    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens."""
        self._text.rollback(num_tokens)

    def is_terminated(self) -> bool:
        """Whether the text has ended."""
        return self._text.is_terminated()

    def fill_next_token_bitmask(self, bitmask: Any, index: int = 0) -> bool:
        """Fill a row; returns whether it forbids anything."""
        forbids = self._text.fill_next_token_bitmask(bitmask, index)
        if self._text.steered and not self._is_counted:
            self._is_counted = True
            count(ENDINGS)
        return forbids

    def reset(self) -> None:
        """To the start of the grammar, with the whole budget."""
        self._inner.reset()
        self._text = self._new_text()

    def _new_text(self) -> TextState:
        parts = self._grammar.new_parts()
        return TextState.begin(
            parts._replace(new_matcher=lambda: self._inner, stops=None, filters=())
        )


class Budgets:
    """Binds the grammars of one engine to what their requests may write; thread-safe.

    manager: vLLM's, with its tokenizer and configuration.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._lock = threading.Lock()
        self._caches: dict[tuple[int, ...], EndingsCache | None] = {}
        self._known: dict[Any, XGrammarGrammar] = {}

    def bind(self, request: Any, grammar: Any) -> None:
        """Give the matcher of ``grammar``, an XgrammarGrammar, the request's budget."""
        limit = self._manager.vllm_config.model_config.max_model_len - request.num_prompt_tokens
        stops = _stops(grammar)
        cache = self._cache(stops)
        if cache is None:
            return
        compiled = self._compiled(request, grammar, stops)
        try:
            bound = cache.bound(compiled, min(request.max_tokens, limit), is_required=False)
        except BudgetTooSmallError:  # it is cut off: no text of the grammar is that short
            return
        if isinstance(bound, CompletingGrammar):
            grammar.matcher = EndingMatcher(bound, grammar.matcher)

    def _cache(self, stops: tuple[int, ...]) -> EndingsCache | None:
        """None, with a warning, for a tokenizer that cannot be read."""
        with self._lock:
            if stops not in self._caches:
                config = self._manager.vllm_config.model_config
                tokens = self._manager.tokenizer, config.get_vocab_size()
                try:
                    found = EndingsCache(Vocabulary.from_tokenizer(*tokens, stops))
                except ModelError as error:
                    warn(f"texts are cut off at max_tokens: {error}")
                    found = None
                self._caches[stops] = found
            return self._caches[stops]

    def _compiled(self, request: Any, grammar: Any, stops: tuple[int, ...]) -> XGrammarGrammar:
        """The compiled grammar that requests share: its endings are found once."""
        key = request.structured_output_request.structured_output_key, stops
        with self._lock:
            found = self._known.pop(key, None) or XGrammarGrammar(grammar.ctx, stops=stops)
            self._known[key] = found
            if len(self._known) > _MOST_KNOWN:
                del self._known[next(iter(self._known))]
        return found


def _stops(grammar: Any) -> tuple[int, ...]:
    """The tokens that end a text; from 0.28 on they are the request's."""
    return tuple(sorted(grammar.matcher.stop_token_ids))


def bind_to_budget(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``StructuredOutputManager._create_grammar``: bind the matcher to the token budget."""

    @functools.wraps(original)
    def _create_grammar(self: Any, request: Any) -> Any:
        grammar = original(self, request)
        is_after_reasoning = self.reasoner_cls is not None and not self.enable_in_reasoning
        if type(grammar).__module__ == _BACKEND and not is_after_reasoning and _may_end(request):
            _budgets(self).bind(request, grammar)
        return grammar

    return _create_grammar


def _may_end(request: Any) -> bool:
    """Whether nothing else that the user asked for may forbid the tokens that would end the text.

    One of theirs is ``extra_args``, for those who would rather have a text cut off.
    """
    params = request.sampling_params
    words, allowed = params.bad_words_token_ids, params.allowed_token_ids
    is_wanted = (params.extra_args or {}).get(ARGUMENT, True)
    return bool(is_wanted) and not (params.ignore_eos or params.min_tokens or words or allowed)


def _budgets(manager: Any) -> Budgets:
    found: Budgets = vars(manager).setdefault(_PLACE, Budgets(manager))
    return found


PATCHES = (
    Patch("vllm.v1.structured_output", "StructuredOutputManager._create_grammar", "self request",
          bind_to_budget),
    Patch("vllm.v1.structured_output", "StructuredOutputManager",
          attributes="tokenizer vllm_config reasoner_cls enable_in_reasoning"),
    Patch("vllm.v1.request", "Request", attributes="max_tokens num_prompt_tokens sampling_params"
          " structured_output_request"),
    Patch("vllm.sampling_params", "SamplingParams",
          attributes="ignore_eos min_tokens bad_words_token_ids allowed_token_ids extra_args"),
    Patch("vllm.v1.structured_output.request", "StructuredOutputRequest",
          attributes="structured_output_key"),
    Patch(_BACKEND, "XgrammarGrammar", attributes="matcher ctx"),
)  # fmt: skip
PARTS = {"": PATCHES}
