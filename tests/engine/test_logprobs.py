"""Log-probabilities are those of a plain pass over prompt and output, whoever drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Completion
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.models.heads.loading import load_head
from guided_spec.ops.bitmask import unpack_bitmask
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.ops.sampling.logprobs import gather_logprobs
from guided_spec.types import LogprobsMode, SamplingParams
from tests.cases import pairwise
from tests.engine.test_equality import PARAMS, PROMPTS
from tests.learned_heads import HeadedTarget, overfit, write_head
from tests.ops.sampling.test_warp import reference_probs
from tests.tiny_llm import VOCAB_SIZE, make_llm, near_copy, tiny_model

PROPOSERS = ("none", "ngram", "draft_model", "chain:grammar_forced+draft_model", "eagle3")
FORCED = GrammarSpec.regex("(?:abcdef){12}")

ASKED: tuple[tuple[int | None, LogprobsMode], ...] = (
    (3, "masked"),
    (5, "raw"),
    (20, "processed"),
    (0, "raw"),
    (None, "raw"),
    (2, "processed"),
    (1, "masked"),
)
WARPED: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 12},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.02},
    {},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.95, "min_p": 0.001},
    {"temperature": 1.0, "top_p": 0.8},
)


def ask(shift: int, *, is_sampled: bool) -> list[SamplingParams]:
    """The seven requests, each under the ``shift``-th mode from its own."""
    asked = []
    for row, params in enumerate(PARAMS):
        count, mode = ASKED[(row + shift) % len(ASKED)]
        # The reference knows of no budget.
        one = replace(params, logprobs=count, logprobs_mode=mode, complete=False)
        asked.append(replace(one, seed=row, **WARPED[row]) if is_sampled else one)
    return asked


def near(expected: Any) -> Any:
    """To 1e-5, absolute or relative: a batch and a whole text round differently."""
    return pytest.approx(expected, rel=1e-5, abs=1e-5)


def adjust(
    row: list[float], prompt: list[int], output: list[int], params: SamplingParams
) -> list[float]:
    """Biases and penalties on one row, token by token."""
    row = list(row)
    for token, bias in dict(params.logit_bias).items():
        row[token] += bias
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        row[token] *= 1 / factor if row[token] > 0 else factor
    for token in output:
        row[token] -= params.frequency_penalty
    for token in set(output):
        row[token] -= params.presence_penalty
    return row


class Reference:
    """Teacher-forced passes of the transformers model, masks of fresh matchers, plain filters."""

    def __init__(self, llm: LLM) -> None:
        self._model: PreTrainedModel = llm.model
        self._llm = llm
        self._backend = XGrammarBackend(llm.vocabulary)
        self._known: dict[Any, Tensor] = {}

    def logits(self, prompt: list[int], output: list[int]) -> Tensor:
        """[len(output), V] float32."""
        with torch.inference_mode():
            found: Tensor = self._model(torch.tensor([prompt + output])).logits
        return found[0, len(prompt) - 1 : -1].float()

    def masked(self, logits: Tensor, output: list[int], spec: GrammarSpec | None) -> Tensor:
        if spec is None:
            return logits
        matcher = self._backend.compile(spec).new_matcher()
        words = torch.zeros(len(output), num_mask_words(VOCAB_SIZE), dtype=torch.int32)
        for row, token in enumerate(output):
            matcher.fill_next_token_bitmask(words, row)
            assert matcher.accept_token(token)
        return logits.masked_fill(~unpack_bitmask(words, VOCAB_SIZE), -torch.inf)

    def logprobs(self, prompt: Any, output: list[int], params: SamplingParams) -> Tensor:
        """[len(output), V] in the mode that ``params`` ask for."""
        key = (prompt, *output, params.logprobs_mode, params.temperature)
        if key not in self._known:
            self._known[key] = self._logprobs(prompt, output, params)
        return self._known[key]

    def _logprobs(self, prompt: Any, output: list[int], params: SamplingParams) -> Tensor:
        logits = self.logits(self._llm.encode(prompt), output)
        if params.logprobs_mode == "raw":
            return logits.double().log_softmax(-1)
        masked = self.masked(logits, output, params.grammar)
        if params.logprobs_mode == "masked":
            return masked.double().log_softmax(-1)
        text = self._llm.encode(prompt)
        rows = []
        for place, row in enumerate(masked.tolist()):
            adjusted = adjust(row, text, output[:place], params)
            rows.append(reference_probs(adjusted, params))
        return torch.tensor(rows, dtype=torch.float64).log()

    def check(self, prompt: Any, completion: Completion, params: SamplingParams) -> None:
        if params.logprobs is None:
            assert completion.logprobs is None
            return
        assert completion.logprobs is not None
        found = completion.logprobs
        assert [one.token_id for one in found] == completion.token_ids
        table = self.logprobs(prompt, completion.token_ids, params)
        for one, row in zip(found, table, strict=True):
            assert one.logprob == near(float(row[one.token_id]))
            assert one.logprob <= 0
            best = row.sort(descending=True).values[: params.logprobs]
            values = [top.logprob for top in one.top]
            assert values == near(best[best > -torch.inf].tolist())
            own = [float(row[top.token_id]) for top in one.top]
            assert values == near(own)


REFERENCES: dict[Any, Reference] = {}


def reference(llm: LLM) -> Reference:
    """The one of this target: most texts are met again under other proposers."""
    return REFERENCES.setdefault(llm.model, Reference(llm))


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> HeadedTarget:
    """A target and an EAGLE-3 head that knows its greedy texts."""
    headed = write_head(tmp_path_factory.mktemp("heads") / "eagle3", "eagle3", VOCAB_SIZE)
    with make_llm(headed.target, "none") as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        texts = [llm.encode(p) + o.token_ids for p, o in zip(PROMPTS, outputs, strict=True)]
    overfit(load_head("eagle3", headed.draft, headed.target), headed.target, texts)
    return headed


def open_llm(proposer: str, taught: HeadedTarget, **options: Any) -> LLM:
    if proposer == "eagle3":
        return make_llm(taught.target, proposer, taught.draft, **options)
    return make_llm("llama", proposer, near_copy("llama"), **options)


def run(llm: LLM, params: list[SamplingParams]) -> list[Completion]:
    outputs = llm.generate(PROMPTS, params, on_error="return")
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return [output.completions[0] for output in outputs]


@cache
def plain_texts(target: Any, shift: int, *, is_sampled: bool) -> list[list[int]]:
    with make_llm(target, "none", max_batch_size=1, verifier="coupled") as llm:
        return [c.token_ids for c in run(llm, ask(shift, is_sampled=is_sampled))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("proposer", "is_sampled", "batch_size"), pairwise(PROPOSERS, (False, True), (1, 5))
)
def test_equal_to_a_plain_pass(
    taught: HeadedTarget, proposer: str, batch_size: int, *, is_sampled: bool
) -> None:
    """Two assignments of the modes to the requests, so that each meets grammars and none."""
    verifier = "coupled" if is_sampled else "rejection"
    accepted = 0
    with open_llm(proposer, taught, max_batch_size=batch_size, verifier=verifier) as llm:
        for shift in (0, 3):
            params = ask(shift, is_sampled=is_sampled)
            found = run(llm, params)
            target = tiny_model("llama") if proposer != "eagle3" else taught.target
            expected = plain_texts(target, shift, is_sampled=is_sampled)
            assert [c.token_ids for c in found] == expected
            for prompt, completion, one in zip(PROMPTS, found, params, strict=True):
                reference(llm).check(prompt, completion, one)
                accepted += sum(completion.stats.accepted)
    assert accepted > (20 if proposer not in ("none", "ngram") else -1)


@pytest.mark.parametrize("proposer", ["draft_model", "chain:grammar_forced+draft_model"])
def test_of_texts_that_rejection_samples(taught: HeadedTarget, proposer: str) -> None:
    """The text is another one than plain sampling's; its log-probabilities are its own."""
    params = ask(1, is_sampled=True)
    with open_llm(proposer, taught) as llm:
        for prompt, completion, one in zip(PROMPTS, run(llm, params), params, strict=True):
            reference(llm).check(prompt, completion, one)


