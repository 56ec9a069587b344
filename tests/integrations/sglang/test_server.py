"""The SGLang plugin inside SGLang's own modules; skipped where SGLang is not installed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor

from guided_spec.errors import ConfigError
from guided_spec.integrations.sglang import plugin
from tests.integrations.sglang.parts import (
    END,
    SCHEMA,
    TOKENIZER,
    allows,
    compile_json,
    encode,
    legal_of,
    logits_after,
    make_request,
    mask_of,
    sgl,
)
from tests.tiny_llm import VOCAB_SIZE

if find_spec("sglang") is None:
    pytest.skip("needs sglang, which is no part of the test extra", allow_module_level=True)

# What SGLang, and what it imports late, warns about is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

REFUSED = '{"not":{"multipleOf":2}}'
KINDS = sorted(plugin.BACKENDS)


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    """What SGLang's scheduler makes of ``--grammar-backend``."""
    plugin.register()
    with (
        sgl("runtime_context")
        .get_context()
        .override_server_args(grammar_backend=request.param) as server_args
    ):
        create = sgl("constrained.base_grammar_backend").create_grammar_backend
        yield create(server_args, TOKENIZER, VOCAB_SIZE, {END})


def test_the_entry_point_adds_the_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choices = sgl("arg_groups.choices").GRAMMAR_BACKEND_CHOICES
    plugins, registry = sgl("plugins"), sgl("constrained.base_grammar_backend")
    kept = [name for name in choices if name not in plugin.BACKENDS]
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.setattr(registry, "GRAMMAR_BACKEND_REGISTRY", {})
    choices[:] = kept
    info = tmp_path / "our_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: our_plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nguided_spec = guided_spec.integrations.sglang.plugin:register\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plugins.load_plugins()
    plugin.register()  # a second call changes nothing
    assert choices == [*kept, *plugin.BACKENDS]
    assert set(registry.GRAMMAR_BACKEND_REGISTRY) == set(plugin.BACKENDS)


def test_an_untested_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.register()
    monkeypatch.setattr(plugin, "TESTED_VERSIONS", ("0.0.1",))
    with (
        sgl("runtime_context")
        .get_context()
        .override_server_args(grammar_backend="guided_spec") as server_args,
        pytest.raises(ConfigError, match="was tested with 0.0.1"),
    ):
        sgl("constrained.base_grammar_backend").create_grammar_backend(
            server_args, TOKENIZER, VOCAB_SIZE, {END}
        )


@pytest.fixture
def manager(backend: Any) -> Iterator[Any]:
    """SGLang's queue of grammars, in a scheduler of one process without a model."""
    config = SimpleNamespace(vocab_size=VOCAB_SIZE, hf_eos_token_id={END}, think_end_ids=None)
    scheduler = SimpleNamespace(
        server_args=None,
        tokenizer=TOKENIZER,
        model_config=config,
        dp_tp_cpu_group=None,
        dp_tp_group=SimpleNamespace(world_size=1, first_rank=0, is_first_rank=True),
        pp_group=None,
    )
    place = {"pp_rank": 0, "pp_size": 1, "tp_rank": 0, "tp_size": 1}
    with sgl("runtime_context").get_parallel().override(**place):
        manager = sgl("constrained.grammar_manager").GrammarManager(scheduler)
        assert type(manager.grammar_backend) is type(backend)
        yield manager


def test_the_manager_refuses_before_the_first_token(manager: Any) -> None:
    """What cannot be enforced ends its request, with our reason; the other one gets its grammar."""
    for attempt in range(2):  # the second time from SGLang's cache
        good = make_request(f"good{attempt}", json_schema=json.dumps(SCHEMA))
        bad = make_request(f"bad{attempt}", json_schema=REFUSED)
        waits = [manager.process_req_with_grammar(request) for request in (good, bad)]
        assert waits == [attempt == 0] * 2
        ready: list[Any] = []
        while manager.has_waiting_grammars():
            ready += manager.get_ready_grammar_requests()
        assert len(ready) == 2 * (1 - attempt)
        assert good.to_finish is None
        assert allows(mask_of(good.grammar), encode("{")[0])
        good.grammar.accept_token(encode("{")[0])  # the copy in the cache stays at the start
        assert bad.grammar is None
        assert "positive spelling" in bad.to_finish.message
        assert "Failed to compile json grammar" in bad.to_finish.message


def random_tree(dice: random.Random, size: int) -> list[int]:
    """The parent of each node; node 0 is the root."""
    return [-1] + [dice.randrange(node) for node in range(1, size)]


def links(parents: Sequence[int]) -> tuple[Tensor, Tensor]:
    """SGLang's form of a tree: each node's first child, and its next sibling."""
    size = len(parents)
    child, sibling = torch.full((size,), -1), torch.full((size,), -1)
    for node in range(size - 1, 0, -1):
        sibling[node] = child[parents[node]]
        child[parents[node]] = node
    return child, sibling


