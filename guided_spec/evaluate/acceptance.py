"""How long drafts are accepted: by source of the prompts, with and without their grammars."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from guided_spec.engine.llm import LLM
from guided_spec.engine.prompt import PromptEncoder
from guided_spec.errors import ConfigError, GuidedSpecError
from guided_spec.evaluate.measurement import (
    Measurement,
    measure_completions,
    run_items,
    valid_share,
)
from guided_spec.evaluate.workload import WorkItem
from guided_spec.training.data.dataset import encode_prompt
from guided_spec.training.data.records import read_example
from guided_spec.training.data.sources import read_lines
from guided_spec.types import SamplingParams

__all__ = ["Acceptance", "Asked", "measure_acceptance", "read_asked"]


class Asked(NamedTuple):
    """A prompt in tokens with its grammar, if any. source: what the record says, or its file."""

    source: str
    item: WorkItem


class Acceptance(NamedTuple):
    """What one proposer did on the prompts of one source; its seconds are not those of the group.

    grammars: whether each answer had to match its grammar; without, none had one.
    """

    source: str
    grammars: bool
    measurement: Measurement

    def as_dict(self) -> dict[str, Any]:
        """For JSON: counts, and tokens per forward pass of the target."""
        kept = ("requests", "failed", "tokens", "forwards", "acceptance_length", "valid")
        found = self.measurement.as_dict()
        return {
            "proposer": self.measurement.name,
            "source": self.source,
            "grammars": self.grammars,
            **{name: found[name] for name in (*kept, "drafted_at", "accepted_at")},
        }


def read_asked(sources: Sequence[str | Path], llm: LLM, *, limit: int | None = None) -> list[Asked]:
    """The prompts of training records, without their answers; ``limit`` of each source.

    Raises ConfigError, naming the record, for one that cannot be read, and where none has a prompt.
    """
    encoder = PromptEncoder(llm.tokenizer, llm.vocabulary.vocab_size, llm.max_model_len)
    found = []
    for source in sources:
        for place, record in islice(read_lines([source]), limit):
            try:
                example = read_example(record)
                if example.prompt is not None:
                    item = WorkItem(encode_prompt(example, encoder), example.grammar)
                    found.append(Asked(str(record.get("source") or Path(source).stem), item))
            except GuidedSpecError as error:
                raise ConfigError("data", place, str(error)) from error
    if not found:
        raise ConfigError("data", [*map(str, sources)], "holds no prompt")
    return found


def measure_acceptance(
    llm: LLM, asked: Sequence[Asked], params: SamplingParams
) -> list[Acceptance]:
    """Answer every prompt under its grammar and, where it has one, without; ``llm`` is closed.

    One of each source with grammars, one without; prompts that never had any are among the latter.
    """
    bound = [each for each in asked if each.item.grammar is not None]
    free = [Asked(source, item._replace(grammar=None)) for source, item in asked]
    both = [*bound, *free]
    completions, seconds = run_items(llm, [each.item for each in both], params)
    keys = [(each.source, each.item.grammar is not None) for each in both]
    results = []
    for key in dict.fromkeys(keys):
        own = [at for at, other in enumerate(keys) if other == key]
        chosen = [completions[at] for at in own]
        valid = valid_share(chosen, [both[at].item for at in own])
        measured = measure_completions(llm.proposer, chosen, seconds, valid=valid, same_text=1.0)
        results.append(Acceptance(*key, measured))
    return results
