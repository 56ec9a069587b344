"""Proposers that learn from earlier texts: what they are shown, and that no text's law changes."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from guided_spec.core import DecodeBatch, FinishedText, ProposerContext
from guided_spec.engine import engine
from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Completion
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.masks.lookahead import Lookahead
from guided_spec.proposers import PROPOSERS
from guided_spec.proposers.drafting import no_draft
from guided_spec.types import Draft, SamplingParams
from tests.tiny_llm import make_llm
from tests.toys import chi_square_p_value

RECORD = GrammarSpec.regex("(name|kind|item): [a-c]{6}; (age|size): [0-4]{6}")
PARAMS = SamplingParams(max_tokens=40, grammar=RECORD)


class Watcher:
    """Drafts nothing, and keeps what it is shown."""

    aux_hidden_layers: tuple[int, ...] = ()
    learns = True

    def __init__(self, context: ProposerContext) -> None:
        del context
        self.texts: list[FinishedText] = []
        self.is_broken = False

    def propose(self, batch: DecodeBatch, lookahead: Lookahead) -> Draft:
        del lookahead
        return no_draft(batch)

    def learn(self, texts: Sequence[FinishedText]) -> None:
        if self.is_broken:
            raise RuntimeError("it has learned enough")
        self.texts += [replace_tokens(text) for text in texts]

    def release(self, slots: Sequence[int]) -> None:
        """Nothing is kept by slot."""


def replace_tokens(text: FinishedText) -> FinishedText:
    return text._replace(token_ids=tuple(text.token_ids))


@pytest.fixture
def watchers() -> Iterator[list[Watcher]]:
    """Those that were made, as the proposer "watcher"."""
    made: list[Watcher] = []

    def factory(context: ProposerContext) -> Watcher:
        made.append(Watcher(context))
        return made[-1]

    PROPOSERS["watcher"] = factory
    yield made
    del PROPOSERS["watcher"]


@pytest.mark.parametrize("proposer", ["watcher", "chain:grammar_forced+watcher"])
def test_whole_texts_are_shown(watchers: list[Watcher], proposer: str) -> None:
    params = [PARAMS, SamplingParams(max_tokens=3, cache_salt="mine")]
    with make_llm("llama", proposer) as llm:
        outputs = llm.generate(["A", "B"], params)
        prompts = [llm.encode(prompt) for prompt in "AB"]
    (watcher,) = watchers
    rows = zip(prompts, outputs, [(RECORD, None), (None, "mine")], strict=True)
    assert sorted(watcher.texts, key=lambda text: text.token_ids[0]) == [
        FinishedText(source, (*prompt, *output.token_ids), len(prompt))
        for prompt, output, source in rows
    ]


def test_texts_that_fail_or_are_cancelled_are_not_shown(watchers: list[Watcher]) -> None:
    banned = replace(PARAMS, allowed_token_ids=(5,))
    with make_llm("llama", "watcher") as llm:
        (failed,) = llm.generate("A", banned, on_error="return")
        assert failed.error is not None
        chunks = llm.stream(["A", "B"], SamplingParams(max_tokens=100, ignore_eos=True))
        assert isinstance(chunks, Generator)
        next(chunks)
        chunks.close()
        llm.generate("A", PARAMS)
    assert [text.source for text in watchers[0].texts] == [(RECORD, None)]


def test_a_proposer_that_breaks_while_it_learns_ends_nobody(
    watchers: list[Watcher], caplog: pytest.LogCaptureFixture
) -> None:
    with make_llm("llama", "watcher") as llm:
        watchers[0].is_broken = True
        lengths = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 30)]
        llm.generate(["A", "B"], lengths)
    assert "it has learned enough" in caplog.text


def accepted(completion: Completion) -> int:
    return sum(completion.stats.accepted)


@pytest.mark.parametrize("verifier", ["rejection", "coupled"])
@pytest.mark.parametrize("proposer", ["suffix", "chain:grammar_forced+suffix"])
def test_later_texts_take_fewer_steps_but_for_those_of_another_salt(
    proposer: str, verifier: str
) -> None:
    with make_llm("llama", proposer, verifier=verifier) as llm:

        def write(params: SamplingParams) -> Completion:
            return llm.generate("The record is", params)[0].completions[0]

        first, again = write(PARAMS), write(PARAMS)
        other = write(replace(PARAMS, cache_salt="mine"))
        another = write(replace(PARAMS, grammar=GrammarSpec.regex(f"({RECORD.source})")))
        cut = write(replace(PARAMS, max_tokens=1, complete=False))
    assert again.text == first.text == other.text
    assert again.stats.steps < first.stats.steps
    assert accepted(again) > accepted(first) == accepted(other) == accepted(another)
    assert other.stats.steps == first.stats.steps
    assert len(cut.token_ids) == 1


def test_without_drafts_without_a_grammar_and_several_samples() -> None:
    free = SamplingParams(temperature=1.0, seed=4, n=3, max_tokens=20)
    params = [replace(PARAMS, n=2, temperature=1.0, seed=2), free]
    found = []
    for proposer, k in (("none", 4), ("suffix", 0), ("suffix", 1), ("suffix", 4)):
        with make_llm("llama", proposer, verifier="coupled", num_draft_tokens=k) as llm:
            runs = [llm.generate(["A", "B"], params) for _ in range(2)]
            found.append([[c.text for o in run for c in o.completions] for run in runs])
    assert found == [found[0]] * 4


@pytest.mark.parametrize("verifier", ["rejection", "coupled"])
@pytest.mark.parametrize("proposer", ["suffix", "chain:grammar_forced+suffix", "ngram"])
def test_equal_requests_part_where_one_learns_from_the_other(
    uniform: PreTrainedModel, proposer: str, verifier: str
) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12)
    with make_llm(uniform, proposer, verifier=verifier) as llm:
        texts = [tuple(output.token_ids) for output in llm.generate(["A"] * 2, params)]
        texts.append(tuple(llm.generate("A", params)[0].token_ids))
    parts = verifier == "rejection" and "suffix" in proposer
    assert len(set(texts)) == (3 if parts else 1)


# --- the law of a text whose draft was learned from equal requests --------------------------------

LETTERS = GrammarSpec.regex("[xyz][xyz] ")
SEEDS = 400


def law_of_the_last(llm: LLM, requests: int) -> float:
    """How likely the last texts of so many equal requests are, one after another, over the seeds.

    Each seed has a salt of its own: its requests learn from one another alone.
    """
    params = [
        SamplingParams(
            temperature=1.0, seed=seed, cache_salt=str(seed), grammar=LETTERS, max_tokens=4
        )
        for seed in range(SEEDS)
    ]
    for _ in range(requests):
        outputs = llm.generate(["A"] * SEEDS, params)
    texts = [a + b for a in "xyz" for b in "xyz"]
    counts = torch.tensor([sum(out.text[:2] == text for out in outputs) for text in texts])
    assert int(counts.sum()) == SEEDS
    return chi_square_p_value(counts, torch.full((len(texts),), 1 / len(texts)))


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["suffix", "chain:grammar_forced+suffix"])
def test_the_law_holds_where_equal_requests_are_learned_from(
    uniform: PreTrainedModel, proposer: str
) -> None:
    with make_llm(uniform, proposer, max_batch_size=50) as llm:
        assert law_of_the_last(llm, 4) > 1e-6


@pytest.mark.slow
def test_the_law_is_broken_where_equal_requests_share_their_noise(
    monkeypatch: pytest.MonkeyPatch, uniform: PreTrainedModel
) -> None:
    monkeypatch.setattr(engine, "noise_key", lambda key, _: key)
    with make_llm(uniform, "suffix", max_batch_size=50) as llm:
        assert law_of_the_last(llm, 4) < 1e-6
