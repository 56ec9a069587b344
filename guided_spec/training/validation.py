"""How good a draft is on documents it was not trained on: by its metrics, and by decoding.

Metrics added up over steps and processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Completion
from guided_spec.errors import ModelError
from guided_spec.evaluate.measurement import Measurement, WorkItem, measure_completions, valid_share
from guided_spec.training.algorithm import Metric, TrainingBatch
from guided_spec.training.features import Features
from guided_spec.types import SamplingParams


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


BATCH_SIZE = 8  # documents decoded at a time


@torch.no_grad()
def evaluate(
    accelerator: Any,
    model: Any,
    features: Features,
    batches: Iterable[TrainingBatch],
    forward: Mapping[str, Any],
) -> dict[str, float]:
    """Mean metrics of ``model`` over all processes' batches, and the acceptance lengths they mean.

    model: as accelerate prepared it; it is left in training mode. forward: keyword arguments of it.
    Every process has to call it, with as many batches.
    """
    sums = MetricSums()
    model.eval()
    for loaded in batches:
        batch = loaded.to(accelerator.device)
        output = model(batch, features(batch), **forward)
        sums.add({**output.metrics, "loss": Metric(output.loss, torch.ones_like(output.loss))})
    model.train()
    means = sums.means(accelerator)
    return {**means, **acceptance_lengths(means)}


class HeldoutDecoding(NamedTuple):
    """The answers of ``items``, decoded with an exported draft, each under its own grammar.

    items: at least one, with prompts of tokens. params: how to sample; their grammar is not used.
    processor: reads pictures; None where the target does not.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    items: Sequence[WorkItem]
    params: SamplingParams
    num_draft_tokens: int
    processor: Any = None

    def run(self, draft: Path) -> Measurement:
        """``valid`` and ``acceptance_length`` of the result are what to look at.

        draft: the folder that it was exported to. Raises ModelError when it does not load, or a
        request fails.
        """
        items = self.items
        with self._engine(draft) as llm:
            started = time.perf_counter()
            asked = [item.prompt for item in items], self._params(items)
            outputs = llm.generate(*asked, on_error="return")
            seconds = time.perf_counter() - started
        completions = [output.completions[0] for output in outputs]
        for completion in completions:
            _raise_error(draft, completion)
        valid = valid_share(completions, items)
        return measure_completions(llm.proposer, completions, seconds, valid=valid, same_text=1.0)

    def check(self, draft: Path) -> None:
        """Raise what ``run`` would, at the cost of the first tokens of every response."""
        with self._engine(draft) as llm:
            for start in range(0, len(self.items), BATCH_SIZE):
                batch = self.items[start : start + BATCH_SIZE]
                waiting = set(range(len(batch)))
                asked = [item.prompt for item in batch], self._params(batch)
                for chunk in llm.stream(*asked, on_error="return"):
                    _raise_error(draft, chunk.completion)
                    waiting.discard(chunk.prompt_index)
                    if not waiting:
                        break

    def _params(self, items: Sequence[WorkItem]) -> list[SamplingParams]:
        return [replace(self.params, grammar=item.grammar) for item in items]

    def _engine(self, draft: Path) -> LLM:
        """An engine with ``draft``, as long as the longest request or the target's own limit."""
        config: Any = self.target.config.get_text_config(decoder=True)
        needed = max(len(item.prompt) for item in self.items) + self.params.max_tokens
        longest = min(needed, getattr(config, "max_position_embeddings", None) or needed)
        settings: dict[str, Any] = {"tokenizer": self.tokenizer, "max_model_len": longest}
        settings["processor"] = self.processor
        settings |= {"num_draft_tokens": self.num_draft_tokens, "max_batch_size": BATCH_SIZE}
        settings["drafting"] = "always"  # else a poor draft would be measured where it does well
        return LLM(self.target, "auto", draft=str(draft), **settings)


def _raise_error(draft: Path, completion: Completion | None) -> None:
    if completion is not None and completion.error is not None:
        problem = f"a held-out document failed: {completion.error}"
        raise ModelError(f"draft={str(draft)!r}: {problem}")
