"""A draft whose graph waits for its masks, against the loop that launches token by token.

A thread plays the device: it runs the graph's body while this one walks the grammars.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

from guided_spec.config import EngineConfig
from guided_spec.core import DecodeBatch
from guided_spec.engine.outputs import RequestOutput
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead
from guided_spec.models.heads.block import reader as block_reader
from guided_spec.models.packed import slot_head as packed_slot_head
from guided_spec.models.packed.graph_pool import NOTHING, GraphPool, Inputs
from guided_spec.ops import mailbox
from guided_spec.ops.sampling.adjust import Adjustments, RuleTable, TokenRules
from guided_spec.ops.sampling.rejection import dense_probs
from guided_spec.proposers import build_proposer, learned_head
from guided_spec.proposers.device_masks import DeviceMasks
from guided_spec.proposers.draft_graphs import DraftGraphs
from guided_spec.proposers.draft_session import DraftRows, DraftSession
from guided_spec.proposers.host_masks import HostMasks
from guided_spec.proposers.learned_head import LearnedHead
from guided_spec.step import speculative_step
from guided_spec.types import Draft, DraftPolicy, SamplingParams
from tests.gpu.test_engine_cuda import GRAMMARS, PROMPTS
from tests.learned_heads import HeadedTarget, write_head
from tests.loops import target_probs, toy_states
from tests.tiny_llm import VOCAB_SIZE as LLM_VOCAB_SIZE
from tests.tiny_llm import make_llm
from tests.toys import (
    TEXTS,
    VOCAB_SIZE,
    Rule,
    ToyCompiled,
    ToyTarget,
    chi_square_p_value,
    hashed_rule,
    text_rule,
    toy_batch,
    toy_context,
)

CPU = torch.device("cpu")
K = 3
RULES: list[Rule | None] = [text_rule([b'{"ab":1}', b'{"ab":0,"cd":1}']), hashed_rule(3), None]
CONTEXTS = [[4, 1], [0, 1, 2, 0, 1], [1, 5, 5]]
MIXED = (0.8, 0.0, 1.0)


class Device(GraphPool):
    """Runs what waits for masks in a thread, as a device runs it next to the host."""

    running: ClassVar[list[threading.Thread]] = []

    def __init__(self) -> None:
        super().__init__(CPU)

    def run(
        self,
        key: Hashable,
        inputs: Inputs,
        body: Callable[[Inputs], Any],
        fixed: Inputs = NOTHING,
        overlapped: Callable[[], None] | None = None,
    ) -> Any:
        self.join()
        name = key[0] if isinstance(key, tuple) else None
        if not (isinstance(name, tuple) and name[0] == "draft"):
            return super().run(key, inputs, body, fixed, overlapped)
        held = self._captured[key].inputs
        for at, value in inputs.items():
            held[at].copy_(value)
        self.running.append(threading.Thread(target=self._run, args=(body, held)))
        self.running[-1].start()
        if overlapped is not None:  # else the device needs nothing from the host
            overlapped()
        return None  # what was drawn is in buffers

    @torch.inference_mode()
    def _run(self, body: Callable[[Inputs], Any], inputs: Inputs) -> None:
        body(inputs)

    @classmethod
    def join(cls) -> None:
        while cls.running:
            cls.running.pop().join()


class Headed(NamedTuple):
    """name: of the proposer."""

    name: str
    written: HeadedTarget


class Drafted(NamedTuple):
    draft: Draft
    drafted: list[list[int]]
    starved: list[int]


@pytest.fixture(scope="module", params=["eagle3", "dflash", "dspark", "p_eagle"])
def headed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Headed:
    """Heads that draft token by token, and that score a block at once."""
    folder = tmp_path_factory.mktemp("head")
    return Headed(request.param, write_head(folder, request.param, VOCAB_SIZE))


@pytest.fixture(autouse=True)
def _in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has walked a draft finds all of it, as what a device does behind it would.

    A CPU reads at once what it is given: so a draft in flight is walked, although nobody is told.
    """
    accept, begin = DeviceMasks.accept_masked, DraftSession.__init__

    def accept_and_wait(self: DeviceMasks) -> None:
        accept(self)
        Device.join()

    def settled(self: DraftSession, rows: DraftRows, masks: Any, *others: Any) -> None:
        if isinstance(masks, DeviceMasks):
            masks.accept_masked()
        begin(self, rows, masks, *others)

    monkeypatch.setattr(DeviceMasks, "accept_masked", accept_and_wait)
    monkeypatch.setattr(DraftSession, "__init__", settled)


