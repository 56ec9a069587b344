"""Tiny random vision-language models with their processors, and pictures for them."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import AutoModelForImageTextToText, PreTrainedModel

from guided_spec.engine.llm import LLM
from tests.models.tiny import GEMMA
from tests.tiny_llm import CORPUS, tiny_tokenizer

TEMPLATE = """\
{%- for message in messages -%}
{{ message['role'] }}:
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}{{ IMAGE }}{%- else %}{{ part['text'] }}{%- endif %}
{%- endfor %}
{%- endif %};
{%- endfor %}
{%- if add_generation_prompt %}assistant:{%- endif %}"""
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
    "initializer_range": 0.2,
}
INTERNVL_VISION = {"image_size": [16, 16], "patch_size": [4, 4], "layer_scale_init_value": 0.5}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
CLIP = {"model_type": "clip_vision_model", "projection_dim": 16, **VISION}
LLAMA = {"model_type": "llama"}
QWEN3: dict[str, Any] = {
    "vision_config": {
        **{"depth": 3, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2},
        **{"patch_size": 4, "out_hidden_size": 32, "num_position_embeddings": 64},
        **{"deepstack_visual_indexes": [0, 1], "initializer_range": 0.2},
    },
    "text_config": {"head_dim": 8, "rope_parameters": AXES},
}
HYBRID: dict[str, Any] = {
    "vision_config": {k: v for k, v in QWEN3["vision_config"].items() if "deepstack" not in k},
    "text_config": {
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_conv_kernel_dim": 4},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 16},
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "shared_expert_intermediate_size": 16,
        "rope_parameters": {**AXES, "partial_rotary_factor": 0.5},
    },
}
GEMMA4: dict[str, Any] = {  # it sees ahead in layers with a window alone
    **{**GEMMA, "global_head_dim": 8, "tie_word_embeddings": False},
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "use_bidirectional_attention": "vision",
}
GRID = [[16, 32], [32, 16], [32, 32]]
SPECIAL = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
SPECIAL += ["<img>", "</img>", "<IMG_CONTEXT>", "<video>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
SPECIAL += [f"<row_{row}_col_{column}>" for row in range(1, 3) for column in range(1, 3)]


@dataclass(frozen=True)
class Sighted:
    """A model that reads pictures, and its processor."""

    model: PreTrainedModel
    processor: Any

    def llm(self, proposer: str = "none", **options: Any) -> LLM:
        """An LLM of it, with small settings."""
        defaults: dict[str, Any] = {
            "num_draft_tokens": 4,
            "max_model_len": 512,
            "max_batch_size": 4,
            "picture_tokens": 256,
        }
        return LLM(self.model, proposer, processor=self.processor, **{**defaults, **options})

    def expected(self, messages: Sequence[Any], num_tokens: int) -> list[int]:
        """The tokens that transformers' ``generate`` writes greedily."""
        images = [part["image"] for one in messages for part in parts(one) if "image" in part]
        shown = self.processor.tokenizer.apply_chat_template(
            [{**one, "content": list(parts(one))} for one in messages],
            tokenize=False,
            add_generation_prompt=True,
        )
        inputs = self.processor(
            text=[shown],
            images=[images] if images else None,
            return_tensors="pt",
            add_special_tokens=False,
        )
        model: Any = self.model
        if self.model.config.model_type.startswith(("qwen", "gemma4")):
            is_picture = inputs["input_ids"] == self.model.config.image_token_id
            inputs = {**inputs, "mm_token_type_ids": is_picture.int()}
        found = model.generate(
            **inputs, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return list(found[0, inputs["input_ids"].shape[1] :].tolist())


def parts(message: Any) -> list[Any]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


@cache
def sighted(family: str, seed: int = 0, head_dim: int | None = None) -> Sighted:
    """Shared, so not to be changed."""
    processor = _processor(family)
    torch.manual_seed(seed)
    config = configuration(family, len(processor.tokenizer) + 9, processor)
    if head_dim is not None:
        _set_head_dim(config.text_config, head_dim)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.generation_config.eos_token_id = None
    for name, one in model.named_parameters():
        if "newline" in name or "mm_input_projection" in name:  # else zeros
            one.data.normal_(0, 0.5)
    return Sighted(model, processor)


def _set_head_dim(config: Any, head_dim: int) -> None:
    """Some families have one that follows from the number of heads."""
    own = getattr(config, "head_dim", None)
    rope, before = config.rope_parameters, own or config.hidden_size // config.num_attention_heads
    if "mrope_section" in rope:
        sections = [part * head_dim // before for part in rope["mrope_section"]]
        config.rope_parameters = {**rope, "mrope_section": sections}
    if hasattr(config, "head_dim"):
        config.head_dim = head_dim
    else:
        config.num_attention_heads = config.hidden_size // head_dim
        config.num_key_value_heads = 1


def picture(seed: int, size: tuple[int, int] = (16, 16)) -> Image.Image:
    """Noise in colours."""
    dice = np.random.default_rng(seed)
    return Image.fromarray(dice.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def png(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """The file of a picture."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def ask(*content: Any) -> list[dict[str, Any]]:
    """A conversation of one message: texts and pictures."""
    kinds = [
        {"type": "text", "text": one} if isinstance(one, str) else {"type": "image", "image": one}
        for one in content
    ]
    return [{"role": "user", "content": kinds}]


def tokenizer_of(image: str) -> Any:
    """image: the token of a picture's place in chats."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", repr(image))
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
        "boi_token": "<img>",
        "eoi_token": "</img>",
    }
    if image == "<img>":  # Gemma's; else a processor takes it for its own
        named["image_token"] = "<IMG_CONTEXT>"
    for name, text in named.items():
        setattr(tokenizer, name, text)
        setattr(tokenizer, "_".join((name, "id")), tokenizer.convert_tokens_to_ids(text))
    return tokenizer


def _processor(family: str) -> Any:
    tokenizer = tokenizer_of(
        {"internvl": "<IMG_CONTEXT>", "mistral3": "[IMG]", "gemma3": "<img>"}.get(family, "<image>")
    )
    template = {"chat_template": tokenizer.chat_template}
    size = {"height": 16, "width": 16}
    images: Any
    if family in ("idefics3", "smolvlm"):  # the second one's own needs num2words and torchvision
        images = transformers.Idefics3ImageProcessorPil(
            size={"longest_edge": 32}, max_image_size={"longest_edge": 16}
        )
        return transformers.Idefics3Processor(images, tokenizer, image_seq_len=4, **template)
    if family in ("llava", "llava_next"):
        kind = "LlavaNext" if family == "llava_next" else "CLIP"
        more: dict[str, Any] = {}
        if family == "llava_next":
            more["image_grid_pinpoints"] = GRID
        images = getattr(transformers, f"{kind}ImageProcessorPil")(
            size={"shortest_edge": 16}, crop_size=size, **more
        )
        wrapped = getattr(transformers, "LlavaNextProcessor" if more else "LlavaProcessor")
        return wrapped(
            images,
            tokenizer,
            patch_size=4,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            **template,
        )
    if family == "gemma3":
        images = transformers.Gemma3ImageProcessorPil(size=size)
        return transformers.Gemma3Processor(images, tokenizer, image_seq_length=16, **template)
    return _like(family, tokenizer)


def _like(family: str, tokenizer: Any) -> Any:
    """Those that need torchvision."""
    images: Any
    if family == "internvl":
        size = {"height": 16, "width": 16}
        images = transformers.GotOcr2ImageProcessorPil(size=size, max_patches=3)
        return InternVLLike(images, tokenizer)
    if family == "gemma4":
        images = transformers.Gemma4ImageProcessorPil(
            patch_size=4, max_soft_tokens=70, do_resize=False
        )
        return Gemma4Like(images, tokenizer)
    if family.startswith("qwen"):
        images = transformers.Qwen2VLImageProcessorPil(
            patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024}
        )
        return QwenLike(images, tokenizer)
    images = transformers.PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size=8)
    return PixtralLike(images, tokenizer)


class InternVLLike:
    """As transformers' processors of InternVL and Pixtral do, which need torchvision."""

    image_token = "<IMG_CONTEXT>"

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self.chat_template = tokenizer.chat_template

    def __call__(self, text: list[str], images: Any, **_: Any) -> Any:
        flat = [one for row in images or [] for one in row]
        found = dict(self.process(flat)) if flat else {}
        shown = iter(found.pop("shown", []))
        pieces = text[0].split(self.image_token)
        whole = pieces[0] + "".join(next(shown) + piece for piece in pieces[1:])
        return {**self.tokenizer([whole], return_tensors="pt", add_special_tokens=False), **found}

    def process(self, images: list[Any]) -> dict[str, Any]:
        found = self.image_processor(images, return_tensors="pt", crop_to_patches=True)
        counts = [int(count) for count in found["num_patches"]]
        shown = [f"<img>{self.image_token * 4 * count}</img>" for count in counts]
        return {"pixel_values": found["pixel_values"], "shown": shown}


class PixtralLike(InternVLLike):
    image_token = "[IMG]"

    def process(self, images: list[Any]) -> dict[str, Any]:
        found = self.image_processor(images, return_tensors="pt", patch_size=8)
        shown = []
        for height, width in found["image_sizes"]:
            row = self.image_token * (int(width) // 8)
            shown.append("[IMG_BREAK]".join([row] * (int(height) // 8)) + "[IMG_END]")
        sizes = torch.tensor([[int(n) for n in one] for one in found["image_sizes"]])
        return {"pixel_values": found["pixel_values"], "image_sizes": sizes, "shown": shown}


class QwenLike(InternVLLike):
    image_token = "<image>"

    def process(self, images: list[Any]) -> dict[str, Any]:
        found = self.image_processor(images, return_tensors="pt")
        grids = found["image_grid_thw"]
        counts = [int(grid.prod()) // 4 for grid in grids]
        shown = [f"<img>{self.image_token * count}</img>" for count in counts]
        return {"pixel_values": found["pixel_values"], "image_grid_thw": grids, "shown": shown}


class Gemma4Like(InternVLLike):
    image_token = "<image>"

    def process(self, images: list[Any]) -> dict[str, Any]:
        small = [one.resize((48, 36)) for one in images]  # its own way takes 64 tokens at least
        found = self.image_processor(small, return_tensors="pt")
        counts = [int(count) for count in found["num_soft_tokens_per_image"]]
        shown = [f"<img>{self.image_token * count}</img>" for count in counts]
        places = found["image_position_ids"]
        return {"pixel_values": found["pixel_values"], "image_position_ids": places, "shown": shown}


IDEFICS3 = {
    "vision_config": VISION,
    "text_config": {"model_type": "llama", "tie_word_embeddings": True},
    "scale_factor": 2,
    "tie_word_embeddings": True,
}
OWN: dict[str, dict[str, Any]] = {
    "idefics3": IDEFICS3,
    "smolvlm": IDEFICS3,
    "llava": {"vision_config": CLIP, "text_config": LLAMA, "vision_feature_layer": -1},
    "llava_next": {
        "vision_config": CLIP,
        "text_config": LLAMA,
        "vision_feature_layer": -1,
        "image_grid_pinpoints": GRID,
    },
    "internvl": {
        "vision_config": {"model_type": "internvl_vision", **VISION, **INTERNVL_VISION},
        "text_config": {"model_type": "qwen2"},
    },
    "mistral3": {
        "vision_config": {"model_type": "pixtral", **VISION, "image_size": 32, "head_dim": 8},
        "text_config": {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
    },
    "qwen2_vl": {
        "vision_config": {
            **{"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2},
            **{"patch_size": 4, "mlp_ratio": 2, "initializer_range": 0.2},
        },
        "text_config": {"rope_parameters": AXES},
    },
    "qwen2_5_vl": {
        "vision_config": {
            **{"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2},
            **{"patch_size": 4, "out_hidden_size": 32, "window_size": 16},
            **{"fullatt_block_indexes": [1], "initializer_range": 0.2},
        },
        "text_config": {"rope_parameters": AXES},
    },
    "qwen3_vl": QWEN3,
    "qwen3_vl_moe": {**QWEN3, "text_config": {**QWEN3["text_config"], **EXPERTS}},
    "gemma3": {  # a picture is wider than the window
        "vision_config": {"model_type": "siglip_vision_model", **VISION},
        "text_config": {**GEMMA, "layer_types": [*GEMMA["layer_types"][:3]]},
        "mm_tokens_per_image": 16,
        "tie_word_embeddings": False,
    },
    "gemma4": {  # with another table of tokens
        "vision_config": {**VISION, "head_dim": 8, "num_key_value_heads": 2},
        "text_config": {
            **GEMMA4,
            **{"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 512},
        },
        "audio_config": None,
        "tie_word_embeddings": False,
    },
    "qwen3_5": HYBRID,
    "qwen3_5_moe": {**HYBRID, "text_config": {**HYBRID["text_config"], **EXPERTS}},
}
NAMES = {
    **{"idefics3": "Idefics3", "smolvlm": "SmolVLM", "llava": "Llava", "llava_next": "LlavaNext"},
    **{"internvl": "InternVL", "mistral3": "Mistral3", "qwen2_vl": "Qwen2VL"},
    **{"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_vl_moe": "Qwen3VLMoe"},
    **{"gemma3": "Gemma3", "gemma4": "Gemma4"},
    **{"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"},
}
FAMILIES = tuple(OWN)


def configuration(family: str, vocab_size: int, processor: Any) -> Any:
    """Of the tiny model of a family."""
    own = OWN[family]
    text = {**TEXT, "vocab_size": vocab_size, **own["text_config"]}
    shown = "<IMG_CONTEXT>" if family == "gemma3" else processor.image_token
    image_token_id = processor.tokenizer.convert_tokens_to_ids(shown)
    given = {**own, "text_config": text, "image_token_id": image_token_id, "pad_token_id": 0}
    return getattr(transformers, f"{NAMES[family]}Config")(**given)


__all__ = ["CORPUS", "FAMILIES", "InternVLLike", "Sighted", "ask", "picture", "png", "sighted"]
