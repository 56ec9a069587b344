"""How long drafts are accepted: by source of the prompts, with and without their grammars.

A trained head is compared with the same head untrained: the acceptance that this one has is not
due to training. A server of vLLM is measured by the counters that it keeps of its drafts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Completion
from guided_spec.engine.prompt import PromptEncoder
from guided_spec.errors import ConfigError, GuidedSpecError
from guided_spec.evaluate.measurement import (
    Measurement,
    WorkItem,
    measure_completions,
    run_items,
    valid_share,
)
from guided_spec.models.heads.draft_head import LayoutHead
from guided_spec.models.heads.export import head_layouts, save_head
from guided_spec.models.heads.loading import find_method, load_head
from guided_spec.training.data.dataset import encode_prompt
from guided_spec.training.data.endpoint import Endpoint
from guided_spec.training.data.records import read_example, read_lines
from guided_spec.types import SamplingParams


class Asked(NamedTuple):
    """A prompt in tokens with its grammar, if any. source: what the record says, or its file."""

    source: str
    item: WorkItem


class Acceptance(NamedTuple):
    """What one proposer did on the prompts of one source; its seconds are not those of the group.

    grammars: whether each text had to match its grammar; if not, none had one.
    """

    source: str
    grammars: bool
    measurement: Measurement

    def as_dict(self) -> dict[str, Any]:
        """For JSON: counts, and tokens per forward pass of the target."""
        kept = ("requests", "failed", "error", "tokens", "forwards", "acceptance_length", "valid")
        found = self.measurement.as_dict()
        return {
            "proposer": self.measurement.name,
            "source": self.source,
            "grammars": self.grammars,
            **{name: found[name] for name in (*kept, "drafted_at", "accepted_at")},
        }


def read_asked(
    sources: Sequence[str | Path], encoder: PromptEncoder, *, limit: int | None = None
) -> list[Asked]:
    """The prompts of training records, without their answers; ``limit`` of each source.

    Raises ConfigError, naming the record, for one that cannot be read, and where none has a prompt.
    """
    found = []
    for source in sources:
        for source_line, record in islice(read_lines([source]), limit):
            try:
                example = read_example(record)
                if example.prompt is not None:
                    item = WorkItem(encode_prompt(example, encoder), example.grammar)
                    found.append(Asked(str(record.get("source") or Path(source).stem), item))
            except GuidedSpecError as error:
                raise ConfigError("data", source_line, str(error)) from error
    if not found:
        raise ConfigError("data", [*map(str, sources)], "holds no prompt")
    return found


def measure_acceptance(
    llm: LLM, asked: Sequence[Asked], params: SamplingParams, *, name: str | None = None
) -> list[Acceptance]:
    """Run every prompt under its grammar and, where it has one, without; ``llm`` is closed.

    One of each source with grammars, one without; prompts that never had any are among the latter.
    name: of the measurements; by default the proposer's.
    """
    both = _both(asked)
    completions, seconds = run_items(llm, [each.item for each in both], params)
    results = []
    for key, indices in _groups(both).items():
        chosen = [completions[at] for at in indices]
        valid = valid_share(chosen, [both[at].item for at in indices])
        label = llm.proposer if name is None else name
        measured = measure_completions(label, chosen, seconds, valid=valid, same_text=1.0)
        results.append(Acceptance(*key, measured))
    return results


class _Group(NamedTuple):
    source: str
    grammars: bool


def _both(asked: Sequence[Asked]) -> list[Asked]:
    bound = [each for each in asked if each.item.grammar is not None]
    return [*bound, *(Asked(source, item._replace(grammar=None)) for source, item in asked)]


def _groups(both: Sequence[Asked]) -> dict[_Group, list[int]]:
    """Which of ``both`` belong together, by their indices."""
    groups: dict[_Group, list[int]] = {}
    for at, (source, item) in enumerate(both):
        groups.setdefault(_Group(source, item.grammar is not None), []).append(at)
    return groups


def write_untrained(draft: str | None, target: PreTrainedModel, folder: Path) -> Path:
    """The head of ``draft`` as it was before any training, written into ``folder``; returns it.

    Of the same shape and over the same tokens, with fresh weights that are the same each time: MTP
    modules start as the target's last layer. draft: a folder or hub id; None is the target's own
    modules. The generator of random numbers is left as it was.

    Raises ConfigError for a draft that is no head, and ModelError for one that is not written here.
    """
    method = find_method(draft, target)
    if method is None or method == "pard":
        fix = "is of draft heads; leave it out, or name one: untrained=FOLDER"
        raise ConfigError("proposers", "untrained", fix)
    trained: Any = load_head(method, draft, target)
    with torch.random.fork_rng([target.device] if target.device.type == "cuda" else []):
        torch.manual_seed(0)
        if isinstance(trained, LayoutHead):
            made = {"vocabulary": trained.vocabulary, "layout": trained.layout}
            head: Any = type(trained).fresh(target, **made)
        else:
            head = type(trained).fresh(target, trained.num_modules)
    return save_head(head, folder, layout=head_layouts(head)[0], target=target)


COUNTERS = {  # of vLLM's /metrics, each with the suffix _total
    "tokens": "vllm:generation_tokens",
    "drafts": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "at": "vllm:spec_decode_num_accepted_tokens_per_pos",
}
LATE = 5.0  # seconds by which counters may lag after the responses
_LINE = re.compile(r"(?P<name>[^\s{]+)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_POSITION = re.compile(r'position="(\d+)"')


class ServedDrafts(NamedTuple):
    """What a vLLM server has counted since it was started, over all of its engines.

    tokens: that it wrote. drafts, drafted: texts that it drafted, and their tokens. accepted: of
    these; accepted_at: by position.
    """

    tokens: int
    drafts: int
    drafted: int
    accepted: int
    accepted_at: tuple[int, ...]

    @classmethod
    def read(cls, url: str, text: str) -> ServedDrafts:
        """Read the text of ``/metrics``. Raises ConfigError if it is not that of vLLM."""
        sums = dict.fromkeys(COUNTERS, 0.0)
        names = {f"{counter}_total": key for key, counter in COUNTERS.items()}
        positions: dict[int, float] = {}
        seen = set()
        for found in map(_LINE.match, text.splitlines()):
            key = None if found is None else names.get(found["name"])
            if found is None or key is None:
                continue
            seen.add(key)
            sums[key] += float(found["value"])
            if key == "at" and (position := _POSITION.search(found["labels"] or "")) is not None:
                at = int(position[1])
                positions[at] = positions.get(at, 0.0) + float(found["value"])
        if "tokens" not in seen:
            fix = f"counts no {COUNTERS['tokens']} at /metrics; pass the address of a vLLM server"
            raise ConfigError("url", url, fix)
        kept = {key: int(sums[key]) for key in ("tokens", "drafts", "drafted", "accepted")}
        return cls(**kept, accepted_at=tuple(int(positions[at]) for at in sorted(positions)))

    def since(self, before: ServedDrafts) -> ServedDrafts:
        """What was counted between the two."""
        pairs = zip_longest(self.accepted_at, before.accepted_at, fillvalue=0)
        return ServedDrafts(
            self.tokens - before.tokens,
            self.drafts - before.drafts,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(now - then for now, then in pairs),
        )


def measure_server(
    endpoint: Endpoint, asked: Sequence[Asked], params: SamplingParams
) -> list[Acceptance]:
    """``measure_acceptance`` of the drafts of a vLLM server, one group after another.

    By its counters, which do not separate requests: it must have no other clients meanwhile.
    ``drafted_at`` are its drafts, each of which it counts at every position, whatever their
    lengths. What it accepts after the end of a text is counted too. forwards: tokens that were not
    accepted.

    Raises ConfigError where the counters include other tokens than these requests'.
    """
    both = _both(asked)
    results = []
    for key, indices in _groups(both).items():
        items = [both[at].item for at in indices]
        before = ServedDrafts.read(endpoint.url, endpoint.metrics())
        started = time.perf_counter()
        sampled = [replace(params, grammar=item.grammar) for item in items]
        outputs = endpoint.generate([item.prompt for item in items], sampled, on_error="return")
        seconds = time.perf_counter() - started
        completions = [output.completions[0] for output in outputs]
        tokens = sum(completion.stats.output_tokens for completion in completions)
        served = _counted(endpoint, before, tokens)
        results.append(Acceptance(*key, _of_server(completions, items, served, seconds)))
    return results


def _counted(endpoint: Endpoint, before: ServedDrafts, tokens: int) -> ServedDrafts:
    """What the server counted for ``tokens`` of its answers, which it may do a moment later."""
    until = time.monotonic() + LATE
    while True:
        found = ServedDrafts.read(endpoint.url, endpoint.metrics()).since(before)
        if found.tokens >= tokens or time.monotonic() > until:
            break
        time.sleep(0.05)
    if found.tokens != tokens:
        fix = f"counted {found.tokens} tokens for {tokens} of its answers: let it serve nobody else"
        raise ConfigError("url", endpoint.url, fix)
    return found


def _of_server(
    completions: Sequence[Completion],
    items: Sequence[WorkItem],
    served: ServedDrafts,
    seconds: float,
) -> Measurement:
    valid = valid_share(completions, items)
    measured = measure_completions("vllm", completions, seconds, valid=valid, same_text=1.0)
    return replace(
        measured,
        forwards=served.tokens - served.accepted,
        drafted=served.drafted,
        accepted=served.accepted,
        drafted_at=(served.drafts,) * len(served.accepted_at),
        accepted_at=served.accepted_at,
        mask_microseconds=None,
    )
