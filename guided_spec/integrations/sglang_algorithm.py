"""Our drafts as a speculative algorithm of SGLang: ``--speculative-algorithm GUIDED_SPEC``.

To SGLang it is its n-gram algorithm in all but the drafts: the same worker, verification, sampling
and CUDA graphs. SGLang's side of it is SGLang's own code; what is replaced is where drafts come
from.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

from guided_spec.errors import ConfigError
from guided_spec.integrations.sglang import BACKENDS, check_version, vocabulary_of

__all__ = ["ALGORITHM", "NUM_NODES", "check_server", "register_algorithm", "worker_class"]

ALGORITHM = "GUIDED_SPEC"
NUM_NODES = 12
"""``speculative_num_draft_tokens`` where the server is not told: SGLang's own for n-grams."""

_LARGEST = 65  # nodes of a tree: the last committed token, and 64 draft tokens
_DEVICES = ("cuda", "cpu", "xpu")  # those of SGLang's n-gram algorithm
_MAX_REQUESTS = 48  # likewise


def register_algorithm() -> None:
    """Make ``ALGORITHM`` known to SGLang. May be called more than once."""
    algorithms = _spec_info().SpeculativeAlgorithm
    try:
        algorithms.from_string(ALGORITHM)
    except ValueError:
        register = algorithms.register(
            ALGORITHM,
            supports_overlap=True,
            validate_server_args=check_server,
            spec_class=_algorithm_class(),
        )
        register(_worker_factory)


class _Rule(NamedTuple):
    """An option of SGLang's server, which of its values can be kept, and what to do otherwise."""

    name: str
    admits: Callable[[Any], bool]
    fix: str


_RULES = (
    _Rule(
        "grammar_backend",
        lambda value: value in BACKENDS,
        f"pass --grammar-backend with one of {', '.join(BACKENDS)}",
    ),
    _Rule(
        "speculative_num_draft_tokens",
        lambda value: value is None or 2 <= value <= _LARGEST,
        f"must be 2 to {_LARGEST}, the last committed token among them",
    ),
    _Rule("skip_tokenizer_init", operator.not_, "drafting needs the tokenizer: leave it out"),
    _Rule(
        "device",
        lambda value: value in _DEVICES,
        f"SGLang verifies n-gram drafts on {', '.join(_DEVICES)}",
    ),
    _Rule(
        "attn_dp_size",
        lambda value: value == 1,
        "SGLang verifies n-gram drafts without DP attention: must be 1",
    ),
    _Rule(
        "speculative_use_rejection_sampling",
        operator.not_,
        "these drafts have no distribution, and are verified exactly without: leave it out",
    ),
    _Rule(
        "speculative_ngram_external_corpus_path",
        operator.not_,
        "texts are drafted from themselves: leave it out, or take the algorithm NGRAM",
    ),
)


def check_server(server_args: Any) -> None:
    """Raises ConfigError for an SGLang that was not tested and for options that cannot be kept.

    server_args: SGLang's, read only.
    """
    check_version(version("sglang"))
    for name, admits, fix in _RULES:
        value = getattr(server_args, name)
        if not admits(value):
            raise ConfigError(name, value, fix)


class GuidedAlgorithm:
    """The answers by which SGLang takes a registered algorithm for its n-gram algorithm.

    SGLang's class for registered algorithms, which is the other base, answers the rest: it is no
    EAGLE, no DFlash and so on.
    """

    def is_ngram(self) -> bool:
        """Verified, sampled and captured as CUDA graphs like n-gram drafts."""
        return True

    def has_draft_kv(self) -> bool:
        """There is no draft model."""
        return False

    def need_topk(self) -> bool:
        """There is no draft model."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        """There is no draft model."""
        return False

    def create_future_map(self, *args: Any, **kwargs: Any) -> Any:
        """What carries tokens from one step to the next: that of n-gram drafts."""
        return _spec_info().SpeculativeAlgorithm.NGRAM.create_future_map(*args, **kwargs)

    def handle_server_args(self, server_args: Any) -> None:
        """Set the options that follow from the algorithm; SGLang writes down what is assigned."""
        server_args.enable_mixed_chunk = False
        if server_args.device == "cpu":
            server_args.disable_overlap_schedule = True
        if server_args.max_running_requests is None:
            server_args.max_running_requests = _MAX_REQUESTS
        if server_args.speculative_num_draft_tokens is None:
            server_args.speculative_num_draft_tokens = NUM_NODES
        # A chain: one child a node, and a level for each draft token.
        server_args.speculative_eagle_topk = 1
        server_args.speculative_num_steps = server_args.speculative_num_draft_tokens - 1
        # The corpus that SGLang's worker makes, and this one does not use, takes memory by this.
        server_args.speculative_ngram_capacity = 1


@cache
def worker_class() -> Any:
    """SGLang's n-gram worker with our drafts, a subclass of its own: made when SGLang is there."""
    ngram = importlib.import_module("sglang.srt.speculative.ngram_worker")
    from guided_spec.integrations.host_drafter import HostDrafter
    from guided_spec.integrations.sglang_drafts import Drafts

    class GuidedWorker(ngram.NGRAMWorker):  # type: ignore[misc, name-defined]
        """Drafts from each request's text and grammar; everything else is SGLang's."""

        def alloc_memory_pool(self, **kwargs: Any) -> None:
            """From here on it is known how many requests run at once."""
            super().alloc_memory_pool(**kwargs)
            target = self._target_worker
            model, tokenizer = target.model_config, target.tokenizer
            vocabulary = vocabulary_of(tokenizer, model.vocab_size, model.hf_eos_token_id)
            num_draft = self.draft_token_num - 1
            drafter = HostDrafter(vocabulary, tokenizer, num_draft, self.max_batch_size)
            self.ngram_corpus = Drafts(drafter, self.draft_token_num)
            # The worker shows its corpus the last so many tokens of a text.
            self.max_trie_depth = self.ngram_corpus.end_length

        def _prepare_draft_tokens(self, batch: Any) -> Any:
            self.ngram_corpus.see(batch.reqs)
            return super()._prepare_draft_tokens(batch)

        def _update_ngram_corpus(self, batch: Any) -> None:
            """Nothing is learnt from the texts: they are looked at anew."""

    return GuidedWorker


def _worker_factory(server_args: Any) -> Any:
    del server_args
    return worker_class()


def _spec_info() -> Any:
    return importlib.import_module("sglang.srt.speculative.spec_info")


@cache
def _algorithm_class() -> Any:
    return type("SGLangAlgorithm", (GuidedAlgorithm, _spec_info().CustomSpecAlgo), {})
