"""Tiny random models that read videos, with transformers' own processors, and videos for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import AutoModelForImageTextToText, BatchFeature
from transformers.models.smolvlm import processing_smolvlm
from transformers.processing_utils import ProcessorMixin
from transformers.video_utils import VideoMetadata

from tests.pictures.sighted import TEMPLATE, Sighted, configuration, picture, tokenizer_of

SIZE = {"shortest_edge": 64, "longest_edge": 1024}
SIDE = 16  # of a frame, where a tower takes one size
PATCH = 4
VIDEO_PART = "{%- elif part['type'] == 'video' %}{{ VIDEO }}{%- else %}{{ part['text'] }}"
QWENS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
SPELLING: Any = processing_smolvlm
if SPELLING.num2words is None:  # of a package that transformers may have
    SPELLING.num2words = str
FILMED = (*QWENS, "internvl", "smolvlm", "gemma4")


class Film(NamedTuple):
    """frames: PIL's. fps: of them in a second."""

    frames: list[Image.Image]
    fps: float


def film(seed: int, length: int = 4, fps: float = 2.0, size: tuple[int, int] = (16, 16)) -> Film:
    """Noise in colours."""
    return Film([picture(1000 * seed + at, size) for at in range(length)], fps)


def show(*content: Any) -> list[dict[str, Any]]:
    """A conversation of one message: texts, pictures and films."""
    return [{"role": "user", "content": [_part(one) for one in content]}]


def _part(one: Any) -> dict[str, Any]:
    if isinstance(one, Film):
        return {"type": "video", "video": one.frames, "fps": one.fps}
    if isinstance(one, str):
        return {"type": "text", "text": one}
    return {"type": "image", "image": one}


def expected(family: str, messages: Sequence[Any], num_tokens: int) -> list[int]:
    """The tokens that transformers' ``generate`` writes greedily."""
    one = filmed(family)
    parts = [part for message in messages for part in message["content"]]
    images = [part["image"] for part in parts if part["type"] == "image"]
    videos = [part for part in parts if part["type"] == "video"]
    given: dict[str, Any] = {"images": [images]} if images else {}
    if videos:
        given["videos"] = [np.stack([*map(np.asarray, part["video"])]) for part in videos]
        given["video_metadata"] = [_metadata(len(p["video"]), p["fps"]) for p in videos]
        given["do_sample_frames"] = False
    text = one.processor.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    inputs = one.processor(text=[text], return_tensors="pt", add_special_tokens=False, **given)
    model: Any = one.model
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(**inputs, max_new_tokens=num_tokens, **options)
    return list(found[0, inputs["input_ids"].shape[1] :].tolist())


def _metadata(length: int, fps: float) -> dict[str, Any]:
    indices = [*range(length)]
    duration = length / fps
    return {
        "total_num_frames": length,
        "fps": fps,
        "duration": duration,
        "frames_indices": indices,
    }


@cache
def filmed(family: str) -> Sighted:
    """Shared, so not to be changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
        processor = _processor(family)
    torch.manual_seed(0)
    config = configuration(family, len(processor.tokenizer) + 9, processor)
    if family not in ("internvl", "smolvlm"):  # whose frames are pictures
        config.video_token_id = processor.tokenizer.convert_tokens_to_ids(processor.video_token)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return Sighted(model, processor)


class Frames:
    """In place of transformers' video processors, which need torchvision."""

    merge_size = temporal_patch_size = 2

    def __init__(self, family: str) -> None:
        self._family = family

    def __call__(self, videos: Any, video_metadata: Any = None, **options: Any) -> BatchFeature:
        assert options["do_sample_frames"] is False
        cut = _patches if self._family in QWENS else OTHERS[self._family]
        given = [torch.from_numpy(video) for video in videos]
        found = [cut(one if one.shape[1] == 3 else one.permute(0, 3, 1, 2)) for one in given]
        whole = {name: torch.cat([one[name] for one in found]) for name in found[0]}
        films = [VideoMetadata(**one) for one in video_metadata]
        return BatchFeature({**whole, "video_metadata": films})


def _scaled(frames: Tensor) -> Tensor:
    return frames.float() / 127.5 - 1


