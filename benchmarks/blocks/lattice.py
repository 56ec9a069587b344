"""What the path through a block's lattice costs: on the host, and beside a verify forward.

A text stands somewhere in a held-out document. The scores of its block are drawn, and the tokens
that follow in the document are the likeliest at most places; at the others another token is, so
that there is something to search. The head's own forward is no part of the time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.forwards import verify_seconds
from benchmarks.gpu.subject import Subject, json_documents
from guided_spec.config import EngineConfig
from guided_spec.core import Batches, DecodeBatch
from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead
from guided_spec.models.causal_lm import PackedForm
from guided_spec.models.heads.block.candidates import (
    Block,
    MarkovHead,
    MarkovShape,
    Transition,
    choose_candidates,
)
from guided_spec.models.loading import end_of_text_ids
from guided_spec.ops.sampling.token_rules import TokenRules
from guided_spec.proposers.block_draft import CANDIDATES, FOLLOWING, BlockDrafter, BlockSource
from guided_spec.proposers.draft_loop import DraftLoop
from guided_spec.types import SamplingParams

__all__ = ["LatticePlan", "LatticeTime", "measure_lattices"]

RIGHT = 0.8  # of the places, where the document's token is the likeliest
RANK, HIDDEN = 256, 64  # of the transition; what it reads of the head weighs nothing here


class LatticePlan(NamedTuple):
    """width: places of a block. repeats: drafts of each size, of which the median counts.

    vocab_size: None is the target's. context: tokens of each text, for the verify forward.
    """

    batches: Sequence[int] = (1, 8, 64)
    width: int = 7
    repeats: int = 30
    vocab_size: int | None = None
    context: int = 1000


class LatticeTime(NamedTuple):
    """Milliseconds, medians. kind: "plain", or "markov" where a place depends on the one before.

    draft: from the block's logits to the draft on the device, grammars included. choose: of that,
    the candidates on the device. verify: the target's forward over the draft; None where it was not
    timed. drafted: mean tokens of a draft.
    """

    kind: str
    batch: int
    width: int
    vocab_size: int
    draft_ms: float
    choose_ms: float
    drafted: float
    verify_ms: float | None = None

    @property
    def share(self) -> float | None:
        """Of the verify forward."""
        return None if self.verify_ms is None else self.draft_ms / self.verify_ms

    def as_dict(self) -> dict[str, Any]:
        """Every field and the share, for JSON."""
        return self._asdict() | {"share": self.share}


@torch.inference_mode()
def measure_lattices(
    subject: Subject, plan: LatticePlan, report: Callable[[str], None], *, with_verify: bool = True
) -> Iterator[LatticeTime]:
    """Plain lattices and those of a Markov head, at each size of batch."""
    model: Any = subject.model
    form = PackedForm.of(model, "auto", plan.context + 64) if with_verify else None
    size = plan.vocab_size or model.config.vocab_size
    vocabulary = Vocabulary.from_tokenizer(
        subject.tokenizer, size, end_of_text_ids(model, subject.tokenizer)
    )
    texts = _Texts(subject, vocabulary, plan.width)
    for batch in plan.batches:
        verify = None
        if form is not None:
            verify = verify_seconds(form, (batch, plan.width + 1), plan.context) * 1e3
        for kind, transition in _transitions(size, model):
            report(f"lattice: {kind}, {batch} requests")
            found = _measure(texts, plan, batch, transition, model.device)
            yield LatticeTime(kind, batch, plan.width, size, *found, verify)


def _transitions(vocab_size: int, model: Any) -> Iterator[tuple[str, Transition | None]]:
    yield "plain", None
    torch.manual_seed(0)
    head = MarkovHead(MarkovShape(RANK, "vanilla"), HIDDEN, vocab_size, None)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    yield "markov", head.to(model.device, model.dtype)


class _Text(NamedTuple):
    """A request in the middle of its output, see ``Running``."""

    slot: int
    tokens: list[int]
    prompt_length: int
    constraint: Constraint
    draft_limit: int = 1000
    params: SamplingParams = SamplingParams(temperature=0.0)
    noise_key: int = 0
    rules: TokenRules = TokenRules(SamplingParams())
    prefill: int = 0


class _Texts:
    """Documents of one target, compiled once."""

    def __init__(self, subject: Subject, vocabulary: Vocabulary, width: int) -> None:
        self._items = json_documents(64)
        self._vocabulary, self._width = vocabulary, width
        backend = BackendChoice("auto", vocabulary)
        self._compiled: list[CompiledGrammar] = [
            backend.compile(item.grammar) for item in self._items if item.grammar is not None
        ]
        spell = partial(subject.tokenizer, add_special_tokens=False)
        self._prompts, self._answers = (
            spell([str(text) for text in texts])["input_ids"]
            for texts in ([i.prompt for i in self._items], [i.answer for i in self._items])
        )

    def batch(
        self, batches: Batches, count: int, dice: torch.Generator
    ) -> tuple[DecodeBatch, list[list[int]]]:
        """``count`` texts at places that are drawn, and what follows in each."""
        texts, following = list[_Text](), list[list[int]]()
        for slot in range(count):
            at = slot % len(self._items)
            answer: list[int] = self._answers[at]
            most = max(1, len(answer) - self._width)
            end = int(torch.randint(0, most, (), generator=dice))
            constraint = Constraint(self._compiled[at], self._vocabulary.stop_token_ids)
            constraint.commit(answer[:end])
            prompt: list[int] = self._prompts[at]
            tokens = [*prompt, *answer[:end]]
            texts.append(_Text(slot, tokens, len(prompt), constraint, prefill=slot))
            following.append(answer[end : end + self._width])
        return batches.make(texts, self._width), following


def _block(noise: Tensor, following: Sequence[Sequence[int]], dice: torch.Generator) -> Block:
    """Scores [R, W, V] of which those of the document's tokens are mostly the highest."""
    places, tokens, scores = list[tuple[int, int]](), list[int](), list[float]()
    for row, found in enumerate(following):
        for place, token in enumerate(found):
            drawn = [(token, 12.0)]
            if float(torch.rand((), generator=dice)) > RIGHT:
                drawn.append((int(torch.randint(0, noise.shape[2], (), generator=dice)), 13.0))
            places += [(row, place)] * len(drawn)
            tokens += [one for one, _ in drawn]
            scores += [score for _, score in drawn]
    rows, at = torch.tensor(places, device=noise.device).T
    logits = noise.clone()
    logits[rows, at, torch.tensor(tokens, device=noise.device)] = torch.tensor(scores).to(noise)
    hidden = noise.new_zeros(*noise.shape[:2], HIDDEN)
    return Block(logits, hidden, torch.zeros_like(rows[:1]).expand(len(noise)))


