"""Every architecture decodes over slots, speculatively and in a ragged batch, as it does alone."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.errors import ModelError
from guided_spec.models.causal_lm import CausalLM, make_causal_lm
from guided_spec.models.slot_lm import SlotLM
from guided_spec.models.stock.slots import SlotInputs
from tests.models.speculation import Row, generate_alone, prefill, prompts_of, speculate
from tests.models.tiny import (
    ARCHITECTURES,
    build,
    kv_bytes_per_token,
    make_line_lm,
    state_bytes_per_slot,
)

VOCAB = 64
NUM_TOKENS = 20
HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
STATEFUL_OR_NOT = pytest.mark.parametrize("name", ["llama", "qwen3_5"])


def rows_in(
    model: PreTrainedModel,
    slots: list[int],
    lengths: list[int],
    num_tokens: int = NUM_TOKENS,
    seed: int = 0,
) -> list[Row]:
    prompts = prompts_of(lengths, VOCAB, seed)
    expected = [generate_alone(model, prompt, num_tokens) for prompt in prompts]
    return [Row(s, p, e) for s, p, e in zip(slots, prompts, expected, strict=True)]


def run(lm: CausalLM, rows: list[Row], seed: int = 0) -> list[list[int]]:
    source = random.Random(seed)
    accepted: list[list[int]] = []
    while open_rows := [row for row in rows if not row.is_done]:
        accepted.append(speculate(lm, open_rows, source))
    return accepted


def generated(rows: list[Row]) -> list[list[int]]:
    return [row.tokens[: len(row.expected)] for row in rows]


def expected(rows: list[Row]) -> list[list[int]]:
    return [row.expected for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_ragged_speculative_batch_gives_what_generate_gives(name: str) -> None:
    model = build(name, vocab_size=VOCAB)
    lm = make_causal_lm(model, num_slots=8, max_length=70)
    rows = rows_in(model, [6, 1, 4, 0, 7], [5, 17, 11, 1, 23])
    assert len({token for row in rows for token in row.expected}) > 8, "the reference is trivial"
    prefill(lm, rows)
    accepted = run(lm, rows)
    assert generated(rows) == expected(rows)
    assert sum(len(set(step)) > 1 for step in accepted) >= 3, "the batch was not ragged"

    # The slots of ended rows, and neighbours, which are read without a copy.
    again = rows_in(model, [1, 2, 3], [9, 3, 14], seed=1)
    prefill(lm, again)
    run(lm, again)
    assert generated(again) == expected(again)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_copied_slot_goes_on_as_its_source(name: str) -> None:
    model = build(name, vocab_size=VOCAB)
    lm = make_causal_lm(model, num_slots=5, max_length=40)
    (row,) = rows_in(model, [3], [10], num_tokens=12)
    prefill(lm, [row])
    copies = [Row(slot, row.prompt, row.expected, list(row.tokens)) for slot in (0, 4)]
    lm.copy_slot(3, [0, 4], row.length)
    run(lm, [copies[0], row, copies[1]])
    assert generated([*copies, row]) == [row.expected] * 3


@STATEFUL_OR_NOT
def test_loaded_states_undo_what_was_committed_since(name: str) -> None:
    model = build(name, vocab_size=VOCAB)
    lm = make_causal_lm(model, num_slots=4, max_length=40)
    rows = rows_in(model, [0, 2], [6, 9])
    prefill(lm, rows)
    saved = lm.save_states([0, 2])
    junk = torch.tensor([[5, 6, 7], [8, 9, 10]])
    lm.forward(SlotInputs(junk, [0, 2], [row.length for row in rows], [3, 3]))
    lm.commit([3, 2], [3, 3])
    lm.load_states([0, 2], saved)
    run(lm, rows)
    assert generated(rows) == expected(rows)


@STATEFUL_OR_NOT
def test_padding_and_absent_rows_change_nothing(name: str) -> None:
    model = build(name, vocab_size=VOCAB)
    lm = make_causal_lm(model, num_slots=3, max_length=40)
    rows = rows_in(model, [0, 1], [6, 9])
    prefill(lm, rows)
    starts = [row.length for row in rows]
    lm.forward(SlotInputs(torch.full((2, 5), 3), [0, 1], starts, [0, 0]))
    lm.commit([0, 0], [0, 0])
    run(lm, rows)
    assert generated(rows) == expected(rows)


@pytest.mark.parametrize("name", [*HYBRIDS, "lfm2"])
def test_keeping_rejected_tokens_in_the_state_would_show(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the stock modules, which otherwise give what ``generate`` does."""
    model = build(name, vocab_size=VOCAB)
    lm = make_causal_lm(model, num_slots=5, max_length=70, kernels="stock")
    rows, others = rows_in(model, [0, 1, 2], [5, 17, 11]), rows_in(model, [4, 3, 0], [5, 17, 11])
    prefill(lm, rows)
    run(lm, rows)
    assert generated(rows) == expected(rows)
    prefill(lm, others)
    commit = lm.commit
    monkeypatch.setattr(lm, "commit", lambda keep, counts: commit([max(keep)] * len(keep), counts))
    run(lm, others)
    assert generated(others) != expected(others)


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_token_more_or_less_in_the_packed_state_would_show(name: str) -> None:
    model = build(name, vocab_size=VOCAB)
    lm = make_line_lm(model, num_slots=3, max_length=70)
    for shift in (0, 1, -1):
        rows, source = rows_in(model, [0, 1, 2], [5, 17, 11]), random.Random(0)
        prefill(lm, rows)
        while open_rows := [row for row in rows if not row.is_done]:
            with torch.inference_mode():
                for states in lm._packed.states:
                    states.extent[:, 0] += shift  # where the states are
            speculate(lm, open_rows, source)
        assert (generated(rows) == expected(rows)) == (shift == 0)


