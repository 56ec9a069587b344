"""Generation loops over the toys: token by token, and by guided speculative steps."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from guided_spec.core import DecodeBatch, Proposer
from guided_spec.masks.constraint import Constraint
from guided_spec.models.hidden_states import HiddenStates
from guided_spec.ops.bitmask import apply_token_bitmask, pack_bitmask
from guided_spec.ops.sampling.warp import warp
from guided_spec.step import commit, speculative_step
from guided_spec.types import SamplingParams
from tests.toys import EOS, VOCAB_SIZE, Rule, ToyCompiled, ToyTarget, toy_batch


def target_probs(
    target: ToyTarget, rule: Rule | None, prompt: Sequence[int], output: Sequence[int]
) -> Tensor:
    """[V] what the next token must be distributed as, at temperature 1."""
    logits = target.logits((*prompt, *output))
    if rule is None:
        return torch.softmax(logits, -1)
    legal = torch.tensor([token in rule(tuple(output)) for token in range(VOCAB_SIZE)])
    sampling = toy_batch([[0]], [None], params=[SamplingParams(temperature=1.0)]).sampling
    return warp(apply_token_bitmask(logits, pack_bitmask(legal)).view(1, 1, -1), sampling)[0, 0]


def plain_greedy(target: ToyTarget, rule: Rule | None, prompt: list[int], length: int) -> list[int]:
    """One token at a time, without any of the package's step."""
    output: list[int] = []
    while len(output) < length and not (rule is not None and EOS in output):
        scores = target.logits((*prompt, *output)).tolist()
        options = range(VOCAB_SIZE) if rule is None else rule(tuple(output))
        output.append(max(options, key=lambda token: scores[token]))
    return output


FEATURE_SIZE = 32  # of the tiny models' hidden states


def toy_features(proposer: Proposer, context: Sequence[int], start: int) -> Tensor | None:
    """Hidden states of ``context[start:-1]`` as a target might have them: fixed by the prefix."""
    width = FEATURE_SIZE * len(proposer.aux_hidden_layers)
    rows = []
    for end in range(start + 1, len(context)):
        seed = zlib.crc32(repr(tuple(context[:end])).encode())
        rows.append(torch.randn(width, generator=torch.Generator().manual_seed(seed)))
    return torch.stack(rows) if rows and width else None


def toy_states(
    proposer: Proposer, batch: DecodeBatch, known: Sequence[int] | None = None
) -> HiddenStates:
    """Of each text of the batch but its last token. known: [B] positions that are known already."""
    states = HiddenStates()
    starts = known or [0] * len(batch)
    for slot, context, start in zip(batch.slots, batch.contexts, starts, strict=True):
        features = toy_features(proposer, context, start)
        if features is not None:
            states.push(slot, start, context, features)
    return states


def speculate(  # noqa: PLR0913
    target: ToyTarget,
    proposer: Proposer,
    rules: Sequence[Rule | None],
    prompt: list[int],
    *,
    length: int,
    k: int = 3,
    params: SamplingParams | None = None,
) -> list[list[int]]:
    """Guided speculation of ``length`` tokens a request; ended ones leave the batch.

    params: None is greedy; others are sampled with coupled verification, a seed a request.
    """
    constraints = [None if rule is None else Constraint(ToyCompiled(rule)) for rule in rules]
    outputs: list[list[int]] = [[] for _ in rules]
    known = [0] * len(rules)  # tokens whose hidden states the proposer has had
    live = list(range(len(rules)))
    while live:
        batch = toy_batch(
            [prompt + outputs[row] for row in live],
            [constraints[row] for row in live],
            k=k,
            limits=[length - len(outputs[row]) - 1 for row in live],
            params=None if params is None else [params] * len(live),
            seeds=live,
        )
        batch.verifier = "rejection" if params is None else "coupled"
        batch.slots = tuple(live)
        batch.states = toy_states(proposer, batch, [known[row] for row in live])
        for row, context in zip(live, batch.contexts, strict=True):
            known[row] = len(context) - 1
        step = speculative_step(target, proposer, batch)
        for row, committed in zip(list(live), commit(batch, step.accepted), strict=True):
            assert committed.error is None
            outputs[row] += committed.token_ids
            if _is_ended(constraints[row]) or len(outputs[row]) >= length:
                live.remove(row)
                proposer.release([row])
    return outputs


def _is_ended(constraint: Constraint | None) -> bool:
    return constraint is not None and constraint.is_terminated
