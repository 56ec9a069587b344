"""Trees of draft tokens: what is emitted is distributed as the target, whatever they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from guided_spec.errors import ConfigError
from guided_spec.ops.bitmask import pack_bitmask
from guided_spec.ops.sampling import tree as tree_verifier
from guided_spec.ops.sampling.adjust import Adjustments, RuleTable, TokenRules
from guided_spec.ops.sampling.noise import NoiseKeys
from guided_spec.ops.sampling.rejection import rejection_sample
from guided_spec.ops.sampling.tree import (
    _adjust,
    couple_tree,
    reject_tree,
    require_tree_verifier,
)
from guided_spec.ops.sampling.verify import coupled_sample, verify
from guided_spec.ops.sampling.warp import Sampling, VerifyRows
from guided_spec.ops.trees.token_tree import TokenTree
from guided_spec.types import Accepted, Draft, Noise, SamplingParams
from tests.toys import CPU, chi_square_p_value

# Every planted fault below is found with a p-value under 1e-200; shares have noise of 0.08 %.
ROWS = 200_000
SIZE = 4
DEPTHS = 3  # of texts: two draft tokens at most, and one more
UNLIKELY = 1e-6
# Two tokens behind the text, of which the first has two behind it and the second three.
PARENTS = (0, 0, 1, 2, 1, 2, 2)


class World(NamedTuple):
    """[SIZE**i, SIZE] for i = 0, 1, 2: what may follow each prefix of i tokens."""

    target: list[Tensor]
    draft: list[Tensor]


@cache
def world() -> World:
    """Some tokens are illegal, and some are never drafted."""
    generator = torch.Generator().manual_seed(7)

    def one(depth: int) -> Tensor:
        probs = torch.rand(SIZE**depth, SIZE, generator=generator) ** 2
        return probs * (torch.rand(probs.shape, generator=generator) < 0.75) + 1e-9

    def normal(probs: Tensor) -> Tensor:
        probs = probs * (probs > 1e-8)
        probs[probs.sum(-1) == 0, 0] = 1.0
        return probs / probs.sum(-1, keepdim=True)

    tables = [[normal(one(depth)) for depth in range(DEPTHS)] for _ in range(2)]
    return World(*tables)


class Grown(NamedTuple):
    """Drafts, the target's distributions at their places, and the prefix at each, [B, N + 1]."""

    draft: Draft
    target: Tensor
    prefixes: Tensor


@cache
def grow(kind: str) -> Grown:
    """Trees of one shape.

    best: the draft's likeliest tokens, certain. sampled: tokens drawn with replacement. unlike:
    without, each from what those before it leave. mixed: the first behind each place is drawn, the
    others are certain.
    """
    known, generator = world(), torch.Generator().manual_seed(3)
    num_drawn = len(PARENTS) if kind in ("sampled", "unlike") else 1
    tree = TokenTree.of([PARENTS], len(PARENTS), num_drawn=num_drawn)
    prefixes = [torch.zeros(ROWS, dtype=torch.int64)]
    rest: dict[int, Tensor] = {}
    tokens, proposed = [], []
    for parent, rank in zip(PARENTS, tree.ranks[0].tolist(), strict=True):
        depth = int(tree.depths[0, parent])
        probs = rest.get(parent, known.draft[depth][prefixes[parent]])
        token = torch.multinomial(probs.clamp_min(1e-12), 1, generator=generator).squeeze(1)
        if kind == "best" or (kind == "mixed" and rank):
            token = probs.argmax(-1)
        proposed.append(probs)
        left = probs.scatter(1, token.unsqueeze(1), 0.0)
        if kind == "sampled":
            left = probs
        is_left = left.sum(1, keepdim=True) > 0
        rest[parent] = torch.where(is_left, left, 1.0 / SIZE)
        rest[parent] = rest[parent] / rest[parent].sum(1, keepdim=True)
        tokens.append(token)
        prefixes.append(prefixes[parent] * SIZE + token)
    depths = tree.depths[0].tolist()
    rows = [known.target[at][prefix] for at, prefix in zip(depths, prefixes, strict=True)]
    is_certain = torch.from_numpy(tree.ranks > 0).expand(ROWS, -1) if kind == "mixed" else None
    probs_of = None if kind == "best" else torch.stack(proposed, 1)
    lengths = torch.randint(0, len(PARENTS) + 1, (ROWS,), generator=generator)
    same: Any = {
        name: torch.from_numpy(part).expand(ROWS, -1).numpy()
        for name, part in tree._asdict().items()
        if name != "num_drawn"
    }
    wide = tree._replace(**same)
    draft = Draft(torch.stack(tokens, 1), lengths, probs_of, is_certain=is_certain, tree=wide)
    return Grown(draft, torch.stack(rows, 1), torch.stack(prefixes, 1))