def build(headed: Headed, *, is_waiting: bool, before: str = "") -> Any:
    """before: of the proposer's name, where it is not the head's own alone."""
    config = EngineConfig(kernels="packed", num_draft_tokens=K)
    context = toy_context(target=headed.written.target, draft=headed.written.draft, config=config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learned_head, "can_share", lambda _: is_waiting)
        if is_waiting:
            patch.setattr(packed_slot_head, "GraphPool", lambda *_, **__: Device())
            patch.setattr(block_reader, "GraphPool", lambda *_, **__: Device())
        found: Any = build_proposer(f"{before}{headed.name}:mask", context)
    return found


def make_batch(
    proposer: LearnedHead, temperatures: Sequence[float], limits: Sequence[int]
) -> DecodeBatch:
    constraints = [None if rule is None else Constraint(ToyCompiled(rule)) for rule in RULES]
    params = [SamplingParams(temperature=temperature) for temperature in temperatures]
    batch = toy_batch(CONTEXTS, constraints, k=K, limits=limits, params=params)
    batch.states = toy_states(proposer, batch)
    return batch


def draft(
    headed: Headed,
    temperatures: Sequence[float],
    limits: Sequence[int],
    given: Sequence[int] = (0, 0, 0),
    *,
    is_waiting: bool,
) -> Drafted:
    """given: legal tokens that the drafts hold before."""
    proposer = build(headed, is_waiting=is_waiting)
    batch = make_batch(proposer, temperatures, limits)
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    every = tuple(range(VOCAB_SIZE))
    lookahead.extend_best([[every] * length for length in given])
    assert proposer.ends_chains == is_waiting
    flight = proposer.begin(batch, lookahead)
    found = flight.finish()
    lengths = found.num_tokens.tolist()
    assert all(length <= most for length, most in zip(lengths, flight.most, strict=True))
    return Drafted(found, lookahead.drafted, lookahead.starved)


@pytest.mark.parametrize("temperatures", [(0.0,) * 3, MIXED], ids=["greedy", "mixed"])
def test_a_chain_drafts_the_same_beside_a_penalty(
    headed: Headed, monkeypatch: pytest.MonkeyPatch, temperatures: Sequence[float]
) -> None:
    """A neighbour's penalty keeps the graph from drafting, and ends no chain elsewhere."""
    rules = [text_rule([b"a:bcd1", b"b:cda1", b"c:dab0"]), hashed_rule(3, share=0.1), None]
    monkeypatch.setattr(sys.modules[__name__], "RULES", rules)
    found = []
    for penalty in (0.0, 2.0):
        proposer = build(headed, is_waiting=True, before="chain:grammar_forced+")
        batch = make_batch(proposer, temperatures, (2 * K,) * 3)
        penalties = [SamplingParams(frequency_penalty=one) for one in (0.0, 0.0, penalty)]
        table = RuleTable.stack([TokenRules(one) for one in penalties], VOCAB_SIZE, CPU)
        batch.adjustments = Adjustments.stack(table, batch.contexts, batch.prompt_lengths)
        lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
        draft = proposer.begin(batch, lookahead).finish()
        pairs = zip(draft.token_ids.tolist(), draft.num_tokens.tolist(), strict=True)
        found.append([tokens[:length] for tokens, length in pairs])
    assert found[0][:2] == found[1][:2]


@pytest.mark.parametrize("count", [1, K])
def test_the_next_draft_overwrites_nothing_of_one_that_is_verified(
    headed: Headed, count: int
) -> None:
    proposer = build(headed, is_waiting=True)
    batch = replace(make_batch(proposer, MIXED, (K,) * 3), num_draft_tokens=count)
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    found = proposer.begin(batch, lookahead).finish()
    parts = [one for one in (found.token_ids, found.probs, found.is_certain) if one is not None]
    before = [one.clone() for one in parts]
    assert len(parts) > 1
    assert proposer._graphs is not None
    for buffers in proposer._graphs._buffers.values():
        for one in (buffers.ids, buffers.probs, buffers.rescued):
            if one is not None:
                one.fill_(7)
    assert all(map(torch.equal, parts, before))


