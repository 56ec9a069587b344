"""``python -m tests.integrations.vllm.ahead``: kernels of tables, compiled for no GPU at all.

Prints as JSON what a drafter has compiled while it is loaded, and what steps ask for besides.
"""

from __future__ import annotations

import json
import sys
from itertools import product

import torch

from guided_spec.integrations.vllm.drafts import tabled_requests
from guided_spec.integrations.vllm.drafts.masks import DraftMasks
from guided_spec.integrations.vllm.ranks import LATER
from guided_spec.masks import rows
from guided_spec.ops import table_rows_triton
from guided_spec.ops.launch_triton import compiling_ahead
from tests.ops.ahead import Hopper, compile_for
from tests.ops.table_walks import random_table

CPU = torch.device("cpu")
SIZE, DEPTH, VOCAB_SIZE = 9, 3, 4096


def steps(own: tabled_requests.TabledRequests) -> None:
    """Of both of vLLM's runners, with free requests and without, whose rows the host may fill."""
    masks = rows.MaskRows(SIZE, DEPTH + 1, VOCAB_SIZE, CPU)
    for count, token_type, count_type in product(
        (1, 2, SIZE), (torch.int32, torch.int64), (torch.int32, torch.int64)
    ):
        names = list(map(str, range(count)))
        tokens = torch.zeros(count, DEPTH + 1, dtype=token_type)
        drafts = DraftMasks(masks, VOCAB_SIZE, lambda at, size: tokens[:size, at])  # noqa: B023
        own.commit(names, tokens, torch.zeros(count, dtype=count_type))
        tabled = own.start(names)
        assert tabled is not None
        drafts.start([None] * count, DEPTH, tabled=tabled)
        for _ in range(DEPTH):
            drafts.turn()
            drafts.drawn()
        drafts.finish()
        tabled.mask(
            0, torch.empty(count, VOCAB_SIZE // 32 + tabled_requests.TAIL, dtype=torch.int32)
        )


def main() -> None:
    made = compile_for(Hopper())
    launched = ((rows, "copy_rows"), (rows, "advance"), (tabled_requests, "advance_committed"))
    for module, name in launched:
        setattr(module, name, getattr(table_rows_triton, name))
    own = tabled_requests.TabledRequests(SIZE, DEPTH, VOCAB_SIZE, None, CPU, 2**24)
    with compiling_ahead():
        own.launch_all()
    loaded = dict(made)
    assert own.begin("0", random_table(0, VOCAB_SIZE), []) > LATER
    with compiling_ahead():
        steps(own)
    served = {name: made[name] - loaded.get(name, 0) for name in made}
    sys.stdout.write(json.dumps([loaded, served]) + "\n")


if __name__ == "__main__":
    main()
