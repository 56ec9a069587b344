"""What a trained draft has for its users: a model card, and plots of its training.

It also pushes the draft to a repository of the Hugging Face hub.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi, get_token
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # it is public

from guided_spec.errors import ConfigError
from guided_spec.evaluate.plots import Origin, draw_all, training_figures
from guided_spec.training.options import TrainOptions

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
| responses | {responses} |
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
forward pass of the target, on the text that it writes itself; {valid:.0%} of the responses match
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
        responses="written by the target" if options.regenerate else "those of the sources",
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


@dataclass(frozen=True)
class HubRepository:
    """Where a draft is pushed: ``name`` is ``org/name``, or the name alone for one's own."""

    name: str
    private: bool

    @classmethod
    def of(cls, options: TrainOptions) -> HubRepository | None:
        """None where nothing is pushed. Raises ConfigError for a bad name and without a token."""
        if options.push_to_hub is None:
            return None
        try:
            validate_repo_id(options.push_to_hub)
        except ValueError as error:
            raise _refused(options.push_to_hub, f"is not a repository name: {error}") from error
        if get_token() is None:
            fix = "needs a token of the hub that may write: run hf auth login, or set HF_TOKEN"
            raise _refused(options.push_to_hub, fix)
        return cls(options.push_to_hub, options.hub_private)

    def create(self) -> None:
        """Make it, unless it is there: the hub is asked before anything is trained.

        Raises ConfigError with the hub's reason where it refuses.
        """
        try:
            HfApi().create_repo(self.name, private=self.private or None, exist_ok=True)
        except Exception as error:  # the hub's own classes, and those of its HTTP client
            raise _refused(self.name, f"cannot be made: {_line(error)}") from error

    def push(self, folder: Path) -> str:
        """Upload a finished draft: the files right in ``folder``, and its plots. The address of it.

        Checkpoints, logs and regenerated responses stay here. Raises ConfigError where it fails.
        """
        kept = [path.name for path in folder.iterdir() if path.is_file()]
        try:
            commit = HfApi().upload_folder(
                repo_id=self.name,
                folder_path=folder,
                allow_patterns=[*kept, f"{PLOTS}/*"],
                ignore_patterns=[".*"],
                commit_message="A draft trained by guided-spec",
            )
        except Exception as error:  # as above
            fix = f"was not pushed: {_line(error)}; the draft is in {folder}, push it by hf upload"
            raise _refused(self.name, fix) from error
        return str(commit.repo_url)


def _refused(name: str, fix: str) -> ConfigError:
    return ConfigError("push_to_hub", name, fix)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
