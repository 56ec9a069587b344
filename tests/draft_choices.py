"""Drawn inputs of the draft's token choice, and when two answers to one input agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from guided_spec.masks.rows import DeviceTables, TableStarts
from guided_spec.models.packed.graph_pool import GraphPool
from guided_spec.ops.bitmask import pack_bitmask, unpack_bitmask
from guided_spec.ops.sampling.draft_choice import choose_draft
from guided_spec.ops.sampling.noise import DraftNoise, Stream, exponential_noise
from guided_spec.ops.sampling.rejection import DraftChoice
from guided_spec.ops.sampling.warp import Sampling
from guided_spec.proposers.choice_graphs import ChoiceGraphs, Chosen
from guided_spec.types import SamplingParams
from tests.ops.table_walks import random_table

MaskKind = Literal["none", "dense", "sparse", "empty", "single", "each"]
MASKS: tuple[MaskKind, ...] = ("none", "dense", "sparse", "empty", "single", "each")
SHARES = {"dense": 0.98, "sparse": 0.005}
CLOSE = 1e-5  # keys of a race this near to each other may come in either order
NO = float("-inf")


class ChoiceCase(NamedTuple):
    """The arguments of ``choose_draft``."""

    logits: Tensor
    bitmask: Tensor | None
    target_ids: Tensor | None
    sampling: Sampling
    noise: DraftNoise


def make_case(
    sizes: tuple[int, int | None],
    temperatures: Sequence[float],
    mask: MaskKind,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> ChoiceCase:
    """V and D (None: no draft vocabulary), a row for each temperature, everything else drawn.

    Every fourth row, from the second on, is -inf throughout; a third of the others' logits is so.
    """
    vocab_size, draft_size = sizes
    batch = len(temperatures)
    generator = torch.Generator(device).manual_seed(vocab_size + batch)
    logits = _uniform(batch, draft_size or vocab_size, generator).logit(1e-9)
    logits[_uniform(batch, logits.shape[1], generator) < 0.3] = NO
    logits[1::4] = NO
    ids = None
    if draft_size is not None:
        ids = _uniform(1, vocab_size, generator)[0].argsort()[:draft_size]
    legal = _legal(mask, batch, vocab_size, generator)
    params = [SamplingParams(temperature=one) for one in temperatures]
    seeds = (_uniform(1, batch, generator)[0] * 2**62).long()
    positions = (_uniform(1, batch, generator)[0] * 2**40).long()
    return ChoiceCase(
        logits.to(dtype),
        None if legal is None else pack_bitmask(legal),
        ids,
        Sampling.stack(params, range(batch), torch.device(device)),
        DraftNoise(seeds, positions, Stream.DRAFT, vocab_size),
    )


def on_cpu(case: ChoiceCase) -> ChoiceCase:
    """The same input on the host."""
    return ChoiceCase(
        case.logits.cpu(),
        None if case.bitmask is None else case.bitmask.cpu(),
        None if case.target_ids is None else case.target_ids.cpu(),
        replace(case.sampling, temperature=case.sampling.temperature.cpu()),
        case.noise._replace(seeds=case.noise.seeds.cpu(), positions=case.noise.positions.cpu()),
    )


def _uniform(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.rand(rows, columns, generator=generator, device=generator.device)


def _legal(mask: MaskKind, batch: int, size: int, generator: torch.Generator) -> Tensor | None:
    """bool [B, V]; "each": one row of each other kind, in turn."""
    if mask == "none":
        return None
    if mask == "each":
        kinds = [MASKS[1 + row % 4] for row in range(batch)]
        rows = [_legal(kind, 1, size, generator) for kind in kinds]
        return torch.cat([row for row in rows if row is not None])
    if mask == "single":
        tokens = (_uniform(batch, 1, generator) * size).long()
        return torch.arange(size, device=generator.device) == tokens
    return _uniform(batch, size, generator) < SHARES.get(mask, 0.0)


def check_alike(case: ChoiceCase, found: DraftChoice, expected: DraftChoice) -> None:
    """Equal, up to probabilities 1e-6 apart and races that were won by less than 1e-5."""
    for one, other in ((found.starved, expected.starved), (found.rescued, expected.rescued)):
        assert (one is None) == (other is None)
        assert one is None or (other is not None and one.dtype == other.dtype)
        assert one is None or (other is not None and torch.equal(one, other))
    assert found.tokens.dtype == torch.int64
    if found.probs is None or expected.probs is None:
        assert found.probs is expected.probs
        assert torch.equal(found.tokens, expected.tokens)
        return
    torch.testing.assert_close(found.probs, expected.probs, atol=1e-6, rtol=1e-5)
    rows = (found.tokens != expected.tokens).nonzero().flatten()
    keys = _keys(case, expected.probs)[rows]
    assert bool((case.sampling.temperature[rows] > 0).all())
    mine, theirs = (keys.gather(1, of.tokens[rows, None]) for of in (found, expected))
    assert bool((mine >= theirs * (1 - CLOSE)).all()), (found.tokens, expected.tokens)


def _keys(case: ChoiceCase, probs: Tensor) -> Tensor:
    """[B, V] what races."""
    noise = exponential_noise(*case.noise)
    if case.target_ids is None:
        return probs / noise
    return torch.zeros_like(noise).index_copy_(1, case.target_ids, probs) / noise


def change(case: ChoiceCase, turn: int) -> None:
    """Other values in the same memory."""
    case.logits.copy_(case.logits.roll(turn + 1, 1))
    if case.bitmask is not None:
        case.bitmask.copy_(case.bitmask.roll(1, 0))


def check_chooser(
    sizes: tuple[int, int | None],
    temperatures: Sequence[float],
    mask: MaskKind,
    top_k: int,
    graphs: GraphPool,
    device: str = "cpu",
) -> None:
    """A ``ChoiceGraphs`` draws what ``choose_draft`` draws, turn by turn.

    Other values come, other requests, and fewer of them; what was drawn stays as it was until the
    next draft.
    """
    case = make_case(sizes, temperatures, mask, device=device)
    chooser = ChoiceGraphs(case.target_ids, graphs)
    seen: set[str] = set()
    for turn in range(9):
        rows = len(temperatures) - turn // 4  # 9, 8, and 7, which another size of graph serves
        if turn % 3 == 0:  # other requests have joined
            warmer = [SamplingParams(temperature=t * (1 + turn), top_k=top_k) for t in temperatures]
            sampling = Sampling.stack(warmer, range(len(warmer)), torch.device(device))
            case = case._replace(
                sampling=sampling, noise=case.noise._replace(seeds=case.noise.seeds + turn)
            )
        case = case._replace(noise=case.noise._replace(positions=case.noise.positions + turn))
        some = _first(case, rows)
        noise = None if some.sampling.all_greedy else some.noise
        draft: list[tuple[Chosen, list[int]]] = []
        # Turned round at first: graphs that are captured later may write over the earlier ones'.
        for depth in (2, 1, 0) if turn == 0 else (0, 1, 2):
            change(case, depth)
            chosen = chooser.choose(depth, some.logits, some.bitmask, some.sampling, noise)
            _check_chosen(some, depth, chosen)
            draft.append((chosen, chosen.report.tolist()))
        assert all(chosen.report.tolist() == report for chosen, report in draft)
        seen |= {str(report) for _, report in draft}
    assert len(seen) > 18


def check_walking(graphs: GraphPool, rows: int, device: str = "cpu") -> None:
    """Texts that walk along tables from choice to choice, some of ``rows`` beside others.

    Drafts follow one another, each from other states. Their masks are the tables' rows.
    """
    size, length, where = 90, 4, torch.device(device)
    chooser, random = ChoiceGraphs(None, graphs), torch.Generator().manual_seed(rows)
    tables = [random_table(seed, size) for seed in (1, 2)]
    kept = DeviceTables(where, -(-size // 32), 2**20)
    sampling = Sampling.stack([SamplingParams(temperature=0.0)] * rows, range(rows), where)
    for turn in range(3):
        states = {row: turn + row % 2 for row in range(rows) if row % 3 != 1}
        starts = {
            table: TableStarts(rest, [states[row] for row in rest])
            for at, table in enumerate(tables)
            if (rest := [row for row in states if row % 2 == at])
        }
        texts = kept.find(starts, rows, others=False)
        assert texts is not None
        walk = chooser.begin_advance(texts, length, where)
        for depth in range(length):
            logits = torch.rand(rows, size, generator=random)
            legal = torch.ones(rows, size, dtype=torch.bool)
            for row, state in states.items():
                if state >= 0:
                    legal[row] = unpack_bitmask(torch.from_numpy(tables[row % 2].row(state)), size)
            mask = torch.full((rows, -(-size // 32)), -1, dtype=torch.int32, device=where)
            scores = logits.to(where)
            tokens = chooser.choose(depth, scores, mask, sampling, None, walk).tokens.tolist()
            assert tokens == logits.where(legal, NO).argmax(1).tolist()
            for row, state in states.items():
                then = tables[row % 2].after(state, tokens[row]) if state >= 0 else -1
                states[row] = then
                assert (walk.sources[depth + 1, row] == 0) == (then < 0)


def _check_chosen(case: ChoiceCase, depth: int, chosen: Chosen) -> None:
    later = case._replace(noise=case.noise._replace(positions=case.noise.positions + depth))
    expected = choose_draft(*later)
    check_alike(later, expected._replace(tokens=chosen.tokens, probs=chosen.probs), expected)
    starved = expected.starved
    starved = torch.zeros_like(expected.tokens) if starved is None else starved
    assert torch.equal(chosen.report[1], starved.long())
    assert torch.equal(chosen.readable, chosen.tokens.clamp_min(0))
    if chosen.rescued is not None and expected.rescued is not None:
        assert torch.equal(chosen.rescued, expected.rescued)


def _first(case: ChoiceCase, rows: int) -> ChoiceCase:
    """Its first requests; the same parameters object for as many as there are."""
    if rows == len(case.logits):
        return case
    mask = None if case.bitmask is None else case.bitmask[:rows]
    sampling = case.sampling.select(torch.arange(rows, device=case.logits.device))
    keys = case.noise._replace(seeds=case.noise.seeds[:rows], positions=case.noise.positions[:rows])
    return ChoiceCase(case.logits[:rows], mask, case.target_ids, sampling, keys)