def test_a_packed_state_goes_back_over_short_rows_alone() -> None:
    model = build("qwen3_5", vocab_size=VOCAB)
    lm = make_causal_lm(model, num_slots=2, max_length=40, kernels="packed", longest_draft=4)
    for counts, keep in (([4, 9], [2, 9]), ([4, 4], [0, 1])):
        lm.forward(SlotInputs(torch.full((2, 9), 3), [0, 1], [0, 0], counts))
        lm.commit(keep, counts)
    lm.forward(SlotInputs(torch.full((2, 9), 3), [0, 1], [0, 0], [4, 9]))
    with pytest.raises(ModelError, match=r"rows of 4 tokens, and one had 9.*longest_draft"):
        lm.commit([4, 8], [4, 9])


def of(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_5"])
def test_logits_and_hidden_states_are_those_of_the_stock_model(name: str) -> None:
    model = build(name, vocab_size=VOCAB)
    lm = make_causal_lm(model, num_slots=2, max_length=30)
    ids = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    inputs = SlotInputs(ids, [0, 1], [0, 0], [9, 6])
    with torch.inference_mode():
        stock = model(ids, output_hidden_states=True)
    output = lm.forward(inputs, hidden_layers=(3, 0, -1, 4))
    lm.commit([9, 6], [9, 6])
    states = [stock.hidden_states[i] for i in (3, 0, 4)]  # transformers has the last one normed
    for row, count in ((0, 9), (1, 6)):
        wanted = torch.cat(states, -1)[row, :count]
        found = of(output.hidden_states)[row, :count]
        assert_close(found[:, : wanted.shape[1]], wanted)
        with torch.inference_mode():
            assert_close(
                lm.model.get_decoder().norm(found[:, wanted.shape[1] :]), states[-1][row, :count]
            )
        assert_close(of(output.logits)[row, :count], stock.logits[row, :count])

    last = lm.forward(inputs, logits="last", hidden_layers=(3,))
    assert of(last.logits).shape == (2, 1, VOCAB)
    wanted = stock.logits[[0, 1], [8, 5]]
    assert_close(of(last.logits)[:, 0], wanted)
    none = lm.forward(inputs, logits="none", hidden_layers=(3,))
    assert none.logits is None
    assert_close(of(none.hidden_states)[1, :6], of(last.hidden_states)[1, :6])
    assert lm.forward(inputs, logits="none").hidden_states is None


def test_a_text_may_fill_its_slot_to_the_last_position() -> None:
    model = build("llama", vocab_size=VOCAB)
    lm = make_causal_lm(model, num_slots=2, max_length=16)
    ids = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    lm.forward(SlotInputs(ids[:, :12], [0, 1], [0, 0], [12, 12]))
    fed = torch.cat([ids[:, 12:], ids[:, :2]], 1)
    logits = of(lm.forward(SlotInputs(fed, [0, 1], [12, 12], [4, 3])).logits)
    with torch.inference_mode():
        wanted = model(ids).logits[:, 12:]
    assert_close(logits[0, :4], wanted[0])
    assert_close(logits[1, :3], wanted[1, :3])


def test_two_cached_models_may_share_one_stock_model() -> None:
    model = build("qwen3_5", vocab_size=VOCAB)
    first = make_causal_lm(model, num_slots=1, max_length=40)
    second = make_causal_lm(model, num_slots=2, max_length=50)
    rows = rows_in(model, [0, 1], [6, 9])
    prefill(first, rows[:1])
    prefill(second, rows[1:])
    run(first, rows[:1])
    run(second, rows[1:])
    assert generated(rows) == expected(rows)


def test_bytes_are_those_of_the_buffers() -> None:
    llama, hybrid = build("llama"), build("qwen3_5")
    assert kv_bytes_per_token(llama) == 4 * 2 * 2 * 8 * 4  # layers, k and v, heads, width, float32
    assert state_bytes_per_slot(llama) == 0
    assert kv_bytes_per_token(hybrid) == 1 * 2 * 2 * 8 * 4
    conv, recurrent = (2 * 2 * 8 + 4 * 8) * 4, 4 * 8 * 8
    assert state_bytes_per_slot(hybrid) == 3 * (conv + recurrent) * 4


def test_attention_without_4d_masks_is_refused() -> None:
    model = build("llama")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ModelError, match="attn_implementation='flex_attention'"):
        make_causal_lm(model, num_slots=1, max_length=8)


