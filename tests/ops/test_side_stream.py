"""Where there is one stream, everything is in its order."""

from __future__ import annotations

import torch

from guided_spec.ops.host import Download
from guided_spec.ops.side_stream import SideStream


def test_without_streams_nothing_is_to_be_done() -> None:
    for side in (SideStream(torch.device("cpu")), SideStream.none()):
        value = torch.zeros(1)
        with side.use():
            value += 1
        side.after_current()
        side.join()
        side.after_download(Download(value))
        side.borrow(value, None)
        assert value.item() == 1
