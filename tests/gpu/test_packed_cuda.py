"""Packed targets and heads as CUDA graphs: what the stock modules compute, step for step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from guided_spec import LLM, SamplingParams
from guided_spec.bundled import bundled_asset
from guided_spec.evaluate.measurement import load_workload
from guided_spec.models.causal_lm import make_causal_lm
from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.eagle import Eagle3Head
from guided_spec.models.heads.slot_head import SlotHead, SlotLimits
from guided_spec.models.line_lm import LineLM
from guided_spec.models.loading import load_model
from guided_spec.models.packed import packed_lm
from guided_spec.models.packed.graph_pool import SIZES, CaptureWindow, GraphPool
from guided_spec.models.packed.heads import PackedEagle3
from guided_spec.models.packed.slot_head import PackedSlotHead
from guided_spec.models.stock.slots import SlotInputs
from guided_spec.models.tokenizer import load_tokenizer
from tests.by_chance import draft_by_chance
from tests.models.fp8_checkpoints import FORMS, write_fp8
from tests.models.heads.heads import write_eagle3
from tests.models.speculation import (
    Row,
    generate_alone,
    prefill,
    prompts_of,
    speculate,
    speculated,
)
from tests.models.tiny import build
from tests.whole_drafts import draft_greedily

pytestmark = pytest.mark.gpu

VOCAB = 64
CUDA = torch.device("cuda")


BEHIND = ("olmo2", "olmo3", "exaone4")  # with norms of what is added alone
OTHERS = ("phi3", "glm", "glm4", "ernie4_5", "helium", "hunyuan", "granite", "smollm3")
LATENT = ("deepseek_v3", "deepseek_v3_yarn", "deepseek_v2", "glm4_moe_lite", "youtu")


def build_wide(name: str, **fields: Any) -> PreTrainedModel:
    """With heads of 16 dimensions at least, what the attention kernel takes; latents have 16."""
    size = {} if name in LATENT else {"head_dim": 16}
    return build(name, **{"vocab_size": VOCAB, "hidden_size": 64, **size, **fields})


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen3", "mistral", "gemma3", "qwen3_moe", "mixtral", "gpt_oss", "glm4_moe"),
        *("qwen3_next", "qwen3_5", "qwen3_5_moe", "llama4"),
        *(*LATENT, *BEHIND, *OTHERS),
    ],
)
def test_batches_that_change_give_what_generate_gives(name: str) -> None:
    model = build_wide(name)
    prompts = prompts_of([5, 17, 90, 1, 23, 9, 8], VOCAB, 0)
    expected = [generate_alone(model, prompt, 20) for prompt in prompts]
    lm = make_causal_lm(cast(Any, model).to(CUDA), num_slots=8, max_length=130)
    assert lm.is_packed
    assert lm.runs_as == "packed forwards" or name == "llama4"
    order = [6, 1, 4, 0, 7, 2, 3]
    rows = [Row(s, p, e) for s, p, e in zip(order, prompts, expected, strict=True)]
    prefill(lm, rows)
    source = random.Random(0)
    while open_rows := [row for row in rows if not row.is_done]:
        speculate(lm, source.sample(open_rows, source.randint(1, len(open_rows))), source)
    assert [row.tokens[: len(row.expected)] for row in rows] == expected


@pytest.mark.parametrize("form", ["qwen", "compressed channels", "compressed tensors"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "olmo3", "phi3"])
def test_a_checkpoint_in_fp8_gives_what_its_numbers_give(
    name: str, form: str, tmp_path: Path
) -> None:
    model = build_wide(name, hidden_size=160)
    whole = write_fp8(tmp_path, model, FORMS[form], with_experts=True)
    prompts = prompts_of([5, 17, 90], VOCAB, 0)
    expected = [generate_alone(whole, prompt, 20) for prompt in prompts]
    lm = make_causal_lm(load_model(tmp_path, dtype="float32"), num_slots=3, max_length=130)
    assert lm.is_packed
    found = speculated(lm, prompts, expected)
    assert [tokens[: len(own)] for tokens, own in zip(found, expected, strict=True)] == expected


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3_moe", "gpt_oss", "qwen3_next", "fp8", "deepseek_v3"),
        *("olmo3", "phi3", "glm4", "hunyuan", "granite"),
    ],
)
def test_graphs_of_many_kinds_are_captured_at_the_start(name: str, tmp_path: Path) -> None:
    """Kernels are compiled ahead meanwhile, and leave anything behind."""
    tokenizer = load_tokenizer(bundled_asset("target"))
    kind = "qwen3_moe" if name == "fp8" else name
    model = build_wide(kind, vocab_size=len(tokenizer))
    if name == "fp8":
        write_fp8(tmp_path, model, FORMS["compressed blocks"], with_experts=True)
        model = load_model(tmp_path, dtype="bfloat16")
    given = cast(Any, model).to(CUDA, None if name == "fp8" else torch.bfloat16)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    given.config.eos_token_id = tokenizer.eos_token_id  # GLM's has others
    with LLM(given, "ngram", tokenizer=tokenizer, max_model_len=256, max_batch_size=4) as llm:
        outputs = llm.generate(["a b c a b c", "1 2 3"], params)
    assert all(output.error is None for output in outputs)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe"])
def test_graphs_record_the_experts(name: str) -> None:
    """Of few tokens as kernels choose them, of many as the stock modules do."""
    tokenizer = load_tokenizer(bundled_asset("target"))
    model = cast(Any, build_wide(name, vocab_size=len(tokenizer))).to(CUDA)
    params = SamplingParams(max_tokens=30, ignore_eos=True, return_routed_experts=True)
    prompts = [[5 + at % 60 for at in range(count)] for count in (3, 40, 150)]
    options: dict[str, Any] = {"tokenizer": tokenizer, "max_model_len": 256, "max_batch_size": 4}
    found = []
    for kernels in ("stock", "auto"):
        with LLM(model, "ngram", kernels=kernels, **options) as llm:
            outputs = llm.generate(prompts, params)
        assert [output.error for output in outputs] == [None] * len(prompts)
        found.append(outputs)
    for prompt, one, other in zip(prompts, *found, strict=True):
        assert one.routed_experts is not None
        assert other.routed_experts is not None
        assert len(other.routed_experts.experts) == len(prompt) + 29
        # Texts may part where tokens are equally likely, and experts where these are.
        rows = (part.routed_experts.experts[: len(prompt)] for part in (one, other))
        expected, recorded = (np.sort(part, -1) for part in rows)
        assert (expected == recorded).mean() > 0.98


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("width", [65, 130, 700])
def test_short_prompts_are_graphs(batch: int, width: int) -> None:
    """A forward of few tokens takes the host longer to launch than the device to run."""
    window = CaptureWindow()
    lm = make_causal_lm(
        cast(Any, build("llama", vocab_size=VOCAB, hidden_size=64, head_dim=16)).to(CUDA),
        num_slots=batch,
        max_length=800,
        window=window,
    )
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (batch, width), generator=source)
    counts = [width - row for row in range(batch)]
    inputs = SlotInputs(ids, list(range(batch)), [0] * batch, counts)
    assert isinstance(lm, LineLM)
    assert lm._packed._graphs is not None
    before, found = len(lm._packed._graphs), []
    for largest in (SIZES[-1], 0):
        window.largest = largest
        output = lm.forward(inputs, logits="last", hidden_layers=(1,))
        lm.commit([0] * batch, counts)
        found.append([None if part is None else part.clone() for part in output])
        is_graph = len(lm._packed._graphs) - before
        assert is_graph == (sum(counts) <= SIZES[-1])  # and none more without
    for graph, eager in zip(*found, strict=True):
        for row in range(batch):  # what is behind a row's end is any
            one, other = (part[row, : width - row] for part in (graph, eager))
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "olmo3", "phi3", "glm4"])
def test_forwards_of_one_size_share_a_graph(name: str) -> None:
    """Whatever their tokens are: drafts of any lengths, pieces of prompts; captured beforehand."""
    lm = make_causal_lm(
        cast(Any, build_wide(name)).to(CUDA),
        num_slots=4,
        max_length=100,
    )
    stock = make_causal_lm(lm.model, num_slots=4, max_length=100, kernels="stock")
    assert isinstance(lm, LineLM)
    assert lm._packed._graphs is not None
    # Latents of a shared prefix are not read once for all.
    num_shared = sum(size >= packed_lm.SHARED_FROM for size in SIZES) if name not in LATENT else 0
    assert len(list(lm.capture((1,)))) == len(SIZES) + num_shared
    captured, source = len(lm._packed._graphs), torch.Generator().manual_seed(0)
    lengths = [0] * 4
    for counts in ([9, 0, 5, 1], [1, 6, 6, 2], [4, 4, 4, 4], [1, 1, 1, 1], [0, 16, 0, 0]):
        ids = torch.randint(VOCAB, (4, max(counts)), generator=source)
        inputs = SlotInputs(ids, [0, 1, 2, 3], list(lengths), counts)
        outputs = [one.forward(inputs, hidden_layers=(1,)) for one in (lm, stock)]
        for found, expected in zip(*outputs, strict=True):
            for row, count in enumerate(counts):
                one, other = found[row, :count], expected[row, :count]
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
        for one in (lm, stock):
            one.commit(counts, counts)
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
    assert len(lm._packed._graphs) == captured


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3"])
@torch.inference_mode()
def test_many_experts_in_half_precision(name: str) -> None:
    """Those of a prompt go through torch's grouped product, which other dtypes do not have."""
    model = cast(Any, build_wide(name)).to(CUDA)
    for key, weight in model.named_parameters():
        if key.endswith((".gate.weight", ".router.weight")):
            weight.data.mul_(8)  # else rounding takes most tokens of a trial to other experts
    model = model.bfloat16()
    lm = make_causal_lm(model, num_slots=2, max_length=130)
    assert lm.is_packed
    text = torch.tensor([prompts_of([40], VOCAB, 0)[0]])
    expected = model(text.to(CUDA), use_cache=False).logits[0].float()
    found = []
    for start, end in ((0, 30), (30, 39), (39, 40)):
        inputs = SlotInputs(text[:, start:end], [1], [start], [end - start])
        logits = lm.forward(inputs).logits
        assert logits is not None
        found.append(logits[0].float())
    errors = (torch.cat(found) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(errors.median()) < 0.15  # rounding takes some tokens to other experts


@torch.inference_mode()
def test_an_eagle3_head_walks_as_the_stock_one(tmp_path: Path) -> None:
    target = cast(Any, build("llama", hidden_size=64, head_dim=16)).to(CUDA)
    write_eagle3(tmp_path, target, layout="speculators", num_layers=2)
    head = Eagle3Head.from_checkpoint(Checkpoint.open(tmp_path), target)
    room = SlotLimits(4, 100)
    packed = PackedEagle3.of(head, room.max_length)
    assert packed is not None
    heads: list[Any] = [
        SlotHead(head, room, device=CUDA, dtype=torch.float32),
        PackedSlotHead(packed, room, device=CUDA, dtype=torch.float32),
    ]
    source = torch.Generator().manual_seed(0)
    for slots in ([0, 3, 1], [3], [1, 0], [0, 3, 1], [2, 3]):
        counts = [int(torch.randint(1, 5, (), generator=source)) for _ in slots]
        tokens = [torch.randint(VOCAB, (n,), generator=source).tolist() for n in counts]
        states = [torch.randn(n, 3 * 64, generator=source).to(CUDA) for n in counts]
        drafted = [torch.randint(VOCAB, (len(slots),), generator=source).to(CUDA) for _ in range(3)]
        found = []
        for slot_head in heads:
            slot_head.read(slots, tokens, states)
            slot_head.mark(slots)
            for draft in drafted:
                found.append(slot_head.logits(slots).clone())
                slot_head.append(slots, draft)
            slot_head.rewind(slots)
        for stock, walked in zip(found[:3], found[3:], strict=True):
            torch.testing.assert_close(walked, stock, rtol=1e-3, atol=1e-3)
        stock_head, packed_head = heads
        walk = draft_greedily(packed_head, head.vocabulary, slots, 3)
        for depth in range(3):
            scores = stock_head.logits(slots)
            rows = torch.arange(len(slots), device=CUDA)
            best = scores.max(-1).values
            assert head.vocabulary is not None
            is_drafted = walk[:, depth, None] == head.vocabulary.target_ids
            assert is_drafted.any(-1).all()
            drafted = scores[rows, is_drafted.int().argmax(-1)]
            torch.testing.assert_close(drafted, best, rtol=1e-3, atol=1e-3)
            stock_head.append(slots, walk[:, depth])


@pytest.mark.parametrize("proposer", ["none", "draft_model", "eagle3"])
def test_the_bundled_model_writes_the_same(proposer: str) -> None:
    items = load_workload(Path(bundled_asset("heldout.jsonl")), 24)
    params = [SamplingParams(max_tokens=120, grammar=item.grammar) for item in items]
    texts = []
    for kernels in ("stock", "auto"):
        draft = bundled_asset("eagle3") if proposer == "eagle3" else None
        options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "kernels": kernels}
        with LLM(proposer=proposer, draft=draft, **options) as llm:
            outputs = llm.generate([item.prompt for item in items], params)
        texts.append([output.text for output in outputs])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("proposer", ["none", "eagle3"])