def test_layers_that_cannot_be_kept_in_slots_are_refused() -> None:
    model = build("llama")
    model.config.layer_types = ["compressed_sparse_attention"] * 4
    with pytest.raises(ModelError, match="model_type='llama': layers of type 'compressed_sparse_"):
        SlotLM(model, num_slots=1, max_length=8)


def test_rotary_embeddings_that_depend_on_the_batch_are_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = build("llama", max_position_embeddings=16, rope_parameters=rope)
    make_causal_lm(model, num_slots=1, max_length=16)
    with pytest.raises(ModelError, match="use a max_length of at most 16"):
        make_causal_lm(model, num_slots=1, max_length=17)


def test_a_model_that_breaks_in_the_first_forward_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("llama")

    def refuse(**_: object) -> None:
        raise ValueError("no cache, please")

    monkeypatch.setattr(model, "forward", refuse)
    with pytest.raises(ModelError, match="failed: no cache, please"):
        make_causal_lm(model, num_slots=1, max_length=8)


def test_a_layer_that_does_not_exist_is_refused() -> None:
    lm = make_causal_lm(build("llama"), num_slots=1, max_length=8)
    with pytest.raises(ModelError, match="hidden layer 5: the model has 4 layers"):
        lm.forward(
            SlotInputs(torch.zeros(1, 1, dtype=torch.int64), [0], [0], [1]), hidden_layers=(5,)
        )
