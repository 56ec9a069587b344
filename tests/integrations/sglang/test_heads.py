"""SGLang's own parser, classes and loader take the heads that are written for it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("sglang", reason="SGLang is not installed")

from guided_spec.models.heads.block.layout import BlockLayout  # noqa: E402
from guided_spec.models.heads.block.model import BlockHead  # noqa: E402
from guided_spec.models.heads.config import HeadShape  # noqa: E402
from guided_spec.models.heads.export import save_head  # noqa: E402
from tests.integrations.sglang.parts import sgl, use_portable_kernels  # noqa: E402
from tests.models.heads.equations import draw_texts  # noqa: E402
from tests.models.heads.fresh import fresh_head, spread  # noqa: E402
from tests.models.tiny import build  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang's own
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
LENGTH, DRAFTS, MASK = 7, 3, 5
RANKS = ("tp_rank", "attn_tp_rank", "moe_tp_rank", "pp_rank")
SIZES = ("tp_size", "attn_tp_size", "moe_tp_size", "pp_size")


@contextmanager
def one_process(folder: Path) -> Iterator[None]:
    """As SGLang's workers set themselves up once arguments are published."""
    state = sgl("distributed.parallel_state")
    if not torch.distributed.is_initialized():
        where = f"file://{folder}/process"
        state.init_distributed_environment(
            backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=where
        )
        state.initialize_model_parallel()
    values = dict.fromkeys(RANKS, 0) | dict.fromkeys(SIZES, 1)
    groups = {"pp_group": state.get_pp_group(), "tp_group": state.get_tp_group()}
    with sgl("runtime_context").get_parallel().override(**values, **groups):
        yield


def save(folder: Path, head: Any, target: Any, layout: str) -> None:
    target.save_pretrained(folder / "target")
    target.config.name_or_path = str(folder / "target")
    spread(head)
    save_head(head, folder / "head", layout=layout, target=target, dtype=torch.float32)


@pytest.mark.parametrize(
    "options", [{}, {"aux_hidden_layers": (0, 1, 3, 4), "draft_vocab_size": None}]
)
def test_eagle3(tmp_path: Path, options: dict[str, Any]) -> None:
    target: Any = build("llama")
    target.config.architectures = ["LlamaForCausalLM"]
    head = fresh_head("eagle3", target, **options)
    save(tmp_path, head, target, "safeailab")
    draft = load(tmp_path)
    assert draft.model.num_aux_hidden_states == len(head.aux_hidden_layers)
    check_weights(draft, head)
    if head.vocabulary is not None:
        assert draft.hot_token_id.equal(head.vocabulary.target_ids)


@torch.no_grad()
def test_dflash(tmp_path: Path) -> None:
    """And a block's outputs, by attention in torch over the context and the block."""
    target: Any = build("qwen3")
    target.config.architectures = ["Qwen3ForCausalLM"]
    made = BlockLayout.fresh(
        target, HeadShape(2), width=DRAFTS, mask_token_id=MASK, aux_hidden_layers=(1, 3)
    )
    torch.manual_seed(0)
    head: Any = BlockHead.fresh(target, vocabulary=None, layout=made)
    save(tmp_path, head, target, "zlab")
    draft = load(tmp_path)
    check_weights(draft, head)
    assert draft.block_size == made.block_size
    (text,) = draw_texts([LENGTH], 32 * 2, 64, drafts=0)
    last, start = torch.tensor([9]), torch.tensor([LENGTH])
    wanted = head.train_blocks(last[None], start[None], DRAFTS, text.states[None])[0, 0]
    context = draft.project_target_hidden(text.states)
    for layer in draft.layers:
        attention, places = layer.self_attn, torch.arange(LENGTH)
        key, value = attention.kv_proj_only(context)
        key = attention.apply_k_rope(places, attention.apply_k_norm(key))
        attention.attn.forward = partial(attend, attention, key, value)
    block = torch.cat([last, torch.full((made.block_size - 1,), MASK)])
    places = start + torch.arange(made.block_size)
    found = draft(block, places, None, input_embeds=head.embed(block)).hidden_states
    torch.testing.assert_close(found[-DRAFTS:], wanted, rtol=1e-4, atol=1e-4)


def attend(
    module: Any, keys: Tensor, values: Tensor, query: Tensor, key: Tensor, value: Tensor, _: object
) -> Tensor:
    """[T, Hq * D]: the block over a context [L, Hkv * D] and itself."""
    heads = (query, torch.cat([keys, key]), torch.cat([values, value]))
    split = [part.unflatten(-1, (-1, module.head_dim)).transpose(0, 1)[None] for part in heads]
    options: Any = {"scale": module.scaling, "enable_gqa": True}
    mixed = scaled_dot_product_attention(*split, **options)
    return mixed[0].transpose(0, 1).flatten(1)


def check_weights(draft: Any, head: Any) -> None:
    """Every weight of the class is the head's, but for what SGLang takes from the target."""
    own = head.state_dict()
    for name, found in draft.named_parameters():
        inner = name.removeprefix("model.")
        if inner == "embed_tokens.weight" or (inner == "lm_head.weight" and inner not in own):
            assert found.isnan().all()  # its worker puts the target's here
            continue
        fused = next((one for one in FUSED if one in inner), None)
        names = [inner] if fused is None else [inner.replace(fused, one) for one in FUSED[fused]]
        wanted = torch.cat([own[one] for one in names])
        torch.testing.assert_close(found[: len(wanted)], wanted, rtol=0, atol=0)


def load(folder: Path) -> Any:
    """The draft's class, its memory full of NaN before the files are read.

    Its files name it. The method is EAGLE-3's, because SGLang refuses DFlash's without a GPU.
    """
    use_portable_kernels()
    arguments = sgl("server_args")
    args = arguments.ServerArgs(
        model_path=str(folder / "target"),
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(folder / "head"),
        speculative_num_steps=DRAFTS,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=DRAFTS + 1,
        sampling_backend="pytorch",
        disable_cuda_graph=True,
    )
    arguments.set_global_server_args_for_scheduler(args)
    config = sgl("configs.model_config").ModelConfig.from_server_args(
        args, model_path=str(folder / "head"), is_draft_model=True
    )
    loader: Any = importlib.import_module("sglang.srt.model_loader.loader")
    build_model = loader._initialize_model

    def build_with_nan(*given: Any, **named: Any) -> Any:
        model = build_model(*given, **named)
        for tensor in model.parameters():
            tensor.data.fill_(torch.nan)
        return model

    with one_process(folder), mock.patch.object(loader, "_initialize_model", build_with_nan):
        return sgl("model_loader").get_model(
            model_config=config,
            load_config=sgl("configs.load_config").LoadConfig(),
            device_config=sgl("configs.device_config").DeviceConfig("cpu"),
        )
