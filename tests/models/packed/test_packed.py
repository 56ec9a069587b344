"""The packed form of a target, and of an EAGLE-3 head, computes what the stock modules do."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from guided_spec.errors import ModelError
from guided_spec.models.causal_lm import make_causal_lm
from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.eagle import Eagle3Head
from guided_spec.models.heads.mtp import MtpHead, QwenMtpHead
from guided_spec.models.heads.slot_head import SlotHead, SlotLimits
from guided_spec.models.packed import packed_lm
from guided_spec.models.packed.blocks import BLOCK, Blocks
from guided_spec.models.packed.decoder import PackedDecoder
from guided_spec.models.packed.graph_pool import SIZES, CaptureWindow, GraphPool, Inputs, bucket
from guided_spec.models.packed.heads import PackedEagle3, PackedMtp
from guided_spec.models.packed.packed_lm import ForwardKind, Rows
from guided_spec.models.packed.slot_head import PackedSlotHead
from guided_spec.models.packed_form import PackedForm
from guided_spec.models.stock.slots import SlotInputs, SlotOutput
from tests.models.heads.heads import write_eagle3
from tests.models.speculation import Row, generate_alone, prefill, prompts_of, speculate
from tests.models.tiny import build, make_line_lm
from tests.whole_drafts import draft_greedily

VOCAB = 64
CPU = torch.device("cpu")
DENSE = ["llama", "llama3_rope", "llama_dynamic", "qwen3", "mistral", "qwen2", "gemma3"]
LATENT = ["deepseek_v3", "deepseek_v3_yarn", "deepseek_v2", "glm4_moe_lite", "youtu"]
FAMILY = [*DENSE, "qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", *LATENT]
STOCK = ["bitnet", "llama4"]  # stock modules, with the attention over slots
HYBRIDS = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
OTHERS = ["gemma2", "deepseek_v32"]


def make(name: str) -> PreTrainedModel:
    if name == "qwen2":
        mixed = ["full_attention", "sliding_attention"] * 2
        more: dict[str, Any] = {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": mixed,
        }
        return build("qwen2", vocab_size=VOCAB, **more)
    if name == "llama_dynamic":
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
        return build("llama", vocab_size=VOCAB, rope_parameters=rope)
    return build(name, vocab_size=VOCAB)


@pytest.mark.parametrize("name", [*FAMILY, *STOCK, *HYBRIDS])
def test_a_ragged_speculative_batch_gives_what_generate_gives(name: str) -> None:
    model = make(name)
    prompts = prompts_of([5, 17, 11, 1, 23], VOCAB, 0)
    expected = [generate_alone(model, prompt, 20) for prompt in prompts]
    lm = make_causal_lm(model, num_slots=8, max_length=70, kernels="packed")
    assert lm.is_packed
    rows = [Row(s, p, e) for s, p, e in zip([6, 1, 4, 0, 7], prompts, expected, strict=True)]
    prefill(lm, rows)
    source = random.Random(0)
    while open_rows := [row for row in rows if not row.is_done]:
        speculate(lm, open_rows, source)
    assert [row.tokens[: len(row.expected)] for row in rows] == expected


@pytest.mark.parametrize("name", [*FAMILY, *STOCK, *HYBRIDS])
def test_a_prompt_beside_other_rows(name: str) -> None:
    """It reads as it does by itself, and so do the others."""
    model, layers, width = make(name), (1, -1), 3
    running, prompt, behind = prompts_of([7, 19, width], VOCAB, 3)
    alone, along = (make_line_lm(model, num_slots=3, max_length=40) for _ in range(2))
    for lm in (alone, along):
        lm.forward(SlotInputs(torch.tensor([running]), [2], [0], [7]), logits="none")
    rows = Rows([2, 0], [7, 0], [width, len(prompt)])
    found = along.forward_line(torch.tensor([*behind, *prompt]), rows, layers)
    drafts = SlotInputs(torch.tensor([behind]), [2], [7], [width])
    expected = alone.forward(drafts, hidden_layers=layers)
    assert expected.logits is not None
    torch.testing.assert_close(along.logits(found.states[:width]), expected.logits[0])
    read = alone.forward(SlotInputs(torch.tensor([prompt]), [0], [0], [19]), hidden_layers=layers)
    assert found.hidden_states is not None
    assert expected.hidden_states is not None
    assert read.hidden_states is not None
    states = torch.cat([expected.hidden_states[0], read.hidden_states[0]])
    torch.testing.assert_close(found.hidden_states, states)
    last = SlotInputs(torch.tensor([[9]]), [0], [19], [1])  # and it goes on from there
    torch.testing.assert_close(along.forward(last).logits, alone.forward(last).logits)


@pytest.mark.parametrize("name", LATENT)
def test_latents_alone_are_kept(name: str) -> None:
    """Of a token and layer a latent of 16 numbers, and a rotary key of 8, for all heads."""
    form = PackedForm.of(make(name), "packed", BLOCK + 1)
    assert form is not None
    assert isinstance(form.decoder, PackedDecoder)
    assert [one and one.kept for one in form.layers] == [(1, 16, 8)] * 4
    (first, *_) = form.allocate(Blocks.full(2, BLOCK - 1, CPU), 2, 1)
    assert [part.shape for part in first] == [(3, 1, BLOCK, 16), (3, 1, BLOCK, 8)]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_line_is_longer_than_any_graph(name: str) -> None:
    """Forwards that are padded to a graph's size, and forwards that are not, give the same."""
    found = []
    prompts = prompts_of([9, 1, 13], VOCAB, 1)
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    for largest in (SIZES[-1], 0):
        window = CaptureWindow(largest=largest)
        lm = make_line_lm(make(name), num_slots=4, max_length=40, window=window)
        output = lm.forward_line(tokens, Rows([2, 0, 3], [0, 0, 0], [9, 1, 13]), (0, -1))
        assert output.hidden_states is not None
        assert output.states.shape == (23, 32)
        found.append((output.states, output.hidden_states))
    for short, long in zip(*found, strict=True):
        torch.testing.assert_close(short, long)


