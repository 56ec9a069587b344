"""The scores of texts that the caller passes, a row of tokens of each in a forward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch.nn.functional import log_softmax

from guided_spec.engine.request import Request
from guided_spec.errors import NoTokenLeftError
from guided_spec.grammar.text.choice_tree import ChoiceTree, TokenRow
from guided_spec.models.causal_lm import CausalLM
from guided_spec.models.stock.slots import SlotInputs
from guided_spec.ops.host import pad_ids, to_device


def score_rows(model: CausalLM, requests: Sequence[Request]) -> None:
    """One forward over the next row of each request. Their slots keep their prompts alone.

    A request ends after its last row, or where the model gives no branch any probability.
    """
    tasks = [_next(request) for request in requests]
    fed = [[one.request.text.tokens[-1], *one.row.token_ids] for one in tasks]
    counts = [len(token_ids) for token_ids in fed]
    starts = [request.text.prompt_length - 1 for request in requests]
    slots = [request.text.slot for request in requests]
    before = model.save_states(slots)
    output = model.forward(SlotInputs(pad_ids(fed, max(counts)), slots, starts, counts))
    model.commit(counts, counts)
    model.load_states(slots, before)
    assert output.logits is not None
    asked = [(at, one.tree.nodes[node]) for at, one in enumerate(tasks) for node in one.row.nodes]
    listed = [[branch.token_id for branch in node.branches] for _, node in asked]
    ids = pad_ids(listed, max(map(len, listed)), -1)
    indices = to_device([(at, len(node.path)) for at, node in asked], model.device)
    logits = output.logits[indices[:, :1], indices[:, 1:], ids.to(model.device).clamp(min=0)]
    logits = logits.cpu().double().masked_fill(ids < 0, -math.inf)
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
