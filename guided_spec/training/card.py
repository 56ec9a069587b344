"""What stands beside a trained draft for its users: a model card, and plots of its training."""

from __future__ import annotations

import importlib.util
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, NamedTuple

from guided_spec.evaluate.plots import Origin, draw_all, training_figures
from guided_spec.training.options import TrainOptions

__all__ = ["CARD", "PLOTS", "CorpusFigures", "command_of", "model_card", "write_plots"]

CARD, PLOTS = "README.md", "plots"  # in the output folder of a run

_CARD = """\
---
base_model: {target}
tags: [guided-spec, speculative-decoding, structured-output]
---

# A draft for {target}

It drafts tokens for `{target}`, and for no other model. `{algorithm}`, written as `{layout}`.

```bash
{command}
```

| Data | |
|---|---|
| sources | {sources} |
| documents trained on, held out | {trained:,}, {heldout:,} |
| of them with a grammar | {grammars:.0%} |
| answers | {answers} |
| steps, tokens | {steps:,}, {tokens:,} |

{estimates}
{decoded}
"""
_ESTIMATES = """\
On the text of the held-out documents, by position in the draft: the share of greedy drafts that
agree with the target up to there, and the probability that rejection sampling at temperature 1
keeps them.

| Position | greedy | sampled |
|---|---|---|
{rows}

Tokens per forward pass, estimated from these: {length:.2f}.
"""
_DECODED = """\
Held-out prompts, decoded with the draft under their grammars ({requests}): {length:.2f} tokens per
forward pass of the target, on the text that it writes itself; {valid:.0%} of the answers match
their grammar. Accepted, by position: {shares}.
"""


class CorpusFigures(NamedTuple):
    """Documents that were trained on and held out, and the share of all that has a grammar."""

    trained: int
    heldout: int
    grammars: float


def model_card(report: Any, corpus: CorpusFigures, config: type) -> str:
    """Markdown for people who find the draft; report: a ``TrainingReport``.

    config: of the algorithm, whose defaults are not spelled out in the command.
    """
    options = TrainOptions(**report.options)
    return _CARD.format(
        target=options.target,
        algorithm=options.algorithm,
        layout=report.layout,
        command=command_of(options, report.algorithm_options, config),
        sources=", ".join(options.data),
        **corpus._asdict(),
        answers="written by the target" if options.regenerate else "those of the sources",
        steps=report.steps,
        tokens=report.tokens,
        estimates=_estimates(report.heldout),
        decoded="" if report.decoded is None else _decoded(report.decoded),
    )


def command_of(options: TrainOptions, own: Mapping[str, Any], config: type) -> str:
    """The command line of a run: what differs from the defaults."""
    words = ["guided-spec", "train"]
    for field in fields(TrainOptions):
        words += _words(field, getattr(options, field.name))
    for field in fields(config):
        if field.name in own:
            words += _words(field, own[field.name])
    return shlex.join(words)


def write_plots(output: Path, log: Path, command: str) -> list[Path]:
    """Draw what was logged, as PNG; nothing where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    figures = training_figures(lines, Origin.here(command))
    return draw_all(figures, output / PLOTS, option="output", suffix=".png")


def _words(field: Field[Any], value: Any) -> Iterator[str]:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    if value == default:
        return
    name = f"--{field.name.replace('_', '-')}"
    if isinstance(value, bool):
        yield name if value else f"--no-{name.removeprefix('--')}"
        return
    for each in value if isinstance(value, list | tuple) else [value]:
        yield from (name, str(each))


def _estimates(heldout: Mapping[str, float]) -> str:
    depths = [d for d in range(len(heldout)) if f"accept_{d}" in heldout]
    if not depths:
        return ""
    rows = [
        f"| {d + 1} | {heldout[f'accept_{d}']:.0%} | {_percent(heldout.get(f'overlap_{d}'))} |"
        for d in depths
    ]
    return _ESTIMATES.format(rows="\n".join(rows), length=heldout["acceptance_length"])


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _decoded(decoded: Mapping[str, Any]) -> str:
    pairs = zip(decoded["drafted_at"], decoded["accepted_at"], strict=False)
    shares = ", ".join(f"{accepted / drafted:.0%}" for drafted, accepted in pairs if drafted)
    return _DECODED.format(
        requests=decoded["requests"],
        length=decoded["acceptance_length"],
        valid=decoded["valid"],
        shares=shares or "nothing was drafted",
    )
