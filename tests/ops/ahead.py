"""``python -m tests.ops.ahead``: kernels compiled for a GPU that is not there.

Prints as JSON how many of each there are: those of decisions, for batches, drafts, filters and
masks of all kinds, products with quantized weights, steps of experts and along tables, attention.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from guided_spec.ops import launch_triton, mailbox_triton, table_rows, table_rows_triton
from guided_spec.ops.attention import latent_attention_triton
from guided_spec.ops.attention.latent_attention import LatentKeys, LatentQueries
from guided_spec.ops.attention.slot_attention import (
    HeadNorms,
    KeyValues,
    QkvShape,
    Rotation,
    SlotIndex,
)
from guided_spec.ops.attention.slot_attention_triton import slot_attention
from guided_spec.ops.delta_rule import DeltaColumns, DeltaLayer, DeltaShape, DeltaStates
from guided_spec.ops.delta_rule_triton import gated_delta
from guided_spec.ops.linear import experts_triton, fp8_linear_triton, int4_linear_triton
from guided_spec.ops.linear.experts import Gating, GroupedChoice, Projection
from guided_spec.ops.linear.fp8_linear import FP8, Fp8Weight, nobody_arrived
from guided_spec.ops.linear.int4_linear import IN_WORD, Int4Weight
from guided_spec.ops.mailbox import Mailbox, Report
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.ops.pointwise_triton import add_branch, norm_all_heads, rotate_and_store
from guided_spec.ops.sampling.adjust import Adjustments, RuleTable, TokenRules
from guided_spec.ops.sampling.noise import NoiseKeys
from guided_spec.ops.sampling.verify_triton import verify
from guided_spec.ops.sampling.warp import Sampling, VerifyRows
from guided_spec.types import Draft, SamplingParams

CPU = torch.device("cpu")
VOCAB_SIZE = 128_256
LONGEST = 40  # tokens of a draft
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=0.7, top_k=20, min_p=0.1),
)


class Hopper:
    """A driver that knows what to compile for, and can run nothing.

    loaded: kernels whose launching code was asked for, by the threads that asked.
    """

    def __init__(self) -> None:
        self.loaded: Counter[str] = Counter()

    def set_current_device(self, device: int) -> None:
        assert device == 0

    def launcher_cls(self, source: Any, _: Any) -> None:
        """Nothing launches, so loading ends here, as a kernel does that is too large."""
        self.loaded[threading.current_thread().name.rpartition("_")[0]] += 1
        raise RuntimeError(f"{source.name} has no GPU")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@triton.jit
def _broken(x):  # type: ignore[no-untyped-def]
    tl.store(x, no_such_thing)  # type: ignore[name-defined]  # noqa: F821


RULES = (
    None,
    TokenRules(SamplingParams(), bad_words=((1, 2),)),
    TokenRules(SamplingParams(), bad_words=((1,),) * 16),
    TokenRules(SamplingParams(logit_bias={3: 1.0})),
    TokenRules(SamplingParams(presence_penalty=1.0)),
    TokenRules(SamplingParams(logit_bias={3: 1.0}, repetition_penalty=1.1)),
)


def drafts(batch: int, width: int) -> Iterator[Draft]:
    """With probabilities and without; some of them forced by a grammar."""
    token_ids = torch.zeros(batch, width, dtype=torch.int64)
    draft = Draft(token_ids, torch.zeros(batch, dtype=torch.int64))
    yield draft
    if width:
        draft = draft._replace(probs=torch.zeros(batch, width, VOCAB_SIZE))
        yield draft
        yield draft._replace(is_certain=torch.zeros(batch, width, dtype=torch.bool))


def decide(
    draft: Draft, params: SamplingParams, rules: TokenRules | None, *, is_masked: bool
) -> None:
    """Over anything: nothing is run."""
    batch, width = draft.token_ids.shape
    logits = torch.empty(batch, width + 1, VOCAB_SIZE, dtype=torch.bfloat16)
    words = num_mask_words(VOCAB_SIZE)
    mask = torch.empty(batch, width + 1, words, dtype=torch.int32) if is_masked else None
    sampling = Sampling.stack([params] * batch, [0] * batch, CPU)
    noise = NoiseKeys(sampling.seeds, sampling.seeds)
    table = RuleTable.stack([rules] * batch, VOCAB_SIZE, CPU)
    adjustments = Adjustments.stack(table, [[]] * batch, [0] * batch)
    verify(logits, mask, draft, VerifyRows(sampling, noise, "rejection", adjustments))


def decide_all() -> None:
    """Over drafts of all lengths."""
    for batch, width in product((1, 2), (0, 1, 5, 15, 31, LONGEST)):
        for draft, params, rules in product(drafts(batch, width), SAMPLINGS, RULES):
            decide(draft, params, rules, is_masked=batch == 1)


def multiply_fp8(count: int, shape: tuple[int, int], block: tuple[int, int]) -> None:
    """Likewise, of so many tokens."""
    scales = torch.ones(-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    weight = Fp8Weight.of(torch.zeros(shape, dtype=FP8), scales, block)
    bias = torch.empty(shape[0], dtype=torch.bfloat16)
    x = torch.empty(count, shape[1], dtype=torch.bfloat16)
    for given in (None, bias):
        fp8_linear_triton.fp8_linear(x, weight, given)


def multiply_int4(count: int, shape: tuple[int, int], group: int) -> None:
    """Likewise, of weights in int4."""
    outputs, inputs = shape
    values = torch.empty(outputs, inputs // IN_WORD, dtype=torch.int16)
    factors = torch.empty(inputs // group, outputs, dtype=torch.int32)
    weight = Int4Weight(values, factors, None, nobody_arrived(outputs, CPU))
    bias = torch.empty(outputs, dtype=torch.bfloat16)
    x = torch.empty(count, inputs, dtype=torch.bfloat16)
    for given in (None, bias):
        int4_linear_triton.int4_linear(x, weight, given)


def share_an_expert(count: int, experts: int, sizes: tuple[int, int, int]) -> None:
    """As ``ask_experts``; all tokens take one more."""
    chosen, hidden, inner = sizes
    logits = torch.empty(count, experts + 1, dtype=torch.bfloat16)
    routes = experts_triton.route(logits, chosen, is_normalized=True, has_shared=True)
    for width, shape in ((hidden, (2 * inner, hidden)), (inner, (hidden, inner))):
        weight = torch.empty(experts, *shape, dtype=torch.bfloat16, device="meta")
        plain = Projection(weight, None, shared=torch.empty(shape, dtype=torch.bfloat16))
        scales = torch.empty(experts, shape[0] // 128, shape[1] // 128)
        in_fp8 = Projection(weight.to(FP8), None, scales, (128, 128))
        in_fp8 = in_fp8._replace(shared=torch.empty(shape, dtype=FP8), shared_scales=scales[0])
        for given in (plain, in_fp8):
            if width == hidden:
                x = torch.empty(count, width, dtype=torch.bfloat16)
                experts_triton.open_experts(x, routes.experts, given, Gating())
            else:
                opened = torch.empty(count, chosen + 1, width, dtype=torch.bfloat16)
                experts_triton.close_experts(opened, routes, given)


def fold(count: int, shape: DeltaShape) -> None:
    """Likewise, of so many tokens in two rows."""
    gate, kept = shape.values * shape.value_size, shape.channels + 2 * shape.values
    columns = DeltaColumns(*(torch.zeros(n, dtype=torch.int32) for n in (kept, gate)))
    taps = torch.empty(shape.channels, shape.taps, dtype=torch.bfloat16)
    rates, norm = (torch.empty(n, dtype=torch.bfloat16) for n in (shape.values, shape.value_size))
    layer = DeltaLayer(shape, columns, taps, rates, rates, 1.0, norm, 1e-6)
    states = DeltaStates.empty(shape, 2, 38, taps[:0])
    line, rows = torch.zeros(2, count, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int64)
    places = SlotIndex(line, rows, torch.zeros(2, 4, dtype=torch.int32), 255)
    gated_delta(torch.empty(count, kept + gate, dtype=torch.bfloat16), layer, states, places)


def turn(shape: QkvShape, part: int, num_axes: int = 0) -> None:
    """Likewise, of three tokens; of each head one part of so many is turned."""
    packed = torch.empty(3, shape.width, dtype=torch.bfloat16)
    rotation = Rotation(*torch.empty(2, 256, shape.size // part, dtype=torch.bfloat16))
    line, rows = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int64)
    places = SlotIndex(line, rows, torch.zeros(2, 4, dtype=torch.int32), 255)
    if num_axes:
        split = torch.zeros(shape.size // part // 2, dtype=torch.int32)
        rotation = rotation._replace(axis_of=split)
        axes = torch.zeros(2, num_axes, 256, dtype=torch.int32)
        places = replace(places, axes=axes)
    buffers = KeyValues(*torch.empty(2, 4, shape.keys, 64, shape.size, dtype=torch.bfloat16))
    norm = torch.empty(shape.size)
    rotate_and_store(packed, rotation, shape, HeadNorms(norm, norm, 1e-6), buffers, places)


def add_branches(width: int) -> None:
    """Likewise, of three tokens: as Llama's layers add, as Gemma's and as Olmo's."""
    x, weight = torch.empty(3, width, dtype=torch.bfloat16), torch.empty(width)
    norm = (weight.bfloat16(), 1e-6, None)
    own = (norm[0], 1e-6, 0.0)
    for first, then in ((None, norm), (own, own), (own, None)):
        add_branch(x, x, first, then)
    norm_all_heads(torch.empty(3, 3 * width), HeadNorms(weight, weight, 1e-6, are_whole=True))


