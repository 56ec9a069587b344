"""Reading prompts with pictures and videos: by the processor of the model, each by itself."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain, zip_longest
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from guided_spec.engine.chats.videos import OpenMedia, OpenVideo
from guided_spec.errors import ConfigError, PromptError
from guided_spec.models.pictures.picture import Picture, PicturePrompt, Sight

if TYPE_CHECKING:  # an extra
    from PIL import Image

_LOG = logging.getLogger(__name__)
_OF_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


class _Shown(NamedTuple):
    """token_ids: of a picture. before, after: text around them."""

    token_ids: list[int]
    before: str
    after: str


class PictureReader:
    """Turns rendered conversations, their pictures and their videos into tokens; thread-safe.

    One picture or video is decoded at a time, whoever asks: the pixels of one take up to 120 MB,
    and what a processor makes of them on its way some times as much.

    processor: of transformers; None where the model reads no pictures. sight: of the model.

    Attributes: processor, and sight: as given, or with what is wrong with the processor, or with
    why it takes no videos.
    """

    def __init__(self, processor: Any, sight: Sight) -> None:
        if sight.refusal is None and sight.videos is None and not _takes_videos(processor):
            sight = sight._replace(videos="its processor takes none")
        self.processor, self.sight = processor, sight
        self._turn = Lock()
        self._marks_videos = False  # with the token of their rows, which no other text may have
        if sight.refusal is None and sight.videos is None:
            token_id = self.tokenizer.convert_tokens_to_ids(processor.video_token)
            self._marks_videos = token_id == sight.video_placeholder

    @classmethod
    def load(
        cls, model: Any, sight: Sight, processor: Any, load: Mapping[str, Any]
    ) -> PictureReader:
        """model, processor: each a hub id, a folder, or loaded; a processor of None is the model's.

        load: the options with which the model was loaded. Where the processor cannot be loaded,
        text is read all the same, and a picture is refused.
        """
        if sight.refusal is not None:
            return cls(None, sight)
        source, options = processor, dict[str, Any]()
        if source is None:
            source = model if isinstance(model, str | Path) else model.config.name_or_path
            names = ("revision", "trust_remote_code")  # of the same repository
            options = {name: load[name] for name in names if name in load}
        if not isinstance(source, str | Path):
            return cls(source, sight)
        from transformers import AutoProcessor

        try:
            return cls(AutoProcessor.from_pretrained(str(source), **options), sight)
        except Exception as error:  # transformers raises nearly every class of exception here
            reason = " ".join(str(error).split())
            fix = "pip install 'guided-spec[vision]'"
            if find_spec("PIL") is None:  # transformers names all that could be missing
                reason = "Pillow is not installed"
            else:
                fix += ", and torchvision where it is asked for"
            _LOG.warning("%s: its processor cannot be loaded: %.300s", source, reason)
            shown = f"its processor cannot be loaded ({reason:.200}): {fix}"
            return cls(None, sight._replace(refusal=shown))

    @property
    def tokenizer(self) -> Any:
        """The processor's; None without one."""
        return None if self.processor is None else self.processor.tokenizer

    @property
    def chat_template(self) -> str | None:
        """The processor's own, which has places for pictures."""
        return getattr(self.processor, "chat_template", None)

    def places_in(self, text: str) -> int:
        """How many pictures a rendered text has places for."""
        return text.count(self.processor.image_token)

    def require_places(self, text: str, pictures: Sequence[OpenMedia]) -> None:
        """Raise PromptError where a rendered text has not one place for each picture and video."""
        num_videos = sum(isinstance(one, OpenVideo) for one in pictures)
        asked = [(self.processor.image_token, len(pictures) - num_videos, "pictures")]
        if num_videos or self._marks_videos:
            asked.append((self.processor.video_token, num_videos, "videos"))
        for token, num, media in asked:
            count = text.count(token)
            if count != num:
                found = f"the chat template has {count} places for {num} {media}"
                fix = f"write no {token} in messages"
                raise PromptError(f"messages: {found}: {fix}, or pass another chat_template")

    def read(self, one: OpenMedia) -> Picture:
        """A picture or a video as the processor has it. Raises ConfigError."""
        with self._turn:
            return self._read(one)[0]

    def encode(
        self,
        text: str,
        pictures: Sequence[OpenMedia],
        tokenize: Callable[[str], list[int]] | None = None,
    ) -> PicturePrompt:
        """The tokens of a rendered conversation, in which a token is each picture and each video.

        tokenize: of a text that goes on after another one; None: it begins here.

        Raises PromptError where the text has not one place for each picture, and for pictures that
        the model cannot keep together.
        """
        token = self.processor.image_token
        self.require_places(text, pictures)
        parts, pictures = self._split(text, pictures)
        if not parts[-1]:
            raise PromptError("messages: the prompt ends with a picture; end it with text")
        read: dict[int, tuple[Picture, list[int]]] = {}
        for one in pictures:
            if id(one) not in read:
                with self._turn:
                    read[id(one)] = self._read(one)
                # Before the next one is read: the arrays of some videos are large.
                self._require_room("messages", [picture for picture, _ in read.values()])
        placeholders, ids = self.sight.placeholders, list[int]()
        shown = [self._shown(read[id(one)][1]) for one in pictures]
        around = [f"{one.before}{token}{one.after}" for one in shown]
        text = "".join(chain.from_iterable(zip_longest(parts, around, fillvalue="")))
        mark, expanded = self.tokenizer.convert_tokens_to_ids(token), iter(shown)
        for token_id in (tokenize or self._tokenize)(text):
            ids += next(expanded).token_ids if token_id == mark else [token_id]
        places = [at for at, one in enumerate(ids) if one in placeholders]
        chosen = tuple(read[id(one)][0] for one in pictures)
        if not all(one.count for one in chosen) or len(places) != sum(one.count for one in chosen):
            fix = "pass the model's own processor"
            raise PromptError(f"messages: the processor's {token} is not the model's token: {fix}")
        return PicturePrompt(ids, chosen, places)

    def _split(self, text: str, pictures: Sequence[OpenMedia]) -> tuple[list[str], list[OpenMedia]]:
        """The text around the places, and what is in these: a template may move videos."""
        videos = [one for one in pictures if isinstance(one, OpenVideo)]
        token = self.processor.image_token
        left: dict[str, Iterator[OpenMedia]]
        left = {token: iter([one for one in pictures if not isinstance(one, OpenVideo)])}
        if videos:
            left[self.processor.video_token] = iter(videos)
        found = re.split(f"({'|'.join(map(re.escape, left))})", text)
        return found[::2], [next(left[mark]) for mark in found[1::2]]

    def _shown(self, ids: list[int]) -> _Shown:
        """What stands for a picture, apart from text around it, which is tokenized with the rest.

        Gemma 3 has it between empty lines, which make one token with those of the text.
        """
        special = {*self.tokenizer.all_special_ids, *self.sight.placeholders}
        known = [at for at, one in enumerate(ids) if one in special] or [0, len(ids) - 1]
        first, end = known[0], known[-1] + 1
        return _Shown(ids[first:end], *map(self.tokenizer.decode, (ids[:first], ids[end:])))

    def require_read(self, prompt: PicturePrompt) -> None:
        """Raise PromptError for a prompt of another model, or of more than is kept here."""
        known = self.sight.placeholders
        found = [at for at in prompt.places if prompt.token_ids[at] in known]
        if found != prompt.places or len(found) != sum(one.count for one in prompt.pictures):
            fix = "pass what prepare_chat of this model made"
            raise PromptError(f"prompt: its places for pictures are not this model's: {fix}")
        if prompt.places and prompt.places[-1] == len(prompt) - 1:
            raise PromptError("prompt: it ends with a picture; end it with text")
        self._require_room("prompt", prompt.pictures)

    def _tokenize(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _read(self, one: OpenMedia) -> tuple[Picture, list[int]]:
        """A picture or a video alone, and the tokens that stand for it."""
        if isinstance(one, OpenVideo):
            images, fps = one.read()
            kind = f"a video of {len(images)} times {_size(images[0])}"
            named = f"video {fps!r} {len(images)} "
            found = self._processed(one.path, kind, _arguments(self.processor, images, fps))
        else:
            images, named = [one.image()], ""
            given = {"text": [self.processor.image_token], "images": [images]}
            found = self._processed(one.path, f"a picture of {_size(images[0])}", given)
        ids = found["input_ids"][0].tolist()
        arrays = {n: torch.as_tensor(v).numpy() for n, v in found.items() if n not in _OF_TEXT}
        pixels = f"{named}{images[0].mode} {images[0].size} ".encode()
        pixels += b"".join(image.tobytes() for image in images)
        count = sum(map(ids.count, self.sight.placeholders))
        return Picture.of(pixels, arrays, count), ids

    def _processed(self, path: str, kind: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            found: Mapping[str, Any] = self.processor(
                **given, add_special_tokens=False, return_tensors="pt"
            )
        except Exception as error:  # processors raise nearly every class of exception
            what = "other frames" if "videos" in given else "another size"
            fix = f"the processor refused it: {error}; send {what}"
            raise ConfigError(path, kind, fix) from error
        return found

    def _require_room(self, name: str, pictures: Sequence[Picture]) -> None:
        needed = sum(one.count for one in set(pictures))
        if needed > self.sight.num_rows:
            room = f"{needed} tokens, and {self.sight.num_rows} are kept at a time"
            fix = "send fewer or smaller ones, or raise picture_tokens"
            raise PromptError(f"{name}: the pictures take {room}: {fix}")


def _takes_videos(processor: Any) -> bool:
    names = ("video_processor", "video_token")
    return all(getattr(processor, name, None) is not None for name in names)


def _size(image: Image.Image) -> str:
    return f"{image.size[0]} x {image.size[1]}"


def _arguments(processor: Any, images: Sequence[Image.Image], fps: float) -> dict[str, Any]:
    """Of a processor, for a video whose frames are all read."""
    width, height = images[0].size
    metadata = {
        **{"total_num_frames": len(images), "frames_indices": [*range(len(images))]},
        **{"fps": fps, "duration": len(images) / fps, "width": width, "height": height},
    }
    # [T, 3, H, W]: processors take a height of 1 or 3 for the channels where these come last.
    frames = np.stack([np.asarray(one).transpose(2, 0, 1) for one in images])
    return {
        "text": [processor.video_token],
        "videos": [frames],
        "video_metadata": [metadata],
        "do_sample_frames": False,
    }
