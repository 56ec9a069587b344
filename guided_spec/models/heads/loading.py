"""Draft heads by the name of their method, loaded once for each target."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from guided_spec.errors import ModelError
from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.block.model import BlockHead
from guided_spec.models.heads.draft_head import DraftHead
from guided_spec.models.heads.eagle import Eagle3Head, EagleHead
from guided_spec.models.heads.mtp import MtpHead, QwenMtpHead

Load = Callable[[Checkpoint, PreTrainedModel], Any]


def _load_mtp(checkpoint: Checkpoint, target: PreTrainedModel) -> MtpHead | QwenMtpHead:
    """Modules of the target's own layers, in the layout of DeepSeek's, Qwen's or speculators'."""
    kind = MtpHead if _has_modules(checkpoint, target) else QwenMtpHead
    return kind.from_checkpoint(checkpoint, target)


# method: who reads its checkpoint, and which targets (by model_type) have it in their own.
METHODS: dict[str, tuple[Load, tuple[str, ...]]] = {
    "eagle": (EagleHead.from_checkpoint, ()),
    "eagle3": (Eagle3Head.from_checkpoint, ()),
    "p_eagle": (Eagle3Head.from_checkpoint, ()),
    "dflash": (BlockHead.from_checkpoint, ()),
    "dflash2": (BlockHead.from_checkpoint, ()),
    "domino": (BlockHead.from_checkpoint, ()),
    "dspark": (BlockHead.from_checkpoint, ()),
    "deepseek_mtp": (MtpHead.from_checkpoint, ("deepseek_v3", "deepseek_v32")),
    "glm4_moe_mtp": (MtpHead.from_checkpoint, ("glm4_moe",)),
    "qwen3_5_mtp": (
        QwenMtpHead.from_checkpoint,
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"),
    ),
    "lilicorr": (BlockHead.from_checkpoint, ()),
    "mtp": (_load_mtp, ()),
}

# What of speculators_model_type is read here, and by which method.
SPECULATORS = {
    "dflash": "dflash",
    "dflash2": "dflash2",
    "dspark": "dspark",
    "eagle3": "eagle3",
    "mtp": "mtp",
    "peagle": "p_eagle",
}


def load_head(method: str, source: str | Path | None, target: PreTrainedModel) -> DraftHead:
    """The head of ``method`` for ``target``, on its device, in its dtype.

    source: a folder or hub id; None: the target's own checkpoint (MTP).
    A head is read once for each target and kept with it: every engine on that target shares it.

    Raises ModelError when the checkpoint does not fit: it lists what was expected and found.
    """
    load, kinds = METHODS[method]
    kind = target.config.model_type
    if kinds and kind not in kinds:
        fix = f"expected a target of type {' or '.join(kinds)}, found {kind}"
        raise ModelError(f"proposer={method!r}: {fix}; choose another proposer, or 'auto'")
    path = _own_checkpoint(target) if source is None and kinds else source
    if path is None:
        missing = "the model was not loaded from a checkpoint" if kinds else "draft=None"
        raise ModelError(f"proposer={method!r}: {missing}; pass draft= the head's folder or hub id")
    heads: dict[tuple[str, str], DraftHead] = vars(target).setdefault("_draft_heads", {})
    key = (method, str(path))
    if key not in heads:
        checkpoint = _open_own(target, path) if source is None else _open_draft(path)
        heads[key] = load(checkpoint, target)
    return heads[key]


def forget_head(source: str | Path, target: PreTrainedModel) -> None:
    """Forget the loaded head of a folder that was rewritten: the next use reads it again."""
    heads: dict[tuple[str, str], DraftHead] = vars(target).get("_draft_heads", {})
    folder = Path(source).resolve()
    for key in [key for key in heads if Path(key[1]).resolve() == folder]:
        del heads[key]


def find_method(source: str | Path | None, target: PreTrainedModel) -> str | None:
    """Whose checkpoint ``source`` is: a method's name, or None for an ordinary language model.

    "pard" is a language model too, which ``load_head`` does not read.

    None as ``source`` asks for the MTP layers in the target's own checkpoint. Reads the config and
    the names of the tensors only. Raises ModelError when the checkpoint cannot be read.
    """
    if source is None:
        return _find_mtp(target)
    checkpoint = _open_draft(source)
    named = checkpoint.config.get("speculators_model_type")
    if named is not None and named not in [*SPECULATORS]:  # it may be of any kind
        raise ModelError(
            f"{checkpoint.source}: expected a speculators_model_type that is read here "
            f"({', '.join(SPECULATORS)}), found {named!r}"
        )
    names = checkpoint.names
    if named == "mtp" or _is_qwen_mtp(names):
        own = _own_method(target)
        return own if own == "qwen3_5_mtp" else "mtp"
    if named is not None:
        return SPECULATORS[named]
    if (found := _find_block(checkpoint)) is not None:
        return found
    if _has_modules(checkpoint, target):
        own = _own_method(target)
        return own if own in ("deepseek_mtp", "glm4_moe_mtp") else "mtp"
    if "d2t" in names or any(name.startswith("midlayer.") for name in names):
        return "eagle3"
    if "fc.weight" in names:
        return "eagle3" if "layers.0.hidden_norm.weight" in names else "eagle"
    return None if checkpoint.config.get("pard_token") is None else "pard"


def _find_block(checkpoint: Checkpoint) -> str | None:
    """The method of a checkpoint that drafts a block by one forward; None: it is none of these."""
    names, config = checkpoint.names, checkpoint.config
    if "mask_hidden" in names:
        return "p_eagle"
    if {"fc.weight", "hidden_norm.weight"} <= names:
        if any(name.startswith("candidate_selector.") for name in names):
            return "dflash2"
        if "prefix_gru.weight_ih_l0" in names:
            return "domino"
        if any(name.startswith("lilicorr.") for name in names):
            return "lilicorr"
        return "dspark" if config.get("markov_rank") else "dflash"
    return None


def _own_method(target: PreTrainedModel) -> str | None:
    """The method of the MTP modules that such targets are published with; None for none."""
    kind = target.config.model_type
    return next((name for name, (_, kinds) in METHODS.items() if kind in kinds), None)


def _is_qwen_mtp(names: Collection[str]) -> bool:
    """Whether there is a module and no model around it: that would be a draft model."""
    layers = [name for name in names if ".layers." in name]
    return bool(layers) and all(name.startswith("mtp.") for name in layers)


def _has_modules(checkpoint: Checkpoint, target: PreTrainedModel) -> bool:
    """Whether modules come after the target's layers, as in checkpoints of DeepSeek and GLM."""
    text_config: Any = target.config.get_text_config(decoder=True)
    return f"model.layers.{text_config.num_hidden_layers}.enorm.weight" in checkpoint.names


def _find_mtp(target: PreTrainedModel) -> str | None:
    method, path = _own_method(target), _own_checkpoint(target)
    if method is None or path is None:
        return None
    text_config: Any = target.config.get_text_config(decoder=True)
    layer = f"model.layers.{text_config.num_hidden_layers}."
    names = _open_own(target, path).names
    has_layers = any(name.startswith(("mtp.", layer)) for name in names)
    return method if has_layers else None


def _open_draft(path: str | Path) -> Checkpoint:
    return Checkpoint.open(path, argument="draft")


def _open_own(target: PreTrainedModel, path: str | Path) -> Checkpoint:
    # The commit that the target itself was loaded from; a folder has none.
    revision = getattr(target.config, "_commit_hash", None)
    return Checkpoint.open(path, revision=revision, argument="model")


def _own_checkpoint(target: PreTrainedModel) -> str | None:
    path: str | None = getattr(target.config, "name_or_path", None)
    return path or None
