"""A forward over trees is one along each of their branches, of which one is kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from guided_spec.models.causal_lm import CausalLM
from guided_spec.models.packed.packed_lm import Rows
from guided_spec.models.stock.slots import SlotInputs
from guided_spec.ops.host import pad_ids
from guided_spec.ops.trees.token_tree import TokenTree
from tests.models.packed.test_packed import FAMILY, STOCK, VOCAB, make
from tests.models.speculation import prompts_of

SLOTS, LENGTHS = [3, 0], [19, 6]
PARENTS = [[0, 1, 0, 3, 2, 2], [0, 1, 2]]  # of three branches, and of one
PATHS = [[1, 2, 6], [1, 2, 3]]  # kept: places of the rows


def tree_rows(tree: TokenTree, counts: list[int]) -> Rows:
    return Rows(SLOTS, [length - 1 for length in LENGTHS], counts, tree.line(counts))


def expected(model: torch.nn.Module, text: list[int]) -> Tensor:
    found: Tensor = model(torch.tensor([text])).logits[0, -1]
    return found


@pytest.mark.parametrize("name", [*FAMILY, *STOCK])
@torch.inference_mode()
def test_each_branch_is_read_as_if_it_stood_alone(name: str) -> None:
    model = make(name)
    lm = CausalLM(model, num_slots=4, max_length=70, kernels="packed")
    texts = prompts_of(LENGTHS, VOCAB, 0)
    begun = [text[:-1] for text in texts]
    lm.forward(SlotInputs(pad_ids(begun, 18), SLOTS, [0, 0], [18, 5]), logits="none")
    tree = TokenTree.of(PARENTS, 6)
    counts = [len(parents) + 1 for parents in PARENTS]
    nodes = [
        [text[-1], *range(10, 10 + len(own))] for text, own in zip(texts, PARENTS, strict=True)
    ]
    fed = torch.tensor(sum(nodes, []))
    rows = tree_rows(tree, counts)
    # A prompt is read along: its tokens are a chain.
    together = Rows([*SLOTS, 1], [*rows.starts, 0], [*counts, 9], rows.tree)
    line = lm.forward_line(torch.cat([fed, torch.arange(9)]), together)
    logits, at = lm.logits(line.states), 0
    for text, own, seen in zip(texts, nodes, tree.ancestors, strict=True):
        for place in range(len(own)):
            branch = [token for other, token in enumerate(own) if int(seen[place]) >> other & 1]
            torch.testing.assert_close(
                logits[at], expected(model, text[:-1] + branch), atol=1e-4, rtol=1e-4
            )
            at += 1
    torch.testing.assert_close(logits[-1], expected(model, list(range(9))), atol=1e-4, rtol=1e-4)

    lm.keep_branch(SLOTS, rows.starts, torch.tensor(PATHS))
    kept = [
        text[:-1] + [own[0], *(own[place] for place in path)]
        for text, own, path in zip(texts, nodes, PATHS, strict=True)
    ]
    starts = [len(text) for text in kept]
    line = lm.forward_line(torch.tensor([5, 6]), Rows(SLOTS, starts, [1, 1]))
    for found, text, token in zip(lm.logits(line.states), kept, (5, 6), strict=True):
        torch.testing.assert_close(found, expected(model, [*text, token]), atol=1e-4, rtol=1e-4)
