"""vLLM's own draft loops on a CPU, of both model runners, around a small table as the draft model.

What is vLLM's: the proposer and the speculator, their loops, buffers and kernels, the runner's own
function around the older loop, the configuration of the bundled EAGLE-3 head, and its class, whose
``compute_logits`` scatters a smaller draft vocabulary. Instead of weights there is a table of what
comes after a token, and instead of CUDA graphs what would be in them is run again.

Import it behind a check that vLLM is there.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.completion.spelling import Spelling
from guided_spec.grammar.isolation import Workers
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.tables.table import proven_table, tabled_part
from guided_spec.grammar.tables.token_table import TokenTable
from guided_spec.integrations.vllm import backend as vllm_backend
from guided_spec.integrations.vllm import requests as vllm_requests
from guided_spec.integrations.vllm.drafts import heads as vllm_drafts
from guided_spec.integrations.vllm.drafts.heads import Drafting, drafting_of
from tests.integrations.vllm.graphs import SLOTS, SWITCHES, make_graphs
from tests.integrations.vllm.parts import (
    MODEL,
    NUM_DRAFT,
    make_config,
    tokenizer,
    use_cpu,
    wait_for_grammar,
)

CPU = torch.device("cpu")
WIDTH = 256  # of the bundled head's hidden states
VOCABULARY = 4096

OWN_TOKENS = 2048  # of the bundled head


def _vllm(module: str) -> Any:
    return importlib.import_module(f"vllm.{module}")


def use_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pinned memory, and Triton's interpreter takes masks that are made of a flag for all."""
    use_cpu(monkeypatch)
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def with_bools(mask: Any) -> Any:
        return interpreter.TensorHandle(mask.data.astype(bool), mask.dtype)

    def load_behind_bools(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
        return load(self, ptrs, with_bools(mask), *others)

    def store_behind_bools(self: Any, ptrs: Any, value: Any, mask: Any, *policies: Any) -> Any:
        return store(self, ptrs, value, with_bools(mask), *policies)

    monkeypatch.setattr(builder, "create_masked_load", load_behind_bools)
    monkeypatch.setattr(builder, "create_masked_store", store_behind_bools)
    for name in ("v1.utils", "v1.spec_decode.llm_base_proposer"):
        monkeypatch.setattr(_vllm(name), "PIN_MEMORY", False, raising=False)
    base = _vllm("v1.spec_decode.llm_base_proposer")
    buffer = functools.partial(base.CpuGpuBuffer, pin_memory=False)
    monkeypatch.setattr(base, "CpuGpuBuffer", buffer)


def use_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars come with their tables, made in this process."""

    def make(workers: Workers, spec: GrammarSpec, *limits: Any) -> TokenTable:
        compiled = XGrammarBackend(workers._vocabulary).compile(spec)
        return proven_table(tabled_part(compiled), Spelling(workers._vocabulary), limits[-1])

    monkeypatch.setenv("GUIDED_SPEC_VLLM", "tables")
    monkeypatch.setattr(Workers, "make_table", make)
    monkeypatch.setattr(vllm_backend, "TEXTS_BEFORE_A_TABLE", 0)


def config_of(**speculative: Any) -> Any:
    """A VllmConfig of the bundled model with its bundled EAGLE-3 head."""
    head = str(MODEL.parent / "eagle3")
    return make_config(speculative={"method": "eagle3", "model": head, **speculative})


class Table:
    """Logits of what follows a token: float [V, D].

    own_ids: int64 [D], the draft vocabulary, ascending; None for all V tokens.
    """

    def __init__(self, seed: int, own_ids: Tensor | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.own_ids = own_ids
        self.embedding = torch.nn.functional.normalize(
            torch.randn(VOCABULARY, WIDTH, generator=generator)
        )
        size = VOCABULARY if own_ids is None else len(own_ids)
        self.head = torch.randn(size, WIDTH, generator=generator) * 0.5

    def prefer(self, text: Sequence[int], strength: float) -> None:
        """Each token of ``text`` likes the one behind it the more, the greater ``strength``."""
        own = range(VOCABULARY) if self.own_ids is None else self.own_ids.tolist()
        place = {token: at for at, token in enumerate(own)}
        for token, after in zip(text, text[1:], strict=False):
            if after in place:
                self.head[place[after]] += strength * self.embedding[token]

    def logits(self, token_id: int) -> Tensor:
        """Float [V] after a token; -inf outside of the draft vocabulary."""
        found = self.embedding[token_id] @ self.head.T
        if self.own_ids is None:
            return found
        return torch.full((VOCABULARY,), float("-inf")).scatter(0, self.own_ids, found)

    def model(self) -> Any:
        """vLLM's class for an EAGLE-3 head, with this table in it."""
        base = _vllm("model_executor.models.llama_eagle3").Eagle3LlamaForCausalLM
        table = self

        class TableModel(base):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                nn.Module.__init__(self)
                own = table.own_ids
                offsets = None if own is None else own - torch.arange(len(own))
                self.draft_id_to_target_id = offsets
                self.config = SimpleNamespace(
                    vocab_size=VOCABULARY, draft_vocab_size=0 if own is None else len(own)
                )
                self.lm_head = table.head
                self.logits_processor = lambda head, hidden: hidden @ head.T

            def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
                return hidden_states[:, :WIDTH]

            def forward(self, input_ids: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
                del others
                hidden = table.embedding[input_ids.long()]
                return hidden, hidden

        return TableModel()


class Drafter:
    """One of vLLM's drafters with a table for a model; ``step`` drafts for a batch."""

    def __init__(self, config: Any, drafter: Any, table: Table, *, guided: bool) -> None:
        self.config = config
        self.drafter = drafter
        self.table = table
        self.is_guided = guided
        drafter.model = table.model()

    @property
    def drafting(self) -> Drafting:
        found = drafting_of(self.drafter)
        assert found is not None
        return found

    def wait(self, *names: str) -> None:
        """Until the grammars of these requests are compiled."""
        for name in names:
            wait_for_grammar(self.drafting.requests, name)


class V1(Drafter):
    """``GPUModelRunner.propose_draft_token_ids`` and ``EagleProposer.propose``."""

    def __init__(self, config: Any, table: Table, *, guided: bool = True) -> None:
        module = _vllm("v1.worker.gpu_model_runner")
        super().__init__(config, module.EagleProposer(config, CPU, None), table, guided=guided)
        self.is_asynchronous = False
        self.drafter.block_size = 16
        self.drafter._draft_attn_layer_names = set()
        self._propose = module.GPUModelRunner.propose_draft_token_ids
        if guided:
            vllm_drafts.guide_proposer(_load_nothing)(self.drafter, None)
            self._propose = vllm_drafts.draft_legal(self._propose)
        self.runner = SimpleNamespace(
            drafter=self.drafter,
            speculative_config=config.speculative_config,
            requests={},
            input_ids=SimpleNamespace(gpu=torch.zeros(SLOTS, dtype=torch.int32)),
            use_aux_hidden_state_outputs=False,
            supports_mm_inputs=False,
            get_model=lambda: None,
            _get_positions=lambda count: torch.arange(count),
            _copy_valid_sampled_token_count=_load_nothing,
        )

    def add(self, name: str, params: Any, output: Sequence[int] = ()) -> None:
        new = _vllm("v1.worker.gpu_input_batch").CachedRequestState
        self.runner.requests[name] = new(
            req_id=name,
            prompt_token_ids=[5, 6, 7],
            mm_features=[],
            sampling_params=params,
            generator=None,
            block_ids=([0],),
            num_computed_tokens=0,
            output_token_ids=list(output),
        )

    def remove(self, name: str) -> None:
        del self.runner.requests[name]

    def sample(self, sampled: Mapping[str, Sequence[int]]) -> Any:
        """A step up to its draft; returns the tokens [B, width] of its requests."""
        names, count = list(sampled), len(sampled)
        self.runner.use_async_scheduling = self.is_asynchronous
        width = max(1, *map(len, sampled.values()))
        rows = [[*tokens, *[-1] * (width - len(tokens))] for tokens in sampled.values()]
        token_ids = torch.tensor(rows, dtype=torch.int32)
        dropped = torch.tensor([not tokens for tokens in sampled.values()])
        self.runner.discard_request_mask = SimpleNamespace(gpu=dropped, np=dropped.numpy())
        self.runner.input_batch = SimpleNamespace(
            req_ids=names,
            num_reqs=count,
            vocab_size=VOCABULARY,
            num_tokens_no_spec=np.full(count, 3),
        )
        if self.is_guided:
            output = SimpleNamespace(sampled_token_ids=token_ids)
            vllm_requests.note_sampled_v1(lambda *_: output)(self.runner, None, None)
        return token_ids

    def step(
        self, sampled: Mapping[str, Sequence[int]], *, temperature: float = 0.0
    ) -> dict[str, list[int]]:
        """Drafts behind the tokens that each request of a batch was just given."""
        names, count = list(sampled), len(sampled)
        token_ids = self.sample(sampled)
        sampling = SimpleNamespace(
            all_greedy=temperature == 0.0,
            temperature=torch.full((count,), temperature or 1.0),
            all_random=True,
            top_k=None,
            top_p=None,
            generators={},
        )
        output = SimpleNamespace(
            total_num_scheduled_tokens=count, num_spec_tokens_to_schedule=NUM_DRAFT
        )
        hidden = torch.zeros(count, WIDTH)
        with _vllm("config").set_current_vllm_config(self.config):
            drafts = self._propose(
                self.runner, output, token_ids, sampling, hidden,
                hidden, None, None, _attention_of(count), None,
            )  # fmt: skip
        self.write(sampled)
        return dict(zip(names, drafts.tolist(), strict=True))

    def write(self, sampled: Mapping[str, Sequence[int]]) -> None:
        """What the runner does with the tokens behind the draft."""
        is_late = self.is_asynchronous
        for name, tokens in sampled.items():
            known = [-1] * bool(tokens) if is_late else list(tokens)
            self.runner.requests[name].output_token_ids.extend(known)


class V2(Drafter):
    """``EagleSpeculator.propose``; ``graphs`` as they would be captured: none, step, fused."""

    def __init__(
        self, config: Any, table: Table, *, graphs: str = "none", guided: bool = True
    ) -> None:
        eagle = _vllm("v1.worker.gpu.spec_decode.eagle.speculator")
        super().__init__(config, eagle.EagleSpeculator(config, CPU), table, guided=guided)
        own = self.drafter
        own.kv_cache_config = SimpleNamespace(kv_cache_groups=[])
        own.attn_groups = []
        own.block_tables = SimpleNamespace(
            compute_slot_mappings=lambda *_: torch.zeros(0, SLOTS, dtype=torch.int64),
            slot_mappings=torch.zeros(0, SLOTS, dtype=torch.int64),
            input_block_tables=[],
            cp_size=1,
        )
        for switch in SWITCHES:
            setattr(own, switch, graphs == "fused")
        mode = _vllm("config.compilation").CUDAGraphMode
        start: Any = functools.partial(make_graphs, graphs)
        if guided:
            vllm_drafts.guide_speculator(_load_nothing)(own, None)
            start = vllm_drafts.split_graphs(start)
        start(own, mode.NONE if graphs == "none" else mode.FULL_AND_PIECEWISE)
        self._slots: dict[str, int] = {}
        self.seed = 0
        self._last = torch.zeros(SLOTS, 1, dtype=torch.int64)
        propose = type(own).propose
        self._propose = vllm_drafts.propose_legal(propose) if guided else propose

    def add(self, name: str, params: Any, output: Sequence[int] = ()) -> None:
        self._slots.pop(name, None)
        free = set(range(SLOTS)) - {*self._slots.values()}
        self._slots[name] = min(free)
        request = SimpleNamespace(
            req_id=name, sampling_params=params, prefill_token_ids=[5, 6, 7, *output]
        )
        self.take(SimpleNamespace(scheduled_new_reqs=[request]))

    def remove(self, name: str) -> None:
        del self._slots[name]
        self.take(SimpleNamespace(scheduled_new_reqs=[]))

    def take(self, scheduled: Any) -> None:
        """What the runner does with the scheduler's new requests."""
        for new in scheduled.scheduled_new_reqs:
            self._slots.setdefault(new.req_id, len(self._slots))
        states = SimpleNamespace(
            req_id_to_index=self._slots, prompt_len=SimpleNamespace(np=np.full(SLOTS, 3))
        )
        runner = SimpleNamespace(speculator=self.drafter, req_states=states)
        vllm_requests.note_requests(_load_nothing)(runner, scheduled)

    def sample(self, sampled: Mapping[str, Sequence[int]]) -> Any:
        """A step up to its draft; returns how many tokens each of its requests was given."""
        width = max(1, *map(len, sampled.values()))
        rows = [[*tokens, *[0] * (width - len(tokens))] for tokens in sampled.values()]
        lengths = torch.tensor([len(tokens) for tokens in sampled.values()], dtype=torch.int32)
        batch = SimpleNamespace(req_ids=list(sampled))
        runner = SimpleNamespace(speculator=self.drafter)
        output = (SimpleNamespace(sampled_token_ids=torch.tensor(rows)), lengths, None)
        vllm_requests.note_sampled_v2(lambda *_: output)(runner, None, batch, None)
        return lengths

    def write(self, sampled: Mapping[str, Sequence[int]]) -> None:
        """The host never has the tokens."""

    def step(
        self, sampled: Mapping[str, Sequence[int]], *, temperature: float = 0.0
    ) -> dict[str, list[int]]:
        """Drafts behind the tokens that each request of a batch was just given."""
        names, count = list(sampled), len(sampled)
        lengths = self.sample(sampled)
        inputs = _vllm("v1.worker.gpu.input_batch")
        batch = inputs.InputBatch.make_dummy(count, count, inputs.InputBuffers(SLOTS, SLOTS, CPU))
        batch.req_ids = names
        batch.idx_mapping = torch.tensor([self._slots[name] for name in names])
        for name, tokens in sampled.items():
            self._last[self._slots[name]] = tokens[-1] if tokens else 1
        aux = [torch.zeros(count, WIDTH)]
        with _vllm("config").set_current_vllm_config(self.config):
            drafts = self._propose(
                self.drafter, batch, {}, {}, aux[0], aux, lengths,
                torch.zeros(count, dtype=torch.int32), self._last,
                torch.ones(1, SLOTS, dtype=torch.int32),
                torch.full((SLOTS,), temperature), torch.arange(SLOTS) * 7919 + self.seed,
            )  # fmt: skip
        return dict(zip(names, drafts.tolist(), strict=True))


def encode(text: str) -> list[int]:
    found: list[int] = tokenizer().encode(text, add_special_tokens=False)
    return found


def started(drafter: Any, **requests: Any) -> Any:
    """The drafter with these requests, whose prompts it has read."""
    for name, params in requests.items():
        drafter.add(name, params)
    drafter.step(dict.fromkeys(requests, ()))
    drafter.wait(*(name for name, params in requests.items() if params.structured_outputs))
    return drafter


def _attention_of(count: int) -> Any:
    """One token of each of ``count`` requests, behind three others."""
    return _vllm("v1.attention.backend").CommonAttentionMetadata(
        query_start_loc=torch.arange(count + 1, dtype=torch.int32),
        query_start_loc_cpu=torch.arange(count + 1, dtype=torch.int32),
        seq_lens=torch.full((count,), 4, dtype=torch.int32),
        num_reqs=count,
        num_actual_tokens=count,
        max_query_len=1,
        max_seq_len=4,
        block_table_tensor=torch.zeros(count, 32, dtype=torch.int32),
        slot_mapping=torch.zeros(count, dtype=torch.int64),
    )


def _load_nothing(*args: Any) -> None:
    del args
