"""A trace holds what the engine did: tokens, verdicts, counts and probabilities, token by token."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Completion
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.ops.bitmask import unpack_bitmask
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.ops.sampling.logprobs import gather_step_probs
from guided_spec.trace.record import StepTrace, TokenTrace, Trace, from_json, to_json
from guided_spec.types import SamplingParams
from tests.engine.test_equality import REQUESTS
from tests.learned_heads import write_head
from tests.tiny_llm import VOCAB_SIZE, make_llm, near_copy, tiny_model

PROPOSERS = (
    "none",
    "ngram",
    "draft_model",
    "draft_model:validate",
    "chain:grammar_forced+ngram",
    "chain:grammar_forced+ngram+draft_model",
)
PROMPTS = [prompt for prompt, _ in REQUESTS]
FORCED = GrammarSpec.regex("(?:abcdef){12}")
CONTACT = GrammarSpec.json_schema(
    {
        "type": "object",
        "properties": {
            "ok": {"type": "boolean"},
            "tags": {"type": "array", "items": {"enum": [7]}},
        },
        "required": ["ok", "tags"],
    }
)


def ask(temperature: float) -> list[SamplingParams]:
    """The reference knows of no budget."""
    return [
        replace(params, temperature=temperature, seed=row, complete=False)
        for row, (_, params) in enumerate(REQUESTS)
    ]


def run(llm: LLM, params: list[SamplingParams]) -> list[Completion]:
    outputs = llm.generate(PROMPTS, params, on_error="return", trace=True)
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return [output.completions[0] for output in outputs]


def trace_of(completion: Completion | None) -> Trace:
    assert completion is not None
    assert completion.trace is not None
    return completion.trace


def check_text(completion: Completion) -> None:
    """The trace is that of the text and of its statistics."""
    trace, stats = trace_of(completion), completion.stats
    assert trace.token_ids == completion.token_ids
    assert (trace.text, trace.finish_reason) == (completion.text, completion.finish_reason)
    assert (trace.drafted_at(), sum(trace.accepted_at())) == (stats.drafted, sum(stats.accepted))
    assert len(trace.steps) == stats.steps
    forced = [t for step in trace.steps for t in step.drafted if t.source == "forced"]
    assert len(forced) == stats.forced
    starts = [step.start for step in trace.steps]
    assert starts == [sum(s.num_kept for s in trace.steps[:at]) for at in range(len(starts))]
    ends = [step.at for step in trace.steps]
    assert ends == sorted(ends)
    assert 0 < sum(step.seconds for step in trace.steps) <= trace.seconds + 1e-9
    assert trace.prompt_tokens == stats.prompt_tokens
    assert from_json(to_json([trace])) == [trace]


def check_outcomes(step: StepTrace) -> None:
    """Accepted ones first, then one that was rejected, then those that nobody looked at."""
    outcomes = [token.outcome for token in step.drafted]
    accepted = outcomes.count("accepted")
    rest = outcomes[accepted:]
    assert outcomes[:accepted] == ["accepted"] * accepted
    assert rest == (["rejected"] + ["unused"] * (len(rest) - 1) if rest else [])
    if step.drawn is not None:
        assert step.drawn.outcome == ("replacement" if rest else "bonus")
        assert step.drawn.source == "target"


class Reference:
    """One pass of a model over each step's draft, and a fresh matcher for each position."""

    def __init__(self, llm: LLM, prompt: str, params: SamplingParams) -> None:
        self._prompt = llm.encode(prompt)
        spec = params.grammar
        backend = XGrammarBackend(llm.vocabulary)
        self._compiled = None if spec is None else backend.compile(spec)

    def logits(self, model: Any, output: list[int], draft: list[int]) -> Tensor:
        """[len(draft) + 1, V]."""
        text = torch.tensor([[*self._prompt, *output, *draft]], device=model.device)
        with torch.inference_mode():
            logits: Tensor = model(text).logits
        return logits[0, -len(draft) - 1 :].double().cpu()

    def legal(self, tokens: list[int]) -> Tensor | None:
        """bool [V], True everywhere for free text; None behind a refused token or an end."""
        if self._compiled is None:
            return torch.ones(VOCAB_SIZE, dtype=torch.bool)
        matcher = self._compiled.new_matcher()
        if not all(not matcher.is_terminated() and matcher.accept_token(t) for t in tokens):
            return None
        if matcher.is_terminated():
            return None
        row = torch.zeros(1, num_mask_words(VOCAB_SIZE), dtype=torch.int32)
        matcher.fill_next_token_bitmask(row, 0)
        return unpack_bitmask(row, VOCAB_SIZE)[0]

    def check(self, trace: Trace, target: Any, draft_model: Any) -> None:
        output: list[int] = []
        for step in trace.steps:
            check_outcomes(step)
            draft = [token.id for token in step.drafted]
            logits = self.logits(target, output, draft)
            drafters = self.logits(draft_model, output, draft)
            for at, token in enumerate(step.drafted):
                legal = self.legal([*output, *draft[:at]])
                self._check_token(token, logits[at], legal)
                self._check_draft_prob(token, drafters[at], legal)
            accepted = sum(token.outcome == "accepted" for token in step.drafted)
            legal = self.legal([*output, *draft[:accepted]])
            if step.drawn is not None:
                self._check_token(step.drawn, logits[accepted], legal)
            output += [token.id for token in step.tokens]

    def _check_token(self, token: TokenTrace, logits: Tensor, legal: Tensor | None) -> None:
        if legal is None:
            assert (token.allowed, token.target_prob) == (None, None)
            return
        assert token.allowed == (None if self._compiled is None else int(legal.sum()))
        probs = logits.masked_fill(~legal, -torch.inf).softmax(-1)
        assert token.target_prob == pytest.approx(float(probs[token.id]), rel=1e-3, abs=1e-6)

    def _check_draft_prob(self, token: TokenTrace, logits: Tensor, legal: Tensor | None) -> None:
        if token.draft_prob is not None and legal is not None and token.outcome != "unused":
            if token.source.endswith("validate"):
                legal = torch.ones_like(legal)
            probs = logits.masked_fill(~legal, -torch.inf).softmax(-1)
            assert token.draft_prob == pytest.approx(float(probs[token.id]), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_equal_to_what_was_generated(proposer: str, temperature: float) -> None:
    params = ask(temperature)
    sources: Counter[str] = Counter()
    with make_llm("llama", proposer, near_copy("llama"), max_batch_size=3) as llm:
        for prompt, completion, one in zip(PROMPTS, run(llm, params), params, strict=True):
            check_text(completion)
            trace = trace_of(completion)
            Reference(llm, prompt, one).check(trace, llm.model, near_copy("llama"))
            drafted = [token for step in trace.steps for token in step.drafted]
            sources.update(token.source for token in drafted)
            for token in drafted:  # of the proposers the model alone draws
                is_drawn = temperature > 0 and token.source.startswith("draft_model")
                assert (token.draft_prob is not None) == is_drawn
            assert trace.grammar == (None if one.grammar is None else one.grammar.kind)
    name, _, members = proposer.partition(":")
    named = {"forced", *members.split("+")[1:]} if name == "chain" else {proposer} - {"none"}
    assert {*sources} == named


def test_of_a_head_with_a_vocabulary_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its probabilities stand in fewer columns than the target has tokens."""
    headed = write_head(tmp_path_factory.mktemp("heads") / "eagle3", "eagle3", VOCAB_SIZE)
    params = [replace(one, temperature=1.0) for one in ask(1.0)]
    with make_llm(headed.target, "chain:grammar_forced+eagle3", headed.draft) as llm:
        completions = run(llm, params)
    found: Counter[str] = Counter()
    for completion in completions:
        check_text(completion)
        for token in (t for step in trace_of(completion).steps for t in step.drafted):
            found[token.source] += 1
            assert (token.draft_prob is None) == (token.source == "forced")
            assert token.draft_prob is None or 0 < token.draft_prob <= 1
    assert found["eagle3"] > 20
    assert found["forced"] > 5


def test_the_verdict_follows_from_the_processed_probabilities() -> None:
    """A token stays with certainty where the target likes it as much as the drafter."""
    params = [replace(one, top_k=9) for one in ask(0.8)]
    verdicts: Counter[str] = Counter()
    with make_llm("llama", "draft_model", near_copy("llama")) as llm:
        for completion in run(llm, params):
            for step in trace_of(completion).steps:
                for token in step.drafted:
                    if token.outcome == "unused" or token.processed_prob is None:
                        continue
                    assert token.draft_prob is not None
                    verdicts[token.outcome] += 1
                    if token.outcome == "rejected":
                        assert token.processed_prob < token.draft_prob
                    else:
                        assert token.processed_prob > 0
                assert step.drawn is None or step.drawn.processed_prob
    assert min(verdicts["accepted"], verdicts["rejected"]) > 5


ENDS: tuple[dict[str, Any], ...] = (
    {"stop": "def"},
    {"max_tokens": 1},
    {"max_tokens": 7},
    {"stop_token_ids": range(100, 400)},
    {},
)


@pytest.mark.parametrize("end", ENDS)
def test_tokens_behind_the_end_are_not_in_the_text(end: dict[str, Any]) -> None:
    params = SamplingParams(grammar=FORCED, complete=False, **end)
    with make_llm("llama", "chain:grammar_forced+draft_model", tiny_model("llama")) as llm:
        completion = llm.generate("The name", params, trace=True)[0].completions[0]
    check_text(completion)
    step = trace_of(completion).steps[-1]
    accepted = sum(token.outcome == "accepted" for token in step.drafted)
    assert step.num_kept <= accepted + (step.drawn is not None)


def test_places_in_the_json_that_is_written() -> None:
    with make_llm("llama", "chain:grammar_forced+draft_model", near_copy("llama")) as llm:
        (output,) = llm.generate("{", SamplingParams(grammar=CONTACT, max_tokens=60), trace=True)
        assert output.trace is not None
        before = ""
        for step in output.trace.steps:
            for token in step.tokens:
                if before.endswith('"ok": '):
                    assert token.place == "/ok"
                if before.endswith(", 7"):
                    assert token.place is not None
                    assert token.place.startswith("/tags/")
                before += token.text
        assert before == output.text
        assert output.trace.steps[0].tokens[0].place == ""
        (free,) = llm.generate("{", SamplingParams(max_tokens=9), trace=True)
        assert free.trace is not None
        assert {t.place for step in free.trace.steps for t in step.drafted} <= {None}


def test_places_begin_behind_the_marker() -> None:
    spec = CONTACT.after("=", reasoning_budget=4)
    with make_llm("llama", "chain:grammar_forced+ngram") as llm:
        (output,) = llm.generate("x", SamplingParams(grammar=spec, max_tokens=80), trace=True)
        assert output.trace is not None
        tokens = [token for step in output.trace.steps for token in step.tokens]
    texts = [token.text for token in tokens]
    marker = next(at for at, text in enumerate(texts) if text.endswith("="))
    assert {token.place for token in tokens[: marker + 1]} == {None}
    assert "/ok" in {token.place for token in tokens[marker + 1 :]}


def test_drafts_before_a_marker_are_counted_as_reasoning() -> None:
    """By the texts that the trace has: the marker is one character here."""
    spec = CONTACT.after("=", reasoning_budget=12)
    with make_llm("llama", "chain:grammar_forced+draft_model", near_copy("llama")) as llm:
        (output,) = llm.generate("x", SamplingParams(grammar=spec, max_tokens=80), trace=True)
    drafted = accepted = 0
    text = ""
    for step in trace_of(output.completions[0]).steps:
        ahead = text
        for token in step.drafted:
            is_before = "=" not in ahead and token.source != "forced"
            drafted += is_before
            accepted += is_before and token.outcome == "accepted"
            ahead += token.text
        text += "".join(token.text for token in step.tokens)
    assert (output.stats.reasoning, output.stats.reasoning_accepted) == (drafted, accepted)
    assert 0 < drafted < sum(output.stats.drafted)


def test_of_every_sample_and_of_streams() -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=3, grammar=GrammarSpec.regex("[a-z]{12}"))
    with make_llm("llama", "chain:grammar_forced+draft_model", near_copy("llama")) as llm:
        (output,) = llm.generate("The name", params, trace=True)
        chunks = list(llm.stream("The name", params, trace=True))
        (later,) = asyncio.run(llm.agenerate("The name", params, trace=True))

        async def read() -> list[Completion | None]:
            return [c.completion async for c in llm.astream("The name", params, trace=True)]

        streamed = [c for c in asyncio.run(read()) if c is not None]
        assert llm.generate("The name", params)[0].trace is None
        plain = list(llm.stream("The name", params))
    for completion in (*output.completions, *later.completions, *streamed):
        check_text(completion)
    finished = [chunk.completion for chunk in chunks if chunk.completion is not None]
    texts = sorted(trace_of(completion).text for completion in finished)
    assert texts == sorted(completion.text for completion in output.completions)
    assert len(texts) == len(streamed) == 3
    for sample in range(3):
        own = [chunk for chunk in chunks if chunk.sample_index == sample]
        joined = tuple(step for chunk in own for step in chunk.steps)
        assert joined == trace_of(own[-1].completion).steps
    assert not any(chunk.steps for chunk in plain)


def test_a_failed_request_keeps_what_it_has() -> None:
    params = [SamplingParams(grammar=GrammarSpec.regex("(")), SamplingParams(max_tokens=2)]
    with make_llm("llama", "ngram") as llm:
        failed, served = llm.generate(["A", "A"], params, on_error="return", trace=True)
    assert failed.trace is not None
    assert failed.trace.steps == ()
    assert (failed.trace.finish_reason, failed.trace.seconds) == ("error", 0.0)
    assert served.trace is not None
    assert len(served.trace.token_ids) == 2


def test_nothing_is_computed_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counting(*args: Any) -> Any:
        calls.append(len(args[-1]))
        return gather_step_probs(*args)

    monkeypatch.setattr("guided_spec.step.gather_step_probs", counting)
    with make_llm("llama", "ngram") as llm:
        llm.generate(["A", "B"], SamplingParams(max_tokens=6, logprobs=1))
        assert calls == []
        traced = llm.generate("A", SamplingParams(max_tokens=6), trace=True)[0].trace
    assert traced is not None
    assert calls == [1] * len(traced.steps)
