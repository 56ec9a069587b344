"""The steps of chosen experts as one kernel each, which are laid out for reading the matrices.

Few tokens wait for their experts to be read. So a program has some outputs of one expert, or of one
token's experts in turn, and reads ahead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from guided_spec.ops.launch_triton import await_previous, launch
from guided_spec.ops.linear.experts import NO_ZERO, Gating, GroupedChoice, Projection, Routes

ROWS = 8  # outputs of a program
OPENING_BYTES, CLOSING_BYTES = 1024, 2048  # of an output that it reads at once, at most
STAGES = 3
SCORING_ROWS, SCORED = 4, 512  # logits of a program, and the inputs that it reads at once

PLAIN, BY_BLOCKS, BY_OUTPUTS = 0, 1, 2  # how weights are scaled


def serves(projection: Projection, parts: int) -> bool:
    """Whether a program's outputs have their scales in common, or each has one.

    parts: of the outputs, which are read apart.
    """
    rows = projection.block[0]
    is_whole = rows % ROWS == 0 and projection.weight.shape[1] // parts % rows == 0
    return _scaling(projection) != BY_BLOCKS or is_whole


def _scaling(projection: Projection) -> int:
    if projection.scales is None:
        return PLAIN
    is_wide = projection.block[1] >= projection.weight.shape[2]
    return BY_OUTPUTS if projection.block[0] == 1 and is_wide else BY_BLOCKS


def _scales(projection: Projection) -> tuple[Tensor, int, int, int, int]:
    """The scales, how many there are in a matrix both ways, and their blocks."""
    scales = projection.weight if projection.scales is None else projection.scales
    return scales, scales.shape[1], scales.shape[2], *projection.block


def _shared(projection: Projection) -> tuple[Tensor, Tensor, int]:
    """The matrix of the shared expert, its scales, and its number."""
    shared = projection.weight if projection.shared is None else projection.shared
    scales = shared if projection.shared_scales is None else projection.shared_scales
    return shared, scales, len(projection.weight)


def _columns(projection: Projection, most: int) -> int:
    width: int = triton.next_power_of_2(projection.weight.shape[2])
    return min(most // projection.weight.element_size(), width)


def route(logits: Tensor, count: int, *, is_normalized: bool, has_shared: bool = False) -> Routes:
    """The experts and shares [N, K] of logits [N, E], on one CUDA device; see ``experts``."""
    rows, num_experts = len(logits), logits.shape[1] - has_shared
    experts = logits.new_empty(rows, count + has_shared, dtype=torch.int64)
    shares = logits.new_empty(rows, count + has_shared, dtype=torch.float32)
    if rows > 0:
        with torch.cuda.device_of(logits):  # Triton launches on the current device
            launch(_route, (rows,), logits)(
                *(logits.contiguous(), experts, shares, num_experts),
                *(count, is_normalized, has_shared, triton.next_power_of_2(num_experts)),
                triton.next_power_of_2(count + has_shared),
                num_warps=1,
            )
    return Routes(experts, shares)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """float32 [N, E]: ``experts.router_logits`` of few tokens, on one CUDA device."""
    (count, inputs), outputs = x.shape, len(weight)
    logits = x.new_empty(count, outputs, dtype=torch.float32)
    columns = min(SCORED, triton.next_power_of_2(inputs))
    if logits.numel() > 0:
        with torch.cuda.device_of(x):  # Triton launches on the current device
            launch(_score, (count, triton.cdiv(outputs, SCORING_ROWS)), x)(
                *(x.contiguous(), weight.contiguous(), logits, outputs, inputs),
                *(SCORING_ROWS, columns, STAGES),
            )
    return logits


def route_in_groups(logits: Tensor, choice: GroupedChoice) -> Routes:
    """The experts and shares [N, K] of logits [N, E], on one CUDA device; see ``experts``."""
    rows, num_experts = logits.shape
    width = choice.top_k + choice.has_shared
    experts = logits.new_empty(rows, width, dtype=torch.int64)
    shares = logits.new_empty(rows, width, dtype=torch.float32)
    size = num_experts // choice.groups
    if rows > 0:
        with torch.cuda.device_of(logits):  # Triton launches on the current device
            launch(_route_in_groups, (rows,), logits)(
                *(logits.contiguous(), logits if choice.bias is None else choice.bias),
                *(experts, shares, choice.factor, choice.top_k, choice.groups, size),
                *(choice.chosen, choice.ranked_by, choice.is_sigmoid, choice.bias is not None),
                *(choice.is_normalized, choice.has_shared, NO_ZERO),
                *(triton.next_power_of_2(choice.groups), triton.next_power_of_2(size)),
                triton.next_power_of_2(width),
                num_warps=1,
            )
    return Routes(experts, shares)


def open_experts(x: Tensor, experts: Tensor, opening: Projection, gating: Gating) -> Tensor:
    """[N, K, O / 2]: ``experts.open_experts`` with the arguments on one CUDA device."""
    (outputs, inputs), width = opening.weight.shape[1:], opening.weight.shape[1] // 2
    opened = x.new_empty(*experts.shape, width)
    columns = _columns(opening, OPENING_BYTES)
    weight, bias = opening.weight, opening.weight if opening.bias is None else opening.bias
    limit = 0.0 if gating.limit is None else gating.limit
    step, up_offset = (2, 1) if gating.is_interleaved else (1, width)
    if opened.numel() > 0:
        with torch.cuda.device_of(x):
            launch(_open, (experts.numel(), triton.cdiv(width, ROWS)), x)(
                *(x.contiguous(), experts.contiguous(), weight, bias, opened, experts.shape[1]),
                *(outputs, width, step, up_offset, gating.alpha, limit, *_scales(opening)),
                *(*_shared(opening), inputs, opening.shared is not None),
                *(opening.bias is not None, gating.limit is not None, _scaling(opening)),
                *(ROWS, columns, STAGES),
            )
    return opened


def close_experts(opened: Tensor, routes: Routes, closing: Projection) -> Tensor:
    """[N, O]: ``experts.close_experts`` with the arguments on one CUDA device."""
    (outputs, inputs), count = closing.weight.shape[1:], routes.experts.shape[1]
    total = opened.new_empty(len(opened), outputs)
    columns = _columns(closing, CLOSING_BYTES)
    weight, bias = closing.weight, closing.weight if closing.bias is None else closing.bias
    if total.numel() > 0:
        with torch.cuda.device_of(opened):
            launch(_close, (len(opened), triton.cdiv(outputs, ROWS)), opened)(
                *(opened.contiguous(), *routes, weight, bias),
                *(total, outputs, *_scales(closing), *_shared(closing), inputs),
                *(closing.shared is not None, count, closing.bias is not None),
                *(_scaling(closing), ROWS, columns, STAGES),
            )
    return total


# Triton reads annotations as its own, so the arguments have none.
@triton.jit  # type: ignore[untyped-decorator]
def _route(  # type: ignore[no-untyped-def] # noqa: PLR0913
    logits,
    experts,
    shares,
    num_experts,
    COUNT: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One token's: the largest, then the largest of the others."""
    await_previous(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    at, number = tl.arange(0, BLOCK), tl.arange(0, CHOSEN)
    logits += token * (num_experts + HAS_SHARED)
    scores = tl.load(logits + at, mask=at < num_experts, other=float("-inf")).to(tl.float32)
    chosen = tl.zeros([CHOSEN], tl.int32)
    found = tl.full([CHOSEN], float("-inf"), tl.float32)
    left = scores
    for rank in tl.static_range(COUNT):
        best, expert = tl.max(left, 0, return_indices=True)
        found = tl.where(number == rank, best, found)
        chosen = tl.where(number == rank, expert, chosen)
        left = tl.where(at == expert, float("-inf"), left)
    largest = tl.max(found, 0)
    weights = tl.exp(found - largest)
    total = tl.sum(weights, 0) if IS_NORMALIZED else tl.sum(tl.exp(scores - largest), 0)
    weights = tl.div_rn(weights, total)
    if HAS_SHARED:
        logit = tl.load(logits + num_experts).to(tl.float32)
        chosen = tl.where(number == COUNT, num_experts, chosen)
        weights = tl.where(number == COUNT, tl.div_rn(1.0, 1.0 + tl.exp(-logit)), weights)
    target = token * (COUNT + HAS_SHARED) + number
    is_there = number < COUNT + HAS_SHARED
    tl.store(experts + target, chosen.to(tl.int64), mask=is_there)
    tl.store(shares + target, weights, mask=is_there)


@triton.jit  # type: ignore[untyped-decorator]
def _score(  # type: ignore[no-untyped-def] # noqa: PLR0913
    x,
    weight,
    logits,
    outputs,
    inputs: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """ROWS logits of one token."""
    await_previous(IS_DEPENDENT)
    token, output = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    address = weight + tl.minimum(output, outputs - 1).to(tl.int64)[:, None] * inputs
    products = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(0, inputs, COLUMNS, num_stages=STAGES):
        at = first + tl.arange(0, COLUMNS)
        read = tl.load(address + at[None, :], mask=at[None, :] < inputs, other=0.0)
        states = tl.load(x + token * inputs + at, mask=at < inputs, other=0.0)
        products += read.to(tl.float32) * states.to(tl.float32)[None, :]
    target = logits + token * outputs + output
    tl.store(target, tl.sum(products, 1), mask=output < outputs)


@triton.jit  # type: ignore[untyped-decorator]
def _route_in_groups(  # type: ignore[no-untyped-def] # noqa: PLR0913
    logits,
    bias,
    experts,
    shares,
    factor,
    COUNT: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    RANKED_BY: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    NO_ZERO: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One token's: the best groups one after another, then likewise the best of their experts."""
    await_previous(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, PADDED_GROUPS), tl.arange(0, PADDED_SIZE)
    at = group[:, None] * SIZE + member[None, :]
    is_there = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    wide = tl.load(logits + token * (GROUPS * SIZE) + at, mask=is_there, other=float("-inf"))
    wide = wide.to(tl.float32)
    if IS_SIGMOID:
        scores = tl.div_rn(1.0, 1.0 + tl.exp(-wide))
    else:
        raised = tl.exp(wide - tl.max(tl.max(wide, 1), 0))
        scores = tl.div_rn(raised, tl.sum(tl.sum(raised, 1), 0) + raised * 0)
    ranked = scores
    if HAS_BIAS:
        ranked += tl.load(bias + at, mask=is_there, other=0.0)
    ranked = tl.where(is_there, ranked, float("-inf"))
    if CHOSEN < GROUPS:
        best, first = tl.max(ranked, 1, return_indices=True)
        if RANKED_BY == 2:
            others = tl.where(member[None, :] == first[:, None], float("-inf"), ranked)
            best += tl.max(others, 1)
        best = tl.where(group < GROUPS, best, float("-inf"))
        is_open = group < 0
        for _ in tl.static_range(CHOSEN):
            _, chosen_group = tl.max(best, 0, return_indices=True)
            is_open = is_open | (group == chosen_group)
            best = tl.where(group == chosen_group, float("-inf"), best)
        ranked = tl.where(is_open[:, None], ranked, float("-inf"))
    flat = tl.arange(0, PADDED_GROUPS * PADDED_SIZE)
    left = tl.reshape(ranked, [PADDED_GROUPS * PADDED_SIZE])
    of_all, number = tl.reshape(scores, [PADDED_GROUPS * PADDED_SIZE]), tl.arange(0, WIDTH)
    chosen, weights = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.float32)
    for rank in tl.static_range(COUNT):
        _, expert = tl.max(left, 0, return_indices=True)
        score = tl.sum(tl.where(flat == expert, of_all, 0.0), 0)
        weights = tl.where(number == rank, score, weights)
        chosen = tl.where(number == rank, expert, chosen)
        left = tl.where(flat == expert, float("-inf"), left)
    if IS_NORMALIZED:
        weights = tl.div_rn(weights, tl.sum(weights, 0) + NO_ZERO + weights * 0)
    weights *= factor
    chosen = chosen // PADDED_SIZE * SIZE + chosen % PADDED_SIZE
    if HAS_SHARED:
        chosen = tl.where(number == COUNT, GROUPS * SIZE, chosen)
        weights = tl.where(number == COUNT, 1.0, weights)
    target, is_kept = token * (COUNT + HAS_SHARED) + number, number < COUNT + HAS_SHARED
    tl.store(experts + target, chosen.to(tl.int64), mask=is_kept)
    tl.store(shares + target, weights, mask=is_kept)


@triton.jit  # type: ignore[untyped-decorator]
def _open(  # type: ignore[no-untyped-def] # noqa: PLR0913
    x,
    experts,
    weight,
    bias,
    opened,
    served,
    outputs,
    width,
    step,
    up_offset,
    alpha,
    limit,
    scales,
    scale_rows,
    scale_columns,
    block_rows,
    block_columns,
    shared,
    shared_scales,
    num_experts,
    INPUTS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    SCALING: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """ROWS results of one token and one expert."""
    await_previous(IS_DEPENDENT)
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(experts + pair)
    output = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_there = output < width
    # Columns after the last output read the last one's, and are not written.
    gate_row = tl.minimum(output, width - 1) * step
    weight += expert * outputs * INPUTS
    scales += expert * scale_rows * scale_columns
    if HAS_SHARED:
        weight = tl.where(expert == num_experts, shared, weight)
        scales = tl.where(expert == num_experts, shared_scales, scales)
    first_gate = weight + gate_row[:, None] * INPUTS
    first_up = first_gate + up_offset * INPUTS
    first_row = tl.program_id(1) * ROWS * step
    gate_scale = scales + first_row // block_rows * scale_columns
    up_scale = scales + (first_row + up_offset) // block_rows * scale_columns
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(0, INPUTS, COLUMNS, num_stages=STAGES):
        at = first + tl.arange(0, COLUMNS)
        inside = (at < INPUTS)[None, :]
        states = tl.load(x + pair // served * INPUTS + at, mask=at < INPUTS, other=0.0)
        for_gate = states.to(tl.float32)
        for_up = for_gate
        if SCALING == 1:  # by blocks, of which all rows of a program are in one
            block = at // block_columns
            for_gate *= tl.load(gate_scale + block, mask=at < INPUTS, other=0.0)
            for_up *= tl.load(up_scale + block, mask=at < INPUTS, other=0.0)
        read = tl.load(first_gate + at[None, :], mask=inside, other=0.0)
        gate += read.to(tl.float32) * for_gate[None, :]
        read = tl.load(first_up + at[None, :], mask=inside, other=0.0)
        up += read.to(tl.float32) * for_up[None, :]
    gate_sum, up_sum = tl.sum(gate, 1), tl.sum(up, 1)
    if SCALING == 2:  # by outputs
        gate_sum *= tl.load(scales + gate_row)
        up_sum *= tl.load(scales + gate_row + up_offset)
    if HAS_BIAS:
        address = bias + expert * outputs + gate_row
        gate_sum += tl.load(address).to(tl.float32)
        up_sum += tl.load(address + up_offset).to(tl.float32)
    if HAS_LIMIT:
        gate_sum = tl.minimum(gate_sum, limit)
        up_sum = tl.minimum(tl.maximum(up_sum, -limit), limit) + 1.0
        result = gate_sum * tl.div_rn(1.0, 1.0 + tl.exp(-alpha * gate_sum)) * up_sum
    else:
        result = tl.div_rn(gate_sum, 1.0 + tl.exp(-gate_sum)) * up_sum
    target = opened + pair * width + output
    tl.store(target, result.to(opened.dtype.element_ty), mask=is_there)


@triton.jit  # type: ignore[untyped-decorator]
def _close(  # type: ignore[no-untyped-def] # noqa: PLR0913
    opened,
    experts,
    shares,
    weight,
    bias,
    total,
    outputs,
    scales,
    scale_rows,
    scale_columns,
    block_rows,
    block_columns,
    shared,
    shared_scales,
    num_experts,
    INPUTS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    COUNT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALING: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """ROWS results of one token: all of its experts, slice by slice."""
    await_previous(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_there = output < outputs
    row = tl.minimum(output, outputs - 1).to(tl.int64)
    slices: tl.constexpr = (INPUTS + COLUMNS - 1) // COLUMNS
    products = tl.zeros([ROWS, COLUMNS], tl.float32)
    for number in tl.range(0, COUNT * slices, num_stages=STAGES):
        pair = token * COUNT + number // slices
        expert, share = tl.load(experts + pair), tl.load(shares + pair)
        at = number % slices * COLUMNS + tl.arange(0, COLUMNS)
        states = tl.load(opened + pair * INPUTS + at, mask=at < INPUTS, other=0.0)
        matrix = weight + expert * outputs * INPUTS
        factor = scales + expert * scale_rows * scale_columns
        if HAS_SHARED:
            matrix = tl.where(expert == num_experts, shared, matrix)
            factor = tl.where(expert == num_experts, shared_scales, factor)
        address = matrix + row[:, None] * INPUTS + at[None, :]
        read = tl.load(address, mask=(at < INPUTS)[None, :], other=0.0)
        factors = states.to(tl.float32) * share
        wide = read.to(tl.float32)
        if SCALING == 1:
            block = tl.program_id(1) * ROWS // block_rows * scale_columns
            scale = factor + block + at // block_columns
            factors *= tl.load(scale, mask=at < INPUTS, other=0.0)
        if SCALING == 2:
            wide *= tl.load(factor + row)[:, None]
        products += wide * factors[None, :]
    result = tl.sum(products, 1)
    if HAS_BIAS:
        for number in range(COUNT):
            pair = token * COUNT + number
            address = bias + tl.load(experts + pair) * outputs + row
            result += tl.load(address).to(tl.float32) * tl.load(shares + pair)
    target = total + token * outputs + output
    tl.store(target, result.to(total.dtype.element_ty), mask=is_there)


# Outputs and inputs of a tile: wide where the weights are contiguous in memory.
INPUTS_FIRST = (16, 512)
OUTPUTS_FIRST = (64, 64)


def expert_linear(x: Tensor, experts: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[S, O]: ``experts.expert_linear`` with the arguments on one CUDA device."""
    pairs, (outputs, inputs) = len(experts), weight.shape[1:]
    product = x.new_empty(pairs, outputs)
    tile = INPUTS_FIRST if weight.stride(2) == 1 else OUTPUTS_FIRST
    x, given = x.contiguous(), weight if bias is None else bias.contiguous()
    with torch.cuda.device_of(x):  # Triton launches on the current device
        launch(_expert_linear, (triton.cdiv(outputs, tile[0]), pairs), x)(
            *(x, experts.contiguous(), weight, given, product, *weight.stride()),
            *(pairs // len(x), outputs, inputs, bias is not None, *tile),
        )
    return product


# Triton reads annotations as its own, so the arguments have none.
@triton.jit(do_not_specialize=["served"])  # type: ignore[untyped-decorator]
def _expert_linear(  # type: ignore[no-untyped-def] # noqa: PLR0913
    x,
    experts,
    weight,
    bias,
    product,
    of_expert,
    of_output,
    of_input,
    served,
    outputs,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """ROWS outputs of one pair."""
    await_previous(IS_DEPENDENT)
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(experts + pair).to(tl.int64)
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_there = output < outputs
    row = weight + expert * of_expert + output.to(tl.int64)[:, None] * of_output
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, INPUTS, COLUMNS):
        at = first + tl.arange(0, COLUMNS)
        states = tl.load(x + pair // served * INPUTS + at, mask=at < INPUTS, other=0.0)
        mask = is_there[:, None] & (at < INPUTS)[None, :]
        tile = tl.load(row + at[None, :] * of_input, mask=mask, other=0.0)
        total += tile.to(tl.float32) * states.to(tl.float32)[None, :]
    found = tl.sum(total, 1)
    if HAS_BIAS:
        found += tl.load(bias + expert * outputs + output, mask=is_there, other=0.0).to(tl.float32)
    target = product + pair * outputs + output
    tl.store(target, found.to(product.dtype.element_ty), mask=is_there)