@pytest.mark.parametrize("seed", range(6))
def test_the_rows_of_a_draft_tree(backend: Any, seed: int) -> None:
    """Each node's row is that of its own path, walked from the start; the grammar stays put."""
    dice = random.Random(seed)
    grammar, prefix = compile_json(backend), encode('{"name": "')
    for token in prefix:
        grammar.accept_token(token)
    parents = random_tree(dice, 12)
    legal = [token for token in range(VOCAB_SIZE) if allows(mask_of(grammar), token)]
    tokens = [0] + [
        dice.choice(legal) if dice.random() < 0.8 else dice.randrange(VOCAB_SIZE)
        for _ in parents[1:]
    ]
    before = mask_of(grammar)
    bitmask = grammar.allocate_vocab_mask(VOCAB_SIZE, len(parents), "cpu")
    traverse = sgl("speculative.spec_utils").traverse_tree
    traverse(*links(parents), torch.tensor(tokens), grammar, bitmask, VOCAB_SIZE)
    assert torch.equal(mask_of(grammar), before)
    for node in range(len(parents)):
        path, at = list[int](), node
        while at > 0:
            path.insert(0, tokens[at])
            at = parents[at]
        own = compile_json(backend)
        try:
            for token in [*prefix, *path]:
                own.accept_token(token)
        except ValueError:
            expected = torch.full_like(before, -1)  # unreachable: SGLang leaves it open
        else:
            expected = mask_of(own)
        assert torch.equal(bitmask[node], expected), (path, node)


def decode(grammar: Any, length: int, dice: random.Random) -> list[int]:
    """SGLang's verification of chains, with its own masks and its own commit, greedily."""
    spec_utils = sgl("speculative.spec_utils")
    accept = sgl("managers.scheduler_components.batch_result_processor")
    accept = accept.SchedulerBatchResultProcessor._accept_grammar_tokens
    request = SimpleNamespace(grammar=grammar, rid="r", to_finish=None)
    output = [encode("{")[0]]
    accept(None, request, output[0])
    while len(output) < 60 and not grammar.is_terminated():
        drafted: list[int] = []
        for _ in range(length):
            guess = int(logits_after([*output, *drafted]).argmax())
            drafted.append(guess if dice.random() < 0.5 else dice.randrange(VOCAB_SIZE))
        tree = spec_utils.GrammarTree.from_linear_chain(torch.tensor([[output[-1], *drafted]]))
        info = SimpleNamespace(vocab_size=VOCAB_SIZE, grammar_mask=None)
        mask = spec_utils.build_grammar_vocab_mask(
            reqs=[request], tree=tree, sampling_info=info, device="cpu", barrier=None
        )
        rows = [logits_after([*output, *drafted[:at]]) for at in range(length + 1)]
        logits = torch.stack(rows)
        mask.apply(logits)
        best = logits.argmax(-1).tolist()
        kept = 0
        while kept < length and best[kept] == drafted[kept]:
            kept += 1
        retained = accept(None, request, best[: kept + 1])
        assert request.to_finish is None
        output += retained
    return output


def test_speculation_writes_the_plain_text(backend: Any) -> None:
    expected = decode(compile_json(backend), 0, random.Random(0))
    assert expected[-1] == END
    jsonschema.validate(json.loads(str(TOKENIZER.decode(expected[:-1]))), SCHEMA)
    for seed in range(3):
        assert decode(compile_json(backend), 4, random.Random(seed)) == expected


def test_the_masks_of_plain_decoding(backend: Any) -> None:
    """One row for each request; finished ones and those without a grammar are left open."""
    fresh, begun, done = (compile_json(backend).copy() for _ in range(3))
    begun.accept_token(encode("{")[0])
    for token in [*encode('{"name": "A", "ok": true}'), END]:
        done.accept_token(token)
    size = 4
    info = sgl("sampling.sampling_batch_info").SamplingBatchInfo(
        temperatures=torch.ones(size, 1),
        top_ps=torch.ones(size),
        top_ks=torch.ones(size),
        min_ps=torch.zeros(size),
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        vocab_size=VOCAB_SIZE,
        grammars=[fresh, None, done, begun],
        device="cpu",
    )
    info.update_regex_vocab_mask()
    logits = torch.zeros(size, VOCAB_SIZE)
    info.grammar_mask.apply(logits)
    is_legal = logits == 0
    assert bool(is_legal[1:3].all())
    for row, grammar in ((0, fresh), (3, begun)):
        assert is_legal[row].tolist() == legal_of(grammar)
        assert 0 < int(is_legal[row].sum()) < VOCAB_SIZE
    fresh.reset_vocab_mask(info.grammar_mask.vocab_mask)
    assert bool((info.grammar_mask.vocab_mask == -1).all())