def follow_tables(count: int) -> None:
    """Likewise, of so many texts, at odd addresses as well as at even ones."""
    words, (ids, *sources) = num_mask_words(VOCAB_SIZE), torch.zeros(4, count, dtype=torch.int64)
    box, ticket = Mailbox(2, count, CPU), torch.zeros(1, dtype=torch.int64)
    cursors = torch.zeros(count, table_rows.CURSOR, dtype=torch.int64)
    out = torch.empty(count, 2, words, dtype=torch.int32)
    for at, starved in enumerate((None, ids > 0)):
        mailbox_triton.fetch_rows(box.orders[at], ticket, out[:, 0].contiguous(), 2, sources[at])
        report = Report(ticket, box.replies[at], sources[at])
        mailbox_triton.reply(ids.clone(), starved, report, cursors, sources[at + 1])
        table_rows_triton.advance(sources[at], cursors, sources[at + 1])
    table_rows_triton.copy_rows(torch.stack(sources[:2]).T, out, is_blank=True)
    table_rows_triton.copy_rows(sources[0], out[:, 0].contiguous())


def ask_experts(count: int, experts: int, sizes: tuple[int, int, int], gating: Gating) -> None:
    """Likewise, of so many tokens. sizes: chosen experts, hidden and inner size."""
    chosen, hidden, inner = sizes
    logits = torch.empty(count, experts, dtype=torch.bfloat16)
    routes = experts_triton.route(logits, chosen, is_normalized=True)
    bias = torch.empty(experts, 2 * inner, dtype=torch.bfloat16)
    weight = torch.empty(experts, 2 * inner, hidden, dtype=torch.bfloat16, device="meta")
    x = torch.empty(count, hidden, dtype=torch.bfloat16)
    opening = Projection(weight, None if gating.limit is None else bias)
    experts_triton.open_experts(x, routes.experts, opening, gating)
    closing = torch.empty(experts, hidden, inner, dtype=torch.bfloat16, device="meta")
    opened = torch.empty(count, chosen, inner, dtype=torch.bfloat16)
    given = Projection(closing, None if gating.limit is None else bias)
    experts_triton.close_experts(opened, routes, given)
    if gating.limit is None:
        scales = torch.empty(experts, 2 * inner // 128, hidden // 128)
        in_fp8 = Projection(weight.to(FP8), None, scales, (128, 128))
        experts_triton.open_experts(x, routes.experts, in_fp8, gating)
        scales = torch.empty(experts, hidden // 128, inner // 128)
        in_fp8 = Projection(closing.to(FP8), None, scales, (128, 128))
        experts_triton.close_experts(opened, routes, in_fp8)


def attend() -> None:
    """Likewise, in one layer, over seven tokens in two rows."""
    line, rows = torch.zeros(2, 7, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int64)
    buffers = KeyValues(*torch.empty(2, 4, 2, 64, 128, dtype=torch.bfloat16))
    tables = torch.zeros(2, 4, dtype=torch.int32)
    query = torch.empty(7, 8, 128, dtype=torch.bfloat16)
    places = SlotIndex(line, rows, tables, 255, width=4, view=256)
    slot_attention(query, None, buffers, places, scale=1.0)


def choose_in_groups(count: int) -> None:
    """Likewise, of so many tokens, as DeepSeek-V3 and V2 choose experts."""
    like = torch.empty(0)
    third = GroupedChoice(8, 8, 4, 2, is_sigmoid=True, bias=like.new_empty(256), has_shared=True)
    states = torch.empty(count, 7168, dtype=torch.bfloat16)
    logits = experts_triton.router_logits(states, like.new_empty(256, 7168))
    experts_triton.route_in_groups(logits, third)
    experts_triton.route_in_groups(like.new_empty(count, 160), GroupedChoice(6, 8, 3))


def attend_to_latents(count: int) -> None:
    """Likewise, of a token or more in two rows, as DeepSeek-V3 does."""
    line, rows = torch.zeros(2, count, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int64)
    places = SlotIndex(line, rows, torch.zeros(2, 4, dtype=torch.int32), 255, width=4, view=256)
    sizes, heads, like = (512, 64), 128, torch.empty(0, dtype=torch.bfloat16)
    buffers = KeyValues(*(like.new_empty(4, 1, 64, size) for size in sizes))
    rotation = Rotation(*like.new_empty(2, 256, 64))
    keys = LatentKeys(like.new_empty(512), 1e-6, reads_pairs=True, writes_pairs=False)
    query = like.new_empty(count, heads, 192)[..., 128:]
    packed = like.new_empty(count, 1536 + 576)[:, 1536:]
    rotary = latent_attention_triton.keep_latents(query, packed, keys, rotation, buffers, places)
    latent = like.new_empty(heads, count, 512).transpose(0, 1)
    given = LatentQueries(latent, rotary)
    latent_attention_triton.latent_attention(given, buffers, places, scale=1.0)


def compile_for(hopper: Hopper) -> Counter[str]:
    """From now on, in this process. Returns how often each kernel was compiled, as it goes on."""
    made: Counter[str] = Counter()

    def compiled(*, fn: Any, **_: Any) -> None:
        made[fn.name] += 1

    driver.set_active(hopper)
    knobs.runtime.jit_post_compile_hook = compiled
    there: Any = torch.cuda
    there.device_of = lambda _: contextlib.nullcontext()
    return made


def main() -> None:
    hopper = Hopper()
    made = compile_for(hopper)
    launch_triton._is_served = lambda _: True  # type: ignore[assignment]
    with launch_triton.compiling_ahead():
        launch_triton.launch(_broken, (1,))(torch.zeros(1))
        decide_all()
        for count, block in product((1, 6, 48, 200, 300), ((128, 128), (1, 4096))):
            multiply_fp8(count, (4096, 4096), block)
            multiply_fp8(count, (24576, 4096), block)
        for count, group in product((1, 6, 48, 200, 300), (32, 128, 4096)):
            multiply_int4(count, (4096, 4096), group)
            multiply_int4(count, (24576, 4096), group)
        for count in (1, 6):
            ask_experts(count, 128, (8, 2048, 768), Gating())
            ask_experts(count, 32, (4, 2880, 2880), Gating(is_interleaved=True, limit=7.0))
            share_an_expert(count, 512, (10, 2048, 512))
        for count in (1, 6, 64, 100):
            fold(count, DeltaShape(16, 32, 128, 128, 4))
        turn(QkvShape(32, 8, 128), 1)
        turn(QkvShape(16, 4, 256, has_gates=True), 4)
        turn(QkvShape(32, 8, 128), 1, num_axes=3)
        turn(QkvShape(32, 2, 128, in_pairs=True), 2)
        add_branches(4096)
        for count in (1, 3, 64, 256):
            follow_tables(count)
        attend()
        for count in (1, 6, 64):
            attend_to_latents(count)
            choose_in_groups(count)
    assert hopper.loaded == {"guided-spec-compile": made.total()}, hopper.loaded
    sys.stdout.write(json.dumps(made) + "\n")


if __name__ == "__main__":
    main()