def _patches(frames: Tensor) -> dict[str, Tensor]:
    """uint8 [T, 3, H, W], of which two frames are a patch. Sides are multiples of 8."""
    even = torch.cat([frames, frames[-1:]])[: len(frames) + len(frames) % 2]
    steps, rows, columns = len(even) // 2, frames.shape[2] // PATCH, frames.shape[3] // PATCH
    parted = _scaled(even).view(steps, 2, 3, rows // 2, 2, PATCH, columns // 2, 2, PATCH)
    cut = parted.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(steps * rows * columns, -1)
    return {
        "pixel_values_videos": cut,
        "video_grid_thw": torch.tensor([[steps, rows, columns]]),
    }


def _small(frames: Tensor) -> Tensor:
    return interpolate(_scaled(frames), (SIDE, SIDE)).unsqueeze(0)


def _masked(frames: Tensor) -> dict[str, Tensor]:
    mask = torch.ones(1, len(frames), SIDE, SIDE, dtype=torch.int64)
    return {"pixel_values": _small(frames), "pixel_attention_mask": mask}


def _pooled(frames: Tensor) -> dict[str, Tensor]:
    """As Gemma 4 has pictures."""
    images = [Image.fromarray(one.permute(1, 2, 0).numpy()).resize((48, 36)) for one in frames]
    found = _gemma4_images()(images, return_tensors="pt", do_resize=False)
    return {
        "pixel_values_videos": found["pixel_values"],
        "video_position_ids": found["image_position_ids"],
        "num_frames_per_video": torch.tensor([len(images)]),
        "num_soft_tokens_per_video": torch.as_tensor(found["num_soft_tokens_per_image"][:1]),
    }


OTHERS: dict[str, Any] = {
    "internvl": lambda frames: {"pixel_values_videos": _small(frames)},
    "smolvlm": _masked,
    "gemma4": _pooled,
}


def _gemma4_images() -> Any:
    return transformers.Gemma4ImageProcessorPil(patch_size=PATCH, max_soft_tokens=70)


def _tokenizer(family: str) -> Any:
    image = "<IMG_CONTEXT>" if family == "internvl" else "<image>"
    video = "<|video|>" if family == "gemma4" else "<video>"
    tokenizer = tokenizer_of(image)
    around = "<img>{}</img>" if family in QWENS else "{}"
    shown = TEMPLATE.replace("{%- else %}{{ part['text'] }}", VIDEO_PART)
    places = {"IMAGE": around.format(image), "VIDEO": around.format(video)}
    for name, text in places.items():
        shown = shown.replace(name, repr(text))
    tokenizer.chat_template = shown
    named = {"image_token": image, "vision_start_token": "<img>", "vision_end_token": "</img>"}
    if family == "gemma4":
        named |= {"audio_token": "[IMG]", "boa_token": "[IMG_BREAK]", "eoa_token": "[IMG_END]"}
        tokenizer.pad_token = "<end_of_utterance>"
    for name, text in named.items():
        setattr(tokenizer, name, text)
        setattr(tokenizer, name.replace("token", "token_id"), tokenizer.convert_tokens_to_ids(text))
    return tokenizer


def _processor(family: str) -> Any:
    tokenizer, videos = _tokenizer(family), Frames(family)
    template = {"chat_template": tokenizer.chat_template}
    if family == "internvl":
        size = {"height": SIDE, "width": SIDE}
        images: Any = transformers.GotOcr2ImageProcessorPil(size=size, max_patches=3)
        return transformers.InternVLProcessor(images, tokenizer, videos, 4, **template)
    if family == "smolvlm":
        images = transformers.SmolVLMImageProcessorPil(
            size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE}
        )
        return transformers.SmolVLMProcessor(images, tokenizer, videos, 4, **template)
    if family == "gemma4":
        sounds = transformers.Gemma4AudioFeatureExtractor()
        given = (sounds, _gemma4_images(), tokenizer, videos)
        return transformers.Gemma4Processor(*given, **template)
    images = transformers.Qwen2VLImageProcessorPil(patch_size=PATCH, size=SIZE)
    kind = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}.get(family, "Qwen3VL")
    return getattr(transformers, f"{kind}Processor")(images, tokenizer, videos, **template)