@pytest.mark.parametrize("is_strict", [False, True])
def test_reasoning_before_the_grammar(backend: Any, is_strict: bool) -> None:  # noqa: FBT001
    """SGLang's wrapper: free until the marker, then ours; a draft may cross it both ways."""
    reasoning = sgl("parser.reasoning_parser").ReasoningParser("qwen3", tokenizer=TOKENIZER)
    wrapped = sgl("constrained.reasoner_grammar_backend").ReasonerGrammarBackend(
        backend, reasoning, TOKENIZER, enable_strict_thinking=is_strict
    )
    value, _ = wrapped.get_cached_or_future_value(
        ("json", json.dumps(SCHEMA)), require_reasoning=True
    )
    grammar = value.result(timeout=60)
    thought, marker = encode("the cat is an answer "), encode("</think>")
    kept_out = set(wrapped.think_excluded_token_ids or ())
    assert bool(kept_out) == is_strict
    thinking = [token not in kept_out for token in range(VOCAB_SIZE)]
    for token in thought:
        grammar.accept_token(token)
    assert legal_of(grammar) == thinking
    draft = [*marker, *encode('{"name": "A"')]
    for _ in range(3):
        for token in draft:
            grammar.accept_token(token)
        legal = legal_of(grammar)
        assert not legal[encode("cat")[0]]
        assert legal[encode(",")[0]]
        grammar.rollback(len(draft))
        assert legal_of(grammar) == thinking
    for token in [*marker, *encode('{"name": "A", "ok": true}'), END]:
        assert not grammar.is_terminated()
        grammar.accept_token(token)
    assert grammar.is_terminated()
    copy = grammar.copy()
    copy.rollback(1)
    assert not copy.is_terminated()
    assert grammar.is_terminated()


def test_a_thinking_budget_writes_the_marker(backend: Any) -> None:
    reasoning = sgl("parser.reasoning_parser").ReasoningParser("qwen3", tokenizer=TOKENIZER)
    wrapped = sgl("constrained.reasoner_grammar_backend").ReasonerGrammarBackend(
        backend, reasoning, TOKENIZER, enable_strict_thinking=True
    )
    wrapped.enable_token_filter, wrapped._token_filter_fn = True, backend.set_token_filter
    grammar = wrapped._make_grammar_object(compile_json(backend), reasoning=True)
    grammar.max_think_tokens = 2
    for token in encode("ab"):
        grammar.accept_token(token)
    marker = encode("</think>")
    assert [token for token, is_legal in enumerate(legal_of(grammar)) if is_legal] == marker[:1]


def test_whitespace_is_the_servers_choice() -> None:
    plugin.register()
    create = sgl("constrained.base_grammar_backend").create_grammar_backend
    context = sgl("runtime_context").get_context()
    for is_fixed in (False, True):
        with context.override_server_args(
            grammar_backend="guided_spec", constrained_json_disable_any_whitespace=is_fixed
        ) as server_args:
            backend = create(server_args, TOKENIZER, VOCAB_SIZE, None)
        grammar = compile_json(backend)
        grammar.accept_token(encode("{")[0])
        assert allows(mask_of(grammar), encode("\n")[0]) == (not is_fixed)
        grammar.grammar_stats.compilation_time = 1.0
        assert grammar.copy().grammar_stats.is_cache_hit


def test_a_refused_token_ends_its_request_alone(backend: Any) -> None:
    processor = sgl("managers.scheduler_components.batch_result_processor")
    accept = processor.SchedulerBatchResultProcessor._accept_grammar_tokens
    request = SimpleNamespace(grammar=compile_json(backend), rid="r", to_finish=None)
    assert accept(None, request, [*encode("{"), *encode("cat")]) == encode("{")
    assert "the grammar refuses token" in request.to_finish.message


def judge(backend: Any, schema: str, text: str) -> str:
    """What a backend makes of a schema and a text that is not valid under it."""
    grammar = backend._init_value_dispatch(("json", schema), False)  # noqa: FBT003
    if isinstance(grammar, sgl("constrained.base_grammar_backend").InvalidGrammarObject):
        return "refuses"
    try:
        for token in encode(text):
            grammar.accept_token(token)
    except ValueError:
        return "prevents it"
    return "writes it" if legal_of(grammar)[END] else "prevents it"


def test_the_table_of_the_page() -> None:
    plugin.register()
    page = (Path(__file__).parents[3] / "docs" / "sglang.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `{")]
    assert len(rows) == 4
    create = sgl("constrained.base_grammar_backend").create_grammar_backend
    context = sgl("runtime_context").get_context()
    for column, name in enumerate(("xgrammar", "llguidance", "guided_spec"), start=2):
        with context.override_server_args(grammar_backend=name) as server_args:
            backend = create(server_args, TOKENIZER, VOCAB_SIZE, {END})
        for row in rows:
            schema, text = (cell.strip("`") for cell in row[:2])
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(
                    json.loads(text),
                    json.loads(schema),
                    format_checker=jsonschema.FormatChecker(),
                )
            assert judge(backend, schema, text) == row[column], (name, schema)
