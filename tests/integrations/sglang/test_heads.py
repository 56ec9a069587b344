"""SGLang's own parser, classes and loader take the heads that are written for it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed")

from guided_spec.models.heads.export import save_head  # noqa: E402
from tests.integrations.sglang.parts import sgl, use_portable_kernels  # noqa: E402
from tests.models.heads.fresh import fresh_head, spread  # noqa: E402
from tests.models.tiny import build  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang's own
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
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


@pytest.mark.parametrize(
    "options", [{}, {"aux_hidden_layers": (0, 1, 3, 4), "draft_vocab_size": None}]
)
def test_eagle3(tmp_path: Path, options: dict[str, Any]) -> None:
    """Every weight of the class is the head's, but for what SGLang takes from the target."""
    target: Any = build("llama")
    target.config.architectures = ["LlamaForCausalLM"]
    target.save_pretrained(tmp_path / "target")
    target.config.name_or_path = str(tmp_path / "target")
    head = fresh_head("eagle3", target, **options)
    spread(head)
    save_head(head, tmp_path / "head", layout="safeailab", target=target, dtype=torch.float32)
    draft = load(tmp_path)
    assert draft.model.num_aux_hidden_states == len(head.aux_hidden_layers)
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
    if head.vocabulary is not None:
        assert draft.hot_token_id.equal(head.vocabulary.target_ids)


def load(folder: Path) -> Any:
    """The draft's class, its memory full of NaN before the files are read."""
    use_portable_kernels()
    arguments = sgl("server_args")
    args = arguments.ServerArgs(
        model_path=str(folder / "target"),
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(folder / "head"),
        speculative_num_steps=3,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=4,
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