@pytest.mark.parametrize("room", [(16, 6), (64, 6), (256, 6), (256, 1)])
@pytest.mark.parametrize("heads", [(32, 8), (16, 2), (8, 8), (8, 1)])
@pytest.mark.parametrize("largest", [1024, 2048])
def test_lines_without_a_graph_take_kernels_that_are_there(
    largest: int, room: tuple[int, int], heads: tuple[int, int]
) -> None:
    """None of their numbers brings a kernel that no forward of ``capture`` has compiled."""
    slot_attention_triton = pytest.importorskip("guided_spec.ops.attention.slot_attention_triton")

    graphs = GraphPool(torch.device("cpu"), CaptureWindow(largest=largest))

    def kernels(total: int, batch: int) -> tuple[int, Any]:
        shape = packed_lm.LineShape.of(total, batch, room, graphs.sizes)
        assert not graphs.has(shape.size)
        query = torch.empty(shape.size, heads[0], 128, dtype=torch.bfloat16, device="meta")
        found = slot_attention_triton.choose_tiling(query, heads[1], shape.width, 40_000)
        return shape.num_rows, found

    there = {kernels(size, 0) for size in graphs.beyond}
    for total in [*range(largest + 1, 4 * largest, 61), 4 * largest]:
        for batch in (1, 2, room[0]):
            assert kernels(total, batch) in there, (total, batch)


