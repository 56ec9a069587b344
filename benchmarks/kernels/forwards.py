"""What a target's verify forward costs: ``python -m benchmarks.kernels.forwards``.

Times the packed forward of models with random weights, output head included, in a CUDA graph;
beside it what reading the weights takes that so many tokens need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, get_args

import torch
import transformers
import typer
from rich.table import Table
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.kernels.device_time import graph_seconds, read_bandwidth, require_graphs
from benchmarks.kernels.lines import places_of
from benchmarks.widening.shape import LLAMA_8B
from guided_spec.cli.console import stdout
from guided_spec.config import Kernels, KvDtype
from guided_spec.errors import ConfigError
from guided_spec.kinds import require_one_of
from guided_spec.models.packed.blocks import Blocks
from guided_spec.models.packed.decoder import LayerStates
from guided_spec.models.packed_form import PackedForm
from guided_spec.models.quantized.fp8 import Fp8Experts, Fp8Linear
from guided_spec.models.quantized.int4 import Int4Linear
from guided_spec.ops.attention.slot_attention import KeyValues
from guided_spec.ops.delta_rule import DeltaStates
from guided_spec.ops.linear.fp8_linear import FP8
from guided_spec.ops.linear.int4_linear import Int4Weight

WIDEST = 64  # tokens a row
STAYING = 3  # tokens of the last row that a linear state folds in

QWEN3 = {"num_attention_heads": 32, "head_dim": 128, "vocab_size": 151936}
# Configuration class, and the sizes of published checkpoints.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-8b": (
        "LlamaConfig",
        {k: v for k, v in LLAMA_8B._asdict().items() if k != "draft_vocab_size"},
    ),
    "qwen3-8b": (
        "Qwen3Config",
        {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_key_value_heads": 8},
    ),
    "qwen3-30b-a3b": (
        "Qwen3MoeConfig",
        {
            **QWEN3,
            **{"hidden_size": 2048, "num_key_value_heads": 4, "moe_intermediate_size": 768},
            **{"num_experts": 128, "num_experts_per_tok": 8},
        },
    ),
    "gpt-oss-20b": ("GptOssConfig", {"num_local_experts": 32}),
    "gemma-3-12b": (
        "Gemma3TextConfig",
        {
            **{"hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16},
            **{"num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024},
        },
    ),
    # One dense layer of three, so that few layers have most of them experts; take 4.
    "deepseek-v3": ("DeepseekV3Config", {"first_k_dense_replace": 1}),
    "olmo-3-7b": ("Olmo3Config", {"vocab_size": 100278, "max_position_embeddings": 65536}),
    "phi-4": (
        "Phi3Config",
        {
            **{"hidden_size": 5120, "intermediate_size": 17920, "num_attention_heads": 40},
            **{"num_key_value_heads": 10, "vocab_size": 100352, "max_position_embeddings": 16384},
            "pad_token_id": None,
        },
    ),
    "glm-4.5-air": ("Glm4MoeConfig", {"max_position_embeddings": 131072}),
    "llama-4-scout": ("Llama4TextConfig", {}),
    # Their classes have the sizes of Qwen3.5-9B, Qwen3.5-35B-A3B and Qwen3-Next-80B-A3B.
    "qwen3.5-9b": ("Qwen3_5TextConfig", {}),
    "qwen3.5-35b-a3b": ("Qwen3_5MoeTextConfig", {}),
    "qwen3-next-80b-a3b": ("Qwen3NextConfig", {}),
}
# The same with linear layers of the decoder in int4, as AWQ has them; after it inputs of a group.
INT4_MODELS = {"qwen3-8b-int4": ("qwen3-8b", 128)}
# And with linear layers and experts of the decoder in fp8; after it the block of a scale, None for
# one output.
FP8_MODELS: dict[str, tuple[str, tuple[int, int] | None]] = {
    "qwen3-8b-fp8": ("qwen3-8b", (128, 128)),
    "llama-3.1-8b-fp8": ("llama-3.1-8b", None),
    "qwen3-30b-a3b-fp8": ("qwen3-30b-a3b", (128, 128)),
    "deepseek-v3-fp8": ("deepseek-v3", (128, 128)),
}
NAMES = (*MODELS, *INT4_MODELS, *FP8_MODELS)
# Not timed unless asked for: 12 layers do not fit one device.
LARGE = ("deepseek-v3", "deepseek-v3-fp8", "glm-4.5-air", "llama-4-scout")
USUAL = ",".join(name for name in NAMES if name not in LARGE)
EXPERTS_USED = ("num_experts_per_tok", "num_experts", "num_local_experts")


class Subject(NamedTuple):
    """A model, its packed form and how many layers it has."""

    model: PreTrainedModel
    form: PackedForm


@torch.inference_mode()
def main(  # noqa: PLR0913 - options of a command
    names: Annotated[str, typer.Option(help=f"Some of {', '.join(NAMES)}.")] = USUAL,
    batch_sizes: Annotated[str, typer.Option(help="Separated by commas.")] = "1,8,64",
    tokens: Annotated[str, typer.Option(help="A row, separated by commas.")] = "1,6",
    context: Annotated[int, typer.Option(help="Tokens that each row holds.")] = 1000,
    layers: Annotated[int, typer.Option(help="Of each model.")] = 12,
    device: Annotated[str, typer.Option(help="A CUDA device.")] = "cuda",
    kv_dtype: Annotated[str, typer.Option(help="Of keys and values: auto or fp8.")] = "auto",
) -> None:
    """Median milliseconds of a forward in bfloat16, by model, batch size and tokens a row."""
    place = require_graphs(device)
    require_one_of("kv_dtype", kv_dtype, get_args(KvDtype))
    bandwidth = read_bandwidth(place)
    columns = ("model", "requests", "tokens", "forward ms", "weights read ms", "ratio")
    table = Table(*columns)
    for name in names.split(","):
        subject = _subject(name, layers, context + WIDEST, place)
        for batch in map(int, batch_sizes.split(",")):
            form = subject.form.in_fp8() if kv_dtype == "fp8" else subject.form
            memory = _memory(form, batch, context)
            for width in map(int, tokens.split(",")):
                seconds = _forward(subject.form, memory, (batch, width), context)
                floor = _bytes_read(subject.model, batch * width) / bandwidth
                shown = [f"{seconds * 1e3:.2f}", f"{floor * 1e3:.2f}", f"{seconds / floor:.2f}"]
                table.add_row(name, str(batch), str(width), *shown)
            del memory
        del subject
        torch.cuda.empty_cache()
    stdout().print(table)


def _subject(
    name: str, layers: int, max_length: int, device: torch.device, kernels: Kernels = "auto"
) -> Subject:
    """Raises ConfigError for a name that is not there, ModelError for a model of no packed form."""
    if name not in NAMES:
        raise ConfigError("names", name, f"must be some of {', '.join(NAMES)}")
    quantized = {**INT4_MODELS, **FP8_MODELS}
    kind, sizes = MODELS[quantized[name][0] if name in quantized else name]
    config = getattr(transformers, kind)(**{**sizes, "num_hidden_layers": layers})
    config.max_position_embeddings = max(config.max_position_embeddings, max_length)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    _calm(model)
    if name in FP8_MODELS:
        _quantize(model, FP8_MODELS[name][1])
    elif name in INT4_MODELS:
        _round_to_int4(model, INT4_MODELS[name][1])
    form = PackedForm.of(model.eval(), kernels, max_length)
    if form is None:
        raise ConfigError("names", name, "runs by its stock modules, which is not timed here")
    return Subject(model, form)


def _calm(model: PreTrainedModel) -> None:
    """Let experts add little: those of random weights have nothing in common, and rounding chooses.

    Then the trial of the packed form would find other logits. No product takes less time.
    """
    for name, weight in model.named_parameters():
        if weight.dim() == 3 and "down_proj" in name:
            weight.mul_(0.05)


def _quantize(model: Any, block: tuple[int, int] | None) -> None:
    """Put the linear layers of the decoder, and its experts, into fp8."""
    layers = model.get_decoder().layers
    for name, module in list(layers.named_modules()):
        quantized: Fp8Linear | Fp8Experts
        if type(module) is torch.nn.Linear:
            quantized = Fp8Linear(module)
            quantized.scale(_put(quantized.weight.data, module.weight, block), block)
        elif Fp8Experts.fits(module):
            quantized = Fp8Experts(module)
            for projection, halves in (("gate_up_proj", 2), ("down_proj", 1)):
                whole = getattr(quantized, projection).data
                scales = _put(whole, getattr(module, projection), block)
                quantized.scale(projection, [one.chunk(halves) for one in scales], block)
        else:
            continue
        parent, _, last = name.rpartition(".")
        setattr(layers.get_submodule(parent), last, quantized)


def _round_to_int4(model: Any, group: int) -> None:
    """Put the linear layers of the decoder into int4, with zero points."""
    layers = model.get_decoder().layers
    for name, module in list(layers.named_modules()):
        if type(module) is torch.nn.Linear:
            quantized = Int4Linear(module)
            quantized.fill(int4_weight(module.weight, group))
            parent, _, last = name.rpartition(".")
            setattr(layers.get_submodule(parent), last, quantized)


def int4_weight(weight: Tensor, group: int) -> Int4Weight:
    """The weight [O, I] in groups of so many inputs, each from its lowest to its highest number."""
    groups = weight.float().unflatten(1, (-1, group))
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scales = (high - low) / 15
    zeros = (-low / scales).round().clamp(0, 15)
    numbers = (groups / scales + zeros).round().clamp(0, 15).to(torch.uint8)
    return Int4Weight.of(numbers.flatten(1), scales[..., 0].T, zeros[..., 0].T.to(torch.uint8))


def _put(values: Tensor, weight: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Fill values in fp8 [..., O, I] with the weight; returns the scales of their blocks."""
    if weight.dim() == 3:  # one expert at a time, or there would be several copies of them all
        return torch.stack([_put(*one, block) for one in zip(values, weight, strict=True)])
    outputs, inputs = weight.shape
    rows, columns = block or (1, inputs)
    whole = functional.pad(weight, (0, -inputs % columns, 0, -outputs % rows))
    tiles = whole.unflatten(-2, (-1, rows)).unflatten(-1, (-1, columns))
    scales: Tensor = tiles.abs().amax((-3, -1)).float() / torch.finfo(FP8).max
    scaled = (tiles / scales[..., :, None, :, None]).view(whole.shape)
    values.copy_(scaled[:outputs, :inputs])
    return scales


