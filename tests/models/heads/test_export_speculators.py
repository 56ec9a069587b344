"""speculators loads what is saved in its layout, and gives the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from guided_spec.models.heads.config import HeadShape
from guided_spec.models.heads.export import save_head
from tests.models.heads.equations import cached_logits, draw_texts
from tests.models.heads.fresh import fresh_head, spread
from tests.models.heads.speculators_models import eagle3_logits
from tests.models.tiny import build

pytestmark = pytest.mark.filterwarnings("ignore")  # of speculators' own dependencies
STEPS = 3


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama3_rope", {"norm_before_residual": True}),
        ("llama", {"draft_vocab_size": None, "fc_norm": True}),
        ("qwen3", {"norm_before_fc": True, "norm_output": True, "shape": HeadShape(2)}),
        ("qwen3", {"model_type": "qwen3", "aux_hidden_layers": (0, 1, 3, 4)}),
    ],
)
def test_eagle3(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    pytest.importorskip("speculators")
    target: Any = build(name)
    head = fresh_head("eagle3", target, **options)
    spread(head)
    save_target(target, tmp_path / "target")
    save_head(head, tmp_path, layout="speculators", target=target, dtype=torch.float32)
    (text,) = draw_texts([7], 32 * len(head.aux_hidden_layers), 64, drafts=STEPS)
    wanted = eagle3_logits(tmp_path, text, steps=STEPS)
    for position in range(7):
        # At position p, its step k saw features up to p only, then k recycled states.
        tokens = text.tokens[: position + STEPS]
        prefix = text._replace(states=text.states[: position + 1], tokens=tokens)
        (logits,) = cached_logits(head, [prefix], drafts=STEPS - 1)
        for step in range(min(STEPS, 7 - position)):
            ours, theirs = logits[position + step], wanted[step][position]
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def save_target(target: Any, folder: Path) -> None:
    """Where the head says that its verifier is."""
    target.save_pretrained(folder)
    target.config.name_or_path = str(folder)