def test_long_lines_that_do_not_fit_their_slots_have_no_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Graphs of long lines are captured with kernels that nothing may go past the slots in."""
    monkeypatch.setattr(packed_lm, "LEAST_WIDTH", 4)
    keys, run = list[Any](), GraphPool.run

    def spy(pool: GraphPool, key: Any, *args: Any, **kwargs: Any) -> Any:
        keys.append(key)
        return run(pool, key, *args, **kwargs)

    monkeypatch.setattr(GraphPool, "run", spy)
    lm = make_line_lm(make("llama"), num_slots=2, max_length=20)
    states = [
        lm.forward_line(torch.arange(count), Rows([slot], [0], [count])).states
        for slot, count in ((0, 20), (1, 23))
    ]
    assert [key is None for key in keys[-2:]] == [False, True]
    torch.testing.assert_close(states[1][:20], states[0])
    lm.forward_line(torch.arange(2), Rows([0], [19], [2]))  # a short one, whose end is lost
    assert keys[-1] is not None


def test_a_line_that_no_blocks_are_left_for() -> None:
    lm = make_line_lm(make("llama"), num_slots=2, max_length=150, num_blocks=2)
    count = BLOCK + 8
    lm.forward_line(torch.arange(count) % VOCAB, Rows([1], [0], [count]))
    with pytest.raises(ModelError, match="slot 0: no blocks are free for 1 positions"):
        lm.forward_line(torch.tensor([3]), Rows([0], [0], [1]))
    lm.release([1])
    lm.forward_line(torch.tensor([3]), Rows([0], [0], [1]))


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_stay_as_they_are(name: str) -> None:
    model = make(name)
    before = {key: value.data_ptr() for key, value in model.state_dict().items()}
    assert not make_causal_lm(model, num_slots=2, max_length=30, kernels="packed").is_packed
    assert {key: value.data_ptr() for key, value in model.state_dict().items()} == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_model_does_behind_its_head_is_not_passed_over(dtype: torch.dtype) -> None:
    """In half precision a wide cap on the logits is less than what rounding does."""
    capped = cast(Any, build("gemma3", vocab_size=VOCAB, final_logit_softcapping=100.0)).to(dtype)
    assert not make_causal_lm(capped, num_slots=1, max_length=8, kernels="packed").is_packed
    plain = cast(Any, build("gemma3", vocab_size=VOCAB)).to(dtype)
    assert make_causal_lm(plain, num_slots=1, max_length=8, kernels="packed").is_packed


def test_stock_is_stock_and_auto_is_packed() -> None:
    model = make("llama")
    assert not make_causal_lm(model, num_slots=1, max_length=8, kernels="stock").is_packed
    assert make_causal_lm(model, num_slots=1, max_length=8).is_packed


@pytest.mark.parametrize("logits", ["all", "last", "none"])
@pytest.mark.parametrize("width", [3, 80])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.inference_mode()
def test_every_kind_of_output_is_that_of_the_stock_forward(
    logits: str, width: int, name: str
) -> None:
    """Narrow forwards are captured on CUDA, wide ones never; rows are padded in both."""
    model = make(name)
    layers = (0, 2, 4, -1)
    inputs = SlotInputs(
        torch.randint(VOCAB, (3, width), generator=torch.Generator().manual_seed(0)),
        [0, 2, 1],
        [0, 0, 0],
        [width, width - 1, 0],
    )
    found: list[SlotOutput] = []
    for kernels in ("stock", "packed"):
        lm = make_causal_lm(model, num_slots=3, max_length=100, kernels=kernels)
        found.append(lm.forward(inputs, logits=logits, hidden_layers=layers))  # type: ignore[arg-type]
    for name in ("logits", "hidden_states"):
        stock, packed = (getattr(output, name) for output in found)
        assert (stock is None) == (packed is None) == (logits == "none" and name == "logits")
        if stock is not None:
            compare(packed, stock, inputs.counts)


def compare(found: Tensor, expected: Tensor, counts: object) -> None:
    assert isinstance(counts, list)
    assert found.shape == expected.shape
    for row, count in enumerate(counts):
        count = min(count, found.shape[1])
        torch.testing.assert_close(found[row, :count], expected[row, :count], rtol=1e-4, atol=1e-4)


def test_packing_leaves_the_stock_model_what_it_was() -> None:
    model = make("qwen3")
    ids = torch.arange(9).unsqueeze(0)
    with torch.no_grad():
        expected, weights = model(ids).logits, {k: v.clone() for k, v in model.state_dict().items()}
        for _ in range(2):  # the second one finds the weights packed
            make_causal_lm(model, num_slots=1, max_length=20, kernels="packed")
            assert torch.equal(model(ids).logits, expected)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    attention = model.get_decoder().layers[0].self_attn
    storage = attention.q_proj.weight.untyped_storage().data_ptr()
    assert attention.v_proj.weight.untyped_storage().data_ptr() == storage


def test_a_hook_is_not_passed_over() -> None:
    model = make("llama")
    hook = model.get_decoder().layers[1].register_forward_hook(lambda *_: None)
    assert not make_causal_lm(model, num_slots=1, max_length=8, kernels="packed").is_packed
    hook.remove()
    assert make_causal_lm(model, num_slots=1, max_length=8, kernels="packed").is_packed


@torch.inference_mode()
def test_a_replaced_projection_is_not_passed_over() -> None:
    class Doubling(nn.Linear):
        def forward(self, states: Tensor) -> Tensor:
            return 2 * super().forward(states)

    model = make("llama")
    mlp = model.get_decoder().layers[2].mlp
    mlp.up_proj = Doubling(32, 64, bias=False)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    lm = make_causal_lm(model, num_slots=1, max_length=8, kernels="packed")
    found = lm.forward(SlotInputs(ids, [0], [0], [5])).logits
    torch.testing.assert_close(found, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_an_unknown_hidden_layer_is_refused() -> None:
    lm = make_causal_lm(make("llama"), num_slots=1, max_length=8, kernels="packed")
    inputs = SlotInputs(torch.zeros(1, 1, dtype=torch.int64), [0], [0], [1])
    with pytest.raises(ModelError, match="hidden layer 5: the model has 4 layers"):
        lm.forward(inputs, hidden_layers=(5,))


def stock_and_packed(head: Any) -> tuple[SlotHead, PackedSlotHead]:
    room = SlotLimits(4, 100)
    stock = SlotHead(head, room, device=CPU, dtype=torch.float32)
    form: Any = PackedEagle3 if isinstance(head, Eagle3Head) else PackedMtp
    packed = form.of(head, room.max_length)
    assert packed is not None
    return stock, PackedSlotHead(packed, room, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"flags": {"norm_before_residual": True}},
        {"flags": {"norm_output": True}},
        {"model_type": "qwen3", "own_embedding": True, "draft_vocab_size": None},
    ],
)
def test_an_eagle3_head_walks_as_the_stock_one(
    num_layers: int, form: dict[str, Any], tmp_path: Path
) -> None:
    target = build("llama")
    write_eagle3(tmp_path, target, layout="speculators", num_layers=num_layers, **form)
    check_walks(Eagle3Head.from_checkpoint(Checkpoint.open(tmp_path), target), 3)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen3_next", "qwen3_5", "deepseek_v3"])
@torch.inference_mode()
def test_an_mtp_module_walks_as_the_stock_one(name: str) -> None:
    check_walks(QwenMtpHead.fresh(build(name), initialize="random").eval(), 1)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "deepseek_v3_yarn", "youtu", "glm4_moe"])
@torch.inference_mode()
def test_a_deepseek_module_walks_as_the_stock_one(name: str) -> None:
    check_walks(MtpHead.fresh(build(name), initialize="random").eval(), 1)


def test_other_modules_keep_their_stock_form() -> None:
    """Those of several modules, and of layers that are made otherwise."""
    for name, count in (("llama", 2), ("gemma3", 1), ("gpt_oss", 1)):
        head = QwenMtpHead.fresh(build(name), count, initialize="random")
        assert PackedMtp.of(head, 10) is None


def check_walks(head: Any, width: int) -> None:
    """width: hidden states that it is fed with."""
    heads = stock_and_packed(head)
    random_ = torch.Generator().manual_seed(0)
    for counts in ([3, 70, 1], [2, 1, 4]):
        tokens = [torch.randint(VOCAB, (n,), generator=random_).tolist() for n in counts]
        states = [torch.randn(n, width * 32, generator=random_) for n in counts]
        drafted = [torch.randint(VOCAB, (3,), generator=random_) for _ in range(3)]
        logits = []
        for head in heads:
            head.read([0, 3, 1], tokens, states)
            for draft in drafted:
                logits.append(head.logits([0, 3, 1]).clone())
                head.append([0, 3, 1], draft)
        for stock, packed in zip(logits[:3], logits[3:], strict=True):
            torch.testing.assert_close(packed, stock, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("count", "size"), [(1, 1), (9, 10), (64, 64), (65, 80), (5000, 5000)])
def test_buckets(count: int, size: int) -> None:
    assert bucket(count) == size


def test_without_cuda_a_pool_runs_the_function() -> None:
    """What is left out of the inputs is what the function made of it."""

    def grow(tensors: Inputs) -> Tensor:
        tensors["total"] += tensors["x"]
        return tensors["total"].clone()

    pool = GraphPool(CPU)
    x, total = torch.tensor([1.0, 2.0]), torch.zeros(2)
    assert pool.run("key", {"x": x, "total": total}, grow).tolist() == [1, 2]
    assert pool.run("key", {"x": 2 * x}, grow).tolist() == [3, 6]
    assert pool.run("other", {"x": x, "total": total}, grow).tolist() == [1, 2]
    assert pool.run("key", {"total": total}, grow).tolist() == [2, 4]
    assert total.tolist() == [0, 0]
    assert len(pool) == 2


def test_a_pool_answers_once_beside_each_run() -> None:
    pool, done = GraphPool(CPU), list[str]()

    def body(_: Inputs) -> None:
        done.append("run")

    for _ in range(2):
        pool.run("key", {}, body, overlapped=lambda: done.append("answer"))
    assert done == ["answer", "run", "run", "answer"]  # before a capture, else behind the launch


@pytest.mark.parametrize("draft_vocab_size", [24, None])
def test_a_greedy_walk_is_one_step_after_another(
    draft_vocab_size: int | None, tmp_path: Path
) -> None:
    target = build("llama")
    write_eagle3(tmp_path, target, draft_vocab_size=draft_vocab_size)
    found = Eagle3Head.from_checkpoint(Checkpoint.open(tmp_path), target)
    slots, random_ = [2, 0, 3], torch.Generator().manual_seed(0)
    one_by_one, packed = stock_and_packed(found)
    tokens = [torch.randint(VOCAB, (n,), generator=random_).tolist() for n in (3, 7, 1)]
    states = [torch.randn(len(row), 3 * 32, generator=random_) for row in tokens]
    for head in (one_by_one, packed):
        head.read(slots, tokens, states)
    walk = draft_greedily(packed, found.vocabulary, slots, 4)
    for depth in range(4):
        logits = one_by_one.logits(slots)
        best = logits.argmax(-1)
        best = best if found.vocabulary is None else found.vocabulary.to_target(best)
        assert torch.equal(walk[:, depth], best)
        if depth < 3:
            one_by_one.append(slots, best)
    assert one_by_one.depth(0) == packed.depth(0) == 3
    torch.testing.assert_close(packed.logits(slots), one_by_one.logits(slots), rtol=1e-5, atol=1e-5)


def test_a_greedy_walk_behind_given_tokens(tmp_path: Path) -> None:
    """Each row reads what it is given, and goes on from there."""
    target = build("llama")
    write_eagle3(tmp_path, target)
    found = Eagle3Head.from_checkpoint(Checkpoint.open(tmp_path), target)
    slots, random_ = [2, 0, 3], torch.Generator().manual_seed(0)
    one_by_one, packed = stock_and_packed(found)
    tokens = [torch.randint(VOCAB, (n,), generator=random_).tolist() for n in (3, 7, 1)]
    states = [torch.randn(len(row), 3 * 32, generator=random_) for row in tokens]
    for head in (one_by_one, packed):
        head.read(slots, tokens, states)
    counts, given = (2, 0, 3), torch.randint(VOCAB, (3, 3), generator=random_)
    for row, count in zip(given, counts, strict=True):
        row[count:] = -1
    walk = draft_greedily(packed, found.vocabulary, slots, 5, given)
    for depth in range(5):
        best = one_by_one.logits(slots).argmax(-1)
        best = best if found.vocabulary is None else found.vocabulary.to_target(best)
        for row, count in enumerate(counts):
            if depth < count:
                best[row] = given[row, depth]
            else:
                assert walk[row, depth] == best[row]
        if depth < 4:
            one_by_one.append(slots, best)
    assert one_by_one.depth(0) == packed.depth(0) == 4
    torch.testing.assert_close(packed.logits(slots), one_by_one.logits(slots), rtol=1e-5, atol=1e-5)
    # Nothing of it is left.
    assert not torch.equal(draft_greedily(packed, found.vocabulary, slots, 5), walk)


@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize(
    ("name", "kinds"),
    [("llama", 1), ("gemma3", 2), ("qwen3_next", 2), ("gpt_oss", 2), ("deepseek_v3", 2)],
)
def test_one_layer_of_each_kind_does_all_that_layers_do(
    name: str, kinds: int, *, records: bool
) -> None:
    """A graph is captured behind it: what is not loaded then would be loaded in the capture."""

    def calls(compute: Callable[[], object]) -> set[Any]:
        seen = set[Any]()

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                shapes = [one.shape for one in tree_leaves(args) if isinstance(one, Tensor)]
                seen.add((str(func), *shapes))
                return func(*args, **(kwargs or {}))

        with Watch():  # type: ignore[no-untyped-call]
            compute()
        return seen

    packed = make_line_lm(build(name), num_slots=2, max_length=64, kernels="auto")._packed
    assert isinstance(packed._decoder, PackedDecoder)
    assert len(packed._decoder._one_of_each) == kinds
    rows = Rows([0, 1], [0, 0], [3, 2])
    inputs = {"token_ids": torch.arange(5), "index": torch.from_numpy(rows.packed_index(5, 2))}
    with torch.inference_mode():
        rows.grow(packed._tables)
        both = [
            calls(partial(compute, ForwardKind(3, (1,), fits=False, records=records), inputs))
            for compute in (packed._compute, packed._launch_kinds)
        ]
    assert both[0] == both[1]


def test_walks_of_some_slots_and_ways_back(tmp_path: Path) -> None:
    """What chains of proposers do: subsets walk on, drafts are taken back to a mark."""
    target = build("llama")
    write_eagle3(tmp_path, target)
    heads = stock_and_packed(Eagle3Head.from_checkpoint(Checkpoint.open(tmp_path), target))
    random_ = torch.Generator().manual_seed(0)
    tokens = [torch.randint(VOCAB, (n,), generator=random_).tolist() for n in (3, 7, 1)]
    states = [torch.randn(len(row), 3 * 32, generator=random_) for row in tokens]
    token = torch.randint(VOCAB, (8,), generator=random_)
    for head in heads:
        head.read([2, 0, 3], tokens, states)
        head.append([2, 3], token[:2])
        head.append([3], token[2:3])
        head.mark([2, 3])
        head.append([2, 0, 3], token[3:6])
        head.append([0], token[6:7])
    stock, packed = heads
    for slots in ([0, 2, 3], [3], [2, 0]):
        expected = stock.logits(slots)
        torch.testing.assert_close(packed.logits(slots), expected, rtol=1e-5, atol=1e-5)
    for head in heads:
        head.rewind([2, 0, 3])
    assert [packed.depth(slot) for slot in (2, 0, 3)] == [1, 0, 2]
    torch.testing.assert_close(
        packed.logits([0, 2, 3]), stock.logits([0, 2, 3]), rtol=1e-5, atol=1e-5
    )
    packed.release([0])
    assert (packed.length(0), packed.length(2)) == (0, 3)


@pytest.mark.parametrize("is_shared", [True, False], ids=["the target's tables", "its own"])
@pytest.mark.parametrize("length", [BLOCK - 2, BLOCK - 1, 2 * BLOCK - 3])
def test_a_draft_goes_on_in_a_block_that_is_new(
    length: int, tmp_path: Path, *, is_shared: bool
) -> None:
    """Nothing was read into it, and no forward of the target came between."""
    target = build("llama")
    write_eagle3(tmp_path, target)
    head = Eagle3Head.from_checkpoint(Checkpoint.open(tmp_path), target)
    room, slots, random_ = (
        SlotLimits(4, 2 * BLOCK + 10),
        [2, 0, 3],
        torch.Generator().manual_seed(0),
    )
    form = PackedEagle3.of(head, room.max_length)
    assert form is not None
    blocks = Blocks(4, room.max_length, CPU) if is_shared else None
    stock = SlotHead(head, room, device=CPU, dtype=torch.float32)
    packed = PackedSlotHead(form, room, device=CPU, dtype=torch.float32, blocks=blocks)
    counts = [length, 3, length]
    tokens = [torch.randint(VOCAB, (n,), generator=random_).tolist() for n in counts]
    states = [torch.randn(n, 3 * 32, generator=random_) for n in counts]
    for one in (stock, packed):
        one.read(slots, tokens, states)
    if blocks is not None:  # as the engine does before a step
        assert all(blocks.grow(slot, length + 8) for slot in slots)
    packed.mark(slots)
    walk = draft_greedily(packed, head.vocabulary, slots, 5)
    packed.rewind(slots)
    for depth in range(5):
        torch.testing.assert_close(packed.logits(slots), stock.logits(slots), rtol=1e-4, atol=1e-4)
        best = stock.logits(slots).argmax(-1)
        best = best if head.vocabulary is None else head.vocabulary.to_target(best)
        assert torch.equal(walk[:, depth], best)
        for one in (stock, packed):
            one.append(slots, best)
