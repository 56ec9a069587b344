"""One drafter of vLLM at work: its requests, its masks, and the step that is being drafted.

vLLM has two model runners with a drafter each, one loop in Python and one around CUDA graphs. What
they share stands here: a step begins with the tokens that were just sampled, the drafter's
``compute_logits`` is looked at once a position, and the step ends with its draft.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from guided_spec.errors import ConfigError
from guided_spec.grammar.constraint import Constraint
from guided_spec.grammar.mask_rows import MaskRows
from guided_spec.integrations.vllm_draft_masks import DraftMasks
from guided_spec.integrations.vllm_patches import log
from guided_spec.integrations.vllm_requests import GrammarRequests
from guided_spec.ops.bitmask import num_mask_words

__all__ = ["FEATURE", "Drafting", "drafting_of", "is_covered"]

FEATURE = "drafts"

_PLACE = "guided_spec_drafting"  # on the drafter, so that the two go together

_LOOPS = ("SpecDecodeBaseProposer", "AutoRegressiveSpeculator", "TargetDependentARSpeculator")
_OTHER_WAYS = ("parallel_drafting", "use_heterogeneous_vocab", "use_local_argmax_reduction")


class Drafting:
    """The drafts of one drafter under the grammars of its requests; hangs on the drafter.

    drafter: vLLM's proposer or speculator, with its model loaded.
    num_draft: K, its draft tokens.
    drafted: gives the tokens [B] drafted last, for the number of those before them and B.

    Raises ModelError for a tokenizer that cannot be read, and ConfigError for a drafter with more
    tokens than the target has.
    """

    def __init__(self, drafter: Any, num_draft: int, drafted: Callable[[int, int], Tensor]) -> None:
        config = drafter.vllm_config
        self.requests = GrammarRequests(config)
        self.num_draft = num_draft
        self.is_capturing = False
        size = config.scheduler_config.max_num_seqs
        vocab_size = self.requests.vocab_size
        width = drafter.draft_model_config.get_vocab_size()
        if num_mask_words(width) > num_mask_words(vocab_size):
            fix = f"the target has {vocab_size} tokens; do not ask for drafts with this drafter"
            raise ConfigError("vocab_size of the drafter", width, fix)
        # Normal tensors: vLLM writes to them inside and outside of its inference mode.
        with torch.inference_mode(mode=False):
            rows = MaskRows(size, num_draft + 1, vocab_size, drafter.device)
            self._masks = DraftMasks(rows, vocab_size, drafted, target_ids_of(drafter.model))
        self._is_running = False
        self._was_running = False
        self._watch(drafter.model)
        setattr(drafter, _PLACE, self)
        log(f"{type(drafter).__name__} drafts under grammars")

    @contextmanager
    def step(self, names: Sequence[str], num_draft: int) -> Iterator[None]:
        """Inside, one batch is drafted for.

        What was sampled has been noted, see ``GrammarRequests.note``.
        """
        constraints: list[Constraint | None] = []
        if num_draft > 0 and self.requests.any_grammar(names):
            constraints = self.requests.commit(names)
        if not any(constraints):
            self._masks.clear()
            yield
            return
        self._masks.start(constraints, num_draft)
        self._report(constraints, num_draft)
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False
            self._masks.finish()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside, whatever is run goes into a CUDA graph, or prepares for one."""
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False

    def replay(self, run: Callable[..., Any], *args: Any) -> Any:
        """Replay a graph that holds the sampling of a position."""
        if not self._is_running:
            return run(*args)
        self._masks.turn()
        result = run(*args)
        self._masks.drawn()
        return result

    def _watch(self, model: Any) -> None:
        original = model.compute_logits

        @functools.wraps(original)
        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = original(*args, **kwargs)
            return logits if logits is None else self._see(logits)

        model.compute_logits = compute_logits

    def _see(self, logits: Tensor) -> Tensor:
        if self.is_capturing:
            return self._masks.see(logits)
        if not self._is_running:
            return logits
        self._masks.turn()  # beside the drafter's forward, which was launched before
        seen = self._masks.see(logits)
        self._masks.drawn()
        return seen

    def _report(self, constraints: Sequence[Constraint | None], num_draft: int) -> None:
        if not self._was_running:
            self._was_running = True
            count = sum(constraint is not None for constraint in constraints)
            text = f"{count} of {len(constraints)} requests, {num_draft} draft tokens"
            log(f"first drafts under a grammar: {text}")


def drafting_of(drafter: Any) -> Drafting | None:
    """What was attached to one of vLLM's drafters; None where nothing was."""
    found: Drafting | None = getattr(drafter, _PLACE, None)
    return found


def is_covered(drafter: Any) -> bool:
    """Whether its drafts are drawn position by position from ``compute_logits``."""
    ways = [name for name in _OTHER_WAYS if getattr(drafter, name, False)]
    loops = [
        cls
        for cls in type(drafter).__mro__
        if cls.__name__ in _LOOPS and type(drafter).propose is cls.propose  # type: ignore[attr-defined]
    ]
    if loops and not ways:
        return True
    why = ", ".join(ways) or "it has a loop of its own"
    log(f"{type(drafter).__name__} drafts as without this package: {why}")
    return False


def target_ids_of(model: Any) -> Tensor | None:
    """int64 [D]: the target's token for each token of a drafter's own vocabulary, None without one.

    vLLM keeps the difference between the two, as the checkpoints of EAGLE-3 do.
    """
    offsets: Tensor | None = getattr(model, "draft_id_to_target_id", None)
    if offsets is None:
        return None
    offsets = offsets.detach().to(torch.int64)
    return torch.arange(len(offsets), device=offsets.device) + offsets
