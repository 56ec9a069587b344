"""vLLM's own drafters, EAGLE-3, EAGLE, MTP and draft models, under the grammars of their requests.

vLLM drafts without a grammar, and cuts what its grammar then refuses. Here the drafter's tokens are
legal from the start. Before each position the host looks at what was drafted, leads the forks on,
and sends up the next masks: one download and one upload a position. What is masked are the logits
that the drafter samples from, so that sampled drafts are verified with the distribution they were
drawn from. The functions are wrapped where vLLM makes its workers.

In the older model runner the draft loop is Python. Only the drafter's forward is captured in CUDA
graphs there, piece by piece, and what is drawn from its logits is not. So the graphs stay as they
are, and the masks of a position are made while its forward runs.

In the new model runner the draft loop is made of CUDA graphs, with the sampling in them. It finds
its masks at one address, where the host writes them between two replays; so there has to be a graph
for each position. vLLM from 0.28 on may also capture all those after the first in one graph: here
that is switched off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from guided_spec.errors import ConfigError
from guided_spec.integrations.host_drafter import HostDrafter
from guided_spec.integrations.patches import OneOf, Patch
from guided_spec.integrations.vllm.drafts.blocks import draws_blocks, guide_blocks
from guided_spec.integrations.vllm.drafts.lookup import LOOKUP_PATCHES
from guided_spec.integrations.vllm.drafts.masks import DraftMasks, Lead
from guided_spec.integrations.vllm.drafts.tabled_requests import TabledRequests
from guided_spec.integrations.vllm.plugin import (
    FORCED,
    TABLES,
    around_drafting,
    in_workers,
    log,
    requested,
    warn,
)
from guided_spec.integrations.vllm.ranks import RANKS, ranks_of
from guided_spec.integrations.vllm.reasoning import REPORTS
from guided_spec.integrations.vllm.requests import NOTES_V1, NOTES_V2, track_requests
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.rows import MaskRows, default_table_bytes
from guided_spec.ops.host import to_device
from guided_spec.ops.mask_words import num_mask_words

_PLACE = "guided_spec_drafting"  # on the drafter, so that the two go together

# Requests under a grammar; the host searches for the text of more of them longer than that saves.
MOST_SEARCHED = 16

_LOOPS = ("SpecDecodeBaseProposer", "AutoRegressiveSpeculator", "TargetDependentARSpeculator")
_FUSES = ("use_fused_multi_step_decode", "supports_decode_metadata_update")
_OTHER_WAYS = ("use_heterogeneous_vocab", "use_local_argmax_reduction")


class Drafting:
    """The drafts of one drafter under the grammars of its requests; hangs on the drafter.

    drafter: vLLM's proposer or speculator, with its model loaded.
    num_draft: K, its draft tokens.
    drafted: gives the tokens [B] drafted last, for the number of those before them and B.
    draft: int64 [>= B, K], what the drafter returns; None where tokens that the host knows cannot
        be put there instead of being drawn.

    Raises ModelError for a tokenizer that cannot be read, and ConfigError for a drafter with more
    tokens than the target has.
    """

    def __init__(
        self,
        drafter: Any,
        num_draft: int,
        drafted: Callable[[int, int], Tensor],
        draft: Tensor | None = None,
    ) -> None:
        config = drafter.vllm_config
        has_tables = TABLES in requested()
        self.requests = track_requests(drafter, config, has_tables=has_tables)
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
            self._masks = DraftMasks(rows, vocab_size, drafted, _target_ids_of(drafter.model))
            self._tabled: TabledRequests | None = None
            if has_tables:
                own, device = self._masks.own, drafter.device
                table_bytes = default_table_bytes(device)
                self._tabled = TabledRequests(size, num_draft, vocab_size, own, device, table_bytes)
                self._tabled.compile_ahead()
                self.requests.use_tables(self._tabled, ranks_of(config))
        self._draft = draft
        self._forced = self._forced_drafter(drafter, width, size)
        self._is_running = False
        self._draws_blocks = draws_blocks(drafter)
        self._block: Tensor | None = None  # logits [B, K, V], while they are drawn from
        self._watch(drafter.model)
        if self._draws_blocks:
            guide_blocks(drafter, self)
        setattr(drafter, _PLACE, self)
        log(f"{type(drafter).__name__} drafts under grammars")

    def _forced_drafter(self, drafter: Any, width: int, size: int) -> HostDrafter | None:
        """width: tokens that the drafter knows. size: requests of a batch."""
        of = self.requests.grammars
        if FORCED not in requested():
            return None
        if width < self.requests.vocab_size:
            known = f"{width} of {self.requests.vocab_size} tokens"
            warn(f"forced is off: {type(drafter).__name__} knows {known}")
            return None
        found = HostDrafter(of.vocabulary, of.tokenizer, self.num_draft, size, "grammar_forced")
        self.requests.at_end(found.release)
        return found

    @property
    def is_running(self) -> bool:
        """Whether a step under a grammar is drafted for."""
        return self._is_running

    @contextmanager
    def step(self, names: Sequence[str], num_draft: int) -> Iterator[None]:
        """Inside, one batch is drafted for.

        What was sampled has been noted, see ``GrammarRequests.note``.
        """
        constraints: list[Constraint | None] = [None] * len(names)
        if num_draft > 0 and self.requests.any_on_host(names):
            constraints = self.requests.commit(names)
        tabled = None
        if num_draft > 0 and self._tabled is not None:
            tabled = self._tabled.start(names)
        if tabled is None and not any(constraints):
            self._masks.clear()
            yield
            return
        lead = self._lead(names, constraints, num_draft)
        self._masks.start(constraints, num_draft, lead, tabled)
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False
            self._masks.finish()

    def _lead(
        self, names: Sequence[str], constraints: Sequence[Constraint | None], num_draft: int
    ) -> Lead | None:
        """Text that the grammar forces, spelled as the tokenizer spells it.

        A drafter under a mask alone may begin it with another token. None where nothing is searched
        for.
        """
        limits = [0 if constraint is None else num_draft for constraint in constraints]
        if self._forced is None or not 0 < sum(limit > 0 for limit in limits) <= MOST_SEARCHED:
            return None
        batch = self._forced.batch(self.requests.on_host(names, constraints, limits))
        return functools.partial(self._forced.extend, batch)

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
        result = None if self._write_known() else run(*args)
        self._masks.drawn()
        return result

    def _write_known(self) -> bool:
        """Write the host's tokens of this position into the draft; returns whether it knew them.

        This position's graph would be run for these tokens alone: in the next step vLLM's drafter
        reads all committed tokens again.
        """
        at, known = self._masks.position, self._masks.known
        if self._draft is None or known is None or at == 0:  # the first graph reads what is new
            return False
        self._draft[: len(known), at] = to_device(known, self._draft.device)
        return True

    def _watch(self, model: Any) -> None:
        original = self._compute_logits = model.compute_logits

        @functools.wraps(original)
        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            if self._block is not None:
                return self.masked(self._block[:, self._masks.position])
            logits = original(*args, **kwargs)
            return logits if logits is None or self._draws_blocks else self.masked(logits)

        model.compute_logits = compute_logits

    def positions(self, hidden_states: Tensor) -> Iterator[Tensor]:
        """Hidden states [B * K, H] by position, [B, H] each; their logits are masked meanwhile.

        The logits of all of them are computed at once.
        """
        logits = self._compute_logits(hidden_states)
        by_request = hidden_states.view(-1, self.num_draft, hidden_states.shape[-1])
        self._block = logits.view(*by_request.shape[:2], -1)
        try:
            for at in range(self.num_draft):
                yield by_request[:, at]
        finally:
            self._block = None

    def masked(self, logits: Tensor) -> Tensor:
        """The logits [B, V] of the next position; as they are where no step is drafted for."""
        if self.is_capturing:
            return self._masks.see(logits)
        if not self._is_running:
            return logits
        self._masks.turn()  # overlaps with the drafter's forward, which was launched before
        seen = self._masks.see(logits)
        self._masks.drawn()
        return seen


def drafting_of(drafter: Any) -> Drafting | None:
    """What was attached to one of vLLM's drafters; None where nothing was."""
    found: Drafting | None = getattr(drafter, _PLACE, None)
    return found