@pytest.mark.parametrize("mode", ["raw", "masked", "processed"])
def test_only_the_processed_ones_see_biases_and_penalties(
    taught: HeadedTarget, mode: LogprobsMode
) -> None:
    params = SamplingParams(
        max_tokens=24,
        temperature=0.9,
        seed=2,
        logit_bias={7: 2.0, 9: -3.5, 300: 5.0},
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.2,
        logprobs=5,
        logprobs_mode=mode,
        grammar=GrammarSpec.regex("[a-z ]{40}"),
        complete=False,
    )
    with open_llm("chain:grammar_forced+draft_model", taught) as llm:
        completion = llm.generate("The name", params)[0].completions[0]
        reference(llm).check("The name", completion, params)
    assert sum(completion.stats.accepted) > 0


def test_of_every_sample(taught: HeadedTarget) -> None:
    grammar = GrammarSpec.regex("[a-z]{12}")
    params = SamplingParams(
        n=4, temperature=1.0, seed=3, logprobs=4, logprobs_mode="masked", grammar=grammar
    )
    with open_llm("chain:grammar_forced+draft_model", taught) as llm:
        (output,) = llm.generate("The name", params)
        for completion in output.completions:
            reference(llm).check("The name", completion, params)
    assert len({c.text for c in output.completions}) > 1
    assert output.logprobs == output.completions[0].logprobs