TEMPERATURES = pytest.mark.parametrize("temperatures", [(0.0,) * 3, MIXED], ids=["greedy", "mixed"])


def test_the_host_launches_on_while_the_device_is_busy(
    headed: Headed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a block's forward before any token, with another one behind the first."""
    waited, accept = list[int](), DeviceMasks.accept_up_to

    def watched(self: DeviceMasks, count: int) -> None:
        waited.append(count)
        accept(self, count)

    monkeypatch.setattr(DeviceMasks, "accept_up_to", watched)
    draft(headed, (0.0,) * 3, (K,) * 3, is_waiting=True)
    assert waited[:-1] == ([1, K] if headed.name == "eagle3" else [K])  # the last is finish's


@TEMPERATURES
@pytest.mark.parametrize("limits", [(3, 3, 3), (1, 3, 2), (0, 2, 0)])
def test_the_same_draft(
    headed: Headed, temperatures: Sequence[float], limits: Sequence[int]
) -> None:
    compare(headed, temperatures, limits, (0, 0, 0))


@TEMPERATURES
@pytest.mark.parametrize("limits", [(12, 12, 12), (4, 6, 5), (2, 12, 3)])
@pytest.mark.parametrize(
    "given", [(2, 0, 0), (0, 0, 3), (K, 1, 2), (K + 1, K - 1, 0), (8, 0, 9), (6, 5, 7)]
)
def test_the_same_draft_behind_what_is_given(
    headed: Headed,
    temperatures: Sequence[float],
    limits: Sequence[int],
    given: Sequence[int],
) -> None:
    """Rows are given less and more than the graph reads, up to their limits and texts' ends."""
    found = compare(headed, temperatures, limits, given)
    for row, (length, limit) in enumerate(zip(given, limits, strict=True)):
        if length >= min(K, limit):
            assert found.draft.num_tokens[row] == 0
        elif RULES[row] is None:
            assert found.draft.num_tokens[row] == min(K, limit) - length


def compare(
    headed: Headed,
    temperatures: Sequence[float],
    limits: Sequence[int],
    given: Sequence[int],
) -> Drafted:
    """The draft of a graph that waits, which is that of the loop."""
    one, other = (
        draft(headed, temperatures, limits, given, is_waiting=is_waiting)
        for is_waiting in (True, False)
    )
    check_same(one, other)
    return one


def check_same(found: Drafted, expected: Drafted) -> None:
    assert found.drafted == expected.drafted
    assert found.starved == expected.starved
    lengths = expected.draft.num_tokens
    assert torch.equal(found.draft.num_tokens, lengths)
    for row, length in enumerate(lengths.tolist()):
        one, other = found.draft.token_ids[row, :length], expected.draft.token_ids[row, :length]
        assert torch.equal(one, other)
        if expected.draft.probs is not None:
            one, other = (dense_probs(each.draft, VOCAB_SIZE) for each in (found, expected))
            torch.testing.assert_close(one[row, :length], other[row, :length])


POLICIES: list[tuple[DraftPolicy | None, ...]] = [
    ("validate",) * 3,
    ("mask", "validate", None),
    ("validate", None, None),
]


@TEMPERATURES
@pytest.mark.parametrize("policies", POLICIES, ids=str)
def test_the_same_draft_under_each_policy(
    headed: Headed, temperatures: Sequence[float], policies: Sequence[DraftPolicy | None]
) -> None:
    """One graph for rows under masks, rows that the host checks afterwards, and free rows."""
    drafts = []
    for is_whole in (True, False):
        proposer = build(headed, is_waiting=True)
        batch = replace(make_batch(proposer, temperatures, (K, K, 2)), policies=tuple(policies))
        lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
        if not is_whole:
            proposer._graphs = None
        flight = proposer.begin(batch, lookahead)
        assert isinstance(flight, DraftSession)
        assert isinstance(flight._masks, DeviceMasks if is_whole else HostMasks)
        if "mask" not in policies and policies[1] is not None:
            assert flight.serve_mailbox is None
        drafts.append(Drafted(flight.finish(), lookahead.drafted, lookahead.starved))
    check_same(*drafts)


@pytest.mark.parametrize("length", [1, 2])
def test_a_short_draft_is_the_beginning_of_one_that_was_captured(
    headed: Headed, length: int
) -> None:
    drafts = []
    for is_captured in (False, True):
        proposer = build(headed, is_waiting=True)
        graphs = proposer._graphs
        if is_captured:
            assert len(list(graphs.capture())) == 6 * len(graphs.sizes)
        assert [graphs.length(n) for n in (1, K, K + 1)] == [K if is_captured else 1, K, K + 1]
        batch = replace(make_batch(proposer, MIXED, (K,) * 3), num_draft_tokens=length)
        lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
        found = proposer.begin(batch, lookahead).finish()
        assert found.token_ids.shape[1] == length
        drafts.append(Drafted(found, lookahead.drafted, lookahead.starved))
    if headed.name in ("eagle3", "p_eagle"):  # the positions of other blocks see those after them
        check_same(*drafts)


@pytest.mark.parametrize("given", [(0, 0, 0), (1, 0, 4), (3, 2, 5)])
def test_the_same_best_tokens_behind_what_is_given(headed: Headed, given: Sequence[int]) -> None:
    """Drafts without masks are one graph too: they are those of the stock head, one by one."""
    drafts = []
    for kernels in ("packed", "stock"):
        config = EngineConfig(kernels=kernels, num_draft_tokens=K)
        written = headed.written
        context = toy_context(target=written.target, draft=written.draft, config=config)
        proposer: Any = build_proposer(f"{headed.name}:validate", context)
        batch = make_batch(proposer, (0.0,) * 3, (12, 12, 12))
        lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
        every = tuple(range(VOCAB_SIZE))
        lookahead.extend_best([[every] * length for length in given])
        found = proposer.begin(batch, lookahead).finish()
        rows = zip(found.token_ids.tolist(), found.num_tokens.tolist(), strict=True)
        drafts.append([tokens[:length] for tokens, length in rows])
    for packed, stock, length in zip(*drafts, given, strict=True):
        assert packed == stock[: max(0, K - length)]


ROWS = 32
PREFIX = b'{"a'  # forced


@pytest.mark.slow
def test_the_law_behind_forced_text(headed: Headed) -> None:
    """The next token has the target's law, whatever the head drew behind what is forced."""
    rule = text_rule([PREFIX + bytes([one, other]) for one in b"abcd" for other in b'01"'])
    target, prompt = ToyTarget(3, scale=1.0), [4, 1]
    config = EngineConfig(kernels="packed", num_draft_tokens=2 * K)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learned_head, "can_share", lambda _: True)
        patch.setattr(packed_slot_head, "GraphPool", lambda *_, **__: Device())
        patch.setattr(block_reader, "GraphPool", lambda *_, **__: Device())
        written = headed.written
        context = toy_context(
            target=written.target, draft=written.draft, config=config, num_slots=ROWS
        )
        proposer = build_proposer(f"chain:grammar_forced+{headed.name}:mask", context)
    counts = torch.zeros(VOCAB_SIZE)
    accepted = 0
    for start in range(0, 40 * ROWS, ROWS):
        batch = toy_batch(
            [prompt] * ROWS,
            [Constraint(ToyCompiled(rule)) for _ in range(ROWS)],
            k=2 * K,
            limits=[8] * ROWS,
            params=[SamplingParams(temperature=1.0)] * ROWS,
            seeds=range(start, start + ROWS),
        )
        batch.states = toy_states(proposer, batch)
        step = speculative_step(target, proposer, batch)
        proposer.release(range(ROWS))
        accepted += int((step.accepted.num_accepted - len(PREFIX)).sum())
        assert min(map(len, step.lookahead.forced)) >= len(PREFIX)
        counts += step.accepted.token_ids[:, len(PREFIX)].bincount(minlength=VOCAB_SIZE)
    assert accepted > 5 * ROWS
    output = [TEXTS.index(bytes([byte])) for byte in PREFIX]
    exact = target_probs(target, rule, prompt, output)
    assert chi_square_p_value(counts, exact) > 1e-4


