"""vLLM's own parser, classes and loader take the heads that are written here, and agree on them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

vllm = pytest.importorskip("vllm", reason="vLLM is not installed")

from guided_spec.models.checkpoint import stitch  # noqa: E402
from guided_spec.models.heads.block.layout import BlockLayout  # noqa: E402
from guided_spec.models.heads.block.model import BlockHead  # noqa: E402
from guided_spec.models.heads.block.transitions import MarkovShape  # noqa: E402
from guided_spec.models.heads.config import HeadShape  # noqa: E402
from guided_spec.models.heads.eagle import Eagle3Head, Eagle3Layout  # noqa: E402
from guided_spec.models.heads.export import save_head  # noqa: E402
from tests.integrations.vllm.heads import Loaded, load_draft  # noqa: E402
from tests.integrations.vllm.parts import RELEASE  # noqa: E402
from tests.models.heads.equations import cached_logits, draw_texts  # noqa: E402
from tests.models.heads.fresh import fresh_head, spread, vocabulary_of  # noqa: E402
from tests.models.tiny import build  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own
LENGTH, DRAFTS, MASK = 7, 3, 5
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-3}


def save(folder: Path, head: Any, target: Any, layout: str) -> None:
    spread(head)
    target.config.architectures = [type(target).__name__]
    target.save_pretrained(folder / "target")
    target.config.name_or_path = str(folder / "target")
    save_head(head, folder / "head", layout=layout, target=target, dtype=torch.float32)


def load(folder: Path, method: str, layout: str) -> Any:
    """As ``vllm serve`` does: what speculators' config.json says, or what a user has to say."""
    asked: dict[str, Any] = {"method": method, "num_speculative_tokens": DRAFTS}
    if layout == "speculators":
        parser: Any = importlib.import_module("vllm.transformers_utils.configs.speculators.base")
        written = json.loads((folder / "head" / "config.json").read_text())
        found = parser.SpeculatorsConfig.extract_vllm_speculative_config(written)
        assert found["method"] == method
        asked = found
    elif method == "eagle3" and "ptd_token_id" in (folder / "head" / "config.json").read_text():
        asked["parallel_drafting"] = True
    return load_draft(folder / "target", folder / "head", **asked)


def scored(loaded: Loaded, head: Any, hidden: Tensor) -> Tensor:
    """[T, D] of vLLM's logits [T, V]; nothing else may be drafted."""
    logits: Tensor = loaded.draft.compute_logits(hidden)
    if head.vocabulary is None:
        return logits
    known = head.vocabulary.columns >= 0
    assert logits[:, ~known].eq(-torch.inf).all()
    return logits[:, known]


@pytest.mark.parametrize(
    ("layout", "name", "options"),
    [
        ("speculators", "llama", {"aux_hidden_layers": (1, 2, 4)}),
        ("speculators", "llama3_rope", {"draft_vocab_size": None, "norm_before_residual": True}),
        ("speculators", "llama", {"fc_norm": True, "norm_output": True, "shape": HeadShape(2)}),
        ("speculators", "qwen3", {"model_type": "qwen3", "norm_before_fc": True}),
        ("speculators", "llama", {"aux_hidden_layers": (0, 1, 3, 4)}),
        ("safeailab", "llama", {}),
        ("safeailab", "qwen3", {"aux_hidden_layers": (0, 1, 3, 4), "draft_vocab_size": None}),
    ],
)
def test_eagle3(tmp_path: Path, layout: str, name: str, options: dict[str, Any]) -> None:
    target: Any = build(name)
    head = fresh_head("eagle3", target, **options)
    save(tmp_path, head, target, layout)
    check_unroll(tmp_path, head, "eagle3", layout)


def test_eagle(tmp_path: Path) -> None:
    target: Any = build("llama")
    head = fresh_head("eagle", target)
    save(tmp_path, head, target, "safeailab")
    check_unroll(tmp_path, head, "eagle", "safeailab")


@pytest.mark.skipif(RELEASE < (0, 31), reason="it has Qwen3.5 as a part of models for images alone")
def test_mtp(tmp_path: Path) -> None:
    """Put into the target's checkpoint, where vLLM looks for modules."""
    target: Any = build("qwen3_5", layer_types=["full_attention"] * 4)
    head = fresh_head("qwen_mtp", target)
    save(tmp_path, head, target, "qwen")
    stitch(tmp_path / "target", tmp_path / "head", tmp_path / "both")
    for part in ("target", "head"):
        (tmp_path / part).rename(tmp_path / f"{part}-before")
        (tmp_path / part).symlink_to(tmp_path / "both")
    check_unroll(tmp_path, head, "mtp", "qwen")


def check_unroll(folder: Path, head: Any, method: str, layout: str) -> None:
    """A text, and drafts that read what the draft left behind, not the target's states."""
    (text,) = draw_texts([LENGTH], 32 * len(head.aux_hidden_layers), 64, drafts=DRAFTS)
    wanted = cached_logits(head, [text], drafts=DRAFTS)[0]
    # Layers behind the first have such a norm in vLLM, and do not run it.
    unused = {f"model.layers.{at}.hidden_norm.weight" for at in range(1, len(head.layers))}
    with load(folder, method, layout) as loaded:
        assert set(loaded.missing) <= unused
        states = text.states
        if method == "eagle3":
            states = loaded.draft.combine_hidden_states(states)
        found: list[Tensor] = []
        for count in range(LENGTH, LENGTH + DRAFTS + 1):
            places = torch.arange(count)
            output = loaded.draft(text.tokens[:count], places, states)
            hidden, left = (output, output) if method == "mtp" else output
            found.append(scored(loaded, head, hidden if not found else hidden[-1:]))
            states = torch.cat([states, left[-1:]])
    torch.testing.assert_close(torch.cat(found), wanted, **CLOSE)