def check_shape(found: Accepted, grown: Grown) -> None:
    """The accepted tokens are the draft's, along a branch of its own tokens."""
    assert found.path is not None
    steps = torch.arange(found.path.shape[1])
    is_kept = steps < found.num_accepted.unsqueeze(1)
    own = grown.draft.token_ids.gather(1, (found.path - 1).clamp_min(0))
    assert torch.equal(found.token_ids[:, :-1][is_kept], own[is_kept])
    assert bool((found.path[is_kept] >= 1).all())
    assert bool((found.path <= grown.draft.num_tokens.unsqueeze(1))[is_kept].all())
    parents = torch.tensor([0, *PARENTS])[found.path.clamp_min(0)]
    before = torch.cat([torch.zeros(ROWS, 1, dtype=torch.int64), found.path[:, :-1]], 1)
    assert torch.equal(parents[found.path > 0], before[found.path > 0])


def complete(token_ids: Tensor, known: World, generator: torch.Generator) -> Tensor:
    """The number of each text of three tokens: the target's own draws follow what was emitted."""
    prefix = torch.zeros(ROWS, dtype=torch.int64)
    for depth in range(DEPTHS):
        drawn = torch.multinomial(known.target[depth][prefix], 1, generator=generator).squeeze(1)
        token = torch.where(token_ids[:, depth] >= 0, token_ids[:, depth], drawn)
        prefix = prefix * SIZE + token
    return prefix


def joint(known: World) -> Tensor:
    """[SIZE**3]: the target's law."""
    law = torch.ones(1)
    for table in known.target:
        law = (law.unsqueeze(1) * table).flatten()
    return law


def p_value(
    verifier: str, kind: str, spoil: Callable[[Noise], Noise] = lambda noise: noise
) -> float:
    """Of 100,000 texts, by trees of a kind, against the target's law. spoil: what noise is used."""
    known, generator = world(), torch.Generator().manual_seed(11)
    grown = grow(kind)
    accept = torch.rand(ROWS, len(PARENTS), generator=generator)
    shape = (ROWS, SIZE) if verifier == "rejection" else (ROWS, DEPTHS, SIZE)
    sample = torch.empty(shape).exponential_(generator=generator).clamp_min(1e-30)
    decide = reject_tree if verifier == "rejection" else couple_tree
    found = decide(grown.target, grown.draft, spoil(Noise(accept, sample)))
    check_shape(found, grown)
    counts = torch.bincount(complete(found.token_ids, known, generator), minlength=SIZE**DEPTHS)
    return chi_square_p_value(counts, joint(known))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["best", "sampled", "unlike", "mixed"])
@pytest.mark.parametrize("verifier", ["rejection", "coupled"])
def test_the_law_is_the_targets(verifier: str, kind: str) -> None:
    assert p_value(verifier, kind) > UNLIKELY


def _nothing_left_out(residual: Tensor, *_: object) -> Tensor:
    """What is refused leaves the target's distribution as it was."""
    return residual


def _nothing_taken(residual: Tensor, tokens: Tensor, is_refused: Tensor) -> Tensor:
    """The same, of certain tokens."""
    del residual, tokens
    return torch.zeros_like(is_refused, dtype=torch.float32)


def _as_if_certain(residual: Tensor, mass: Tensor, draft: Draft, at: Tensor) -> Tensor:
    """A token that was drawn takes itself alone from what is left."""
    del mass
    return residual.scatter(-1, draft.token_ids.gather(1, at).unsqueeze(-1), 0.0)


