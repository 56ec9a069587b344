"""Whole texts through LMDeploy's own sampling and draft loop, with our helper inside."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from tests.integrations.lmdeploy.world import Requests, toy_tokenizer
from tests.toys import EOS, VOCAB_SIZE, ToyCompiled, ToyTarget, hashed_rule, text_rule

K = 3
TARGET = ToyTarget(seed=5)


class ToyQueue:
    """The compile queue of a manager, with toy grammars that count their rows."""

    def __init__(self, grammars: dict[str, ToyCompiled]) -> None:
        self.grammars = grammars

    def submit(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        future: Future[CompiledGrammar] = Future()
        future.set_result(self.grammars[spec.source])
        return future


def toy_manager(modules: Any, grammars: dict[str, ToyCompiled]) -> Any:
    manager = modules.agent.GuidedDecodingManager(toy_tokenizer(), VOCAB_SIZE)
    manager.close()
    manager._queue = ToyQueue(grammars)
    return manager


def regex_format(name: str) -> dict[str, str]:
    return {"type": "regex_schema", "regex_schema": name}


class Drafter:
    """Stands in for the draft model's forward: random logits, of which some agree with the target.

    target_ids: the draft vocabulary; None for the target's own.
    """

    def __init__(self, requests: Requests, target_ids: Tensor | None = None) -> None:
        self.texts: list[list[int]] = []
        self.target_ids = target_ids
        self.requests = requests
        self.generator = torch.Generator().manual_seed(11)
        proposer = requests.agent.proposer
        requests.agent._forward_impl = self.forward
        proposer.get_logits = self.logits
        if target_ids is not None:
            proposer.draft_id_to_target_id = target_ids
            proposer._init_bitmask_translate_constants()

    def forward(self, inputs: Any) -> dict[str, Any]:
        hidden = torch.zeros(1, inputs.input_ids.shape[1], 4)
        return {"hidden_states": hidden, "hidden_states_prenorm": hidden, "model_metas": None}

    def logits(self, hidden: Tensor) -> Tensor:
        assert hidden.shape[1] == len(self.texts)
        rows = torch.stack([TARGET.logits(text) for text in self.texts])
        noisy = rows + 2 * torch.randn(rows.shape, generator=self.generator)
        return (noisy if self.target_ids is None else noisy[:, self.target_ids]).unsqueeze(0)


def generate(
    requests: Requests, drafter: Drafter, formats: Sequence[Any], params: dict[str, Any]
) -> list[list[int]]:
    """Texts up to their end-of-text token; ended requests leave the batch, as in the engine."""
    texts: list[list[int]] = [[] for _ in formats]
    running = list(range(len(formats)))
    drafts: Tensor | None = None
    torch.manual_seed(0)  # LMDeploy's portable operators draw the first tokens with it
    for step in range(150):
        seeds = [100 + row for row in running]
        chosen = [formats[row] for row in running]
        sampling = requests.sampling(seeds, params, chosen, running)
        contexts = [texts[row] for row in running]
        if drafts is None:
            rows = torch.stack([TARGET.logits(context) for context in contexts])
            drawn = requests.prefill(rows, sampling)
            inputs = requests.inputs(len(running), 0, width=3, is_decoding=False)
        else:
            rows = torch.stack(
                [
                    torch.stack([TARGET.logits([*text, *draft[:i]]) for i in range(K + 1)])
                    for text, draft in zip(contexts, drafts.tolist(), strict=True)
                ]
            )
            drawn = requests.decode(rows, drafts, sampling, history=3 + 4 * step)
            inputs = requests.inputs(len(running), 3, width=K + 1)
        for row, tokens in zip(running, drawn.token_ids.tolist(), strict=True):
            new = [token for token in tokens if token >= 0]
            texts[row] += new[: new.index(EOS) + 1] if EOS in new else new
        drafter.texts = [texts[row] for row in running]
        drafts = requests.draft(inputs, drawn.extra, sampling)
        keep = [i for i, row in enumerate(running) if texts[row][-1] != EOS]
        running, drafts = [running[i] for i in keep], drafts[keep]
        if not running:
            return texts
    raise AssertionError("the texts did not end")


def greedy(rule: Any) -> list[int]:
    text: list[int] = []
    while not text or text[-1] != EOS:
        legal = list(rule(tuple(text)))
        text.append(max(legal, key=lambda token: float(TARGET.logits(text)[token])))
    return text


@pytest.mark.parametrize("method", ["deepseek_mtp", "eagle3"])
def test_the_greedy_text_is_that_of_plain_constrained_decoding(modules: Any, method: str) -> None:
    rules = {str(seed): hashed_rule(seed) for seed in range(6)}
    manager = toy_manager(modules, {name: ToyCompiled(rule) for name, rule in rules.items()})
    requests = Requests(modules, K, manager, method)
    is_reduced = method == "eagle3"
    drafter = Drafter(requests, torch.tensor([7, 0, 11, 3, 4]) if is_reduced else None)
    texts = generate(requests, drafter, [regex_format(name) for name in rules], {"top_k": 1})
    assert texts == [greedy(rule) for rule in rules.values()]


def test_sampled_texts_are_legal_and_free_requests_stay_free(modules: Any) -> None:
    rule = hashed_rule(2)
    manager = toy_manager(modules, {"a": ToyCompiled(rule)})
    requests = Requests(modules, K, manager)
    formats = [regex_format("a") if row % 2 else None for row in range(12)]
    texts = generate(requests, Drafter(requests), formats, {"temperature": 1.5, "top_p": 0.95})
    for text in texts[1::2]:
        assert all(token in rule(tuple(text[:at])) for at, token in enumerate(text))
    illegal = [t for t in texts[::2] if any(x not in rule(tuple(t[:i])) for i, x in enumerate(t))]
    assert illegal, "the free requests were masked too"


def test_a_row_is_filled_once_for_drafter_and_target(modules: Any) -> None:
    grammar = ToyCompiled(hashed_rule(4))
    manager = toy_manager(modules, {"a": grammar})
    requests = Requests(modules, K, manager)
    text = generate(requests, Drafter(requests), [regex_format("a")], {"top_k": 1})[0]
    on_text = [grammar.fills[tuple(text[:at])] for at in range(len(text))]
    assert set(on_text) == {1}


def test_starved_drafts_take_the_only_legal_token(modules: Any) -> None:
    """The head knows none of the text's tokens, so that it drafts nothing but what is forced."""
    rule = text_rule([b"abcd"])
    manager = toy_manager(modules, {"a": ToyCompiled(rule)})
    requests = Requests(modules, K, manager, "eagle3")
    drafter = Drafter(requests, torch.tensor([8, 9]))
    sampling = requests.sampling([1], {"top_k": 1}, [regex_format("a")])
    drawn = requests.prefill(TARGET.logits([]), sampling)
    drafter.texts = [[0]]
    inputs = requests.inputs(1, 0, width=3, is_decoding=False)
    assert drawn.token_ids.tolist() == [[0]]
    assert requests.draft(inputs, drawn.extra, sampling).tolist() == [[1, 2, 3]]


