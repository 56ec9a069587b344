"""The verifier's decision on trees of draft tokens: one branch of each, and one token behind it.

``reject_tree`` tries the tokens that follow an accepted place one after another, each against what
the ones before it have left of the target's distribution: the multi-round rejection of SpecInfer
(Miao et al., 2024, algorithm 2), with the strict test of ``rejection_sample``. With the residual r,
which is the target at first, and the distribution q that the token x was drawn from:

    accept x where u q(x) < r(x), else r = max(r - q, 0), normalized

Tokens drawn without replacement are drawn from other distributions, each given those before it:
that is the q of each. Where none is accepted, the next token is drawn from what is left. A chain is
decided as ``rejection_sample`` decides it.

``couple_tree`` follows the target's own draws, as ``coupled_sample`` does.

Both are exact whatever the tree is, as long as it was chosen without the noise that verifies it;
``couple_tree`` even then.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from guided_spec.errors import ConfigError
from guided_spec.ops.bitmask import apply_token_bitmask
from guided_spec.ops.host import to_device
from guided_spec.ops.sampling.adjust import Adjustments
from guided_spec.ops.sampling.rejection import dense_probs, draw, proposed_probs
from guided_spec.ops.sampling.warp import VerifyRows, warp
from guided_spec.ops.trees.token_tree import TokenTree
from guided_spec.types import Accepted, Draft, Noise


def reject_tree(target_probs: Tensor, draft: Draft, noise: Noise) -> Accepted:
    """Accept a branch of every row's tree and draw one more token; exact for any draft.

    target_probs: [B, N + 1, V] float32, row i + 1 given the branch that ends with draft token i; a
        row of zeros means that no token is legal there.
    draft: N >= 1 tokens a row with a ``tree``; ``probs`` of each is what it was drawn from, given
        the tokens before it in the row; None means one-hot. Those beyond ``tree.num_drawn`` behind
        a place are one-hot whatever it says.
    noise: ``accept`` [B, >= N], one number for each token; ``sample`` [B, V].

    All on one device, no sync.
    """
    tree = _tree_of(draft)
    children = _children(tree, draft)
    residual, proposed = target_probs.clone(), proposed_probs(draft)
    mass = torch.ones_like(target_probs[..., 0])
    chosen = torch.full_like(children[0], -1)
    for rank, nodes in enumerate(children):
        at = nodes.clamp_min(0)
        tokens = draft.token_ids.gather(1, at).unsqueeze(-1)
        scaled = noise.accept.gather(1, at) * proposed.gather(1, at) * mass
        is_asked = (nodes >= 0) & (chosen < 0)
        is_kept = is_asked & (scaled < residual.gather(-1, tokens).squeeze(-1))
        chosen = torch.where(is_kept, nodes, chosen)
        is_refused = is_asked & ~is_kept
        if draft.probs is None or rank >= tree.num_drawn:
            mass = mass - _take_out(residual, tokens, is_refused)
        else:
            left = _without(residual, mass, draft, at)
            residual = torch.where(is_refused.unsqueeze(-1), left, residual)
            mass = torch.where(is_refused, residual.sum(-1), mass)
    # As in ``rejection_sample``, rounding may leave nothing of a residual that is not empty.
    is_left = (residual > 0).any(-1, keepdim=True)
    left = torch.where(is_left, residual, target_probs)
    parents = to_device(tree.parents, chosen.device)
    places = torch.arange(parents.shape[1], device=chosen.device)
    is_chosen = chosen.gather(1, parents) == places
    return _follow(draft, is_chosen, draw(left, noise.sample.unsqueeze(1)))


def couple_tree(target_probs: Tensor, draft: Draft, noise: Noise) -> Accepted:
    """Accept the branch that equals the target's own draws, and emit the first that differs.

    As ``reject_tree``, but ``probs`` of the draft is not used, and ``noise.sample`` is
    [B, >= D + 1, V]: that of the position that follows i draft tokens in row i.
    """
    tree = _tree_of(draft)
    # Behind a row's own tokens, where nothing is accepted, the depth may be anything.
    depths = to_device(np.minimum(tree.depths, tree.depth), target_probs.device)
    size = noise.sample.shape[-1]
    sample = noise.sample.gather(1, depths.unsqueeze(-1).expand(-1, -1, size))
    return _match(draft, draw(target_probs, sample))


TREE_VERIFIERS: dict[str, Callable[[Tensor, Draft, Noise], Accepted]] = {
    "rejection": reject_tree,
    "coupled": couple_tree,
}


def require_tree_verifier(name: str) -> None:
    """Raise ConfigError for a verifier that decides chains alone."""
    if name not in TREE_VERIFIERS:
        known = ", ".join(TREE_VERIFIERS)
        raise ConfigError("verifier", name, f"decides no trees: take {known}, or tree_nodes=0")


def verify_tree(logits: Tensor, bitmask: Tensor | None, draft: Draft, rows: VerifyRows) -> Accepted:
    """Accept a branch of every row's tree and draw one more token, see ``verify``.

    logits: [B, N + 1, V]; row 0 follows the text, row i + 1 the branch that ends with draft token
        i. bitmask: int32 [B, N + 1, W], or None.

    ``path`` of what it returns has as many places as the deepest branch has tokens.
    """
    tree = _tree_of(draft)
    logits = apply_token_bitmask(logits, bitmask)
    if rows.adjustments is not None:
        logits = _adjust(logits, draft, tree, rows.adjustments)
    if rows.sampling.all_greedy:  # both verifiers decide alike, under any noise
        best = logits.max(-1)
        return _match(draft, torch.where(best.values > float("-inf"), best.indices, -1))
    noise = _draw_noise(tree, rows, logits.shape[-1])
    return TREE_VERIFIERS[rows.verifier](warp(logits, rows.sampling), draft, noise)


def _tree_of(draft: Draft) -> TokenTree:
    assert draft.tree is not None
    return draft.tree


def _children(tree: TokenTree, draft: Draft) -> tuple[Tensor, ...]:
    """``TokenTree.children``, each int64 [B, N + 1] on the device; -1 also behind a row's end."""
    found = to_device(tree.children(), draft.token_ids.device)
    return found.masked_fill(found >= draft.num_tokens.view(1, -1, 1), -1).unbind(0)


