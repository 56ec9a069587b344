"""What the verify decision costs from logits on: ``python -m benchmarks.kernels.sampler``.

Times ``verify`` with its kernels, on CUDA in a graph, and as the reference composes it, launch by
launch; beside it the time that one reading of the logits takes at the device's bandwidth.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple, get_args

import torch
import typer
from rich.table import Table
from torch import Tensor

from benchmarks.kernels.device_time import eager_seconds, graph_seconds, read_bandwidth
from guided_spec.cli.console import stdout
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.ops.sampling.noise import NoiseKeys
from guided_spec.ops.sampling.verify import draw_noise, verify
from guided_spec.ops.sampling.warp import Sampling, VerifyRows
from guided_spec.types import Accepted, Draft, SamplingParams, Verifier

CALLS = 20  # in one graph
SETTINGS = {
    "greedy": SamplingParams(),
    "T 0.8": SamplingParams(temperature=0.8),
    "T 0.8, top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "T 0.8, top-k 50": SamplingParams(temperature=0.8, top_k=50),
}
MASKS = {"none": 1.0, "dense": 0.97, "sparse": 6e-5}  # the share of the tokens that is legal
EXPONENTS = {"peaked": 1.3, "flat": 0.7}  # of a rank's probability; the nucleus: tens, or thousands


class Case(NamedTuple):
    """One step's inputs; the draft is what the target likes best."""

    logits: Tensor
    bitmask: Tensor | None
    draft: Draft
    rows: VerifyRows

    def kernels(self) -> Accepted:
        """As the step decides."""
        return verify(self.logits, self.bitmask, self.draft, self.rows)

    def reference(self) -> Accepted:
        """The composition that is the definition."""
        noise = draw_noise(self.rows, self.draft.token_ids.shape[1], self.logits.shape[-1])
        return verify(self.logits, self.bitmask, self.draft, self.rows._replace(noise=noise))


def main(
    vocab_size: Annotated[int, typer.Option(help="V.")] = 128_256,
    num_draft_tokens: Annotated[int, typer.Option("--num-draft-tokens", "-k")] = 5,
    batch_sizes: Annotated[str, typer.Option(help="Requests, with commas.")] = "1,8,64,256",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
) -> None:
    """Median microseconds of one decision over bfloat16 logits."""
    where = torch.device(device)
    columns = ("requests", "logits", "verifier", "sampling", "masks")
    table = Table(*columns, "one reading", "kernels", "reference")
    bandwidth = read_bandwidth(where)
    for size in map(int, batch_sizes.split(",")):
        for shape in EXPONENTS:
            logits = _logits((size, num_draft_tokens + 1, vocab_size), EXPONENTS[shape], where)
            floor = logits.numel() * logits.element_size() / bandwidth * 1e6
            for verifier in get_args(Verifier):
                for setting, params in SETTINGS.items():
                    for mask, share in MASKS.items():
                        case = _case(logits, params, share, verifier)
                        labels = (str(size), shape, verifier, setting, mask)
                        numbers = (floor, *_times(case))
                        table.add_row(*labels, *(f"{x:.1f}" for x in numbers))
    stdout().print(table)


def _logits(shape: tuple[int, int, int], exponent: float, device: torch.device) -> Tensor:
    """Probabilities that fall with a power of the rank, the ranks shuffled over the vocabulary."""
    ranks = torch.arange(1, shape[-1] + 1, device=device).float()
    row = -exponent * 0.8 * ranks.log()  # at temperature 0.8
    order = torch.randperm(shape[-1], device=device)
    noise = torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.1
    return (row[order] + noise).to(torch.bfloat16)


def _case(logits: Tensor, params: SamplingParams, share: float, verifier: Verifier) -> Case:
    batch, num_rows, vocab_size = logits.shape
    device = logits.device
    bitmask = None
    if share < 1:
        words = (batch, num_rows, num_mask_words(vocab_size))
        dense = torch.full(words, -2, dtype=torch.int32, device=device)  # 31 of 32
        few = torch.rand(words, device=device) < share * 32
        bitmask = dense if share > 0.5 else torch.where(few, 1, 0).to(torch.int32)
        bitmask[..., 0] |= 1  # something is legal
    ids = logits[:, :-1].argmax(-1)
    draft = Draft(ids, torch.full((batch,), num_rows - 1, device=device))
    seeds = torch.arange(batch, device=device)
    sampling = Sampling.stack([params] * batch, range(batch), device)
    return Case(logits, bitmask, draft, VerifyRows(sampling, NoiseKeys(seeds, seeds), verifier))


@torch.inference_mode()
def _times(case: Case) -> tuple[float, float]:
    """Microseconds of the kernels and of the reference."""
    device = case.logits.device
    kernels = graph_seconds(case.kernels, device, CALLS)
    return kernels * 1e6, eager_seconds(case.reference, device) * 1e6


if __name__ == "__main__":
    typer.run(main)