def _measure(
    texts: _Texts,
    plan: LatticePlan,
    count: int,
    transition: Transition | None,
    device: torch.device,
) -> tuple[float, float, float]:
    """Milliseconds of a draft, and of its candidates; tokens of a draft."""
    size = plan.vocab_size or texts._vocabulary.vocab_size
    dtype = _dtype(transition, device)
    noise = torch.randn(count, plan.width, size, device=device, dtype=dtype)
    config = EngineConfig(num_draft_tokens=plan.width, max_batch_size=count)
    batches = Batches(config, count, size, device)
    dice = torch.Generator().manual_seed(0)
    drafter = BlockDrafter("path", None, transition)
    whole, chosen, drafted = list[float](), list[float](), list[int]()
    for repeat in range(plan.repeats + 2):
        batch, following = texts.batch(batches, count, dice)
        block = _block(noise, following, dice)
        lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
        seconds = _timed(partial(_draft, drafter, batch, lookahead, block), device)
        drafter.release(range(count))
        number = CANDIDATES if transition is None else FOLLOWING
        own = _timed(partial(choose_candidates, block, number, None, transition), device)
        if repeat >= 2:  # kernels are loaded
            whole.append(seconds * 1e3)
            chosen.append(own * 1e3)
            drafted += lookahead.lengths
    return statistics.median(whole), statistics.median(chosen), statistics.fmean(drafted)


def _dtype(transition: Transition | None, device: torch.device) -> torch.dtype:
    if isinstance(transition, MarkovHead):
        return transition.markov_w1.weight.dtype
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _draft(drafter: BlockDrafter, batch: DecodeBatch, lookahead: Lookahead, block: Block) -> Tensor:
    def compute(rows: Sequence[int], count: int) -> Block:
        assert len(rows) == len(batch)
        assert count > 0
        return block

    def loop(rows: Sequence[int]) -> DraftLoop:
        raise AssertionError(f"no request asks for another policy, and so do {rows}")

    flight = drafter.begin(batch, lookahead, range(len(batch)), BlockSource(compute, loop))
    return flight.finish().token_ids


def _timed(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
