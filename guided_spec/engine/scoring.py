"""Given texts behind a prompt, scored: how likely their tokens are among the legal ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import log_softmax

from guided_spec.engine.request import Request
from guided_spec.errors import NoTokenLeftError
from guided_spec.grammar.choice_tree import ChoiceTree, TokenRow
from guided_spec.models.causal_lm import CausalLM, SlotInputs
from guided_spec.models.packed.graph_pool import pad_ids

__all__ = ["score_rows", "scored_length"]


def score_rows(model: CausalLM, requests: Sequence[Request]) -> None:
    """One forward over the next row of each request. Their slots keep their prompts alone.

    A request ends behind its last row, or where the model gives no branch any probability.
    """
    tasks = [_next(request) for request in requests]
    fed = [[one.request.text.tokens[-1], *one.row.token_ids] for one in tasks]
    counts = [len(token_ids) for token_ids in fed]
    starts = [request.text.prompt_length - 1 for request in requests]
    slots = [request.text.slot for request in requests]
    output = model.forward(SlotInputs(pad_ids(fed, max(counts)), slots, starts, counts))
    model.commit([0] * len(requests))
    assert output.logits is not None
    asked = [(at, one.tree.nodes[node]) for at, one in enumerate(tasks) for node in one.row.nodes]
    widest = max(len(node.branches) for _, node in asked)
    ids = torch.tensor([_padded([b.token_id for b in n.branches], widest) for _, n in asked])
    places = torch.tensor([(at, len(node.path)) for at, node in asked])
    places, ids = places.to(model.device), ids.to(model.device)
    logits = output.logits[places[:, :1], places[:, 1:], ids.clamp(min=0)]
    logits = logits.cpu().double().masked_fill(ids.cpu() < 0, -math.inf)
    found = iter(log_softmax(logits, -1).tolist())
    for one in tasks:
        branches = {node: len(one.tree.nodes[node].branches) for node in one.row.nodes}
        one.take({node: next(found)[:count] for node, count in branches.items()})


def scored_length(request: Request) -> int:
    """Positions that the request's slot holds while its next row is scored."""
    return request.text.prompt_length + len(_next(request).row.token_ids)


class _Task(NamedTuple):
    """The row that a request reads next. is_last: no other follows."""

    request: Request
    tree: ChoiceTree
    row: TokenRow
    is_last: bool

    def take(self, scores: dict[int, list[float]]) -> None:
        """The scores of the row."""
        if any(map(math.isnan, sum(scores.values(), []))):
            error = NoTokenLeftError("the model gives no legal token any probability")
            self.request.fail(error)
        self.request.scores.append(scores)
        if self.is_last:
            self.request.finish("stop")


def _next(request: Request) -> _Task:
    assert request.job.scoring is not None
    tree, rows = request.job.scoring
    at = len(request.scores)
    return _Task(request, tree, rows[at], at == len(rows) - 1)


def _padded(token_ids: list[int], width: int) -> list[int]:
    return token_ids + [-1] * (width - len(token_ids))
