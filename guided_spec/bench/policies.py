"""What each draft policy costs: ``python -m guided_spec.bench.policies``.

Times one draft of K tokens by the real draft loop and real grammars. The drafter is a stand-in
with the arithmetic of one decoder layer and an output layer, whose best token is always the right
one: so all policies draft the same tokens, and differ only in masks, copies and waiting.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.table import Table
from torch import Tensor

from guided_spec.bench.workload import load_workload
from guided_spec.cli.console import failures_as_messages, stdout
from guided_spec.core import DecodeBatch
from guided_spec.engine.setup import bundled_asset
from guided_spec.grammar.constraint import Constraint
from guided_spec.grammar.lookahead import Lookahead
from guided_spec.grammar.mask_rows import MaskRows
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.grammar.xgrammar import XGrammarBackend
from guided_spec.models.draft_vocabulary import DraftVocabulary
from guided_spec.models.loading import load_tokenizer
from guided_spec.ops.warp import Sampling
from guided_spec.proposers.draft_loop import draft_autoregressively
from guided_spec.types import DRAFT_POLICIES, SamplingParams

__all__ = ["main"]

REPEATS = 30
CERTAIN = 1e4  # added to the right token's logit


class Drafter:
    """[B, D] logits whose largest entry is the next token of each row's right answer."""

    def __init__(self, answers: Tensor, hidden_size: int, draft_size: int, dtype: Any) -> None:
        device = answers.device
        # A layer of a Llama has about 13 H^2 weights: H^2 for each of q and o, the rest in the MLP.
        self._layer = torch.randn(hidden_size, 13 * hidden_size, device=device, dtype=dtype)
        self._head = torch.randn(hidden_size, draft_size, device=device, dtype=dtype)
        self._hidden = torch.randn(len(answers), hidden_size, device=device, dtype=dtype)
        self._answers = answers
        self.depth = 0

    def __call__(self, _: Tensor | None = None) -> Tensor:
        wide = self._hidden @ self._layer
        hidden = wide.view(len(wide), 13, -1).mean(1)
        logits = hidden @ self._head
        column = self._answers[:, self.depth : self.depth + 1]
        self.depth += 1
        return logits.scatter_add_(1, column, torch.full_like(column, CERTAIN, dtype=logits.dtype))


class Case(NamedTuple):
    """One batch: constraints, their right answers as draft ids [B, K], and the draft vocabulary."""

    batch: DecodeBatch
    answers: Tensor
    vocabulary: DraftVocabulary


def main(
    tokenizer: Annotated[str | None, typer.Option(help="Hub id or folder of a model.")] = None,
    num_draft_tokens: Annotated[int, typer.Option("--num-draft-tokens", "-k")] = 5,
    hidden_size: Annotated[int, typer.Option(help="H of the drafter.")] = 256,
    draft_vocab_size: Annotated[int, typer.Option(help="D of the drafter.")] = 2048,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
) -> None:
    """Milliseconds from the start of a draft to the end of its mask rows, by batch size."""
    with failures_as_messages():
        loaded = load_tokenizer(tokenizer or bundled_asset("target"))
    params = SamplingParams(temperature=temperature)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    table = Table("requests", "policy", "draft ms", "and its rows ms", "tokens")
    for size in (1, 4, 16, 64):
        case = _case(loaded, size, num_draft_tokens, draft_vocab_size, (params, device))
        for policy in DRAFT_POLICIES:
            drafter = Drafter(case.answers, hidden_size, len(case.vocabulary), dtype)
            draft, rows, tokens = _time(case, policy, drafter)
            table.add_row(str(size), policy, f"{draft:.2f}", f"{rows:.2f}", f"{tokens:.1f}")
    stdout().print(table)


def _case(
    tokenizer: Any, size: int, depth: int, draft_size: int, how: tuple[SamplingParams, str]
) -> Case:
    params, device = how[0], torch.device(how[1])
    vocabulary = Vocabulary.from_tokenizer(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    backend = XGrammarBackend(vocabulary)
    found = []
    for item in load_workload(Path(bundled_asset("heldout.jsonl")), None):
        answer = tokenizer(item.answer or "", add_special_tokens=False)["input_ids"]
        if item.grammar is not None and item.grammar.kind == "json_schema" and len(answer) > depth:
            found.append((item.grammar, answer[:depth]))
        if len(found) == size:
            break
    used = sorted({token for _, answer in found for token in answer})
    rest = (token for token in range(len(tokenizer)) if token not in set(used))
    ids = torch.tensor(sorted([*used, *(next(rest) for _ in range(draft_size - len(used)))]))
    answers = torch.searchsorted(ids, torch.tensor([answer for _, answer in found]))
    batch = DecodeBatch(
        slots=tuple(range(size)),
        contexts=((0,),) * size,
        prompt_lengths=(1,) * size,
        constraints=tuple(Constraint(backend.compile(grammar)) for grammar, _ in found),
        limits=(depth,) * size,
        sampling=Sampling.stack([params] * size, range(size), device),
        mask_rows=MaskRows(size, depth + 1, vocabulary.vocab_size, device),
        num_draft_tokens=depth,
        vocab_size=vocabulary.vocab_size,
        device=device,
    )
    return Case(batch, answers.to(device), DraftVocabulary(ids.to(device), vocabulary.vocab_size))


class Cost(NamedTuple):
    """Median milliseconds until the draft is there, until its mask rows are, and its length."""

    draft: float
    rows: float
    tokens: float


@torch.inference_mode()
def _time(case: Case, policy: Any, drafter: Drafter) -> Cost:
    batch, drafts, rows, tokens = case.batch, list[float](), list[float](), list[float]()
    for _ in range(REPEATS):
        drafter.depth = 0
        _wait(batch.device)
        began = time.perf_counter()
        lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
        draft = draft_autoregressively(
            drafter(), drafter, batch, lookahead, policy, case.vocabulary
        )
        _wait(batch.device)
        drafts.append(time.perf_counter() - began)
        draft = lookahead.start(draft)
        lookahead.finish(draft.token_ids.shape[1])
        _wait(batch.device)
        rows.append(time.perf_counter() - began)
        tokens.append(float(draft.num_tokens.float().mean()))
    return Cost(
        statistics.median(drafts) * 1e3, statistics.median(rows) * 1e3, statistics.mean(tokens)
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    typer.run(main)