def test_a_walk_that_fails_lets_the_device_go(
    headed: Headed, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = build(headed, is_waiting=True)
    batch = make_batch(proposer, (0.0,) * 3, (3, 3, 3))
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    with monkeypatch.context() as patch:
        patch.setattr(lookahead, "accept_ids", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            proposer.begin(batch, lookahead).finish()
    Device.join()  # it waits for no mask any more
    again = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    found = proposer.begin(batch, again).finish()
    Device.join()
    assert (
        found.token_ids.tolist()
        == draft(headed, (0.0,) * 3, (3, 3, 3), is_waiting=False).draft.token_ids.tolist()
    )


@pytest.mark.slow
@pytest.mark.usefixtures("drafted_from_the_start")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_same_texts_by_the_same_drafts(
    headed_llm: HeadedTarget, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Of a device that waits for the host, of one that has tables for some, and of none."""
    found: list[list[RequestOutput]] = []
    for is_waiting, tables in ((True, "off"), (True, "always"), (False, "off")):
        monkeypatch.setattr(learned_head, "can_share", lambda _, now=is_waiting: now)
        found.append(generate(headed_llm, "eagle3:mask", temperature, grammar_tables=tables))
    assert [output.error for output in found[0]] == [None] * len(PROMPTS)
    for waiting, tabled, old in zip(*found, strict=True):
        assert waiting.token_ids == tabled.token_ids == old.token_ids
        assert waiting.stats.drafted == tabled.stats.drafted == old.stats.drafted
        assert waiting.stats.accepted == tabled.stats.accepted == old.stats.accepted
        assert waiting.stats.starved == tabled.stats.starved == old.stats.starved
        assert waiting.stats.device_steps == 0
    assert [output.stats.device_steps > 0 for output in found[1]] == [False, True, False, True]


@pytest.mark.parametrize("verifier", ["rejection", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_chain_in_flight_changes_no_text(
    headed_llm: HeadedTarget, monkeypatch: pytest.MonkeyPatch, temperature: float, verifier: str
) -> None:
    """Some requests are given forced text, and a free one is in the same batch."""
    monkeypatch.setattr(learned_head, "can_share", lambda _: True)
    given: list[bool] = []
    launch = DraftGraphs.launch

    def watched(*arguments: Any) -> DeviceMasks:
        given.append(arguments[3] is not None)
        return launch(*arguments)

    monkeypatch.setattr(DraftGraphs, "launch", watched)
    chain = "chain:grammar_forced+eagle3:mask"
    found = generate(headed_llm, chain, temperature, verifier=verifier)
    assert [output.error for output in found] == [None] * len(PROMPTS)
    assert set(given) == {True, False}
    assert sum(len(output.stats.drafted) > 0 for output in found) == len(PROMPTS)
    if temperature == 0 or verifier == "coupled":
        plain = generate(headed_llm, "none", temperature, verifier=verifier)
        assert [output.token_ids for output in found] == [output.token_ids for output in plain]


SPECS = [
    "eagle3:mask",
    "chain:grammar_forced+eagle3:mask",
    "chain:grammar_forced:start+eagle3:mask",
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_device_that_waits_in_vain_changes_no_text(
    headed_llm: HeadedTarget, monkeypatch: pytest.MonkeyPatch, temperature: float, spec: str
) -> None:
    """It draws from masks of other positions, or none. Coupled texts are those without drafts."""
    monkeypatch.setattr(mailbox, "PATIENCE", 0)
    monkeypatch.setattr(learned_head, "can_share", lambda _: True)
    plain = generate(headed_llm, "none", temperature, verifier="coupled")
    drafted = generate(headed_llm, spec, temperature, verifier="coupled")
    assert [output.error for output in drafted] == [None] * len(PROMPTS)
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    starts = sum(len(output.stats.drafted) > 0 for output in drafted)
    assert starts == len(PROMPTS)


def generate(
    headed: HeadedTarget, proposer: str, temperature: float, **options: Any
) -> list[RequestOutput]:
    """Three requests at a time, whose drafts a thread makes where they wait for masks."""
    params = [
        SamplingParams(max_tokens=30, temperature=temperature, seed=4, grammar=grammar)
        for grammar in GRAMMARS
    ]
    options |= {"kernels": "packed", "max_batch_size": 3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_slot_head, "GraphPool", lambda *_, **__: Device())
        with make_llm(headed.target, proposer, headed.draft, **options) as llm:
            return llm.generate(PROMPTS, params)


@pytest.fixture(scope="module")
def headed_llm(tmp_path_factory: pytest.TempPathFactory) -> HeadedTarget:
    return write_head(tmp_path_factory.mktemp("head"), "eagle3", LLM_VOCAB_SIZE)
