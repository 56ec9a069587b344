"""What runs beside the current stream, and who waits for whom."""

from __future__ import annotations

import pytest
import torch

from guided_spec.ops.host import Download
from guided_spec.ops.side_stream import SideStream

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
LONG = 200_000_000  # cycles


def test_it_does_not_wait_for_the_current_stream_unless_told() -> None:
    """Nothing between is allocated or launched for the first time: both may wait for the device."""
    side, slow, seen = SideStream(CUDA), torch.zeros(1, device=CUDA), torch.ones(2, device=CUDA)
    ended, copied = torch.cuda.Event(), torch.cuda.Event()
    with side.use():
        seen[:1].copy_(slow)
        copied.record()
    slow += 0
    ended.record()
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * LONG)
    slow += 1
    ended.record()
    with side.use():
        seen[:1].copy_(slow)
        copied.record()
    copied.synchronize()
    assert not ended.query()
    side.after_current()
    with side.use():
        seen[1:].copy_(slow)
    side.join()
    assert seen.tolist() == [0, 1]


def test_who_joins_waits() -> None:
    side, slow = SideStream(CUDA), torch.zeros(1, device=CUDA)
    torch.cuda.synchronize()
    with side.use():
        torch.cuda._sleep(LONG)
        slow += 1
    side.join()
    assert Download(slow.clone()).wait().item() == 1


def test_it_waits_for_a_download() -> None:
    side, slow = SideStream(CUDA), torch.zeros(1, device=CUDA)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    slow += 1
    download = Download(slow)
    side.after_download(download)
    with side.use():
        assert Download(slow.clone()).wait().item() == 1


def test_what_is_lent_is_not_given_to_others_before() -> None:
    side, torn = SideStream(CUDA), list[int]()
    for _ in range(20):
        borrowed = torch.ones(1 << 20, device=CUDA)
        side.after_current()
        with side.use():
            torch.cuda._sleep(LONG // 100)
            read = Download((borrowed != 1).sum())
        side.borrow(borrowed, None)
        del borrowed
        torch.full((1 << 20,), 5.0, device=CUDA)
        torn.append(int(read.wait()))
    assert sum(torn) == 0
