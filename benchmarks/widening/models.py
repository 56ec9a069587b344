"""The bundled models in the shape of an 8B Llama: ``python -m benchmarks.widening.models``.

A benchmark wants a target that costs what a large one costs and writes what a trained one writes.
Widening gives both: the weights of a small Llama are a corner of each tensor of the large one, all
else is zero, and the function is the same. Every matrix is as large as in the model whose shape it
has, and no kernel knows that it multiplies with zeros.

- Layers: new ones are zero, which is the identity on the residual stream.
- Heads and their dimensions: see ``layer``; frequencies: see ``rope_theta``.
- Norms, and the logits of tokens that only fill up the vocabulary: see ``Carrier``.

Logits, and the distribution over the tokens at any temperature, are those of the small model up to
rounding; tokens that fill up have no probability, but text of their own for the grammars to weigh
(``tokenizer``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.widening.block import block_config, block_tensors
from benchmarks.widening.files import write_safetensors
from benchmarks.widening.head import head_config, head_tensors
from benchmarks.widening.layer import (
    Widening,
    WideTensor,
    empty_layer,
    wide_layer,
    wide_norm,
    wide_rows,
)
from benchmarks.widening.shape import (
    LLAMA_8B,
    Carrier,
    Shape,
    check_growth,
    place_layers,
    rope_theta,
    shape_of,
)
from benchmarks.widening.tokenizer import write_tokenizer
from guided_spec.bundled import bundled_asset
from guided_spec.cli.console import failures_as_messages, print_json
from guided_spec.errors import ConfigError
from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.block.model import BlockHead
from guided_spec.models.heads.eagle import Eagle3Head
from guided_spec.models.heads.loading import find_method
from guided_spec.models.loading import load_model

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class WideFolders(NamedTuple):
    """Where a widened target and its EAGLE-3 head lie; None for a head that was not asked for."""

    target: Path
    eagle3: Path | None


def write_wide(
    output: Path,
    *,
    target: str | Path | None = None,
    eagle3: str | Path | None = None,
    shape: Shape = LLAMA_8B,
    dtype: torch.dtype = torch.bfloat16,
) -> WideFolders:
    """Write ``target`` and ``eagle3`` below ``output``, each widened to ``shape``.

    target: a folder with a plain Llama; None is the bundled one, with its EAGLE-3 head unless
        another is named. eagle3: a folder. dtype: torch.bfloat16 or torch.float32.

    What is there already is written anew. Raises ConfigError for sizes that do not go together or
    a dtype in which padded tokens would overflow, ModelError for models that cannot be widened.
    """
    if dtype not in DTYPES.values():
        raise ConfigError("dtype", dtype, "must be torch.bfloat16 or torch.float32")
    if target is None:
        eagle3 = eagle3 or bundled_asset("eagle3")
    source = Path(target or bundled_asset("target"))
    model = load_model(source, device="cpu", dtype=torch.float32)
    how = _widening(model, shape)
    folder = _folder(output / "target", _config(model, how, dtype))
    write_safetensors(folder, _target_tensors(model, how), dtype)
    model.generation_config.save_pretrained(folder)
    write_tokenizer(source, folder, range(model.config.vocab_size, shape.vocab_size))
    if eagle3 is None:
        return WideFolders(folder, None)
    head = Eagle3Head.from_checkpoint(Checkpoint.open(eagle3), model)
    return WideFolders(folder, _write_head(output / "eagle3", head, how, dtype))


def write_wide_head(
    output: Path,
    source: str | Path,
    *,
    target: str | Path | None = None,
    shape: Shape = LLAMA_8B,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write the head in ``source`` into ``output``, widened with its target to ``shape``.

    source: the folder of an EAGLE-3, P-EAGLE, DFlash or DSpark head; others as for ``write_wide``,
    which raises the same.
    """
    model = load_model(Path(target or bundled_asset("target")), device="cpu", dtype=torch.float32)
    method = find_method(source, model)
    kinds = {"eagle3": Eagle3Head, "p_eagle": Eagle3Head, "dflash": BlockHead, "dspark": BlockHead}
    if method not in kinds:
        raise ConfigError("source", source, f"must be a head of {', '.join(kinds)}, found {method}")
    head = kinds[method].from_checkpoint(Checkpoint.open(source), model)
    return _write_head(output, head, _widening(model, shape), dtype)