def _bytes_read(model: Any, count: int) -> float:
    """Bytes of the weights that a forward of ``count`` tokens reads, of random experts."""
    config: Any = model.config.get_text_config()
    sizes = [getattr(config, name, None) for name in EXPERTS_USED]
    chosen, experts = sizes[0] or 1, sizes[1] or sizes[2] or 1
    share = 1 - (1 - chosen / experts) ** count
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    matrices = [w for w in model.parameters() if w.dim() == 2 and w is not embeddings]
    read = sum(w.nbytes for w in matrices) + share * sum(
        w.nbytes for w in model.parameters() if w.dim() == 3 and len(w) == experts
    )
    return float(read + (head.nbytes if head is embeddings else 0))


def _memory(form: PackedForm, batch: int, context: int) -> list[LayerStates]:
    """Any keys and values; states whose texts' last rows had ``STAYING`` tokens, which stay."""
    length, device = context + WIDEST, form.decoder.device
    memory = form.allocate(Blocks.full(batch, length, device), batch, WIDEST)
    for one in memory:
        if isinstance(one, KeyValues):
            for buffer in one:
                buffer.copy_(torch.randn_like(buffer, dtype=torch.float32))  # fp8 has no normal_
        else:
            one.recent.normal_()
            one.extent.copy_(torch.tensor([context - STAYING, STAYING]))
    return memory


def verify_seconds(form: PackedForm, size: tuple[int, int], context: int) -> float:
    """Median seconds of a forward and its output head; as a CUDA graph where there are any.

    size: rows, and tokens of each, ``WIDEST`` at most. context: tokens that each row holds.
    """
    return _forward(form, _memory(form, size[0], context), size, context)


def _forward(
    form: PackedForm, memory: Sequence[LayerStates], size: tuple[int, int], context: int
) -> float:
    decoder = form.decoder
    device = decoder.device
    batch, width = size
    token_ids = torch.arange(batch * width, device=device)
    places = places_of([context] * batch, width, context + WIDEST, device)

    states = [one for one in memory if isinstance(one, DeltaStates)]
    before = [one.extent.clone() for one in states]

    def run() -> None:
        for one, extent in zip(states, before, strict=True):
            one.extent.copy_(extent)  # or no token would stay in the second forward
        decoder.logits(decoder.forward(token_ids, places, memory).states)

    return graph_seconds(run, device)


if __name__ == "__main__":
    typer.run(main)
