"""Metrics added up over steps and processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from guided_spec.training.algorithm import Metric

__all__ = ["MetricSums", "acceptance_lengths"]


class MetricSums:
    """Totals and counts by name, on the device they come from: adding never waits for it."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, metrics: Mapping[str, Metric]) -> None:
        """Add the metrics of one batch."""
        for name, metric in metrics.items():
            both = torch.stack([metric.total.detach().double(), metric.count.detach().double()])
            known = self._sums.get(name)
            self._sums[name] = both if known is None else known + both

    def means(self, accelerator: Any) -> dict[str, float]:
        """The means over all processes, NaN where nothing was counted; starts anew.

        Every process has to call it, after batches with the same names.
        """
        names = sorted(self._sums)
        if not names:
            return {}
        sums = accelerator.reduce(torch.stack([self._sums[name] for name in names]), "sum").cpu()
        self._sums = {}
        means = (sums[:, 0] / sums[:, 1]).tolist()
        return dict(zip(names, means, strict=True))


def acceptance_lengths(means: Mapping[str, float]) -> dict[str, float]:
    """Estimates of the tokens that one forward of the target commits, from teacher-forced metrics.

    acceptance_length: of greedy decoding, 1 + the sum of ``accept_{depth}``.
    sampled_acceptance_length: at temperature 1, likewise from ``overlap_{depth}``. One is missing
    where its metrics are.
    """
    found = {}
    pairs = (("acceptance_length", "accept_"), ("sampled_acceptance_length", "overlap_"))
    for name, prefix in pairs:
        shares = [value for metric, value in means.items() if metric.startswith(prefix)]
        if shares:
            found[name] = 1 + sum(shares)
    return found
