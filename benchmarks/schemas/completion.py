"""Whole texts within any budget, and what that costs: ``python -m benchmarks.schemas.completion``.

First many runs whose budgets lie between the shortest text of their grammar and 50 tokens more:
how many are valid, and within their budgets. Then the right answers of the same documents, with
budgets in proportion to what the answer takes. Then the time of a mask row.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.table import Table

from guided_spec.bundled import bundled_asset
from guided_spec.cli.console import failures_as_messages, stderr, stdout
from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Completion
from guided_spec.evaluate.measurement import WorkItem, is_valid, load_workload
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.completion.completion import CompletingGrammar, EndingsCache
from guided_spec.grammar.protocol import GrammarMatcher
from guided_spec.types import SamplingParams

SHARES = (0.5, 0.75, 1.0, 1.25, 2.0)  # of the tokens of the right answer
AT_ONCE = 500
FAR = 400  # tokens: more than any right answer takes


class _Limits(NamedTuple):
    """least: tokens of the shortest text. answer: of the right one, with the stop token."""

    least: int
    answer: int


def main(
    workload: Annotated[Path | None, typer.Argument(help="JSON Lines with answers.")] = None,
    runs: Annotated[int, typer.Option(help="Texts with budgets from the shortest one on.")] = 10000,
    limit: Annotated[int, typer.Option(help="Documents.")] = 100,
    proposer: Annotated[str | None, typer.Option(help="See guided_spec.proposers.")] = None,
) -> None:
    """Valid texts, right values and microseconds, with budgets that run out."""
    with failures_as_messages():
        items = load_workload(workload or Path(bundled_asset("heldout.jsonl")), limit)
        items = [item for item in items if item.grammar is not None and item.answer is not None]
        with LLM(proposer=proposer, max_batch_size=64) as llm:
            limits = [_limits(llm, item) for item in items]
            _print_runs(llm, items, limits, runs)
            _print_quality(llm, items, limits)
            _print_costs(llm, items, limits)


def _limits(llm: LLM, item: WorkItem) -> _Limits:
    assert item.grammar is not None
    compiled = XGrammarBackend(llm.vocabulary).compile(item.grammar)
    endings = EndingsCache(llm.vocabulary).of(compiled)
    tokens = llm.tokenizer(item.answer, add_special_tokens=False)["input_ids"]
    return _Limits(endings.cost(endings.start), len(tokens) + 1)


def _print_runs(llm: LLM, items: Sequence[WorkItem], limits: Sequence[_Limits], runs: int) -> None:
    dice = random.Random(0)
    valid = within = stopped = at_the_end = 0
    for first in range(0, runs, AT_ONCE):
        chosen = [dice.randrange(len(items)) for _ in range(min(AT_ONCE, runs - first))]
        params = [
            SamplingParams(
                max_tokens=limits[at].least + dice.randrange(51),
                temperature=dice.choice((0.0, 0.7, 1.0, 1.5)),
                seed=first + run,
                grammar=items[at].grammar,
            )
            for run, at in enumerate(chosen)
        ]
        for at, param, completion in zip(
            chosen, params, _generate(llm, [items[at] for at in chosen], params), strict=True
        ):
            valid += is_valid(completion.text, items[at].grammar)
            stopped += completion.finish_reason == "stop"
            within += len(completion.token_ids) <= param.max_tokens
            at_the_end += len(completion.token_ids) == param.max_tokens
        done = first + len(chosen)
        stderr().print(f"{done} texts: {valid} valid, {within} within their budget")
    table = Table("texts", "valid", "within their budget", "stopped", "with the last token")
    table.add_row(str(runs), *(f"{n / runs:.2%}" for n in (valid, within, stopped, at_the_end)))
    stdout().print(table)


def _print_quality(llm: LLM, items: Sequence[WorkItem], limits: Sequence[_Limits]) -> None:
    """Greedy. A text is the same if it is that of a budget which is nowhere near its end."""
    far = SamplingParams(max_tokens=FAR)
    free = _generate(llm, items, [replace(far, grammar=item.grammar) for item in items])
    table = Table(
        *("budget / answer", "valid", "right values", "same text"),
        *("valid if cut", "right values if cut", "same text if cut"),
    )
    for share in SHARES:
        cells = []
        for complete in (True, False):
            params = [
                SamplingParams(
                    max_tokens=max(limit.least, round(limit.answer * share)),
                    grammar=item.grammar,
                    complete=complete,
                )
                for item, limit in zip(items, limits, strict=True)
            ]
            found = _generate(llm, items, params)
            valid = [is_valid(c.text, i.grammar) for c, i in zip(found, items, strict=True)]
            right = [_right(c.text, i.answer) for c, i in zip(found, items, strict=True)]
            same = [c.token_ids == f.token_ids for c, f in zip(found, free, strict=True)]
            goals = sum(goal for _, goal in right)
            shares = (sum(valid) / len(items), sum(n for n, _ in right) / goals)
            cells += [f"{value:.1%}" for value in (*shares, sum(same) / len(items))]
        table.add_row(f"{share}", *cells)
    stdout().print(table)


def _generate(
    llm: LLM, items: Sequence[WorkItem], params: Sequence[SamplingParams]
) -> list[Completion]:
    outputs = llm.generate([item.prompt for item in items], list(params), on_error="return")
    return [output.completions[0] for output in outputs]


def _right(text: str, answer: str) -> tuple[int, int]:
    """Leaf values that are right, and how many there are; nothing is right in a broken text."""
    goal = _leaves(_parse(answer))
    found = _leaves(_parse(text))
    return sum(found.get(path, path) == value for path, value in goal.items()), len(goal)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {}


def _leaves(value: Any, path: str = "") -> dict[str, str]:
    if isinstance(value, dict):
        parts = [(f"{path}.{key}", part) for key, part in value.items()]
    elif isinstance(value, list):
        parts = [(f"{path}[{at}]", part) for at, part in enumerate(value)]
    else:
        return {path: json.dumps(value)}
    return {name: leaf for key, part in parts for name, leaf in _leaves(part, key).items()}


def _print_costs(llm: LLM, items: Sequence[WorkItem], limits: Sequence[_Limits]) -> None:
    """Microseconds of a row and the step to the next one, at every token of the right answers."""
    spent: dict[str, list[float]] = {}
    for item, limit in zip(items[:20], limits, strict=False):
        assert item.grammar is not None
        compiled = XGrammarBackend(llm.vocabulary).compile(item.grammar)
        endings = EndingsCache(llm.vocabulary).of(compiled)
        tokens = llm.tokenizer(item.answer, add_special_tokens=False)["input_ids"]
        far, near = (CompletingGrammar(compiled, endings, n) for n in (10**6, limit.answer))
        for name, grammar in (
            ("without a budget", compiled),
            ("far from its end, first time", far),
            ("far from its end, again", far),
            ("near its end, first time", near),
            ("near its end, again", near),
        ):
            spent.setdefault(name, []).extend(_walk(grammar.new_matcher(), tokens, llm))
    table = Table("mask row and token", "median us", "mean us", "p99 us")
    for name, times in spent.items():
        values = np.array(times) * 1e6
        numbers = (np.median(values), values.mean(), np.quantile(values, 0.99))
        table.add_row(name, *(f"{number:.1f}" for number in numbers))
    stdout().print(table)


def _walk(matcher: GrammarMatcher, tokens: Sequence[int], llm: LLM) -> list[float]:
    row = np.zeros((1, -(-llm.vocabulary.vocab_size // 32)), dtype=np.int32)
    times = []
    for token in tokens:
        started = time.perf_counter()
        matcher.fill_next_token_bitmask(row, 0)
        is_legal = matcher.accept_token(token)
        times.append(time.perf_counter() - started)
        if not is_legal:  # the budget leaves no room for this answer
            break
    return times


if __name__ == "__main__":
    typer.run(main)
