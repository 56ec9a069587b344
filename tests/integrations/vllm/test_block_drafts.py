"""vLLM's block drafters: what they draw is legal, and as vLLM draws it where nothing binds."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="vLLM is not installed")

from guided_spec.integrations.vllm.drafts import heads as vllm_drafts  # noqa: E402
from guided_spec.integrations.vllm.drafts.blocks import draws_blocks  # noqa: E402
from guided_spec.integrations.vllm.drafts.heads import Drafting, drafting_of  # noqa: E402
from tests.integrations.vllm.drafters import (  # noqa: E402
    CPU,
    V1,
    VOCABULARY,
    Table,
    config_of,
    encode,
    use_loops,
)
from tests.integrations.vllm.parts import (  # noqa: E402
    NUM_DRAFT,
    RELEASE,
    interpreted,
    make_config,
    sampling_params,
    wait_for_grammar,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, and the Triton interpreter's
    interpreted,
]
REGEXES = {"digits": r"\d{40}", "free": None, "letters": "[a-z]{40}"}
SLOTS = 8
Draw = Callable[[], list[list[int]]]


@pytest.fixture(autouse=True)
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    use_loops(monkeypatch)


def vllm(module: str) -> Any:
    return importlib.import_module(f"vllm.{module}")


def start(drafter: Any) -> Drafting:
    """Its requests are behind their first token, and their grammars are compiled."""
    drafting = drafting_of(drafter)
    assert drafting is not None
    requests = drafting.requests
    for name, regex in REGEXES.items():
        requests.add(
            name, sampling_params(make_config(), **({"regex": regex} if regex else {})), []
        )
    for name in ("digits", "letters"):
        wait_for_grammar(requests, name)
    sampled = torch.tensor([encode("1"), encode("x"), encode("y")])
    requests.note([*REGEXES], sampled, torch.ones(len(REGEXES)))
    return drafting


def hidden_states(table: Table, seed: int = 3) -> Tensor:
    """[B * K, H], of tokens by chance."""
    made = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (len(REGEXES) * NUM_DRAFT,), generator=made)
    return table.embedding[tokens]


def text_of(tokens: Sequence[int]) -> str:
    text: str = importlib.import_module("tests.integrations.vllm.parts").tokenizer().decode(tokens)
    return text


def check(plain: list[list[int]], found: list[list[int]]) -> None:
    assert len(found[0]) == NUM_DRAFT
    assert text_of(found[0]).isdigit()
    assert text_of(found[2]).isalpha()
    assert found[1] == plain[1]
    assert not text_of(plain[0]).isdigit()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_older_runner_draws_from_left_to_right(temperature: float) -> None:
    """P-EAGLE and DFlash, by their common function."""
    config = config_of(draft_sample_method="probabilistic") if temperature else config_of()
    table = Table(5)
    proposer = V1(config, table, guided=False).drafter
    proposer.parallel_drafting = True
    assert draws_blocks(proposer)
    metadata = SimpleNamespace(
        all_greedy=temperature == 0.0, all_random=True, top_k=None, top_p=None, generators={},
        temperature=torch.ones(len(REGEXES)),
    )  # fmt: skip
    hidden = hidden_states(table)
    with vllm("config").set_current_vllm_config(config):
        plain, _ = proposer._sample_draft_tokens(hidden, SimpleNamespace(
            **{**vars(metadata), "temperature": torch.ones(len(hidden))}
        ))  # fmt: skip
        vllm_drafts.guide_proposer(lambda *_: None)(proposer, None)
        drafting = start(proposer)
        with drafting.step([*REGEXES], NUM_DRAFT):
            drawn, probs = proposer._sample_draft_tokens(hidden, metadata)
        again, _ = proposer._sample_draft_tokens(hidden, SimpleNamespace(
            **{**vars(metadata), "temperature": torch.ones(len(hidden))}
        ))  # fmt: skip
    found = drawn.view(-1, NUM_DRAFT).tolist()
    if temperature == 0.0:
        assert torch.equal(again, plain)  # outside of a step nothing changes
        check(plain.view(-1, NUM_DRAFT).tolist(), found)
    else:
        assert text_of(found[0]).isdigit()
        by_token = probs.gather(1, drawn.view(-1, 1).long())
        assert (by_token.view(-1, NUM_DRAFT)[0] > 0).all()
        assert probs.view(-1, NUM_DRAFT, VOCABULARY)[0, 0].count_nonzero() < VOCABULARY / 2


def speculator_of(name: str, table: Table, temperature: float) -> Any:
    """As much of a speculator of the new runner as draws."""
    cls: Any = getattr(vllm(f"v1.worker.gpu.spec_decode.{name.lower()}.speculator"),
                       f"{name}Speculator")  # fmt: skip
    own, config, count = cls.__new__(cls), config_of(), len(REGEXES)
    size = SLOTS * NUM_DRAFT
    own.vllm_config, own.device, own.dp_size = config, CPU, 1
    own.draft_model_config = config.speculative_config.draft_model_config
    own.num_speculative_steps = own.num_query_per_req = NUM_DRAFT
    own.max_num_reqs, own.vocab_size = SLOTS, VOCABULARY
    own.use_local_argmax_reduction = own.use_fp64_gumbel = own.use_confidence_head = False
    own.enable_adaptive_verification = own.use_acceptance_estimator = False
    own.draft_watermarker = own._draft_topk = own.acceptance_estimator = None
    own._d2t_scatter_index = own._draft_scatter_buf = None
    own.sample_indices = torch.arange(size)
    own.sample_pos = torch.arange(size) + 9
    own.sample_idx_mapping = torch.arange(SLOTS).repeat_interleave(NUM_DRAFT)
    own.sample_col = torch.arange(NUM_DRAFT, dtype=torch.int32).repeat(SLOTS)
    own._step_cols = torch.arange(NUM_DRAFT, dtype=torch.int32)
    own._anchor_idx = torch.arange(SLOTS) * NUM_DRAFT
    own.input_buffers = SimpleNamespace(input_ids=torch.full((size,), 7))
    own.temperature, own.seeds = torch.full((SLOTS,), temperature), torch.arange(SLOTS) * 7919
    own.draft_tokens = torch.zeros(SLOTS, NUM_DRAFT, dtype=torch.int64)
    own.draft_logits = torch.zeros(SLOTS, NUM_DRAFT, VOCABULARY) if temperature else None
    own.model = SparkModel(table) if name == "DSpark" else table.model()
    own._run_model = lambda *_: hidden_states(table)
    own._maybe_predict_acceptance = lambda *_: None
    none: Any = None

    def propose(batch: Any, **others: Any) -> Tensor:
        del others
        own._generate_draft(len(batch.req_ids), count * NUM_DRAFT, none, none, none)
        tokens: Tensor = own.draft_tokens[:count]
        return tokens

    own.propose = propose
    return own


class SparkModel:
    """A DSpark head with a table in it; its Markov head likes a token the more behind itself."""

    draft_id_to_target_id = None

    def __init__(self, table: Table) -> None:
        self._table = table

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self._table.head.T

    compute_draft_logits = compute_logits

    def markov_embed(self, token_ids: Tensor) -> Tensor:
        return self._table.embedding[token_ids]

    def markov_bias(self, embedding: Tensor) -> Tensor:
        return embedding @ self._table.embedding.T * 9

    def map_draft_to_target(self, token_ids: Tensor) -> Tensor:
        return token_ids


KINDS = ["DFlash"] + ["DSpark"] * (RELEASE >= (0, 28))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", KINDS)
def test_the_new_runner_draws_once_more_from_left_to_right(name: str, temperature: float) -> None:
    table = Table(6)
    own = speculator_of(name, table, temperature)
    batch = SimpleNamespace(req_ids=[*REGEXES])
    plain = own.propose(batch).tolist()
    vllm_drafts.guide_speculator(lambda *_: None)(own, None)
    start(own)
    assert own.propose(SimpleNamespace(req_ids=["dummy"] * len(REGEXES))).tolist() == plain
    check(plain, own.propose(batch).tolist())
    assert own.propose(batch, num_speculative_tokens=0).tolist() == plain


@pytest.mark.parametrize("name", KINDS)
def test_sampled_blocks_have_the_distribution_that_they_were_drawn_from(name: str) -> None:
    own = speculator_of(name, Table(6), 1.0)
    vllm_drafts.guide_speculator(lambda *_: None)(own, None)
    start(own)
    drawn = own.propose(SimpleNamespace(req_ids=[*REGEXES]))
    logits = own.draft_logits[0]
    assert (logits.gather(1, drawn[0].view(-1, 1)) > -100).all()
    assert (logits > -100).sum(1).max() < VOCABULARY / 2  # what is illegal is not drawn


def test_blocks_that_cannot_be_masked_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    own = speculator_of("DFlash", Table(6), 0.0)
    other: Any = type("OtherSpeculator", (type(own),), {"_generate_draft": print})
    own.__class__ = other
    vllm_drafts.guide_speculator(lambda *_: None)(own, None)
    assert drafting_of(own) is None
    assert "OtherSpeculator drafts as without this package" in caplog.text
    spark = speculator_of("DSpark", Table(6), 0.0)
    assert draws_blocks(spark) is (RELEASE >= (0, 28))
    spark.model.draft_id_to_target_id = torch.zeros(VOCABULARY)
    assert not draws_blocks(spark)


@pytest.mark.skipif(RELEASE < (0, 33), reason="there are none")
def test_kernels_that_draw_without_logits_are_left_out_of_a_guided_step() -> None:
    own = speculator_of("DSpark", Table(6), 0.0)
    calls: list[int] = []

    def draw(speculator: Any, count: int, hidden: Tensor) -> bool:
        del speculator, hidden
        calls.append(count)
        return True

    own.model.sample_sequential = draw
    vllm_drafts.guide_speculator(lambda *_: None)(own, None)
    start(own)
    found = own.propose(SimpleNamespace(req_ids=[*REGEXES])).tolist()
    assert text_of(found[0]).isdigit()
    assert calls == [len(REGEXES)]  # the block before
