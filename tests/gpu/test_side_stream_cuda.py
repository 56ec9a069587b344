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
    side, slow = SideStream(CUDA), torch.zeros(1, device=CUDA)
    with side.use():
        Download(slow.clone())  # to get pinned memory waits for the device
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    slow += 1
    with side.use():
        beside = Download(slow.clone())
    assert beside.wait().item() == 0
    side.follow()
    with side.use():
        behind = Download(slow.clone())
    assert behind.wait().item() == 1


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
    side.follow_download(download)
    with side.use():
        assert Download(slow.clone()).wait().item() == 1


def test_what_is_lent_is_not_given_to_others_before() -> None:
    side, torn = SideStream(CUDA), list[int]()
    for _ in range(20):
        lent = torch.ones(1 << 20, device=CUDA)
        side.follow()
        with side.use():
            torch.cuda._sleep(LONG // 100)
            read = Download((lent != 1).sum())
        side.lend(lent, None)
        del lent
        torch.full((1 << 20,), 5.0, device=CUDA)
        torn.append(int(read.wait()))
    assert sum(torn) == 0
