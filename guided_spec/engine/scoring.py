"""Given texts behind a prompt, scored: how likely their tokens are among the legal ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import log_softmax

from guided_spec.engine.outputs import Chunk
from guided_spec.engine.request import Job, Request, State
from guided_spec.errors import NoTokenLeftError
from guided_spec.grammar.choice_tree import ChoiceTree, TokenRow
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.models.causal_lm import CausalLM, SlotInputs
from guided_spec.models.padding import pad_ids

__all__ = ["ScoringRequest", "score_rows"]


class ScoringRequest(Request):
    """A request that writes nothing: its slot reads the rows of a tree behind the prompt.

    tree: whose nodes are asked about. rows: of it, one a step.
    scores: by node, the log-probabilities of its branches; those of ``rows`` once it has ended.
    """

    after_prompt = State.SCORE

    def __init__(
        self,
        job: Job,
        vocabulary: Vocabulary,
        report: Callable[[Chunk], None],
        tree: ChoiceTree,
        rows: Sequence[TokenRow],
    ) -> None:
        super().__init__(job, vocabulary, report)
        self.tree = tree
        self.scores: dict[int, list[float]] = {}
        self._rows = list(rows)

    @property
    def row(self) -> TokenRow:
        """What the next forward reads."""
        return self._rows[0]

    def take(self, scores: dict[int, list[float]]) -> None:
        """The scores of ``row``; ends the request behind the last one."""
        if any(map(math.isnan, sum(scores.values(), []))):
            self.fail(NoTokenLeftError("the model gives no legal token any probability"))
        self.scores |= scores
        del self._rows[0]
        if not self._rows:
            self.finish("stop")


def score_rows(model: CausalLM, requests: Sequence[ScoringRequest]) -> None:
    """One forward over the next row of each request. Their slots keep their prompts alone."""
    rows = [request.row for request in requests]
    fed = [[r.tokens[-1], *row.token_ids] for r, row in zip(requests, rows, strict=True)]
    counts = [len(token_ids) for token_ids in fed]
    starts = [request.prompt_length - 1 for request in requests]
    slots = [request.slot for request in requests]
    output = model.forward(SlotInputs(pad_ids(fed, max(counts)), slots, starts, counts))
    model.commit([0] * len(requests))
    assert output.logits is not None
    asked = [
        (at, request.tree.nodes[node])
        for at, request in enumerate(requests)
        for node in request.row.nodes
    ]
    widest = max(len(node.branches) for _, node in asked)
    ids = torch.tensor([_padded([b.token_id for b in n.branches], widest) for _, n in asked])
    places = torch.tensor([(at, len(node.path)) for at, node in asked])
    places, ids = places.to(model.device), ids.to(model.device)
    logits = output.logits[places[:, :1], places[:, 1:], ids.clamp(min=0)]
    logits = logits.cpu().double().masked_fill(ids.cpu() < 0, -math.inf)
    found = iter(log_softmax(logits, -1).tolist())
    for request, row in zip(requests, rows, strict=True):
        branches = {node: len(request.tree.nodes[node].branches) for node in row.nodes}
        request.take({node: next(found)[:count] for node, count in branches.items()})


def _padded(token_ids: list[int], width: int) -> list[int]:
    return token_ids + [-1] * (width - len(token_ids))