def is_covered(drafter: Any) -> bool:
    """Whether its drafts can be drawn position by position, from logits under masks.

    Warns, once for each drafter, of one whose are not.
    """
    ways = [name for name in _OTHER_WAYS if getattr(drafter, name, False)]
    loops = [
        cls
        for cls in type(drafter).__mro__
        if cls.__name__ in _LOOPS and type(drafter).propose is cls.propose  # type: ignore[attr-defined]
    ]
    is_loop = bool(loops) and not getattr(drafter, "parallel_drafting", False)
    if not ways and (is_loop or draws_blocks(drafter)):
        return True
    if not hasattr(drafter, _PLACE):
        why = ", ".join(ways) or "it has a way of its own to draft"
        warn(f"{type(drafter).__name__} drafts as without this package: {why}")
        setattr(drafter, _PLACE, None)
    return False


def _target_ids_of(model: Any) -> Tensor | None:
    """int64 [D]: the target's token for each token of a drafter's own vocabulary, None without one.

    vLLM keeps the difference between the two, as the checkpoints of EAGLE-3 do.
    """
    offsets: Tensor | None = getattr(model, "draft_id_to_target_id", None)
    if offsets is None:
        return None
    offsets = offsets.detach().to(torch.int64)
    return torch.arange(len(offsets), device=offsets.device) + offsets


