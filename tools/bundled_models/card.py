"""The model card that is written next to the models."""

from dataclasses import dataclass

from tools.bundled_models.evaluate import Acceptance, Accuracy
from tools.bundled_models.train import TrainResult

_CARD = """\
---
license: apache-2.0
library_name: transformers
tags: [structured-output, speculative-decoding]
---

# The bundled model pair

Two Llama models that read a short text and answer with JSON for a given schema, or with a short
string for a given regex. They are small enough for a CPU. They are demonstration models: they
know the kinds of text of their own generator and nothing else.

| | target | draft |
| --- | --- | --- |
| parameters | {target_parameters:,} | {draft_parameters:,} |
| training steps | {target.steps:,} | {draft.steps:,} |
| training tokens (M) | {target_tokens:.0f} | {draft_tokens:.0f} |
| training seconds | {target.seconds:.0f} | {draft.seconds:.0f} |
| device | {device} | {device} |

Held-out documents ({documents}; schemas, keys and templates that training never showed), greedy
decoding under the grammar:

| measure | value |
| --- | --- |
| leaf values equal to the expected ones | {accuracy.fields:.1%} |
| documents with every value right | {accuracy.documents:.1%} |
| tokens per target step with 5 drafts | {acceptance.length:.2f} |
| single tokens on which draft and target agree | {acceptance.agreement:.1%} |

| kind of document | leaf values right |
| --- | --- |
{kinds}

Made with `python -m tools.bundled_models --output guided_spec/assets`. The data are
synthetic and come from the same module. Licence of models and data: Apache-2.0.
"""


@dataclass(frozen=True)
class Run:
    """The figures of one training run."""

    target: TrainResult
    draft: TrainResult
    target_parameters: int
    draft_parameters: int
    device: str


def model_card(run: Run, accuracy: Accuracy, acceptance: Acceptance) -> str:
    """Return the card as Markdown."""
    return _CARD.format(
        target=run.target,
        draft=run.draft,
        target_parameters=run.target_parameters,
        draft_parameters=run.draft_parameters,
        target_tokens=run.target.tokens / 1e6,
        draft_tokens=run.draft.tokens / 1e6,
        device=run.device,
        documents=accuracy.count,
        accuracy=accuracy,
        acceptance=acceptance,
        kinds="\n".join(f"| {kind} | {share:.1%} |" for kind, share in accuracy.by_kind.items()),
    )
