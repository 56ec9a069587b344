"""What pictures cost a prompt and its text: ``python -m benchmarks.pictures``.

A model of Qwen3-VL-8B's shape with random weights, on prompts of text, of one picture and of many.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from PIL import Image
from rich.table import Table
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
)

from benchmarks.widening.tokenizer import write_tokenizer
from guided_spec.bundled import bundled_asset
from guided_spec.cli.console import failures_as_messages, stdout
from guided_spec.engine.llm import LLM
from guided_spec.kinds import require_one_of
from guided_spec.models.tokenizer import load_tokenizer
from guided_spec.types import SamplingParams

VISION: dict[str, Any] = {
    **{"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16},
    **{"patch_size": 16, "out_hidden_size": 4096, "num_position_embeddings": 2304},
    "deepstack_visual_indexes": [8, 16, 24],
}
TEXT: dict[str, Any] = {
    **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    **{"vocab_size": 151936, "max_position_embeddings": 262144},
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3-vl-8b": (VISION, TEXT),
    "tiny": (  # to try the command
        {**VISION, "depth": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        {
            **{**TEXT, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "num_key_value_heads": 2},
        },
    ),
}
IMAGE = "<image>"
TEMPLATE = """\
{%- for message in messages -%}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}Picture: <image>{%- else %}{{ part['text'] }}{%- endif %}
{%- endfor %}
{%- endfor %}"""
PROMPT = "What does it show? "


class Processor:
    """As transformers' own, which needs torchvision. A picture has a token for 2 x 2 patches."""

    image_token = IMAGE

    def __init__(self) -> None:
        bundled = Path(bundled_asset("target"))
        with TemporaryDirectory() as folder:
            size = len(load_tokenizer(str(bundled)))
            write_tokenizer(bundled, Path(folder), range(size, TEXT["vocab_size"] - 1))
            self.tokenizer: Any = load_tokenizer(folder)
        self.tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
        self.tokenizer.chat_template = self.chat_template = TEMPLATE
        self.image_processor = Qwen2VLImageProcessorPil(
            patch_size=VISION["patch_size"],
            size={"shortest_edge": 32 * 32, "longest_edge": 4096 * 4096},
        )

    def __call__(self, text: list[str], images: Any, **_: Any) -> dict[str, Any]:
        """One prompt, and its pictures in a list of their own."""
        found: dict[str, Any] = {}
        shown = text[0]
        if images and images[0]:
            found = dict(self.image_processor(images[0], return_tensors="pt"))
            first, *others = shown.split(IMAGE)
            counts = (int(grid.prod()) // 4 for grid in found["image_grid_thw"])
            pieces = (IMAGE * count + one for count, one in zip(counts, others, strict=True))
            shown = first + "".join(pieces)
        return {**self.tokenizer([shown], return_tensors="pt", add_special_tokens=False), **found}


class Case(NamedTuple):
    """pictures: of a prompt. ours, stock: seconds to its first token, here and in transformers."""

    pictures: int
    tokens: int
    ours: float
    stock: float
    per_token: float


def main(
    counts: Annotated[str, typer.Option(help="Pictures of a prompt.")] = "0,1,16",
    side: Annotated[int, typer.Option(help="Pixels of a square picture's side.")] = 1024,
    max_tokens: Annotated[int, typer.Option(help="Of a text whose decoding is timed.")] = 65,
    repeats: Annotated[int, typer.Option(help="Prompts of each kind; medians are shown.")] = 5,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cuda",
    shape: Annotated[str, typer.Option(help=f"{' or '.join(SHAPES)}.")] = "qwen3-vl-8b",
) -> None:
    """Seconds to the first token, and milliseconds of each further one, without drafts.

    A prompt without pictures has as many tokens as one with one. Every picture is new.
    """
    with failures_as_messages():
        require_one_of("shape", shape, SHAPES)
        processor = Processor()
        model = _model(processor, torch.device(device), SHAPES[shape])
        numbers = [int(one) for one in counts.split(",")]
        tokens = (side // 32) ** 2
        longest = (max(numbers) + 1) * (tokens + 32) + max_tokens
        table = Table("pictures", "prompt tokens", "first token s", "transformers s", "a token ms")
        with LLM(
            model,
            "none",
            processor=processor,
            max_model_len=longest,
            max_batch_size=1,
            picture_tokens=max(numbers) * tokens,
        ) as llm:
            for number in numbers:
                prompts = [_messages(number, side, seed) for seed in range(repeats + 1)]
                case = _measure(llm, model, processor, prompts, max_tokens)
                shown = (f"{case.ours:.3f}", f"{case.stock:.3f}", f"{case.per_token * 1e3:.2f}")
                table.add_row(str(number), str(case.tokens), *shown)
        stdout().print(table)


def _model(
    processor: Processor, device: torch.device, shape: tuple[dict[str, Any], dict[str, Any]]
) -> PreTrainedModel:
    vision, text = shape
    image_token_id = processor.tokenizer.convert_tokens_to_ids(IMAGE)
    config = Qwen3VLConfig(vision_config=vision, text_config=text, image_token_id=image_token_id)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None
    model.eval()
    return model


def _messages(number: int, side: int, seed: int) -> list[dict[str, Any]]:
    """A question after noise in colours, or after as much text as a picture has tokens."""
    dice = np.random.default_rng(1000 * number + seed)
    content: list[dict[str, Any]] = []
    for _ in range(number):
        noise = dice.integers(0, 256, (side, side, 3), dtype=np.uint8)
        content.append({"type": "image", "image": Image.fromarray(noise)})
    words = "" if number else f"{seed} " + "the " * (side // 32) ** 2
    return [{"role": "user", "content": [*content, {"type": "text", "text": words + PROMPT}]}]


def _measure(
    llm: LLM,
    model: PreTrainedModel,
    processor: Processor,
    prompts: Sequence[list[dict[str, Any]]],
    max_tokens: int,
) -> Case:
    """The first prompt warms up."""
    first = SamplingParams(max_tokens=1, ignore_eos=True)
    whole = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    stock = [_seconds(partial(_generate, model, processor, one)) for one in prompts]
    ours = [_seconds(partial(llm.chat, one, params=first)) for one in prompts]
    again = [_seconds(partial(llm.chat, one, params=first)) for one in prompts]
    texts = [_seconds(partial(llm.chat, one, params=whole)) for one in prompts]
    rest = [long - short for long, short in zip(texts[1:], again[1:], strict=True)]
    return Case(
        len(_pictures(prompts[0])),
        _inputs(processor, prompts[0])["input_ids"].shape[1],
        statistics.median(ours[1:]),
        statistics.median(stock[1:]),
        statistics.median(rest) / (max_tokens - 1),
    )


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _generate(model: Any, processor: Processor, messages: list[dict[str, Any]]) -> None:
    """The first token of transformers' ``generate``."""
    inputs = _inputs(processor, messages)
    is_picture = inputs["input_ids"] == model.config.image_token_id
    inputs = {**inputs, "mm_token_type_ids": is_picture.int()}
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    model.generate(**inputs, max_new_tokens=1, do_sample=False, pad_token_id=0)


def _inputs(processor: Processor, messages: list[dict[str, Any]]) -> dict[str, Any]:
    shown: Any = processor.tokenizer.apply_chat_template(messages, tokenize=False)
    return processor([shown], [_pictures(messages)])


def _pictures(messages: list[dict[str, Any]]) -> list[Image.Image]:
    return [part["image"] for part in messages[0]["content"] if part["type"] == "image"]


if __name__ == "__main__":
    typer.run(main)