@pytest.mark.parametrize("layout", ["speculators", "safeailab"])
@pytest.mark.parametrize("layers", [(1, 2, 4), (1, 3)])
@torch.no_grad()
def test_p_eagle(tmp_path: Path, layout: str, layers: tuple[int, ...]) -> None:
    target: Any = build("llama")
    known = vocabulary_of(24)
    made = Eagle3Layout.fresh(target, aux_hidden_layers=layers, draft_vocab_size=24)
    torch.manual_seed(0)
    head: Any = Eagle3Head.fresh(target, vocabulary=known, layout=made.with_masks(MASK))
    save(tmp_path, head, target, layout)
    (text,) = draw_texts([LENGTH], 32 * len(layers), 64, drafts=DRAFTS)
    tokens = torch.cat([text.tokens[:LENGTH], torch.full((DRAFTS,), MASK)])
    places = torch.arange(len(tokens))
    fed = [head.features(text.states), head.features(head.mask_hidden).expand(DRAFTS, -1)]
    output = head(
        tokens[None],
        torch.cat(fed)[None],
        module=0,
        position_ids=places[None],
        attention_mask=torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()[None, None],
        cache=None,
    )
    with load(tmp_path, "eagle3", layout) as loaded:
        assert loaded.missing == []
        assert loaded.config.speculative_config.parallel_drafting
        draft_config = loaded.config.speculative_config.draft_model_config.hf_config
        assert MASK in (
            getattr(draft_config, "pard_token", None),
            getattr(draft_config, "ptd_token_id", None),
        )
        draft = loaded.draft
        masks = draft.mask_hidden.view(1, -1).expand(DRAFTS, -1)
        states = draft.combine_hidden_states(torch.cat([text.states, masks]))
        hidden, _ = draft(tokens, places, states)
        torch.testing.assert_close(scored(loaded, head, hidden), head.logits(output[0]), **CLOSE)


def causality(loaded: Loaded, method: str) -> list[bool]:
    """Whether the places of a block see only those before them, for each layer."""
    layers = loaded.draft.model.layers
    if RELEASE >= (0, 31):
        return [layer.self_attn.causal for layer in layers]
    if method == "dspark":  # such a release has no other
        return [False] * len(layers)
    utils: Any = importlib.import_module("vllm.v1.worker.gpu.spec_decode.dflash.utils")
    draft_config = loaded.config.speculative_config.draft_model_config
    return [bool(utils.get_dflash_causal(draft_config))] * len(layers)


@pytest.mark.parametrize(
    ("method", "layout", "size"),
    [
        ("dflash", "zlab", None),
        ("dflash", "speculators", None),
        ("dflash", "speculators", 24),
        ("dspark", "deepseek", None),
        ("dspark", "speculators", None),
        ("dspark", "speculators", 24),
    ],
)
@torch.no_grad()
def test_blocks(tmp_path: Path, method: str, layout: str, size: int | None) -> None:
    target: Any = build("qwen3")
    known = None if size is None else vocabulary_of(size)
    sizes: dict[str, Any] = {"width": DRAFTS, "mask_token_id": MASK, "draft_vocab_size": size}
    made = BlockLayout.fresh(target, HeadShape(2), aux_hidden_layers=(1, 3), **sizes)
    if method == "dspark":
        made = made.with_markov(MarkovShape(4, "vanilla"), confidence=True)
    torch.manual_seed(0)
    head: Any = BlockHead.fresh(target, vocabulary=known, layout=made)
    save(tmp_path, head, target, layout)
    (text,) = draw_texts([LENGTH], 32 * len(made.aux_hidden_layers), 64, drafts=0)
    last, start = torch.tensor([9]), torch.tensor([LENGTH])
    wanted = head.train_blocks(last[None], start[None], DRAFTS, text.states[None])[0, 0]
    with load(tmp_path, method, layout) as loaded:
        assert set(loaded.missing) <= {"model.mask_embedding"}  # vLLM reads it where it is told to
        draft, count = loaded.draft, made.block_size
        config = loaded.config.speculative_config.draft_model_config.hf_config
        for layer, is_causal in zip(draft.model.layers, causality(loaded, method), strict=True):
            layer.self_attn.attn.is_causal = is_causal
        states = draft.combine_hidden_states(text.states)
        slots = torch.arange(LENGTH)
        draft.model.precompute_and_store_context_kv(states, slots, slots)
        block = torch.cat([last, torch.full((count - 1,), MASK)])
        hidden = draft(block, start + torch.arange(count))[count - DRAFTS :]
        torch.testing.assert_close(hidden, wanted, **CLOSE)
        if method == "dflash":
            torch.testing.assert_close(scored(loaded, head, hidden), head.logits(wanted), **CLOSE)
            return
        assert config.block_size == made.block_size
        previous = torch.tensor([9, 3, 8])
        found = draft.compute_draft_logits(hidden) + draft.markov_bias(draft.markov_embed(previous))
        step = head.markov_head.step(head.logits(wanted), wanted, previous)
        torch.testing.assert_close(found, step, **CLOSE)
        if RELEASE < (0, 31):  # it has no use for the confidence head
            return
        joined = torch.cat([wanted, head.markov_head.markov_w1(previous)], -1)
        sure = draft.compute_confidence(hidden, draft.markov_embed(previous))
        torch.testing.assert_close(sure, head.confidence_head(joined).sigmoid(), **CLOSE)
