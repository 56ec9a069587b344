"""Sampled drafts that the grammar refuses, in the real vLLM: its scheduler and its kernels.

p is (.5, .5) over two legal tokens, q is .5 on the first of them and .5 on an illegal one. Given
the legal draft the step gives the first token; given the illegal one it must give the second, the
only one in the residual. So the law is (.5, .5) iff no refused draft is followed by the first.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from guided_spec.integrations.vllm import exact as vllm_exact
from guided_spec.integrations.vllm.plugin import install

vllm = pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.integrations.vllm.parts import (  # noqa: E402
    RELEASE,
    Step,
    add_request,
    first_step,
    interpreted,
    make_config,
    make_scheduler,
    next_step,
    tokenizer,
    use_cpu,
    verify,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, and the Triton interpreter's

SCHEDULER = "vllm.v1.core.sched.scheduler"
WORKER = "vllm.v1.worker.gpu.structured_outputs"
RUNNER = "vllm.v1.worker.gpu.model_runner"
MINUS = float("-inf")


@pytest.fixture
def original(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test installs is gone after it."""
    scheduler = importlib.import_module(SCHEDULER).Scheduler
    for name in ("update_draft_token_ids", "get_grammar_bitmask"):
        monkeypatch.setattr(scheduler, name, getattr(scheduler, name))
    for module in map(importlib.import_module, (WORKER, RUNNER)):
        if hasattr(module, "grammar_invalid_drafts"):
            kept = module.grammar_invalid_drafts
            monkeypatch.setattr(module, "grammar_invalid_drafts", kept)


def ids(*texts: str) -> list[int]:
    found = [tokenizer().encode(text, add_special_tokens=False) for text in texts]
    assert all(len(one) == 1 for one in found)
    return [one[0] for one in found]


def step_after(drafts: dict[str, list[int]]) -> Step:
    """One request a draft, behind the token "a" of a grammar that goes on with "b" or "c"."""
    config = make_config()
    config.speculative_config.draft_sample_method = "probabilistic"
    scheduler = make_scheduler(config)
    for name in drafts:
        add_request(scheduler, name, regex="a(b|c)d*")
    step = first_step(scheduler, len(drafts))
    return next_step(scheduler, step, {name: ids("a") for name in drafts}, drafts)


