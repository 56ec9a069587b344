"""The parts of the LMDeploy integration that need no LMDeploy: sampler, places, manager, helper."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from guided_spec.errors import (
    ConfigError,
    GrammarCompileError,
    GrammarDeadEndError,
    GrammarStateError,
    UnsupportedSchemaError,
    VocabularyMismatchError,
)
from guided_spec.grammar.pipeline import PendingGrammar
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.integrations.lmdeploy.helper import (
    GuidedHelper,
    RejectionSampler,
    translate_for_draft,
)
from guided_spec.integrations.lmdeploy.manager import (
    TURN,
    GrammarProcessor,
    GuidedManager,
    compile_ahead,
    response_spec,
)
from guided_spec.integrations.lmdeploy.plugin import install, is_installed, uninstall
from guided_spec.ops.bitmask import pack_bitmask, unpack_bitmask
from tests.integrations.lmdeploy.world import closed_form, toy_tokenizer
from tests.toys import EOS, VOCAB_SIZE, Rule, ToyCompiled, chi_square_p_value, text_rule

K = 2
CHOICE = {"type": "regex_schema", "regex_schema": "ab|ba"}


def _expanded(batch: int, params: dict[str, Any]) -> SimpleNamespace:
    """``SamplingInputs`` as LMDeploy expands them: K + 1 rows a request, no values where equal."""
    rows = batch * (K + 1)

    def values(name: str, nothing: float) -> Tensor | None:
        value = params.get(name, nothing)
        return None if value == nothing else torch.full((rows,), float(value))

    return SimpleNamespace(
        batch_size=rows,
        max_top_k=params.get("top_k", 0),
        top_k=None,
        top_p=values("top_p", 1.0),
        min_p=values("min_p", 0.0),
        random_seeds=torch.arange(batch).repeat_interleave(K + 1),
        random_offsets=torch.full((rows,), 9),
    )


@pytest.mark.parametrize("params", [{}, {"top_k": 2}, {"top_p": 0.45, "min_p": 0.35}], ids=str)
def test_each_position_of_a_step_has_the_law_of_its_filters(params: dict[str, Any]) -> None:
    batch, logits = (
        6_000,
        torch.randn(K + 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)),
    )
    drafts = logits[:K].argsort(-1, descending=True)[:, 1].expand(batch, -1)
    rows = logits.expand(batch, -1, -1)
    sampled = RejectionSampler()(rows, drafts, _expanded(batch, params))
    for position in range(K + 1):
        tokens = sampled.output_token_ids[:, position]
        counts = torch.bincount(tokens[tokens >= 0], minlength=VOCAB_SIZE)
        assert counts.sum() > 90
        assert chi_square_p_value(counts, closed_form(logits[position], params)) > 1e-3
    lengths = (sampled.output_token_ids >= 0).sum(1)
    assert torch.equal(sampled.num_rejected, K + 1 - lengths)
    last = sampled.output_token_ids.gather(1, lengths.unsqueeze(1) - 1).squeeze(1)
    assert torch.equal(sampled.last_token_ids, last)


def test_a_sampled_draft_is_corrected_for_what_it_was_drawn_from() -> None:
    batch, generator = 6_000, torch.Generator().manual_seed(2)
    target = torch.randn(K + 1, VOCAB_SIZE, generator=generator)
    probs = torch.softmax(torch.randn(K, VOCAB_SIZE, generator=generator), -1)
    drafts = torch.multinomial(probs, batch, replacement=True, generator=generator).T
    sampled = RejectionSampler()(
        target.expand(batch, -1, -1), drafts, _expanded(batch, {}), probs.expand(batch, -1, -1)
    )
    counts = torch.bincount(sampled.output_token_ids[:, 0], minlength=VOCAB_SIZE)
    assert chi_square_p_value(counts, closed_form(target[0], {})) > 1e-3


def test_rows_without_any_token_give_a_valid_id() -> None:
    logits = torch.full((1, K + 1, VOCAB_SIZE), float("-inf"))
    sampled = RejectionSampler()(logits, torch.tensor([[3, 4]]), _expanded(1, {"top_p": 0.5}))
    assert sampled.output_token_ids.tolist() == [[0, -1, -1]]
    assert sampled.last_token_ids.tolist() == [0]


def _processor(rule: Rule, num_draft: int = K) -> tuple[GrammarProcessor, ToyCompiled]:
    compiled, future = ToyCompiled(rule), Future[CompiledGrammar]()
    future.set_result(compiled)
    return GrammarProcessor(PendingGrammar(future, None), VOCAB_SIZE, num_draft), compiled


def _legal(row: Any) -> list[int]:
    found = unpack_bitmask(torch.as_tensor(row), VOCAB_SIZE)
    return [int(token) for token in found.nonzero().flatten()]


def test_the_drafters_rows_are_the_targets_rows() -> None:
    processor, compiled = _processor(text_rule([b"abc", b"acd"]))
    ahead = processor.fork()
    assert _legal(ahead.next_row()) == [0]
    assert ahead.draft(0) == 0
    assert _legal(ahead.next_row()) == [1, 2]
    assert ahead.draft(2) == 2
    assert not processor.missing(K)
    rows = processor.verify_rows(K, None)
    assert rows is not None
    assert [_legal(row) for row in rows] == [[0], [1, 2], [3]]
    assert set(compiled.fills.values()) == {1}
    assert processor.commit([0, 1]) == [0, 1]
    assert _legal(processor.next_row()) == [2]


def test_an_illegal_draft_is_cut_and_a_forced_token_takes_its_place() -> None:
    processor, _ = _processor(text_rule([b"abcd", b"abdd"]), 3)
    ahead = processor.fork()
    assert [ahead.draft(5), ahead.draft(1), ahead.draft(9)] == [0, 1, 9]
    assert ahead.next_row() is None
    rows = processor.verify_rows(3, None)
    assert rows is not None
    assert [_legal(row) for row in rows[:3]] == [[0], [1], [2, 3]]


def test_a_draft_that_nobody_walked_is_walked_at_verification() -> None:
    processor, _ = _processor(text_rule([b"abcd"]), 1)
    assert processor.missing(3)
    rows = processor.verify_rows(3, [0, 1, 2])  # longer than the processor was made for
    assert rows is not None
    assert [_legal(row) for row in rows] == [[0], [1], [2], [3]]


def test_a_request_that_is_computed_again_forgets_its_draft() -> None:
    processor, _ = _processor(text_rule([b"abcd"]))
    processor.fork().draft(0)
    assert _legal(processor.next_row()) == [0]
    assert processor.commit([0]) == [0]
    assert _legal(processor.next_row()) == [1]


def test_what_a_commit_raises() -> None:
    processor, _ = _processor(text_rule([b"ab"]))
    processor.fork()
    with pytest.raises(GrammarStateError):
        processor.commit([5])
    assert processor.is_terminated()
    assert processor.next_row() is None
    assert processor.commit([0]) == []

    dead, _ = _processor(lambda prefix: frozenset() if prefix else frozenset({0}))
    dead.fork()
    with pytest.raises(GrammarDeadEndError):
        dead.commit([0, 3])

    failed = Future[CompiledGrammar]()
    failed.set_exception(ValueError("a backend's own error"))
    broken = GrammarProcessor(PendingGrammar(failed, None), VOCAB_SIZE)
    assert broken.is_broken
    assert broken.fork().next_row() is None
    assert broken.next_row() is None
    assert broken.fork().draft(3) == 3
    with pytest.raises(GrammarCompileError, match="a backend's own error"):
        broken.commit([0])


@pytest.fixture
def manager() -> Iterator[GuidedManager]:
    made = GuidedManager(toy_tokenizer(), VOCAB_SIZE, [EOS])
    made.num_draft = K
    yield made
    made.close()


def _context(session: int, turn: int | None = None) -> dict[str, Any]:
    return {"session_id": session, "seq_id": 0, **({} if turn is None else {TURN: turn})}


def test_places_are_kept_for_one_turn_and_one_format(manager: GuidedManager) -> None:
    def processor(context: dict[str, Any], response_format: Any = CHOICE) -> GrammarProcessor:
        return manager.get_processors([context], [response_format])[0]

    first = processor(_context(1, 7))
    assert processor(_context(1, 7)) is first
    second = processor(_context(1, 8))
    assert second is not first
    without = processor(_context(2))
    assert processor(_context(2), {**CHOICE, "regex_schema": "b"}) is not without
    manager.remove_processor(1)
    assert processor(_context(1, 8)) is not second
    assert manager.get_processors([_context(1), _context(2)], [None, {"type": "text"}]) == {}


def test_a_schema_that_cannot_be_enforced_is_refused_before_any_token(
    manager: GuidedManager,
) -> None:
    schema = {"not": {"multipleOf": 2}}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(UnsupportedSchemaError, match="positive spelling"):
        asyncio.run(compile_ahead(response_format))
    with pytest.raises(ConfigError, match="response_format"):
        asyncio.run(compile_ahead({"type": "grammar"}))
    asyncio.run(compile_ahead(CHOICE))
    asyncio.run(compile_ahead(None))
    # Past that check, its first commit ends the request.
    processor = manager.get_processors([_context(1)], [response_format])[0]
    assert not manager.commit(0, processor, [0])
    assert manager.take_stops() == {0: 0}


def test_formats_as_lmdeploy_reads_them() -> None:
    schema = {"type": "integer"}
    expected = GrammarSpec.json_schema(schema, any_whitespace=True)
    for wrapper in (schema, {"name": "x", "schema": schema}, {"json_schema": schema}):
        assert response_spec({"type": "json_schema", "json_schema": wrapper}) == expected
    assert response_spec({"type": "json_object"}) == GrammarSpec.json_object(any_whitespace=True)
    assert response_spec(CHOICE) == GrammarSpec.regex("ab|ba")


def test_a_tokenizer_that_cannot_be_read_fails_guided_requests_and_no_others() -> None:
    class Unreadable:
        added_tokens_decoder: dict[int, Any] = {}

        def __len__(self) -> int:
            return VOCAB_SIZE

    manager = GuidedManager(Unreadable(), VOCAB_SIZE, [EOS])
    with pytest.raises(Exception, match="Unreadable"):
        asyncio.run(compile_ahead(CHOICE))
    assert manager.get_processors([_context(1)], [None]) == {}
    manager.close()


def test_the_calls_of_plain_decoding(manager: GuidedManager) -> None:
    """What ``FusedLogitsProcessor`` does where nothing is drafted; the logits are padded."""
    manager.num_draft = 0
    text: list[int] = []
    while EOS not in text:
        processors = manager.get_processors([_context(0), _context(1)], [None, CHOICE])
        bitmask = manager.allocate_batched_bitmap(2)
        manager.fill_bitmap(processors[1], bitmask, 1)
        logits = torch.zeros(2, 40)
        manager.apply_batched_bitmap(logits, bitmask)
        text.append(int(logits[1].argmax()))
        assert logits[0, :VOCAB_SIZE].eq(0).all()
        assert logits[:, VOCAB_SIZE + 20 :].isneginf().all()  # past the words of the mask
        manager.accept_token(processors[1], text[-1])
    assert text == [0, 1, EOS]
    assert manager.is_terminated(processors[1])
    assert manager.take_stops() == {1: 0}


def test_helpers_masks_and_commits(manager: GuidedManager) -> None:
    helper = GuidedHelper(manager)
    processors = helper.get_processors([_context(0), _context(1)], [CHOICE, None])

    async def step() -> tuple[Tensor, Tensor, Tensor]:
        drafts = []
        ahead = {row: processor.fork() for row, processor in processors.items()}
        for _ in range(K):
            logits = torch.zeros(2, VOCAB_SIZE)
            logits[:, 9] = 1.0
            helper.apply_bitmask(logits, await helper.prepare_bitmask(logits, ahead))
            tokens = logits.argmax(-1, keepdim=True)
            await helper.accept_draft_tokens(tokens, ahead)
            drafts.append(tokens)
        scores = torch.zeros(2, K + 1, VOCAB_SIZE)
        draft = torch.cat(drafts, 1)
        await helper.apply_serial_bitmask(scores, processors, draft, K)
        output = torch.tensor([[0, 5, -1], [3, 4, 5]])
        last = torch.tensor([5, 5])
        await helper.accept_rejection_sampled_tokens(
            processors, torch.tensor([1, 0]), output, last, K
        )
        return draft, scores, output

    draft, scores, output = asyncio.run(step())
    assert draft.tolist() == [[0, 1], [9, 9]]
    legal = [row.nonzero().flatten().tolist() for row in ~scores[0].isneginf()]
    assert legal == [[0, 1], [1], [EOS]]
    assert not scores[1].isneginf().any()
    assert output.tolist() == [[EOS, -1, -1], [3, 4, 5]]  # "a" and then 5, which is no "b"
    assert helper.manager is manager
    helper.cleanup_sessions([0])
    assert helper.get_processors([_context(0)], [CHOICE])[0] is not processors[0]


def test_helpers_do_nothing_without_guided_requests() -> None:
    for helper in (GuidedHelper(None), GuidedHelper(None)):
        logits = torch.zeros(1, VOCAB_SIZE)
        assert asyncio.run(helper.prepare_bitmask(logits, {})) is None
        helper.apply_bitmask(logits, None)
        assert helper.get_processors(None, None) == {}
        assert logits.eq(0).all()


def test_a_starved_row_keeps_the_drafters_own_favourite(manager: GuidedManager) -> None:
    helper = GuidedHelper(manager)
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    helper.apply_bitmask(logits, pack_bitmask(torch.tensor([[False] * 3, [True, False, True]])))
    assert logits.argmax(-1).tolist() == [1, 2]


@pytest.mark.parametrize("target_ids", [[3, 0, 40], [63]])
def test_masks_of_draft_vocabularies(target_ids: Sequence[int]) -> None:
    legal = torch.rand(4, 64, generator=torch.Generator().manual_seed(0)) < 0.5
    ids = torch.tensor(target_ids)
    drafter = SimpleNamespace(draft_id_to_target_id=ids, _max_d2t_word=int(ids.max()) // 32)
    translated = translate_for_draft(drafter, pack_bitmask(legal))
    assert torch.equal(unpack_bitmask(translated, len(ids)), legal[:, ids])
    with pytest.raises(VocabularyMismatchError):
        translate_for_draft(SimpleNamespace(_max_d2t_word=2), pack_bitmask(legal))


@pytest.mark.parametrize("version", [None, "0.17.0"])
def test_install_refuses_other_versions(
    monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    def find(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)
    with pytest.raises(ConfigError, match=r"0\.18\.0"):
        install()
    assert not is_installed()
    uninstall()
