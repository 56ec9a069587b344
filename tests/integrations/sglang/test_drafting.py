"""Our drafts inside SGLang's own code: its registry, options, worker, masks and whole engine."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch

from guided_spec.errors import ConfigError
from guided_spec.integrations.sglang import plugin
from guided_spec.integrations.sglang.plugin import ALGORITHM, NUM_NODES, worker_class
from tests.integrations.sglang.engine import TARGET
from tests.integrations.sglang.parts import (
    END,
    SCHEMA,
    TOKENIZER,
    compile_json,
    encode,
    logits_after,
    make_request,
    sgl,
    use_portable_kernels,
)
from tests.tiny_llm import VOCAB_SIZE

if find_spec("sglang") is None:
    pytest.skip("needs sglang, which is no part of the test extra", allow_module_level=True)

# What SGLang, and what it imports late, warns about is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

PROMPT = encode("the cat is the dog; ")


def algorithms() -> Any:
    return sgl("speculative.spec_info").SpeculativeAlgorithm


def test_to_sglang_it_is_its_ngram_algorithm() -> None:
    """Every question that SGLang asks an algorithm is answered as n-gram drafting answers it."""
    for _ in range(2):  # a second time changes nothing
        plugin.register()
    ours, ngram = algorithms().from_string(ALGORITHM.lower()), algorithms().NGRAM
    questions = [name for name in vars(algorithms()) if name.startswith(("is_", "supports_"))]
    assert len(questions) > 10
    for name in [*questions, "has_draft_kv", "need_topk", "carries_draft_hidden_states"]:
        assert getattr(ours, name)() == getattr(ngram, name)(), name
    # What SGLang may call besides; a platform's own worker is asked for by the built-in ones.
    methods = {name for name, value in vars(algorithms()).items() if callable(value)}
    missing = {name for name in methods if not name.startswith("_")} - {*dir(ours)}
    assert missing == {"get_platform_worker_cls"}


def test_an_sglang_that_asks_for_more_goes_on_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sgl("speculative.spec_registry"), "_REGISTRY", {})
    monkeypatch.setattr(algorithms(), "supports_time_travel", bool, raising=False)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert "no speculative algorithm of this SGLang" in caplog.text
    assert "supports_time_travel" in caplog.text


def resolve(*options: str) -> Any:
    """What SGLang's server makes of its command line."""
    plugin.register()
    line = ["--model-path", str(TARGET), "--device", "cpu", "--attention-backend", "triton"]
    line += ["--speculative-algorithm", ALGORITHM, *options]
    server_args = sgl("server_args").prepare_server_args(line)
    sgl("arg_groups.pipeline").run_resolution_pipeline(server_args)
    return sgl("arg_groups.overrides").resolved_view(server_args)


def test_the_options_of_a_server() -> None:
    view = resolve("--grammar-backend", "guided_spec", "--enable-mixed-chunk")
    assert view.speculative_num_draft_tokens == NUM_NODES
    assert (view.speculative_eagle_topk, view.speculative_num_steps) == (1, NUM_NODES - 1)
    assert (view.disable_overlap_schedule, view.enable_mixed_chunk) == (True, False)
    assert view.max_running_requests == 48
    options = ["--speculative-num-draft-tokens", "5", "--max-running-requests", "7"]
    view = resolve("--grammar-backend", "guided_spec:xgrammar", *options)
    assert (view.speculative_num_draft_tokens, view.max_running_requests) == (5, 7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--grammar-backend xgrammar", "grammar_backend='xgrammar': pass --grammar-backend with"),
        ("--speculative-num-draft-tokens 1", "speculative_num_draft_tokens=1: must be 2 to 65"),
        ("--speculative-num-draft-tokens 66", "speculative_num_draft_tokens=66: must be 2 to"),
        ("--skip-tokenizer-init", "skip_tokenizer_init=True: drafting needs the tokenizer"),
        ("--attn-dp-size 2 --tp-size 2", "attn_dp_size=2: SGLang verifies n-gram drafts without"),
        (
            "--speculative-use-rejection-sampling",
            "sampling=True: these drafts have no distribution",
        ),
        ("--speculative-ngram-external-corpus-path x", "corpus_path='x': texts are drafted from"),
    ],
)
def test_options_that_cannot_be_kept_are_refused(options: str, words: str) -> None:
    backend = [] if "grammar-backend" in options else ["--grammar-backend", "guided_spec"]
    with pytest.raises(ConfigError, match=words):
        resolve(*backend, *options.split())