def test_a_new_turn_and_a_changed_format_get_a_new_matcher(modules: Any) -> None:
    grammars = {"a": ToyCompiled(text_rule([b"a"])), "b": ToyCompiled(text_rule([b"b"]))}
    requests = Requests(modules, K, toy_manager(modules, grammars))
    logits = torch.zeros(VOCAB_SIZE)
    logits[7] = 1.0  # what a matcher that has ended lets through

    def first(name: str) -> int:
        sampling = requests.sampling([1], {"top_k": 1}, [regex_format(name)])
        return int(requests.prefill(logits, sampling).token_ids)

    assert [first("a"), first("a")] == [0, EOS]  # one turn goes on
    requests.params.clear()
    assert first("a") == 0
    requests.params.clear()
    assert first("b") == 1


def test_a_failed_grammar_ends_its_request_alone(
    modules: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing may follow "a" in one grammar; the other request goes on."""
    dead = ToyCompiled(lambda prefix: frozenset({0}) if not prefix else frozenset())
    manager = toy_manager(modules, {"dead": dead, "a": ToyCompiled(text_rule([b"abcd"]))})
    requests = Requests(modules, K, manager)
    formats = [regex_format("dead"), regex_format("a")]
    sampling = requests.sampling([1, 2], {"top_k": 1}, formats)
    assert requests.prefill(torch.zeros(VOCAB_SIZE), sampling).token_ids.tolist() == [[0], [0]]
    drafts = torch.tensor([[5, 5, 5], [1, 2, 3]])
    logging.getLogger("lmdeploy").propagate = True
    with caplog.at_level("ERROR", logger="lmdeploy"):
        drawn = requests.decode(torch.zeros(K + 1, VOCAB_SIZE), drafts, sampling)
    assert drawn.token_ids.tolist() == [[EOS, -1, -1, -1], [1, 2, 3, EOS]]
    assert drawn.extra.next_token_ids.tolist() == [EOS, EOS]
    assert "GrammarDeadEndError" in caplog.text
    assert manager.take_stops() == {0: 0, 1: 3}
