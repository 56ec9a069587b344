"""Plugin of SGLang: guided_spec's grammars as a grammar backend, and its drafts as an algorithm.

SGLang finds ``register`` by the entry point group ``sglang.srt.plugins`` and calls it in each of
its processes. It adds names to ``--grammar-backend`` and one to ``--speculative-algorithm``;
nothing else happens until they are chosen.

To SGLang our algorithm is its n-gram algorithm in all but the drafts: the same worker,
verification, sampling and CUDA graphs. SGLang's side of it is SGLang's own code; what is replaced
is where drafts come from.

SGLang verifies a tree of a fixed number of nodes for each request. A draft is one chain in it; the
nodes after a short draft have no parent, so that no verifier reaches them.
"""

from __future__ import annotations

import importlib
import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.errors import ConfigError
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.integrations.host_drafter import CHECKED, HostDrafter, HostRequest, HostTexts
from guided_spec.integrations.sglang.backend import GuidedGrammar, make_backend
from guided_spec.masks.constraint import Constraint

TESTED_VERSIONS = ("0.5.23",)
BACKENDS = {
    "guided_spec": "auto",
    "guided_spec:llguidance": "llguidance",
    "guided_spec:xgrammar": "xgrammar",
}
"""The names for ``--grammar-backend``, and which backend of guided_spec each one is."""

ALGORITHM = "GUIDED_SPEC"
NUM_NODES = 12
"""Default of ``speculative_num_draft_tokens``: SGLang's own for n-grams."""

_LARGEST = 65  # nodes of a tree: the last committed token, and 64 draft tokens
_DEVICES = ("cuda", "cpu", "xpu")  # those of SGLang's n-gram algorithm
_MAX_REQUESTS = 48  # likewise

logger = logging.getLogger(__name__)


def register() -> None:
    """Make ``BACKENDS`` and the speculative algorithm known to SGLang; again changes nothing.

    An SGLang without these registrations logs a line and runs without the plugin.
    """
    try:
        choices: Any = importlib.import_module("sglang.srt.arg_groups.choices")
        backends: Any = importlib.import_module("sglang.srt.constrained.base_grammar_backend")
    except ImportError as error:
        logger.warning("guided_spec is no grammar backend of this SGLang: %s", error)
        return
    known = choices.GRAMMAR_BACKEND_CHOICES
    choices.add_grammar_backend_choices([name for name in BACKENDS if name not in known])
    for name, kind in BACKENDS.items():
        backends.register_grammar_backend(name, partial(create_backend, kind))
    try:
        register_algorithm()
    except (ImportError, AttributeError, TypeError) as error:  # other versions ask for more
        logger.warning("guided_spec is no speculative algorithm of this SGLang: %s", error)


def create_backend(
    kind: str, server_args: Any, tokenizer: Any, vocab_size: int, eos_token_ids: Any = None
) -> Any:
    """What SGLang calls when it starts with one of our names; returns its ``BaseGrammarBackend``.

    kind: a value of ``BACKENDS``. The rest is SGLang's: its ``ServerArgs``, which are not read (the
    options in force are those of its runtime context), the tokenizer, the width of the logits, and
    the ids that end a text, None for the tokenizer's own.

    Raises ConfigError for an SGLang that was not tested and for a server option that cannot be
    kept, and ModelError for a tokenizer that cannot be read.
    """
    del server_args
    check_version(version("sglang"))
    serving = importlib.import_module("sglang.srt.runtime_context").get_serving()
    check_options(serving)
    vocabulary = vocabulary_of(tokenizer, vocab_size, eos_token_ids)
    is_free = not serving.constrained_json_disable_any_whitespace
    return make_backend(kind, vocabulary, any_whitespace=is_free)


def vocabulary_of(tokenizer: Any, vocab_size: int, eos_token_ids: Any = None) -> Vocabulary:
    """The tokens of SGLang's model.

    vocab_size: the width of the logits. eos_token_ids: the ids that end a text, None for the
        tokenizer's own.

    Raises ModelError for a tokenizer that cannot be read.
    """
    ends = eos_token_ids or tokenizer.eos_token_id
    stop_ids = [ends] if isinstance(ends, int) else sorted(ends or ())
    return Vocabulary.from_tokenizer(tokenizer, vocab_size, stop_ids)


def check_version(found: str) -> None:
    """Raises ConfigError, in one sentence, for a version of SGLang that was not tested."""
    if found not in TESTED_VERSIONS:
        fix = f"guided_spec was tested with {', '.join(TESTED_VERSIONS)}: install that"
        raise ConfigError("sglang", found, f"{fix}, or choose another --grammar-backend")


