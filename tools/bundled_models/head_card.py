"""The model card that is written next to a draft head."""

from collections.abc import Sequence

from guided_spec.evaluate.measurement import Measurement
from guided_spec.training.run import TrainingReport

_CARD = """\
---
license: apache-2.0
tags: [structured-output, speculative-decoding]
---

# The bundled {name} head

It drafts for the bundled target and for nothing else. Trained by `guided-spec train` on documents
of the target's own generator; see `docs/bundled_model.md`.

| | |
| --- | --- |
| format | {report.layout} |
| steps | {report.steps:,} |
| tokens (M) | {tokens:.0f} |
| seconds | {report.seconds:.0f} |
| peak memory (GB) | {memory} |

Held-out documents ({requests}), decoded under their grammars with 5 draft tokens:

| temperature | tokens per target forward | valid |
| --- | --- | --- |
{rows}

Made with `python -m tools.bundled_models.heads`. Licence: Apache-2.0.
"""


def head_card(
    name: str,
    report: TrainingReport,
    figures: Sequence[Measurement],
    temperatures: Sequence[float],
) -> str:
    """Return the card as Markdown; one of ``figures`` for each temperature."""
    peak = report.peak_cuda_bytes
    rows = [
        f"| {temperature} | {found.acceptance_length:.2f} | {found.valid:.1%} |"
        for temperature, found in zip(temperatures, figures, strict=True)
    ]
    return _CARD.format(
        name=name,
        report=report,
        tokens=report.tokens / 1e6,
        memory="not measured" if peak is None else f"{peak / 1e9:.1f}",
        requests=figures[0].requests,
        rows="\n".join(rows),
    )
