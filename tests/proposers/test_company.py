"""What a request drafts does not depend on its company: nor does what its seed gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from guided_spec import proposers
from guided_spec.core import Proposer
from guided_spec.proposers import build_proposer
from tests.proposers.company import CONFIG, Company, Member, ToyModel, alone
from tests.tiers import examples
from tests.toys import ToyDrafter, ToyTarget, hashed_rule, text_rule, toy_context

CHAINS = (
    "model",
    "chain:ngram+model",
    "chain:grammar_forced+model",
    "chain:grammar_forced+last",
    "chain:grammar_forced+model+ngram",
    "chain:grammar_forced+narrow+ngram",
    "chain:ngram+toy+model",
    "chain:model+ngram",
)
RULES = (
    None,
    text_rule([b'{"ab":1}', b'{"ab":0,"cd":1}', b'{"b":10}']),
    text_rule([b"ab:cd", b"ba:cd", b"ab,dcba", b"cab0", b"dab1"]),
    hashed_rule(5),
)
PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"frequency_penalty": 1.0},
    {"logit_bias": {0: 2.0, 3: -1.0}},
    {"allowed_token_ids": (6, 7, 8, 11)},  # of which "narrow" knows none
    {"bad_words": ([0, 1],), "min_tokens": 3},
    {"top_k": 3},
    {"repetition_penalty": 1.3, "max_tokens": 5},
)
POLICIES = (None, "mask", "validate")
FREE, GUIDED = Member(None), Member(RULES[1])

members = st.builds(
    lambda rule, params, policy, joins: Member(rule, {**params, "draft_policy": policy}, joins),
    st.sampled_from(RULES),
    st.sampled_from(PARAMS),
    st.sampled_from(POLICIES),
    st.integers(0, 3),
)


def narrow(text: Sequence[int]) -> Tensor:
    """The logits of a model that knows half of the tokens."""
    logits = ToyTarget(7, scale=0.5).logits(text).clone()
    logits[6:] = -torch.inf
    return logits


@pytest.fixture(autouse=True, scope="module")
def _toys() -> Iterator[None]:
    model = ToyTarget(7, scale=0.5)
    toys = {
        "model": lambda _: ToyModel(model.logits),
        "last": lambda _: ToyModel(model.logits, "validate"),
        "narrow": lambda _: ToyModel(narrow),
        "toy": lambda _: ToyDrafter(model),
    }
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        for name, factory in toys.items():
            patch.setitem(proposers.PROPOSERS, name, factory)
        yield


def build(spec: str) -> Proposer:
    return build_proposer(spec, toy_context(config=CONFIG))


@settings(max_examples=examples(80))
@example("chain:ngram+model", [FREE, GUIDED], 1)
@example("chain:grammar_forced+model", [GUIDED, Member(RULES[2], {"draft_policy": "validate"})], 2)
@example("chain:grammar_forced+narrow+ngram", [Member(None, PARAMS[4]), GUIDED], 3)
@given(
    st.sampled_from(CHAINS), st.lists(members, min_size=2, max_size=3), st.integers(0, 2**31 - 1)
)
def test_drafts_and_texts_are_the_same_alone_and_in_any_company(
    spec: str, company: list[Member], seed: int
) -> None:
    found = Company(company, seed).write(build(spec))
    assert found == [alone(member, seed, build(spec)) for member in company]