def check_options(serving: Any) -> None:
    """Raises ConfigError for options about whitespace that the grammars would not keep."""
    for name in ("constrained_json_max_whitespace_cnt", "constrained_json_whitespace_pattern"):
        value = getattr(serving, name, None)
        if value is not None:
            fix = "whitespace is free or fixed: pass --constrained-json-disable-any-whitespace"
            raise ConfigError(name, value, f"{fix} instead, or choose another --grammar-backend")


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
        """Set the options that the algorithm implies; SGLang records what is assigned."""
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
            """Does nothing: the texts are searched anew at each draft."""

    return GuidedWorker


def _worker_factory(server_args: Any) -> Any:
    del server_args
    return worker_class()


def _spec_info() -> Any:
    return importlib.import_module("sglang.srt.speculative.spec_info")


@cache
def _algorithm_class() -> Any:
    return type("SGLangAlgorithm", (GuidedAlgorithm, _spec_info().CustomSpecAlgo), {})


class Trees(NamedTuple):
    """The trees of B requests with D nodes each, both flat.

    token_ids: int64 [B * D]; node 0 is the last committed token.
    mask: int64 [B * D * D]; 1 where the second node is the first one or an ancestor of it.
    """

    token_ids: NDArray[np.int64]
    mask: NDArray[np.int64]


class Drafts:
    """The corpus of SGLang's n-gram worker, as far as a worker without a corpus asks for one.

    num_nodes: D, the nodes of a tree.
    """

    def __init__(self, drafter: HostDrafter, num_nodes: int) -> None:
        self._drafter = drafter
        self._num_nodes = num_nodes
        self._texts = HostTexts(drafter.release)
        self._requests: Sequence[Any] = ()

    def see(self, requests: Sequence[Any]) -> None:
        """Take note of SGLang's ``Req`` objects that the next ``batch_get`` is about."""
        self._requests = requests

    def synchronize(self) -> None:
        """Do nothing: no work runs in the background."""

    def batch_get(
        self, names: Sequence[str], ends: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> Trees:
        """Draft after each request's text.

        names: [B] the requests' names. ends: [B] the last ``Drafts.end_length`` tokens of prompt
        and output, or all. lengths: of the texts.
        """
        texts = [
            self._texts.update(name, length, _Reader(end, length, request).read)
            for name, end, length, request in zip(names, ends, lengths, self._requests, strict=True)
        ]
        drafts = self._drafter.draft(
            [
                HostRequest(
                    slot=text.slot,
                    text=text.token_ids,
                    prompt_length=len(request.origin_input_ids_unpadded),
                    limit=self._num_nodes - 1,
                    constraint=_constraint_of(request.grammar),
                )
                for text, request in zip(texts, self._requests, strict=True)
            ]
        )
        return chains([end[-1] for end in ends], drafts, self._num_nodes)

    @property
    def end_length(self) -> int:
        """Tokens that a step may add to a text, and some of those before it.

        SGLang's own drafts look no further back than their trie is deep.
        """
        return self._num_nodes + CHECKED

    def erase_match_state(self, names: Iterable[str]) -> None:
        """Forget requests that have left the batch."""
        self._texts.forget(names)

    def reset(self) -> None:
        """Forget all requests."""
        self._texts.forget(self._texts)


class _Reader(NamedTuple):
    """Reads a text of which SGLang shows the end: the rest is among its request's tokens."""

    end: Sequence[int]
    length: int
    request: Any

    def read(self, start: int, stop: int) -> list[int]:
        begin = self.length - len(self.end)
        if start >= begin:
            return [*self.end[start - begin : stop - begin]]
        known = [*self.request.origin_input_ids_unpadded, *self.request.output_ids]
        return [*known[:begin], *self.end][start:stop]


def chains(roots: Sequence[int], drafts: Sequence[Sequence[int]], num_nodes: int) -> Trees:
    """Each draft as a chain below its root.

    roots: [B] the last committed tokens. drafts: [B], ``num_nodes - 1`` tokens at most.
    """
    token_ids = np.zeros((len(roots), num_nodes), dtype=np.int64)
    mask = np.zeros((len(roots), num_nodes, num_nodes), dtype=np.int64)
    mask[:] = np.eye(num_nodes, dtype=np.int64)
    for row, (root, draft) in enumerate(zip(roots, drafts, strict=True)):
        size = 1 + len(draft)
        token_ids[row, :size] = [root, *draft]
        mask[row, :size, :size] = np.tri(size, dtype=np.int64)
    return Trees(token_ids.reshape(-1), mask.reshape(-1))


def _constraint_of(grammar: Any) -> Constraint | None:
    """The grammar that binds the request's next token, where it is one of ours."""
    if isinstance(grammar, GuidedGrammar):
        return grammar.constraint()
    # SGLang's wrapper: its grammar binds nothing until the reasoning has ended.
    is_active = getattr(grammar, "_grammar_active", None)
    return _constraint_of(grammar.grammar) if is_active is not None and is_active() else None