def test_an_untested_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "TESTED_VERSIONS", ("0.0.1",))
    with pytest.raises(ConfigError, match="was tested with 0.0.1"):
        resolve("--grammar-backend", "guided_spec")


class Worker:
    """SGLang's n-gram worker with our drafts, made by SGLang for a target without a model."""

    def __init__(self, server_args: Any, num_nodes: int) -> None:
        target = SimpleNamespace(
            tokenizer=TOKENIZER,
            model_config=SimpleNamespace(vocab_size=VOCAB_SIZE, hf_eos_token_id={END}),
            model_runner=SimpleNamespace(max_running_requests=3),
            get_memory_pool=lambda: (None, None),
        )
        self.num_nodes = num_nodes
        algorithm = algorithms().from_string(ALGORITHM)
        self.worker = algorithm.create_worker(server_args)(server_args, 0, 0, target)
        self.worker.alloc_memory_pool()

    def trees(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """SGLang's form of a batch's drafts: each node's token, first child, and next sibling."""
        token_ids, mask = self.worker._prepare_draft_tokens(batch)
        links = sgl("speculative.ngram_worker")._derive_tree_links(
            mask, len(batch.reqs), self.num_nodes
        )
        return torch.from_numpy(token_ids).view(-1, self.num_nodes), *links

    def draft(self, batch: Any) -> list[list[int]]:
        """What hangs below the root of each tree, from parent to child."""
        drafts: list[list[int]] = []
        for tokens, children, siblings in zip(*self.trees(batch), strict=True):
            assert bool((siblings == -1).all())
            node, draft = int(children[0]), list[int]()
            while node != -1:
                draft.append(int(tokens[node]))
                node = int(children[node])
            drafts.append(draft)
        return drafts


def batch_of(*requests: Any, is_synchronous: bool = True, **fields: Any) -> Any:
    return SimpleNamespace(reqs=list(requests), grammar_needs_sync=lambda: is_synchronous, **fields)


def request_of(rid: str, output: str, grammar: Any = None) -> Any:
    request = make_request(rid)
    request.origin_input_ids_unpadded = type(request.origin_input_ids_unpadded)("q", PROMPT)
    request.output_ids.extend(encode(output))
    request.grammar = grammar
    return request


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    plugin.register()
    use_portable_kernels()
    context = sgl("runtime_context").get_context()
    with context.override_server_args(
        device="cpu",
        grammar_backend="guided_spec",
        speculative_algorithm=ALGORITHM,
        speculative_num_draft_tokens=8,
        speculative_num_steps=7,
        speculative_eagle_topk=1,
        speculative_ngram_capacity=1,
    ) as server_args:
        worker = Worker(server_args, 8)
        assert type(worker.worker) is worker_class()
        yield worker


@pytest.fixture
def backend(worker: Worker) -> Any:
    del worker
    server_args = sgl("runtime_context").get_context().server_args
    create = sgl("constrained.base_grammar_backend").create_grammar_backend
    return create(server_args, TOKENIZER, VOCAB_SIZE, {END})


def test_forced_text_and_lookup_in_one_batch(worker: Worker, backend: Any) -> None:
    grammar = compile_json(backend).copy()
    for token in encode("{"):
        grammar.accept_token(token)
    batch = batch_of(request_of("forced", "{", grammar), request_of("free", "the cat"))
    forced, free = worker.draft(batch)
    assert forced == encode('"name": "')[:7]
    assert str(TOKENIZER.decode(free)).startswith(" is the")
    assert worker.draft(batch) == [forced, free]
    worker.worker.ngram_corpus.erase_match_state(["forced"])
    worker.worker.clear_cache_pool()
    assert worker.draft(batch) == [forced, free]


def test_what_the_overlapped_step_has_accepted_is_part_of_the_text(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's requests lag a step behind then; its worker knows the tokens in between."""
    monkeypatch.setattr(worker.worker, "enable_overlap", True)
    accepted = encode("the cat")
    padded = [*accepted, *[0] * (8 - len(accepted))]
    info = SimpleNamespace(
        accept_tokens=torch.tensor(padded), accept_lens=torch.tensor([len(accepted)])
    )
    lagging = batch_of(request_of("a", ""), is_synchronous=False, spec_info=info)
    (draft,) = worker.draft(lagging)
    assert str(TOKENIZER.decode(draft)).startswith(" is the")
    assert worker.draft(batch_of(request_of("b", "the cat"))) == [draft]


def test_reasoning_is_drafted_without_the_grammar(worker: Worker, backend: Any) -> None:
    parser = sgl("parser.reasoning_parser").ReasoningParser("qwen3", tokenizer=TOKENIZER)
    wrapped = sgl("constrained.reasoner_grammar_backend").ReasonerGrammarBackend(
        backend, parser, TOKENIZER
    )
    key = ("json", json.dumps(SCHEMA))
    value, _ = wrapped.get_cached_or_future_value(key, require_reasoning=True)
    grammar = value.result(timeout=60)
    request = request_of("thinks", "the cat", grammar)
    for token in encode("the cat"):
        grammar.accept_token(token)
    assert str(TOKENIZER.decode(worker.draft(batch_of(request))[0])).startswith(" is the")
    for token in encode("</think>{"):
        grammar.accept_token(token)
        request.output_ids.append(token)
    assert worker.draft(batch_of(request)) == [encode('"name": "')[:7]]


def decode(worker: Worker, request: Any, *, is_drafted: bool) -> tuple[list[int], int]:
    """SGLang's verification of what the worker drafts, greedily: a text, and in how many steps."""
    spec_utils = sgl("speculative.spec_utils")
    module = sgl("managers.scheduler_components.batch_result_processor")
    accept = module.SchedulerBatchResultProcessor._accept_grammar_tokens
    steps = 0
    while len(request.output_ids) < 60 and not request.grammar.is_terminated():
        steps += 1
        text = list(request.output_ids)
        tokens, children, siblings = worker.trees(batch_of(request))
        if not is_drafted:
            children = torch.full_like(children, -1)
        tree = spec_utils.GrammarTree.from_host(children, siblings, tokens)
        info = SimpleNamespace(vocab_size=VOCAB_SIZE, grammar_mask=None)
        mask = spec_utils.build_grammar_vocab_mask(
            reqs=[request], tree=tree, sampling_info=info, device="cpu", barrier=None
        )
        chain = tokens[0, 1:].tolist()
        logits = torch.stack([logits_after([*text, *chain[:at]]) for at in range(len(chain) + 1)])
        mask.apply(logits)
        new, node = list[int](), 0
        while node != -1:
            new.append(int(logits[node].argmax()))
            child = int(children[0, node])
            node = child if child != -1 and int(tokens[0, child]) == new[-1] else -1
        retained = accept(None, request, new)
        assert request.to_finish is None
        request.output_ids.extend(retained)
    return list(request.output_ids), steps


def test_drafts_change_the_steps_and_not_the_text(worker: Worker, backend: Any) -> None:
    texts = {}
    for is_drafted in (False, True):
        grammar = compile_json(backend).copy()
        for token in encode("{"):
            grammar.accept_token(token)
        texts[is_drafted] = decode(worker, request_of("r", "{", grammar), is_drafted=is_drafted)
    assert texts[True][0] == texts[False][0]
    output, steps = texts[True]
    assert output[-1] == END
    jsonschema.validate(json.loads(str(TOKENIZER.decode(output[:-1]))), SCHEMA)
    assert steps < texts[False][1] == len(output) - 1


REQUESTS = [
    (
        "Anna Smith is 30. JSON:",
        {"temperature": 0, "max_new_tokens": 40, "json_schema": json.dumps(SCHEMA)},
    ),
    ("Anna Smith is 30. JSON:", {"temperature": 0, "max_new_tokens": 12}),
    ("Kind:", {"temperature": 0, "max_new_tokens": 12, "regex": "north-(east|west)!"}),
]


def run_engine(folder: Path, **options: Any) -> Any:
    """What a server of SGLang answers, in processes of its own."""
    info = folder / "portable-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: portable\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\n"
        "portable = tests.integrations.sglang.parts:use_portable_kernels\n"
        "guided_spec = guided_spec.integrations.sglang.plugin:register\n"
    )
    command = [sys.executable, "-m", "tests.integrations.sglang.engine"]
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(folder), str(root)])
    done = subprocess.run(
        [*command, json.dumps(REQUESTS), json.dumps(options)],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_whole_engine_drafts_and_writes_what_it_writes_without(tmp_path: Path) -> None:
    plain = run_engine(tmp_path, attention_backend="torch_native")
    drafted = run_engine(
        tmp_path,
        attention_backend="triton",
        speculative_algorithm=ALGORITHM,
        speculative_num_draft_tokens=8,
    )
    for expected, answer in zip(plain, drafted, strict=True):
        assert answer["output_ids"] == expected["output_ids"]
    for answer in (drafted[0], drafted[2]):
        meta = answer["meta_info"]
        assert meta["spec_num_correct_drafts"] > 0
        assert meta["spec_verify_ct"] < meta["completion_tokens"] - 1
    jsonschema.validate(json.loads(drafted[0]["text"]), SCHEMA)
