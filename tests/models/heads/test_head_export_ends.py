"""What a saved head holds of its target: embedding and output head, where a loader needs them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from guided_spec.errors import ModelError
from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.export import save_head
from guided_spec.models.heads.loading import find_method, load_head
from tests.models.heads.fresh import fresh_head, spread
from tests.models.heads.heads import write_eagle3
from tests.models.heads.test_head_export import MODEL, drafts, named, same_tensors
from tests.models.tiny import build

# Parameters and buffers of Eagle3DraftModel of speculators 0.9.0, one layer of Llama's kind and a
# draft vocabulary. What of them is not in a file stays uninitialized memory.
SPECULATORS_EAGLE3 = (
    *("d2t", "t2d", "embed_tokens.weight", "fc.weight", "lm_head.weight", "norm.weight"),
    *("verifier_norm.weight", "verifier_lm_head.weight"),
    *(f"layers.0.{name}.weight" for name in ("hidden_norm", "input_layernorm")),
    *(f"layers.0.mlp.{name}_proj.weight" for name in ("down", "gate", "up")),
    *(f"layers.0.self_attn.{name}_proj.weight" for name in "kqov"),
    "layers.0.post_attention_layernorm.weight",
)


@pytest.mark.parametrize(
    ("kind", "layout"), [("eagle", "safeailab"), ("eagle3", "speculators"), ("eagle3", "safeailab")]
)
def test_a_copied_embedding_changes_no_draft(tmp_path: Path, kind: str, layout: str) -> None:
    target: Any = named(build("llama"))
    head = fresh_head(kind, target)
    spread(head)
    options: Any = {"dtype": torch.float32, "embedding": "copy"}
    save_head(head, tmp_path, layout=layout, target=target, **options)
    loaded: Any = load_head(kind, tmp_path, target)
    stored = load_file(tmp_path / MODEL)["embed_tokens.weight"]
    assert torch.equal(stored, target.model.embed_tokens.weight)
    assert loaded.embed_tokens is None  # the target's own memory
    assert torch.equal(drafts(loaded, target), drafts(head, target))
    with torch.no_grad():
        target.model.embed_tokens.weight[3] += 1
    other: Any = load_head(kind, save_copy(tmp_path), target)
    assert torch.equal(other.embed_tokens.weight, stored)


@pytest.mark.parametrize(
    ("kind", "layout", "names"),
    [
        (
            "mtp",
            "deepseek",
            ("model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight"),
        ),
        ("qwen_mtp", "qwen", ("model.embed_tokens.weight", "lm_head.weight")),
    ],
)
def test_mtp_modules_may_hold_copies_of_the_ends(
    tmp_path: Path, kind: str, layout: str, names: tuple[str, str]
) -> None:
    target: Any = build("llama")
    head = fresh_head(kind, target)
    spread(head)
    options: Any = {"dtype": torch.float32, "embedding": "copy"}
    save_head(head, tmp_path, layout=layout, target=target, **options)
    stored = load_file(tmp_path / MODEL)
    assert torch.equal(stored[names[0]], target.model.embed_tokens.weight)
    assert torch.equal(stored[names[1]], target.lm_head.weight)
    assert find_method(tmp_path, target) == "mtp"
    same_tensors(load_head("mtp", tmp_path, target), head.state_dict())  # type: ignore[arg-type]


def save_copy(folder: Path) -> Path:
    """The same files in another folder: heads are cached by theirs."""
    return Path(shutil.copytree(folder, folder / "copy"))


def test_what_speculators_needs_is_always_there(tmp_path: Path) -> None:
    """Its loader takes no embedding and no output head of EAGLE-3 from the verifier reliably."""
    target: Any = named(build("llama"))
    save_head(fresh_head("eagle3", target), tmp_path, layout="speculators", target=target)
    stored = load_file(tmp_path / MODEL)
    rows = target.model.embed_tokens.weight.bfloat16()
    assert torch.equal(stored["embed_tokens.weight"], rows)
    ignored = {"verifier_norm.weight", "verifier_lm_head.weight"}  # its own copies, for training
    assert not set(SPECULATORS_EAGLE3) - stored.keys() - ignored
    loaded: Any = load_head("eagle3", tmp_path, target)
    assert loaded.embed_tokens is None  # of another dtype than the target's, and yet the same
    with pytest.raises(ModelError, match="embedding='omit': speculators does not reliably"):
        save_head(
            fresh_head("eagle3", target),
            tmp_path,
            layout="speculators",
            target=target,
            embedding="omit",
        )


def test_what_a_head_borrowed_is_copied(tmp_path: Path) -> None:
    """A head whose checkpoint had no output head uses the target's."""
    target: Any = named(build("llama"))
    write_eagle3(tmp_path / "old", target, draft_vocab_size=None, own_lm_head=False)
    head: Any = load_head("eagle3", tmp_path / "old", target)
    for layout, embedding in (
        ("safeailab", "omit"),
        ("safeailab", "copy"),
        ("speculators", "auto"),
    ):
        folder = tmp_path / layout / embedding
        options: Any = {"dtype": torch.float32, "embedding": embedding}
        save_head(head, folder, layout=layout, target=target, **options)
        assert ("lm_head.weight" in Checkpoint.open(folder).names) == (embedding != "omit")
        assert torch.equal(
            drafts(load_head("eagle3", folder, target), target), drafts(head, target)
        )
