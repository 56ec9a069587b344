"""A random Llama of three layers and an EAGLE-3 head for it, as folders; no size is another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.widening.shape import Shape
from guided_spec.models.heads.block.layout import BlockLayout
from guided_spec.models.heads.block.model import BlockHead
from guided_spec.models.heads.block.transitions import MarkovShape
from guided_spec.models.heads.config import HeadShape
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.models.heads.eagle import Eagle3Head, Eagle3Layout
from guided_spec.models.heads.export import save_head
from guided_spec.models.loading import load_model
from tests.tiny_llm import VOCAB_SIZE, tiny_tokenizer

SMALL = Shape(32, 3, 4, 2, 8, 48, VOCAB_SIZE, 1024, 200)
HEAD_SHAPE = HeadShape(1, 4, 2, 12, 40)  # another head size than the target's

Module = TypeVar("Module", bound=nn.Module)


class Folders(NamedTuple):
    """Where the two are."""

    target: Path
    eagle3: Path


def write_small(folder: Path) -> Folders:
    """Both below ``folder``, in float32."""
    folders = Folders(folder / "target", folder / "eagle3")
    small_target().save_pretrained(folders.target)
    tiny_tokenizer().save_pretrained(folders.target)
    model = load_model(folders.target, device="cpu")
    head = small_head(model)
    save_head(head, folders.eagle3, layout="safeailab", target=model, dtype=torch.float32)
    return folders


def write_small_block(folder: Path, method: str, target: PreTrainedModel) -> Path:
    """A random head of ``method``, which drafts five tokens at once, in float32."""
    torch.manual_seed(2)
    head: Any
    where: dict[str, Any] = {"target": target, "dtype": torch.float32}
    if method == "p_eagle":
        scored: Any = {"aux_hidden_layers": (1, 2, 3), "draft_vocab_size": 200}
        masked = Eagle3Layout.fresh(target, HEAD_SHAPE, **scored).with_masks(7)
        vocabulary = DraftVocabulary(torch.arange(200) * 2, VOCAB_SIZE)
        head = Eagle3Head.fresh(target, vocabulary=vocabulary, layout=masked)
        layout_name = "safeailab"
    else:
        sizes: Any = {"width": 5, "aux_hidden_layers": (1, 2), "mask_token_id": 7}
        block = BlockLayout.fresh(target, HEAD_SHAPE._replace(num_layers=2), **sizes)
        if method == "dspark":
            block = block.with_markov(MarkovShape(6, "gated"), confidence=True)
        head = BlockHead.fresh(target, layout=block)
        layout_name = "deepseek" if method == "dspark" else "zlab"
    save_head(_randomize(head), folder, layout=layout_name, **where)
    return folder


def small_target(**options: Any) -> LlamaForCausalLM:
    """Random, with norms that are not 1, and an eps that shows."""
    torch.manual_seed(0)
    sizes = SMALL._asdict()
    del sizes["draft_vocab_size"]
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    settings = {"rms_norm_eps": 1e-3, "initializer_range": 0.2}
    config = LlamaConfig(**{**sizes, **ends, **settings, **options})
    return _randomize(LlamaForCausalLM(config))


def small_head(target: PreTrainedModel) -> Eagle3Head:
    """It scores every second token."""
    torch.manual_seed(1)
    sizes: Any = {"aux_hidden_layers": (1, 2, 3), "draft_vocab_size": 200}
    layout = Eagle3Layout.fresh(target, HEAD_SHAPE, **sizes)
    vocabulary = DraftVocabulary(torch.arange(200) * 2, VOCAB_SIZE)
    return _randomize(Eagle3Head.fresh(target, vocabulary=vocabulary, layout=layout))


def _randomize(module: Module) -> Module:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return module.eval()