def _write_head(output: Path, head: Any, how: Widening, dtype: torch.dtype) -> Path:
    is_block = isinstance(head, BlockHead)
    config, tensors = (block_config, block_tensors) if is_block else (head_config, head_tensors)
    folder = _folder(output, {**config(head, how), "torch_dtype": _name(dtype)})
    write_safetensors(folder, tensors(head, how), dtype)
    return folder


def _widening(model: PreTrainedModel, shape: Shape) -> Widening:
    small = shape_of(model.config)
    check_growth(small, shape)
    config: Any = model.config
    carrier = Carrier.between(small.hidden_size, shape.hidden_size, config.rms_norm_eps)
    return Widening(small, shape, carrier)


def _target_tensors(model: PreTrainedModel, how: Widening) -> Iterator[WideTensor]:
    weights: dict[str, Tensor] = model.state_dict()
    size = how.wide.vocab_size
    names = ("model.embed_tokens.weight", "lm_head.weight")
    yield wide_rows(names[0], weights[names[0]], size, how, is_output=False)
    places = place_layers(how.small.num_hidden_layers, how.wide.num_hidden_layers)
    for index in range(how.wide.num_hidden_layers):
        prefix = f"model.layers.{index}."
        if index in places:
            source = f"model.layers.{places.index(index)}."
            yield from wide_layer(prefix, _below(weights, source), how)
        else:
            yield from empty_layer(prefix, how.wide)
    yield wide_norm("model.norm.weight", weights["model.norm.weight"], how, keeps_constant=True)
    yield wide_rows(names[1], weights[names[1]], size, how, is_output=True)


def _below(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: w for name, w in weights.items() if name.startswith(prefix)}


def _config(model: PreTrainedModel, how: Widening, dtype: torch.dtype) -> dict[str, Any]:
    config: dict[str, Any] = model.config.to_dict()
    # Of the file that was read, such as a GGUF; other engines would look for such weights here.
    config.pop("quantization_config", None)
    theta = config["rope_parameters"]["rope_theta"]
    theta = rope_theta(theta, how.small.head_dim, how.wide.head_dim)
    sizes = how.wide._asdict()
    del sizes["draft_vocab_size"]
    return {
        **config,
        **sizes,
        "rms_norm_eps": how.carrier.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": False,
        "dtype": _name(dtype),
    }


def _folder(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    config = {name: value for name, value in config.items() if name != "_name_or_path"}
    for old in path.glob("model*.safetensors*"):
        old.unlink()
    text = json.dumps(config, indent=2, sort_keys=True)
    (path / "config.json").write_text(f"{text}\n", encoding="utf-8")
    return path


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(
    output: Annotated[Path, typer.Option(help="Folder for target/ and a folder for each head.")],
    target: Annotated[Path | None, typer.Option(help="A Llama; default: the bundled one.")] = None,
    head: Annotated[
        list[Path] | None, typer.Option(help="Head of that target; can be repeated.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Write a target and its heads in the shape of Llama-3.1-8B; default: the bundled EAGLE-3."""
    with failures_as_messages():
        if dtype not in DTYPES:
            raise ConfigError("dtype", dtype, f"must be {' or '.join(DTYPES)}")
        kind = DTYPES[dtype]
        found = write_wide(output, target=target, dtype=kind)._asdict()
        for source in head or ():
            folder = output / source.name
            found[source.name] = write_wide_head(folder, source, target=target, dtype=kind)
    print_json({name: str(path) for name, path in found.items() if path is not None})


if __name__ == "__main__":
    typer.run(main)