def _as_if_likely(draft: Draft) -> Tensor:
    """Every token is tested as one with probability 1."""
    return torch.ones_like(draft.token_ids, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault", "kind"),
    [
        ("_take_out", _nothing_taken, "best"),
        ("_take_out", _nothing_taken, "mixed"),
        ("_without", _nothing_left_out, "mixed"),
        ("_without", _nothing_left_out, "unlike"),
        ("_without", _as_if_certain, "sampled"),
        ("_without", _as_if_certain, "unlike"),
        ("proposed_probs", _as_if_likely, "sampled"),
        ("proposed_probs", _as_if_likely, "unlike"),
    ],
)
def test_faults_of_rejection_change_the_law(
    monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., Tensor], kind: str
) -> None:
    monkeypatch.setattr(tree_verifier, name, fault)
    assert p_value("rejection", kind) < UNLIKELY


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["rejection", "coupled"])
def test_noise_that_is_used_twice_changes_the_law(verifier: str) -> None:
    def spoil(noise: Noise) -> Noise:
        if verifier == "coupled":  # of all positions the first one's
            return noise._replace(sample=noise.sample[:, :1].expand_as(noise.sample))
        return noise._replace(accept=noise.accept[:, :1].expand_as(noise.accept))

    assert p_value(verifier, "best", spoil) < UNLIKELY


def chain_of(rows: int, width: int) -> TokenTree:
    return TokenTree.of([list(range(width))] * rows, width)


