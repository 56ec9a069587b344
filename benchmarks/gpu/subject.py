"""What a GPU benchmark measures: a target in memory, its tokenizer and its draft head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from guided_spec.bundled import bundled_asset
from guided_spec.evaluate.measurement import WorkItem, load_workload
from guided_spec.models.loading import load_model
from guided_spec.models.tokenizer import load_tokenizer


class Subject(NamedTuple):
    """model: on its device. folder: where it was loaded from. eagle3: the head's folder, if any."""

    model: PreTrainedModel
    tokenizer: Any
    folder: str
    eagle3: str | None


def load_subject(
    folder: str | Path, eagle3: str | Path | None, *, device: str, dtype: str
) -> Subject:
    """Load the target once, for all engines that are measured. Raises ModelError."""
    model = load_model(folder, device=device, dtype=dtype)
    head = None if eagle3 is None else str(eagle3)
    return Subject(model, load_tokenizer(folder), str(folder), head)


def with_draft(subject: Subject, proposers: Sequence[str]) -> list[str]:
    """The proposers that can run: those with a draft head only where there is one."""
    return [name for name in proposers if "eagle3" not in name or subject.eagle3 is not None]


def json_documents(count: int) -> list[WorkItem]:
    """``count`` held-out documents whose answer is JSON, over again from the first if need be."""
    items = load_workload(Path(bundled_asset("heldout.jsonl")))
    kept = [i for i in items if i.grammar is not None and i.grammar.kind == "json_schema"]
    return [kept[index % len(kept)] for index in range(count)]


def without_weights(subject: Subject) -> Subject:
    """The same with a model on the meta device: its configuration and nothing else."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(subject.model.config)
    skeleton.generation_config = subject.model.generation_config
    return subject._replace(model=skeleton)
