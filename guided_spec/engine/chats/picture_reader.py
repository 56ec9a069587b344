"""Reading prompts with pictures: by the processor of the model, each picture by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain, zip_longest
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch

from guided_spec.engine.chats.pictures import OpenPicture
from guided_spec.errors import ConfigError, PromptError
from guided_spec.models.pictures.picture import Picture, PicturePrompt, Sight

_LOG = logging.getLogger(__name__)
_OF_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


class _Shown(NamedTuple):
    """token_ids: of a picture. before, after: text around them."""

    token_ids: list[int]
    before: str
    after: str


class PictureReader:
    """Turns rendered conversations and their pictures into tokens; thread-safe.

    One picture is decoded at a time, whoever asks: the pixels of one take up to 120 MB, and what a
    processor makes of them on its way some times as much.

    processor: of transformers; None where the model reads no pictures. sight: of the model.

    Attributes: processor, and sight: as given, or with what is wrong with the processor.
    """

    def __init__(self, processor: Any, sight: Sight) -> None:
        self.processor, self.sight = processor, sight
        self._turn = Lock()

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

    def require_places(self, text: str, pictures: Sequence[OpenPicture]) -> None:
        """Raise PromptError where a rendered text has not one place for each picture."""
        count = self.places_in(text)
        if count != len(pictures):
            found = f"the chat template has {count} places for {len(pictures)} pictures"
            fix = f"write no {self.processor.image_token} in messages"
            raise PromptError(f"messages: {found}: {fix}, or pass another chat_template")

    def read(self, one: OpenPicture) -> Picture:
        """A picture as the processor has it. Raises ConfigError."""
        with self._turn:
            return self._read(one)[0]

    def encode(
        self,
        text: str,
        pictures: Sequence[OpenPicture],
        tokenize: Callable[[str], list[int]] | None = None,
    ) -> PicturePrompt:
        """The tokens of a rendered conversation, in which a token of its own is each picture.

        tokenize: of a text that goes on after another one; None: it begins here.

        Raises PromptError where the text has not one place for each picture, and for pictures that
        the model cannot keep together.
        """
        token = self.processor.image_token
        self.require_places(text, pictures)
        parts = text.split(token)
        if not parts[-1]:
            raise PromptError("messages: the prompt ends with a picture; end it with text")
        read: dict[int, tuple[Picture, list[int]]] = {}
        for one in pictures:
            if id(one) not in read:
                with self._turn:
                    read[id(one)] = self._read(one)
        self._require_room("messages", [picture for picture, _ in read.values()])
        placeholder, ids = self.sight.placeholder, list[int]()
        shown = [self._shown(read[id(one)][1]) for one in pictures]
        around = [f"{one.before}{token}{one.after}" for one in shown]
        text = "".join(chain.from_iterable(zip_longest(parts, around, fillvalue="")))
        mark, expanded = self.tokenizer.convert_tokens_to_ids(token), iter(shown)
        for token_id in (tokenize or self._tokenize)(text):
            ids += next(expanded).token_ids if token_id == mark else [token_id]
        places = [at for at, one in enumerate(ids) if one == placeholder]
        chosen = tuple(read[id(one)][0] for one in pictures)
        if not all(one.count for one in chosen) or len(places) != sum(one.count for one in chosen):
            fix = "pass the model's own processor"
            raise PromptError(f"messages: the processor's {token} is not the model's token: {fix}")
        return PicturePrompt(ids, chosen, places)

    def _shown(self, ids: list[int]) -> _Shown:
        """What stands for a picture, apart from text around it, which is tokenized with the rest.

        Gemma 3 has it between empty lines, which make one token with those of the text.
        """
        special = {*self.tokenizer.all_special_ids, self.sight.placeholder}
        known = [at for at, one in enumerate(ids) if one in special] or [0, len(ids) - 1]
        first, end = known[0], known[-1] + 1
        return _Shown(ids[first:end], *map(self.tokenizer.decode, (ids[:first], ids[end:])))

    def require_read(self, prompt: PicturePrompt) -> None:
        """Raise PromptError for a prompt of another model, or of more than is kept here."""
        found = [prompt.token_ids[at] for at in prompt.places]
        if found != [self.sight.placeholder] * sum(one.count for one in prompt.pictures):
            fix = "pass what prepare_chat of this model made"
            raise PromptError(f"prompt: its places for pictures are not this model's: {fix}")
        if prompt.places and prompt.places[-1] == len(prompt) - 1:
            raise PromptError("prompt: it ends with a picture; end it with text")
        self._require_room("prompt", prompt.pictures)

    def _tokenize(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _read(self, one: OpenPicture) -> tuple[Picture, list[int]]:
        """A picture alone, and the tokens that stand for it."""
        processor, image = self.processor, one.image()
        try:
            found: Mapping[str, Any] = processor(
                text=[processor.image_token],
                images=[[image]],
                add_special_tokens=False,
                return_tensors="pt",
            )
        except Exception as error:  # processors raise nearly every class of exception
            shown = f"{image.size[0]} x {image.size[1]}"
            fix = f"the processor refused it: {error}; send another size"
            raise ConfigError(one.path, f"a picture of {shown}", fix) from error
        ids = found["input_ids"][0].tolist()
        arrays = {n: torch.as_tensor(v).numpy() for n, v in found.items() if n not in _OF_TEXT}
        pixels = f"{image.mode} {image.size} ".encode() + image.tobytes()
        return Picture.of(pixels, arrays, ids.count(self.sight.placeholder)), ids

    def _require_room(self, name: str, pictures: Sequence[Picture]) -> None:
        needed = sum(one.count for one in set(pictures))
        if needed > self.sight.num_rows:
            room = f"{needed} tokens, and {self.sight.num_rows} are kept at a time"
            fix = "send fewer or smaller ones, or raise picture_tokens"
            raise PromptError(f"{name}: the pictures take {room}: {fix}")