def guide_proposer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around a proposer's ``load_model``: its drafts are masked from then on."""

    @functools.wraps(original)
    def load_model(self: Any, target_model: Any) -> Any:
        result = original(self, target_model)
        if is_covered(self):
            # The token that was drafted last is what the drafter reads next.
            Drafting(
                self,
                self.num_speculative_tokens,
                lambda before, count: self.input_ids[:count],  # noqa: ARG005
            )
        return result

    return load_model


def draft_legal(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around the runner's ``propose_draft_token_ids``: one step."""

    @functools.wraps(original)
    def propose_draft_token_ids(
        self: Any, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        drafting = drafting_of(self.drafter)
        if drafting is None:
            is_covered(self.drafter)  # warns: n-grams load no model, where it is checked
            return original(self, scheduler_output, sampled_token_ids, *args, **kwargs)
        num_draft = scheduler_output.num_spec_tokens_to_schedule
        with drafting.step(self.input_batch.req_ids, num_draft):
            return original(self, scheduler_output, sampled_token_ids, *args, **kwargs)

    return propose_draft_token_ids


def guide_speculator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around a speculator's ``load_model``: its drafts are masked from then on."""

    @functools.wraps(original)
    def load_model(self: Any, target_model: Any) -> Any:
        result = original(self, target_model)
        if is_covered(self):
            # Drawn tokens have probabilities. Ranks that share a model have to run it together, and
            # one that has sampled another text than the others would wait for them forever.
            parallel = self.vllm_config.parallel_config
            is_alone = parallel.tensor_parallel_size == 1 and self.dp_size == 1
            is_alone = is_alone and not draws_blocks(self)
            Drafting(
                self,
                self.num_speculative_steps,
                lambda before, count: self.draft_tokens[:count, before],
                self.draft_tokens if is_alone and self.draft_logits is None else None,
            )
        return result

    return load_model


def split_graphs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around a speculator's ``init_cudagraph_manager``: a graph for each position.

    vLLM does the same itself where an attention backend needs it.
    """

    @functools.wraps(original)
    def init_cudagraph_manager(self: Any, cudagraph_mode: Any) -> Any:
        drafting = drafting_of(self)
        if drafting is None:
            return original(self, cudagraph_mode)
        is_full = cudagraph_mode.decode_mode().name == "FULL" and self.num_speculative_steps > 1
        for switch in _FUSES if is_full else ():
            if getattr(self, switch, False):
                setattr(self, switch, False)
        result = original(self, cudagraph_mode)
        _wrap_graphs(self, drafting)
        return result

    return init_cudagraph_manager


def propose_legal(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around a speculator's ``propose``: one step."""

    @functools.wraps(original)
    def propose(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        drafting = drafting_of(self)
        if drafting is None:
            return original(self, input_batch, *args, **kwargs)
        num_draft = kwargs.get("num_speculative_tokens")
        num_draft = drafting.num_draft if num_draft is None else num_draft
        with drafting.step(input_batch.req_ids, num_draft):
            return original(self, input_batch, *args, **kwargs)

    return propose


def _wrap_graphs(speculator: Any, drafting: Drafting) -> None:
    """Wrap capture and replay of this speculator's graphs, so that each position is masked."""
    for manager in (speculator.prefill_cudagraph_manager, speculator.decode_cudagraph_manager):
        manager.run_fullgraph = functools.partial(drafting.replay, manager.run_fullgraph)
    capture = speculator.capture

    @functools.wraps(capture)
    def captured(*args: Any, **kwargs: Any) -> Any:
        with drafting.capturing():
            return capture(*args, **kwargs)

    speculator.capture = captured


def check_up_to_end(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``XgrammarGrammar.validate_tokens``: cut drafts after the token that ends a text.

    Legal drafts reach it, and up to vLLM 0.32 xgrammar writes a warning for the next one.
    """

    @functools.wraps(original)
    def validate_tokens(self: Any, tokens: list[int]) -> Any:
        stops = self.matcher.stop_token_ids
        end = next((at for at, token in enumerate(tokens) if token in stops), len(tokens))
        return original(self, tokens[: end + 1])

    return validate_tokens


_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer"
_V1_PATCHES = (
    *NOTES_V1,
    Patch(_PROPOSER, "SpecDecodeBaseProposer.load_model", "self target_model", guide_proposer),
    Patch(_PROPOSER, "SpecDecodeBaseProposer",
          attributes="propose num_speculative_tokens input_ids device draft_model_config"),
    Patch("vllm.v1.core.sched.output", "SchedulerOutput", attributes="num_spec_tokens_to_schedule"),
    around_drafting(draft_legal),
)  # fmt: skip

_V2 = "vllm.v1.worker.gpu"
_SPECULATOR = f"{_V2}.spec_decode.speculator"


def _loop(folder: str, name: str, attributes: str) -> tuple[Patch, ...]:
    """One of the forms that the draft loop of the new model runner has had."""
    module = f"{_V2}.spec_decode.{folder}.speculator"
    init = f"{name}.init_cudagraph_manager"
    graphs = "capture prefill_cudagraph_manager decode_cudagraph_manager"
    return (
        Patch(module, init, "self cudagraph_mode", split_graphs),
        Patch(module, f"{name}.propose", "self input_batch ...", propose_legal),
        Patch(module, name, attributes=f"{graphs} {attributes}"),
    )


_OLD_LOOP = ("autoregressive", "AutoRegressiveSpeculator")
_V2_PATCHES = (
    *NOTES_V2,
    Patch(_SPECULATOR, "DraftModelSpeculator.load_model", "self target_model", guide_speculator),
    Patch(_SPECULATOR, "DraftModelSpeculator",
          attributes="num_speculative_steps draft_tokens draft_logits dp_size device"
          " draft_model_config sample_draft"),
    # All positions in one graph: by no switch, by one, and by another.
    OneOf((
        _loop(*_OLD_LOOP, "!_generate_fused_drafts"),
        _loop(*_OLD_LOOP, _FUSES[0]),
        _loop("target_dependent_ar", "TargetDependentARSpeculator", _FUSES[1]),
    )),
    Patch(f"{_V2}.cudagraph_utils", "CudaGraphManager.run_fullgraph", "self desc"),
    # The drafter without a model, or a release that has none in the new runner.
    OneOf((
        LOOKUP_PATCHES,
        (Patch("vllm.config.speculative", "SpeculativeConfig", attributes="!use_ngram"),),
    )),
)  # fmt: skip

WORKER_PATCHES = (_V1_PATCHES, _V2_PATCHES)
PATCHES = (
    in_workers("drafts", WORKER_PATCHES),
    *REPORTS,
    *RANKS,
    Patch("vllm.v1.structured_output.backend_xgrammar", "XgrammarGrammar.validate_tokens",
          "self tokens", check_up_to_end),
)  # fmt: skip
PARTS = {
    "old runner": (*PATCHES, *_V1_PATCHES),
    "new runner": (*PATCHES, *_V2_PATCHES),
}
