"""Mask rows and tokens between the host and a device, whose part another thread plays."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from guided_spec.ops import mailbox
from guided_spec.ops.mailbox import (
    LAST_TICKET,
    UNTICKETED,
    Mailbox,
    Report,
    can_share,
    fetch_rows,
    reply,
)

CPU = torch.device("cpu")
WORDS = 3


def addresses(rows: Tensor) -> list[int]:
    return [row.data_ptr() for row in rows]


def ticket_of(box: Mailbox) -> Tensor:
    return torch.tensor([box.ticket])


def fail() -> None:
    raise AssertionError("the replies were late")


@contextmanager
def beside(work: object) -> Iterator[None]:
    thread = threading.Thread(target=work)  # type: ignore[arg-type]
    thread.start()
    yield
    thread.join()


def test_rows_come_when_they_are_posted() -> None:
    box, rows = Mailbox(2, 4, CPU), torch.arange(4 * WORDS, dtype=torch.int32).view(4, WORDS)
    kept, out = rows[[2, 0, 1]], torch.zeros(3, WORDS, dtype=torch.int32)
    box.begin()
    with beside(lambda: fetch_rows(box.orders[1], ticket_of(box), out)):
        box.post(0, addresses(rows))  # another position's
        box.post(1, addresses(kept))
    assert torch.equal(out, kept)
    box.begin()
    first, _, last = addresses(kept)
    box.post(0, [first, 0, last])
    fetch_rows(box.orders[0], ticket_of(box), out)
    kept[1] = -1  # forbids nothing
    assert torch.equal(out, kept)


def test_the_device_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "PATIENCE", 3)
    box, out = Mailbox(1, 2, CPU), torch.zeros(2, WORDS, dtype=torch.int32)
    box.begin()
    fetch_rows(box.orders[0], ticket_of(box), out)
    assert bool((out == -1).all())  # forbids nothing


def test_nobody_waits_without_a_ticket_or_behind_a_release() -> None:
    box, out = Mailbox(2, 2, CPU), torch.zeros(2, WORDS, dtype=torch.int32)
    row = torch.full((2, WORDS), 7, dtype=torch.int32)
    box.begin()
    fetch_rows(box.orders[0], torch.tensor([UNTICKETED]), out)
    assert bool((out == -1).all())
    box.post(0, addresses(row))
    box.release()
    fetch_rows(box.orders[0], ticket_of(box), out)
    assert bool((out == 7).all())  # what was posted stands
    fetch_rows(box.orders[1], ticket_of(box), out)
    assert bool((out == -1).all())


drawn = st.lists(
    st.tuples(st.integers(-1, 2**31 - 3), st.booleans()), min_size=1, max_size=5
)  # a token and whether its row starved


@given(drawn, st.integers(1, LAST_TICKET))
def test_answers_arrive_whole(rows: list[tuple[int, bool]], ticket: int) -> None:
    box = Mailbox(1, 8, CPU)
    box.ticket = ticket - 1
    assert box.begin() == ticket
    ids = torch.tensor([token for token, _ in rows])
    flags = torch.tensor([flag for _, flag in rows])
    out = torch.zeros(len(rows), 2, dtype=torch.int64)[:, 1]
    with beside(lambda: reply(ids, flags, Report(ticket_of(box), box.replies[0], out))):
        found = box.wait(0, len(rows), fail)
    assert found.token_ids == ids.tolist()
    assert found.starved == flags.long().tolist()
    assert out.tolist() == [max(token, 0) for token in found.token_ids]


def test_an_answer_to_another_draft_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "IMPATIENCE", 0.01)
    box, out = Mailbox(1, 2, CPU), torch.zeros(2, dtype=torch.int64)
    box.begin()
    reply(torch.tensor([1, 2]), None, Report(ticket_of(box), box.replies[0], out))
    assert box.wait(0, 2, fail).token_ids == [1, 2]
    box.begin()
    with pytest.raises(AssertionError, match="late"):
        box.wait(0, 2, fail)
    with pytest.raises(RuntimeError, match="drafted no token 0"):
        box.wait(0, 2, lambda: None)


def test_tickets_begin_again() -> None:
    box = Mailbox(1, 1, CPU)
    box.ticket = LAST_TICKET
    assert box.begin() == 1 != UNTICKETED


def test_a_cpu_is_not_shared_with() -> None:
    assert not can_share(CPU)