def legal_rows(step: Step, name: str) -> list[set[int] | None]:
    """The legal tokens of each row of a request's mask; None for a row that forbids nothing."""
    names = step.grammar.structured_output_request_ids
    counts = [len(step.scheduled.scheduled_spec_decode_tokens.get(n, ())) + 1 for n in names]
    bits = np.asarray(step.grammar.grammar_bitmask)
    start, count = sum(counts[: names.index(name)]), counts[names.index(name)]
    if len(bits) != sum(counts):  # 0.33: as many rows for each request
        start = names.index(name) * (len(bits) // len(names))
    rows = np.unpackbits(bits.view(np.uint8), axis=-1, bitorder="little")[start : start + count]
    return [None if row.all() else set(np.flatnonzero(row).tolist()) for row in rows]


def worker_drafts(counts: list[int], drafts: list[list[int]], step: Step) -> list[list[int]]:
    """The draft tokens that reach the kernels: vLLM 0.33 takes some away on the worker."""
    module: Any = importlib.import_module(WORKER)
    if not hasattr(module, "grammar_invalid_drafts"):
        return [row[:count] for row, count in zip(drafts, counts, strict=True)]
    lengths = torch.tensor([count + 1 for count in counts])
    batch = SimpleNamespace(
        req_ids=step.grammar.structured_output_request_ids,
        num_reqs=len(counts),
        num_draft_tokens=sum(counts),
        num_draft_tokens_per_req=np.array(counts),
        expanded_local_pos=torch.cat([torch.arange(n) for n in lengths.tolist()]),
        cu_num_logits=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
    )
    invalid = module.grammar_invalid_drafts(
        batch, step.grammar.structured_output_request_ids, step.grammar.num_acceptable_drafts
    )
    flags = torch.zeros(sum(counts) + len(counts), dtype=torch.bool) if invalid is None else invalid
    kept: list[list[int]] = []
    for row, count, own in zip(drafts, counts, flags.split(lengths.tolist()), strict=True):
        dropped = own[1:].tolist()
        kept.append([-1 if gone else t for t, gone in zip(row[:count], dropped, strict=True)])
    return kept


def logits(vocab_size: int, *tokens: int) -> Tensor:
    row = torch.full((vocab_size,), MINUS)
    row[list(tokens)] = 0.0
    return row


def first_tokens(step: Step, draft: list[int], copies: int) -> list[int]:
    """The first token of each of ``copies`` requests that are like "request" of ``step``."""
    b, c, illegal = ids("b", "c", "z")
    count = len(step.scheduled.scheduled_spec_decode_tokens.get("request", ()))
    assert legal_rows(step, "request")[0] == {b, c}
    vocab_size = max(b, c, illegal) + 1
    (kept,) = worker_drafts([count], [draft], step)
    target = logits(vocab_size, b, c).expand(copies, len(draft) + 1, -1)
    drawn_from = logits(vocab_size, b, illegal).expand(copies, len(draft), -1)
    return [row[0] for row in verify(target, drawn_from, [kept] * copies)]


@interpreted
@pytest.mark.usefixtures("original")
def test_the_law_of_a_step_without_asynchronous_scheduling(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpu(monkeypatch)
    b, c, illegal = ids("b", "c", "z")
    before = first_tokens(step_after({"request": [illegal, illegal]}), [illegal, illegal], 10)
    install("exact", vllm_exact.PATCHES)
    after = first_tokens(step_after({"request": [illegal, illegal]}), [illegal, illegal], 10)
    accepted = first_tokens(step_after({"request": [b, illegal]}), [b, illegal], 4)

    assert set(accepted) == {b}
    assert {b, c} == set(before)  # so b has .75 altogether
    assert set(after) == {c}  # and now .5


@interpreted
@pytest.mark.usefixtures("original")
@pytest.mark.skipif(RELEASE < (0, 32), reason="older releases drop no tokens there")
def test_the_law_of_a_step_with_asynchronous_scheduling(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpu(monkeypatch)
    b, c, illegal = ids("b", "c", "z")
    copies = 64
    generator = torch.Generator().manual_seed(5)
    draws = (torch.rand(copies, 1, generator=generator) < 0.5).squeeze(1).tolist()
    drafts = [[b] if legal else [illegal] for legal in draws]
    names = [str(at) for at in range(copies)]
    grammar = SimpleNamespace(
        structured_output_request_ids=names, num_acceptable_drafts=[int(legal) for legal in draws]
    )
    step = Step(None, grammar)
    target = logits(illegal + b + c, b, c).expand(copies, 2, -1)
    drawn_from = logits(illegal + b + c, b, illegal).expand(copies, 1, -1)

    def share_of_b() -> float:
        kept = worker_drafts([1] * copies, drafts, step)
        tokens = [row[0] for row in verify(target, drawn_from, kept)]
        assert set(tokens) <= {b, c}
        return tokens.count(b) / copies

    legal_share = sum(draws) / copies
    before = share_of_b()
    install("exact", vllm_exact.PATCHES)

    assert before == pytest.approx(legal_share + (1 - legal_share) / 2, abs=0.12)
    assert share_of_b() == legal_share  # each refused draft gave the other token


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each step adds to the counter of ``/metrics``."""
    found: list[int] = []
    monkeypatch.setattr(vllm_exact, "count", lambda _, times: found.append(times))
    return found


@pytest.mark.usefixtures("original")
def test_what_the_grammar_and_the_worker_see(counted: list[int]) -> None:
    b, illegal, d = ids("b", "z", "d")
    drafts = {"cut": [b, illegal, d], "whole": [b, d], "none": [illegal]}
    before = step_after(drafts).scheduled.scheduled_spec_decode_tokens
    assert (before["cut"], before["whole"], before.get("none", [])) == ([b], [b, d], [])

    install("exact", vllm_exact.PATCHES)
    step = step_after(drafts)
    after = step.scheduled.scheduled_spec_decode_tokens
    assert after == {"cut": [b, illegal], "whole": [b, d], "none": [illegal]}
    assert counted == [2]
    first, second, behind = legal_rows(step, "cut")
    assert first is not None
    assert second is not None
    assert b in first
    assert d in second
    assert illegal not in first | second
    assert behind in (None, second)  # never reached
    whole = legal_rows(step, "whole")
    assert whole[:2] == [first, second]
    assert whole[2] is not None
    counts = getattr(step.grammar, "num_acceptable_drafts", None)
    if counts is not None:
        named = dict(zip(step.grammar.structured_output_request_ids, counts, strict=True))
        assert named == {"cut": 1, "whole": 2, "none": 0}


@pytest.mark.usefixtures("original")
def test_greedy_drafts_are_cut_as_before(counted: list[int]) -> None:
    b, illegal = ids("b", "z")
    install("exact", vllm_exact.PATCHES)
    scheduler = make_scheduler(make_config())
    add_request(scheduler, "request", regex="a(b|c)d*")
    step = first_step(scheduler, 1)
    found = next_step(scheduler, step, {"request": ids("a")}, {"request": [b, illegal]})
    assert found.scheduled.scheduled_spec_decode_tokens == {"request": [b]}
    assert not counted