def test_prompts_again_and_too_few_blocks(proposer: str) -> None:
    """What is taken from the prefix cache, and what had to go for others, writes the same texts."""
    items = load_workload(Path(bundled_asset("heldout.jsonl")), 12)
    params = [SamplingParams(max_tokens=120, grammar=item.grammar) for item in items]
    prompts = [f"{item.prompt}\n{item.prompt}\n{item.prompt}" for item in items]  # several blocks
    draft = bundled_asset("eagle3") if proposer == "eagle3" else None
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_model_len": 512}
    texts, cached = [], []
    for memory in (None, 2**23):
        with LLM(proposer=proposer, draft=draft, kv_memory_bytes=memory, **options) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, params)
                texts.append([output.text for output in outputs])
                cached.append(sum(output.stats.cached_tokens for output in outputs))
    assert texts == [texts[0]] * 4
    assert cached[1] > cached[0]


def test_beginnings_that_are_read_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts behind two long prompts, some with words of their own in front: the same texts."""
    items = load_workload(Path(bundled_asset("heldout.jsonl")), 12)
    params = [SamplingParams(max_tokens=60, grammar=item.grammar) for item in items]
    fronts = [f"{items[at].prompt}\n" * 3 for at in (0, 1)]
    prompts = [
        (fronts[at % 2] if at % 5 else "") + str(item.prompt) for at, item in enumerate(items)
    ]
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_model_len": 1024}
    texts, asked = [], []
    monkeypatch.setattr(packed_lm, "WORTH_SHARING", 64)
    shared = packed_lm.Rows.shared

    def spied(rows: packed_lm.Rows, size: int, groups: Any) -> Any:
        asked.append(len(groups))
        return shared(rows, size, groups)

    monkeypatch.setattr(packed_lm.Rows, "shared", spied)
    for is_on in (False, True):
        with LLM(proposer="none", prefix_cache=is_on, **options) as llm:
            asked.clear()
            texts.append([output.text for output in llm.generate(prompts, params)])
            assert max(asked, default=0) == 2 * is_on
    assert texts[0] == texts[1]


def test_drafts_of_any_length_come_from_the_graphs_of_the_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the texts are those of whole drafts, whichever length a step has."""
    items = load_workload(Path(bundled_asset("heldout.jsonl")), 24)
    params = [SamplingParams(max_tokens=120, grammar=item.grammar) for item in items]
    used, made = draft_by_chance(monkeypatch), GraphPool.prepare
    texts, late = [], list[Any]()
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_batch_size": 8}
    for drafting in ("always", "auto"):
        with LLM(
            proposer="eagle3", draft=bundled_asset("eagle3"), drafting=drafting, **options
        ) as llm:

            def prepare(pool: GraphPool, key: Any, *arguments: Any, **others: Any) -> bool:
                late.append(key)
                return made(pool, key, *arguments, **others)

            monkeypatch.setattr(GraphPool, "prepare", prepare)
            outputs = llm.generate([item.prompt for item in items], params)
            monkeypatch.setattr(GraphPool, "prepare", made)
        texts.append([output.text for output in outputs])
    assert {*used} == {0, 3, 5}
    assert texts[0] == texts[1]
    assert not late
