"""The law of LMDeploy's verification against the closed form, before ``install`` and after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from guided_spec.integrations.lmdeploy.plugin import install, uninstall
from tests.integrations.lmdeploy.world import Requests, closed_form, toy_tokenizer, world
from tests.toys import VOCAB_SIZE, chi_square_p_value

K = 2
BATCH = 20_000
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.3, "temperature": 1.5},
    {"top_k": 8, "top_p": 0.8, "temperature": 1.3},
    {"top_p": 0.5, "min_p": 0.3, "temperature": 2.0},
]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield world(monkeypatch)
    uninstall()


def _logits() -> Tensor:
    return torch.randn(K + 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(3)) * 1.5


def _drafts(logits: Tensor) -> Tensor:
    """The third best token of each position: likely, and outside of the narrow filters."""
    return logits[:K].argsort(-1, descending=True)[:, 2].expand(BATCH, -1).clone()


def _p_values(modules: Any, params: dict[str, Any]) -> list[float]:
    """For each position, of the tokens drawn there by the requests that came so far."""
    logits, requests = _logits(), Requests(modules, K)
    drafts = _drafts(logits)
    drawn = requests.decode(logits, drafts, requests.sampling(range(BATCH), params)).token_ids
    found = []
    for position in range(K + 1):
        tokens = drawn[:, position][drawn[:, position] >= 0]
        counts = torch.bincount(tokens, minlength=VOCAB_SIZE)
        if len(tokens) > 100:
            found.append(chi_square_p_value(counts, closed_form(logits[position], params)))
    return found


@pytest.mark.parametrize("params", SETTINGS[1:], ids=str)
def test_lmdeploys_own_sampler_filters_the_bonus_token_only(
    modules: Any, params: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    assert _p_values(modules, params)[0] < 1e-6


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_every_position_has_the_law_of_plain_decoding(modules: Any, params: dict[str, Any]) -> None:
    install()
    found = _p_values(modules, params)
    assert min(found) > 1e-3
    if params == SETTINGS[0]:
        assert len(found) == K + 1, "no request came to the bonus token"


def test_a_seed_gives_the_same_tokens_alone_and_again_only_when_installed(modules: Any) -> None:
    logits = _logits()
    drafts = _drafts(logits)[:64]

    def draw(seeds: list[int]) -> Tensor:
        requests = Requests(modules, K)
        sampling = requests.sampling(seeds, {"temperature": 1.2})
        return requests.decode(logits, drafts[: len(seeds)], sampling).token_ids

    assert not torch.equal(draw(list(range(64))), draw(list(range(64))))
    install()
    together = draw(list(range(64)))
    assert torch.equal(together, draw(list(range(64))))
    assert torch.equal(together[40:41], draw([40]))


def test_positions_that_several_steps_touch_share_no_noise(modules: Any) -> None:
    """LMDeploy adds one to its offsets a step: after two tokens the next step would draw again
    what has been drawn."""
    install()
    requests, logits = Requests(modules, K), torch.zeros(K + 1, VOCAB_SIZE)
    drafts = torch.zeros(4000, K, dtype=torch.int64)
    sampling = requests.sampling(range(4000), {})
    first = requests.decode(logits, drafts, sampling, history=7).token_ids[:, 0]
    same = requests.decode(logits, drafts, sampling, history=7).token_ids[:, 0]
    later = requests.decode(logits, drafts, sampling, history=8).token_ids[:, 0]
    assert torch.equal(first, same)
    pairs = torch.bincount(first * VOCAB_SIZE + later, minlength=VOCAB_SIZE**2)
    assert chi_square_p_value(pairs, torch.ones(VOCAB_SIZE**2)) > 1e-3


def test_greedy_requests_share_a_batch_with_others(modules: Any) -> None:
    install()
    requests, logits = Requests(modules, K), _logits()
    best = logits.argmax(-1)
    drafts = torch.stack([best[:K], best[:K].flip(0)])
    sampling = requests.sampling([1, 2], {"top_k": [1, 0], "temperature": [1.0, 0.3]})
    drawn = requests.decode(logits, drafts, sampling)
    assert drawn.token_ids[0].tolist() == best.tolist()
    assert drawn.extra.num_rejected_tokens[0] == 0
    assert drawn.extra.next_token_ids[0] == best[-1]
    requests.params.clear()
    both = requests.sampling([1, 2], {"top_k": 1})
    greedy = requests.decode(logits, drafts.flip(0), both).token_ids
    assert greedy[1].tolist() == best.tolist()
    assert greedy[0].tolist() == [int(best[0]), -1, -1]


GRAMMAR = {"type": "regex_schema", "regex_schema": "[abc](d|1)?(0|a)*"}
LEGAL_FIRST = (0, 1, 2)


@pytest.mark.parametrize("params", [SETTINGS[0], SETTINGS[1], SETTINGS[5]], ids=str)
def test_a_grammar_and_filters_together_have_the_law_of_masked_decoding(
    modules: Any, params: dict[str, Any]
) -> None:
    install()
    batch, logits = 4000, _logits()
    manager = modules.agent.GuidedDecodingManager(toy_tokenizer(), VOCAB_SIZE)
    requests = Requests(modules, K, manager)
    sampling = requests.sampling(range(batch), params, [GRAMMAR] * batch)
    drafts = torch.tensor([[1, 9]]).expand(batch, -1).clone()  # "b1"
    drawn = requests.decode(logits, drafts, sampling).token_ids
    law = closed_form(logits[0], params, LEGAL_FIRST)
    assert chi_square_p_value(torch.bincount(drawn[:, 0], minlength=VOCAB_SIZE), law) > 1e-3
    second = drawn[:, 1][(drawn[:, 0] == 1) & (drawn[:, 1] >= 0)]
    law = closed_form(logits[1], params, (3, 9, 10, 0, 11))
    assert chi_square_p_value(torch.bincount(second, minlength=VOCAB_SIZE), law) > 1e-3
    manager.close()
