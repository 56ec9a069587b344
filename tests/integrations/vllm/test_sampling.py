"""Sampling settings as vLLM's own, and its outputs as records of this package."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from guided_spec import GrammarSpec, SamplingParams
from guided_spec.engine.outputs import Chunk
from guided_spec.engine.request import Job, Request, Scoring, State
from guided_spec.errors import ConfigError
from guided_spec.grammar.document import SpecDocument
from guided_spec.grammar.text.choice_tree import ChoiceTree
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.integrations.vllm import llm as integration
from guided_spec.integrations.vllm.grammars import GrammarText, written
from guided_spec.integrations.vllm.plugin import installed_version
from guided_spec.integrations.vllm.sampling import (
    SamplingFacts,
    read_logprobs,
    require_honoured,
    to_vllm,
)
from guided_spec.trace.record import TraceSource
from guided_spec.types import TopLogprob
from tests.integrations.vllm.fake import install

VOCABULARY = Vocabulary((b"a", b"b", b"c", b""), (3,), 4)
PLAIN = SamplingFacts(drafts=False, masks=False, logprobs_mode="raw_logprobs", num_ends=1)
DRAFTS = PLAIN._replace(drafts=True)
MASKS = DRAFTS._replace(masks=True)
PROCESSED = PLAIN._replace(logprobs_mode="processed_logprobs")
LETTERS = GrammarSpec.regex("[ab]+")

with_vllm = pytest.mark.skipif(installed_version() is None, reason="vLLM is not installed")


def job(words: tuple[tuple[int, ...], ...] = (), **params: Any) -> Job:
    return Job([0, 1], SamplingParams(**params), 64, seed=11, bad_words=words)


@pytest.mark.parametrize(
    ("asked", "facts", "reason"),
    [
        (job(temperature=0.005), PLAIN, "temperature=0.005: under engine='vllm' it would be"),
        (job(grammar=LETTERS, complete=True), PLAIN, "complete=True: under engine='vllm' a text"),
        (job(grammar=LETTERS.after("b", reasoning_budget=3)), PLAIN, "reasoning_budget=3"),
        (job(min_p=0.1), DRAFTS, "min_p=0.1: under engine='vllm' nothing is drafted with it"),
        (job(logit_bias={1: 2.0}), MASKS, "logit_bias="),
        (job(draft_policy="validate"), MASKS, "draft_policy='validate'"),
        (job(draft_policy="mask"), DRAFTS, "draft_policy='mask'"),
        (job(logit_bias=dict.fromkeys(range(1025), 1.0)), PLAIN, "1024 is the most"),
        (job(allowed_token_ids=range(1025)), PLAIN, "allowed_token_ids='1025 tokens'"),
        (job(tuple((i,) for i in range(129))), PLAIN, "128 words"),
        (job(((1, 2),)), PLAIN, "the prompt ends with its first tokens"),
        (job(min_tokens=2, stop_token_ids=range(128)), PLAIN, "with min_tokens 127 is the most"),
        (job(logprobs=1, grammar=LETTERS), PLAIN, "pass 'masked'"),
        (job(logprobs=1, logprobs_mode="processed"), PLAIN, "pass 'raw'"),
        (job(logprobs=1), PROCESSED, "pass 'processed'"),
        (job(return_routed_experts=True), PLAIN, "return_routed_experts=True: under engine='vllm'"),
        (job()._replace(traced=TraceSource("none", "rejection")), PLAIN, "trace=True"),
    ],
)
def test_what_vllm_would_not_honour(asked: Job, facts: SamplingFacts, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        require_honoured(asked, facts)
    assert reason in str(raised.value)


def test_scores_are_refused() -> None:
    tree = ChoiceTree.of(["a", "b"], VOCABULARY, None)
    with pytest.raises(ConfigError, match="choices are not scored"):
        require_honoured(job()._replace(scoring=Scoring(tree, tree.rows())), PLAIN)


def test_what_is_honoured() -> None:
    for asked, facts in (
        (job(temperature=0.01, min_p=0.1, logit_bias={1: float("-inf")}), PLAIN),
        (job(grammar=LETTERS.after("b"), complete=False), DRAFTS),
        (job(draft_policy="mask"), MASKS),
        (job(((2, 1), (0,), (1,))), MASKS),
        (job(logprobs=1), PLAIN),
        (job(logprobs=1, logprobs_mode="masked", grammar=LETTERS), MASKS),
        (job(logprobs=1, logprobs_mode="processed", grammar=LETTERS), PROCESSED),
    ):
        require_honoured(asked, facts)


def test_logprobs() -> None:
    row = {
        2: SimpleNamespace(logprob=-3.0, rank=5),
        0: SimpleNamespace(logprob=-1.0, rank=1),
        3: SimpleNamespace(logprob=float("-inf"), rank=2),
        1: SimpleNamespace(logprob=-1.0, rank=1),
    }
    (found,) = read_logprobs([2], [row], 3)
    assert (found.token_id, found.logprob) == (2, -3.0)
    assert found.top == (TopLogprob(0, -1.0), TopLogprob(1, -1.0))
    assert read_logprobs([2], None, None) == []


ASKED = job(
    ((2,), (1, 0)),
    max_tokens=9,
    temperature=0.5,
    top_k=3,
    top_p=0.9,
    min_p=0.1,
    seed=11,
    stop_token_ids=[1],
    logit_bias={2: -1.5},
    allowed_token_ids=[0, 1, 3],
    min_tokens=2,
    repetition_penalty=1.5,
    frequency_penalty=0.25,
    presence_penalty=-0.5,
    logprobs=4,
)


def check(made: Any, kind: Any) -> None:
    names = ["max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "min_tokens"]
    names += ["repetition_penalty", "frequency_penalty", "presence_penalty", "logprobs"]
    for name in names:
        assert getattr(made, name) == getattr(ASKED.params, name), name
    assert sorted(made.stop_token_ids) == [1, 3]
    assert made.logit_bias == {2: -1.5}
    assert made.allowed_token_ids == [0, 1, 3]
    assert made._bad_words_token_ids == [[2], [1, 0]]
    assert (made.detokenize, made.ignore_eos) == (False, False)
    assert made.output_kind is kind.FINAL_ONLY
    assert made.structured_outputs.grammar == "root ::= x"


def test_settings_of_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path)
    names: Any = importlib.import_module("vllm.sampling_params")
    text = GrammarText("grammar", "root ::= x")
    check(to_vllm(ASKED, text, VOCABULARY, in_parts=False), names.RequestOutputKind)
    free = to_vllm(job(ignore_eos=True), None, VOCABULARY, in_parts=True)
    assert (free.ignore_eos, free.stop_token_ids) == (True, [])
    assert (free.structured_outputs, free.seed, free.output_kind.name) == (None, None, "DELTA")
    guided = to_vllm(job(ignore_eos=True), text, VOCABULARY, in_parts=True)
    assert (guided.ignore_eos, guided.stop_token_ids) == (False, [3])  # a grammar ends
    assert guided.extra_args is None
    cut = to_vllm(job(complete=False), text, VOCABULARY, in_parts=True)
    assert cut.extra_args == {"guided_spec_endings": False}


@with_vllm
@pytest.mark.filterwarnings("ignore")  # vLLM's own
def test_vllms_own_settings() -> None:
    """They are taken, come through its own checks and copies, and travel as they are."""
    names: Any = importlib.import_module("vllm.sampling_params")
    text = GrammarText("grammar", "root ::= x")
    made = to_vllm(ASKED, text, VOCABULARY, in_parts=False)
    check(made, names.RequestOutputKind)
    made.update_from_tokenizer(object())  # which would spell bad words
    check(made.clone(), names.RequestOutputKind)
    serial: Any = importlib.import_module("vllm.v1.serial_utils")
    sent = serial.MsgpackEncoder().encode(made)
    check(serial.MsgpackDecoder(names.SamplingParams).decode(sent), names.RequestOutputKind)
    assert made.bad_words_token_ids == [[2], [1, 0]]
    assert {1, 3} <= made.all_stop_token_ids


@with_vllm
@pytest.mark.filterwarnings("ignore")  # vLLM's own
@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec.json_schema({"type": "object", "properties": {"a": {"enum": ['é"', 1]}}}),
        GrammarSpec.json_object(any_whitespace=True),
        GrammarSpec.regex(r"\d+|[^\W\d]"),
        GrammarSpec.choice(["a", 'b"\n']),
        GrammarSpec.ebnf('root ::= "a" root?'),
        GrammarSpec.lark('start: "a"+'),
        GrammarSpec.tools([{"type": "function", "function": {"name": "f"}}]),
    ],
)
def test_vllm_takes_the_grammars(spec: GrammarSpec) -> None:
    """Its own check of a request passes them, and hands them on unchanged."""
    backend: Any = importlib.import_module("vllm.v1.structured_output.backend_xgrammar")
    requests: Any = importlib.import_module("vllm.v1.structured_output.request")
    text = written(SpecDocument(spec))
    made = to_vllm(job(), text, VOCABULARY, in_parts=False)
    backend.validate_xgrammar_grammar(made)
    option, source = requests.get_structured_output_key(made.structured_outputs)
    assert option.name == text.kind.upper()
    assert source == text.source


@with_vllm
@pytest.mark.filterwarnings("ignore")  # vLLM's own
def test_outputs_of_vllm() -> None:
    """Its RequestOutput becomes a Completion, in parts and as a whole."""
    outputs: Any = importlib.import_module("vllm.outputs")
    logprobs: Any = importlib.import_module("vllm.logprobs")
    chunks: list[Chunk] = []
    asked = job(logprobs=1, stop_token_ids=[2])
    request = Request(asked, VOCABULARY, chunks.append)
    setup: Any = SimpleNamespace(facts=PLAIN, reports_drafts=False)

    def take(token_ids: list[int], reason: str | None) -> None:
        rows = [{token: logprobs.Logprob(-0.5, 1)} for token in token_ids]
        one = outputs.CompletionOutput(0, "", token_ids, None, rows, finish_reason=reason)
        whole = outputs.RequestOutput("1", None, [0, 1], None, [one], bool(reason), None, None)
        whole.num_cached_tokens = 1
        integration._take(request, whole, setup)

    take([0, 1], None)
    assert request.state is not State.FINISHED
    take([0, 2], "stop")
    assert [chunk.text for chunk in chunks] == ["ab", "a"]
    completion = chunks[-1].completion
    assert completion is not None
    assert (completion.token_ids, completion.finish_reason) == ([0, 1, 0, 2], "stop")
    assert (completion.stats.steps, completion.stats.cached_tokens) == (4, 1)
    assert completion.logprobs is not None
    assert [one.top[0].logprob for one in completion.logprobs] == [-0.5] * 4


@with_vllm
@pytest.mark.filterwarnings("ignore")  # vLLM's own
def test_drafts_of_one_request() -> None:
    stats: Any = importlib.import_module("vllm.v1.metrics.stats")
    if not hasattr(stats, "RequestSpecDecodeMetrics"):
        pytest.skip("this release does not tell what was drafted for a request")
    found = stats.RequestSpecDecodeMetrics.new(3)
    for drafted, accepted in ((3, 3), (2, 0), (3, 1)):
        found.observe(num_draft_tokens=drafted, num_accepted=accepted, detailed=True)
    request = Request(job(), VOCABULARY, lambda _: None)
    setup: Any = SimpleNamespace(facts=DRAFTS, reports_drafts=True)
    integration._count(request.stats, SimpleNamespace(spec_decode_metrics=found), 7, setup)
    assert (request.stats.drafted, request.stats.accepted) == ([3, 3, 2], [2, 1, 1])
    assert request.stats.steps == 3