@pytest.fixture(scope="module")
def chain() -> Any:
    """Every draft is accepted: the draft model is the target."""
    with make_llm("llama", "chain:grammar_forced+draft_model", tiny_model("llama")) as llm:
        yield llm


ENDS: Sequence[dict[str, Any]] = (
    {"stop": "def"},
    {"stop": ["efa", "fabcdefab"]},
    {"max_tokens": 1},
    {"max_tokens": 7},
    {"stop_token_ids": range(100, 400)},
    {},
)


@pytest.mark.parametrize("end", ENDS)
def test_cut_where_the_tokens_are_cut(chain: LLM, end: dict[str, Any]) -> None:
    """Inside accepted blocks; streamed pieces join to the whole."""
    params = SamplingParams(grammar=FORCED, complete=False, logprobs=2, **end)
    completion = chain.generate("The name", params)[0].completions[0]
    reference(chain).check("The name", completion, params)
    chunks = list(chain.stream("The name", params))
    last = chunks[-1].completion
    assert last is not None
    assert last.logprobs is not None
    assert [one for chunk in chunks for one in chunk.logprobs] == last.logprobs
    assert [one.token_id for one in last.logprobs] == completion.token_ids
    assert completion.stats.acceptance_length > 2 or len(completion.token_ids) < 8


def test_a_failed_request_keeps_those_of_its_tokens(chain: LLM) -> None:
    params = [
        SamplingParams(logprobs=1, grammar=GrammarSpec.regex("(")),
        SamplingParams(max_tokens=2),
    ]
    failed, served = chain.generate(["A", "A"], params, on_error="return")
    assert failed.finish_reason == "error"
    assert failed.logprobs == []
    assert served.logprobs is None


def test_nothing_is_computed_unless_asked(chain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counting(scores: Any, token_ids: Tensor, plan: Any) -> Any:
        found = gather_logprobs(scores, token_ids, plan)
        calls.append(found.values.shape[0])
        return found

    monkeypatch.setattr("guided_spec.step.gather_logprobs", counting)
    free = SamplingParams(max_tokens=6)
    chain.generate(["A", "B"], free)
    assert calls == []
    chain.generate(["A", "B", "C"], [free, replace(free, logprobs=0), free])
    assert set(calls) == {1}  # rows of the others are left alone
