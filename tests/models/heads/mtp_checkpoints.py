"""Tiny targets with MTP modules, written to a folder under the names that published ones have.

The modules come from one-layer models of the target's kind, the donors: a donor's layer is a
module's decoder layer, and the donor's final norm the module's. So a donor itself, run without a
cache on what a module feeds its layer, says what the module has to give: see ``reference_logits``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.models.checkpoint import Checkpoint
from tests.models.tiny import build

DRAFT_STEPS = 4
# Longer and shorter than what the sparse attention of the tiny DeepSeek-V3.2 selects.
TEXTS = [[3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7, 9, 3], [23, 8, 46], [26, 43, 38, 32, 7, 9, 50, 2]]
BLOCK = (16, 24)  # of fp8 quantization; so small that weights have several, cut ones among them
QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
DONOR: dict[str, dict[str, Any]] = {
    "deepseek": {"first_k_dense_replace": 0},
    "glm4": {"first_k_dense_replace": 0},
    "qwen3": {"layer_types": ["full_attention"]},
}


class Written(NamedTuple):
    """A checkpoint, and what is in it.

    folder: what to load. donors: one a module. tensors: those of the modules, by published names.
    """

    folder: Path
    donors: list[PreTrainedModel]
    tensors: dict[str, Tensor]


def write(
    folder: Path,
    name: str,
    *,
    num_modules: int = 1,
    num_files: int = 1,
    fused: bool = False,
    quantized: Sequence[str] = (),
    **fields: object,
) -> Written:
    """Write a target of ``tiny.ARCHITECTURES[name]`` with modules.

    num_files: 2 puts the modules into a file of their own, with an index. fused: store the experts
    of the modules as one tensor. quantized: endings of names to store as fp8 blocks. fields: of
    the configuration, that differ.
    """
    target = build(name, **fields)  # type: ignore[arg-type]
    is_qwen = name.startswith("qwen")
    layers: int = target.config.num_hidden_layers
    donors, tensors = [], {}
    for module in range(num_modules):
        donor = _donor(name, module, **fields)
        donor.save_pretrained(folder / "donor")
        stored = load_file(folder / "donor" / "model.safetensors")
        stored = {key: t.clone() for key, t in donor.state_dict().items()} if fused else stored
        renamed = _qwen_names(stored) if is_qwen else _deepseek_names(stored, layers + module)
        donors.append(donor)
        tensors.update(renamed)
    tensors = _quantize(tensors, quantized)
    target.save_pretrained(folder)
    own = load_file(folder / "model.safetensors")
    published: dict[str, Any] = {"num_nextn_predict_layers": num_modules}
    if is_qwen:  # Qwen3-Next's configuration does not say
        published = {} if name == "qwen3_next" else {"mtp_num_hidden_layers": num_modules}
    if quantized:
        published["quantization_config"] = QUANTIZATION
    config = json.loads((folder / "config.json").read_text())
    files = [own, tensors] if num_files == 2 else [own | tensors]
    save(folder, files, config | published)
    return Written(folder, donors, tensors)


def save(folder: Path, files: Sequence[dict[str, Tensor]], config: dict[str, Any]) -> None:
    """Write safetensors files, with an index if there are several, and config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink(missing_ok=True)
    if len(files) == 1:
        save_file(files[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    index: dict[str, str] = {}
    for number, tensors in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )


def reference_logits(
    written: Written, target: PreTrainedModel, tokens: Sequence[int], steps: int
) -> Tensor:
    """The logits [steps, V] of consecutive greedy drafts behind ``tokens``, of the first module.

    The published equations over the whole text at every step. All but the last of the tokens have
    target features.
    """
    model: Any = target
    donor: Any = written.donors[0]
    ids = list(tokens[1:])
    hidden = model.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state
    scores = []
    for _ in range(steps):
        embedded = model.get_input_embeddings()(torch.tensor([ids]))
        states = _module_input(written, model.config, embedded, hidden)
        output = donor.model(inputs_embeds=states, use_cache=False).last_hidden_state[:, -1:]
        scores.append(output[0, 0] @ model.lm_head.weight.T)
        ids.append(int(scores[-1].argmax()))
        hidden = torch.cat([hidden, output], 1)
    return torch.stack(scores)


def _module_input(written: Written, config: Any, embedded: Tensor, hidden: Tensor) -> Tensor:
    """[1, T, H]: what the first module feeds its decoder layer."""
    prefix, names, offset = f"model.layers.{config.num_hidden_layers}.", "enorm hnorm eh_proj", 0.0
    if "mtp.fc.weight" in written.tensors:
        prefix, names = "mtp.", "pre_fc_norm_embedding pre_fc_norm_hidden fc"
    if config.model_type.startswith(("qwen3_5", "qwen3_next")):
        offset = 1.0
    of_embedding, of_hidden, projection = (
        written.tensors[f"{prefix}{name}.weight"] for name in names.split()
    )

    def normalize(states: Tensor, weight: Tensor) -> Tensor:
        scale = (states.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        normalized: Tensor = states * scale * (offset + weight)
        return normalized

    both = normalize(embedded, of_embedding), normalize(hidden, of_hidden)
    fed: Tensor = torch.cat(both, -1) @ projection.T
    return fed


def expand_blocks(scales: Tensor, shape: torch.Size) -> Tensor:
    """Scales of blocks [ceil(O / 16), ceil(I / 24)] to one an element, [O, I]."""
    expanded = scales.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
    return expanded[: shape[0], : shape[1]]


def _donor(name: str, module: int, **fields: object) -> PreTrainedModel:
    """A model of one layer, like a module's, whose norms and biases are random as well."""
    differences: dict[str, Any] = {"num_hidden_layers": 1, **fields}
    differences |= next(those for prefix, those in DONOR.items() if name.startswith(prefix))
    donor = build(name, seed=7 + module, **differences)
    generator = torch.Generator().manual_seed(module)
    for tensor in donor.state_dict().values():
        if tensor.dim() == 1:
            tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
    return donor


def _deepseek_names(stored: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    """A donor's tensors as a module of DeepSeek or GLM, with copies of what targets have."""
    prefix = f"model.layers.{layer}."
    renamed = {
        key.replace("model.layers.0.", prefix): tensor
        for key, tensor in stored.items()
        if key.startswith("model.layers.0.")
    }
    width = len(stored["model.norm.weight"])
    return renamed | {
        f"{prefix}enorm.weight": 1 + 0.3 * torch.randn(width),
        f"{prefix}hnorm.weight": 1 + 0.3 * torch.randn(width),
        f"{prefix}eh_proj.weight": 0.25 * torch.randn(width, 2 * width),
        f"{prefix}shared_head.norm.weight": stored["model.norm.weight"],
        # In published checkpoints they equal the target's. Here reading them would show.
        f"{prefix}embed_tokens.weight": stored["model.embed_tokens.weight"],
        f"{prefix}shared_head.head.weight": stored["lm_head.weight"],
    }


def _qwen_names(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """A donor's tensors as the module of a Qwen."""
    renamed = {
        key.replace("model.layers.", "mtp.layers."): tensor
        for key, tensor in stored.items()
        if key.startswith("model.layers.")
    }
    width = len(stored["model.norm.weight"])
    return renamed | {
        "mtp.pre_fc_norm_embedding.weight": 0.3 * torch.randn(width),
        "mtp.pre_fc_norm_hidden.weight": 0.3 * torch.randn(width),
        "mtp.fc.weight": 0.25 * torch.randn(width, 2 * width),
        "mtp.norm.weight": stored["model.norm.weight"],
    }


def _quantize(tensors: dict[str, Tensor], endings: Sequence[str]) -> dict[str, Tensor]:
    """The same, with fp8 blocks and their scales for weights with these endings."""
    quantized = dict(tensors)
    for name, weight in tensors.items():
        if name.endswith(tuple(endings)):
            shape = [-(-n // b) for n, b in zip(weight.shape, BLOCK, strict=True)]
            scales = 0.01 + 0.01 * torch.rand(shape)
            levels = weight / expand_blocks(scales, weight.shape)
            quantized[name] = levels.to(torch.float8_e4m3fn)
            quantized[f"{name}_scale_inv"] = scales
    return quantized


def names_read(monkeypatch: pytest.MonkeyPatch, load: Callable[[], object]) -> list[str]:
    """The tensors that ``load`` reads of checkpoints."""
    found: list[str] = []
    read = Checkpoint.read

    def spy(self: Checkpoint, names: Iterable[str]) -> dict[str, Tensor]:
        wanted = [*names]
        found.extend(wanted)
        return read(self, wanted)

    monkeypatch.setattr(Checkpoint, "read", spy)
    load()
    return found