def _match(draft: Draft, drawn: Tensor) -> Accepted:
    """The branch whose tokens are those drawn at the places that they follow, int64 [B, N + 1]."""
    parents = to_device(_tree_of(draft).parents, drawn.device)
    return _follow(draft, draft.token_ids == drawn.gather(1, parents), drawn)


def _take_out(residual: Tensor, tokens: Tensor, is_refused: Tensor) -> Tensor:
    """Refuse certain tokens int64 [B, P, 1], which take no more than themselves, in place.

    is_refused: bool [B, P]. Returns what they had, [B, P].
    """
    known = residual.gather(-1, tokens)
    taken = known * is_refused.unsqueeze(-1)
    residual.scatter_(-1, tokens, known - taken)
    return taken.squeeze(-1)


def _without(residual: Tensor, mass: Tensor, draft: Draft, at: Tensor) -> Tensor:
    """[B, P, V]: what refusing the draft tokens ``at`` int64 [B, P] leaves of it, not normalized.

    mass: [B, P], the sum of each residual.
    """
    tokens = draft.token_ids.gather(1, at)
    assert draft.probs is not None
    index = at.unsqueeze(-1).expand(-1, -1, draft.probs.shape[-1])
    certain = None if draft.is_certain is None else draft.is_certain.gather(1, at)
    picked = Draft(tokens, draft.num_tokens, draft.probs.gather(1, index), draft.columns, certain)
    taken = dense_probs(picked, residual.shape[-1]) * mass.unsqueeze(-1)
    return (residual - taken).clamp_min(0)


def _follow(draft: Draft, is_chosen: Tensor, last: Tensor) -> Accepted:
    """The branch of every row from its text on, and behind it how the draft would have gone on.

    is_chosen: bool [B, N], the tokens that are accepted where the place that they follow is; of
    those that follow one place only the first counts. last: int64 [B, N + 1], what is drawn behind
    each place where none is.
    """
    tree, device = _tree_of(draft), is_chosen.device
    width, depth = is_chosen.shape[1], tree.depth
    # Ancestors of each place, its depth, and the way through it: one upload.
    bits = (tree.ancestors[:, :, None] >> np.arange(1, width + 1)) & 1
    tables = np.concatenate([bits, tree.depths[:, :, None], tree.ways()], -1)
    ancestors, depths, ways = to_device(tables, device).split([width, 1, depth], -1)
    is_own = torch.arange(width, device=device) < draft.num_tokens.unsqueeze(1)
    refused = (~(is_chosen & is_own)).unsqueeze(1) & (ancestors != 0)
    reached = torch.where(refused.any(-1), -1, depths.squeeze(-1))
    num_accepted, end = reached.max(1, keepdim=True)
    path = ways.gather(1, end.unsqueeze(-1).expand(-1, -1, depth)).squeeze(1)
    path = path.masked_fill(path > draft.num_tokens.unsqueeze(1), -1)
    is_kept = torch.arange(depth, device=device) < num_accepted
    followed = draft.token_ids.gather(1, (path - 1).clamp_min(0))
    token_ids = functional.pad(torch.where(is_kept, followed, -1), (0, 1), value=-1)
    token_ids.scatter_(1, num_accepted, last.gather(1, end))
    return Accepted(token_ids, num_accepted.squeeze(1), path)


def _draw_noise(tree: TokenTree, rows: VerifyRows, vocab_size: int) -> Noise:
    """As ``draw_noise``: that of a chain, and more for the tokens that have others beside them."""
    if isinstance(rows.noise, Noise):
        return rows.noise
    # The first token behind a place has the number of a chain's at its position, others their own.
    offsets = tree.depths[:, 1:] - 1 + (tree.ranks.clip(0) << 32)
    given, is_coupled = to_device(offsets, rows.noise.seeds.device), rows.verifier == "coupled"
    return rows.noise.draw(given, tree.depth, vocab_size, at_each=is_coupled)


def _adjust(logits: Tensor, draft: Draft, tree: TokenTree, adjustments: Adjustments) -> Tensor:
    """Every branch as the chain that it is; places of several branches come out alike."""
    adjusted = logits.float()
    for branch in tree.branches():
        places = to_device(branch, logits.device)
        index = places.unsqueeze(-1).expand(-1, -1, logits.shape[-1])
        drafted = draft.token_ids.gather(1, (places[:, 1:] - 1).clamp_min(0))
        found = adjustments.apply(logits.gather(1, index), drafted)
        if (branch[:, 1:] == branch[:, :-1]).any():  # a shorter branch ends with its own last row
            ends = to_device((branch[:, 1:] != branch[:, :-1]).sum(1), logits.device)
            steps = torch.arange(branch.shape[1], device=logits.device).expand_as(places)
            steps = torch.minimum(steps, ends.unsqueeze(1)).unsqueeze(-1)
            found = found.gather(1, steps.expand_as(found))
        adjusted = adjusted.scatter(1, index, found)
    return adjusted