@given(data=st.data())
def test_a_chain_is_decided_as_a_chain(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    target = torch.rand(rows, width + 1, SIZE, generator=generator)
    target *= torch.rand(target.shape, generator=generator) < 0.7
    ids = torch.randint(0, SIZE, (rows, width), generator=generator)
    lengths = torch.randint(0, width + 1, (rows,), generator=generator)
    probs = torch.rand(rows, width, SIZE, generator=generator)
    draft = Draft(ids, lengths, probs if data.draw(st.booleans()) else None)
    accept = torch.rand(rows, width, generator=generator)
    sample = torch.empty(rows, width + 1, SIZE).exponential_(generator=generator)
    tree = draft._replace(tree=chain_of(rows, width))
    noise, coupled = Noise(accept, sample[:, 0]), Noise(accept, sample)
    for found, expected in (
        (reject_tree(target, tree, noise), rejection_sample(target, draft, noise)),
        (couple_tree(target, tree, coupled), coupled_sample(target, draft, coupled)),
    ):
        assert torch.equal(found.token_ids, expected.token_ids)
        assert torch.equal(found.num_accepted, expected.num_accepted)


SHAPES: list[Sequence[int]] = [(0, 0, 1, 2, 1), (0, 1, 2), (), (0, 0, 0, 3, 4, 4)]


def some_logits(seed: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(SHAPES), width + 1, SIZE, generator=generator) * 2


def along(found: Accepted, row: int) -> list[int]:
    """The places that were accepted, behind the text's own."""
    assert found.path is not None
    return [0, *found.path[row, : found.num_accepted[row]].tolist()]


@pytest.mark.parametrize("verifier", ["rejection", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_noise_of_keys_is_that_of_positions(verifier: str, temperature: float) -> None:
    """Alone and in a batch a row is decided alike; a chain among trees as among chains."""
    width = max(map(len, SHAPES))
    logits, mask = some_logits(0, width), torch.rand(len(SHAPES), width + 1, SIZE) < 0.8
    bitmask = pack_bitmask(mask)
    ids = torch.randint(0, SIZE, (len(SHAPES), width), generator=torch.Generator().manual_seed(5))
    params = SamplingParams(temperature=temperature)
    lengths = torch.tensor([len(shape) for shape in SHAPES])

    def decide(rows: list[int], *, is_tree: bool = True) -> Accepted:
        sampling = Sampling.stack([params] * len(rows), [40 + row for row in rows], CPU)
        keys = NoiseKeys(sampling.seeds, torch.tensor([100 + row for row in rows]))
        tree = TokenTree.of([SHAPES[row] for row in rows], width) if is_tree else None
        draft = Draft(ids[rows], lengths[rows], tree=tree)
        how = VerifyRows(sampling, keys, verifier)  # type: ignore[arg-type]
        return verify(logits[rows], bitmask[rows], draft, how)

    whole = decide([0, 1, 2, 3])
    for row, shape in enumerate(SHAPES):
        alone = decide([row])
        depth = alone.token_ids.shape[1]
        assert torch.equal(whole.token_ids[row, :depth], alone.token_ids[0])
        if list(shape) == list(range(len(shape))):
            chain = decide([row], is_tree=False)
            assert torch.equal(chain.token_ids[0, :depth], alone.token_ids[0])


def test_greedy_rows_follow_the_best_tokens() -> None:
    width = max(map(len, SHAPES))
    logits = some_logits(1, width)
    best = logits.argmax(-1)
    ids = torch.zeros(len(SHAPES), width, dtype=torch.int64)
    ids[0, 1], ids[0, 3] = best[0, 0], best[0, 2]  # the second behind the text, and one behind it
    ids[0, 0] = (best[0, 0] + 1) % SIZE
    ids[3] = (best[3, 0] + 1) % SIZE
    sampling = Sampling.stack([SamplingParams()] * len(SHAPES), [0] * len(SHAPES), CPU)
    tree = TokenTree.of(SHAPES, width)
    draft = Draft(ids, torch.tensor([len(shape) for shape in SHAPES]), tree=tree)
    found = verify(logits, None, draft, VerifyRows(sampling, NoiseKeys(*[sampling.seeds] * 2)))
    assert along(found, 0) == [0, 2, 4]
    assert found.token_ids[0, :3].tolist() == [best[0, 0], best[0, 2], best[0, 4]]
    assert along(found, 2) == along(found, 3) == [0]
    assert found.token_ids[2].tolist() == [best[2, 0], *[-1] * (found.token_ids.shape[1] - 1)]
    # Behind what was accepted, the path goes on as the draft would have.
    assert found.path is not None
    assert found.path[3].tolist() == [1, -1, -1]


def test_biases_and_penalties_count_the_tokens_of_a_branch() -> None:
    """Each place as if the branch that ends there were drafted alone."""
    words = ((1, 2), (3,))
    params = SamplingParams(
        repetition_penalty=2.0, frequency_penalty=0.7, presence_penalty=0.3, bad_words=words
    )
    width = max(map(len, SHAPES))
    logits = some_logits(2, width)
    ids = torch.randint(0, SIZE, (len(SHAPES), width), generator=torch.Generator().manual_seed(6))
    texts = [[0, 1, row % SIZE] for row in range(len(SHAPES))]

    def rules(rows: list[int]) -> Adjustments:
        asked = [TokenRules(params, words, ()) for _ in rows]
        table = RuleTable.stack(asked, SIZE, CPU)
        found = Adjustments.stack(table, [texts[row] for row in rows], [1] * len(rows))
        assert found is not None
        return found

    tree = TokenTree.of(SHAPES, width)
    lengths = torch.tensor([len(shape) for shape in SHAPES])
    draft = Draft(ids, lengths, tree=tree)
    found = _adjust(logits, draft, tree, rules([0, 1, 2, 3]))
    for row, shape in enumerate(SHAPES):
        for place in range(len(shape) + 1):
            seen = int(tree.ancestors[row, place])
            branch = [at for at in range(1, place + 1) if seen >> at & 1]
            drafted = ids[row, [at - 1 for at in branch]].unsqueeze(0)
            at = logits[row, place].view(1, 1, -1)
            expected = rules([row]).apply(at, drafted, len(branch))
            assert torch.equal(found[row, place], expected[0, 0])
    assert not torch.equal(found[0], logits[0])


def test_a_verifier_of_chains_is_refused() -> None:
    require_tree_verifier("coupled")
    with pytest.raises(ConfigError, match="decides no trees: take rejection, coupled"):
        require_tree_verifier("own")
