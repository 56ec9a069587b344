"""The pictures of training records: where they are, and what a document keeps of them.

A document keeps no pixels: a picture is read again when its document is trained on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guided_spec.engine.chats.picture_reader import PictureReader
from guided_spec.engine.chats.pictures import PICTURE_PARTS, PictureRules, address_of, path_within
from guided_spec.errors import ConfigError
from guided_spec.models.pictures.axes import NUM_AXES
from guided_spec.models.pictures.picture import Picture, PicturePrompt
from guided_spec.models.pictures.vision import VisionTower


class TargetSight(NamedTuple):
    """How a target reads pictures. tower: counts positions, where they have three axes."""

    reader: PictureReader
    tower: VisionTower | None = None


class KeptPicture(NamedTuple):
    """address: its path, or its ``data:`` address. content, num_tokens: see ``Picture``."""

    address: str
    content: bytes
    num_tokens: int

    def read(self, reader: PictureReader) -> Picture:
        """The picture again. Raises ConfigError, also where it is another one by now."""
        part = {"type": "image", "image": self.address}
        found = reader.read(PictureRules(None).read("picture", part))
        if (found.content, found.count) != (self.content, self.num_tokens):
            fix = "has changed since the run began: leave it as it is, and start anew"
            raise ConfigError("data", f"{self.address:.80}", fix)
        return found


class DocumentPictures(NamedTuple):
    """kept: in the order of the document. places: [N] the positions that stand for them.

    axes: [3][E], the positions of the first E tokens, up to the last picture; [] where positions
    have one axis.
    """

    kept: tuple[KeptPicture, ...]
    places: list[int]
    axes: list[list[int]]

    @classmethod
    def of(
        cls, prompt: PicturePrompt, addresses: Sequence[str], tower: VisionTower | None
    ) -> DocumentPictures:
        """prompt: the whole document, response included. addresses: of its pictures."""
        pairs = zip(addresses, prompt.pictures, strict=True)
        kept = tuple(KeptPicture(address, one.content, one.count) for address, one in pairs)
        end, axes = prompt.places[-1] + 1, list[list[int]]()
        if tower is not None:
            axes = tower.positions(prompt)[:, :end].tolist()
        return cls(kept, prompt.places, axes)

    @property
    def contents(self) -> str:
        """Of all pictures, as files of hidden states name them."""
        return " ".join(one.content.hex() for one in self.kept)

    @property
    def spans(self) -> tuple[range, ...]:
        """Where places follow one another, see ``PicturePrompt``."""
        return PicturePrompt([], (), self.places).spans

    def positions(self, length: int) -> Tensor:
        """int64 [3, length], of a document of so many tokens or more."""
        known = torch.tensor(self.axes)
        end = known.shape[1]
        after = int(known.max()) + 1 + torch.arange(length - end)
        return torch.cat([known, after.expand(NUM_AXES, -1)], 1)

    def prompt(self, token_ids: list[int], reader: PictureReader) -> PicturePrompt:
        """The document up to its last response, for the engine. Raises ConfigError."""
        return PicturePrompt(token_ids, tuple(one.read(reader) for one in self.kept), self.places)


def write_pictures_text(pictures: DocumentPictures | None) -> str:
    """A document's pictures as one line of JSON, for a column of text; "" for None."""
    if pictures is None:
        return ""
    kept = [[one.address, one.content.hex(), one.num_tokens] for one in pictures.kept]
    return json.dumps([kept, pictures.places, pictures.axes])


def read_pictures_text(text: str) -> DocumentPictures | None:
    """The pictures in a text of ``write_pictures_text``; None for ""."""
    if not text:
        return None
    kept, places, axes = json.loads(text)
    pictures = (KeptPicture(address, bytes.fromhex(name), count) for address, name, count in kept)
    return DocumentPictures(tuple(pictures), places, axes)


def picture_parts(messages: Any) -> Iterator[Mapping[str, Any]]:
    """Those parts of messages that are pictures, in their order, well formed or not."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type") in PICTURE_PARTS:
                yield part


def addresses_of(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of the pictures of messages, whose kinds were looked at. Raises ConfigError."""
    found = [address_of(part) for part in picture_parts([*messages])]
    for one in found:
        if not isinstance(one, str):
            fix = "must be the path of a file, or a data: address"
            raise ConfigError("picture", type(one).__name__, fix)
    return found


def with_whole_paths(
    record: Mapping[str, Any], names: Sequence[str], folder: Path
) -> dict[str, Any]:
    """A record in which paths of pictures, relative to ``folder``, are whole.

    names: of the members that may be messages. The record itself where it has none.
    """
    asked = [name for name in names if next(picture_parts(record.get(name)), None) is not None]
    return {**record, **{name: _whole(record[name], folder.absolute()) for name in asked}}


def _whole(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_whole(one, folder) for one in value]
    if not isinstance(value, Mapping):
        return value
    if value.get("type") == "image" and isinstance(value.get("image"), str):
        return {**value, "image": path_within(folder, value["image"])}
    return {**value, "content": _whole(value["content"], folder)} if "content" in value else value


class BatchPictures(NamedTuple):
    """The pictures of B documents.

    documents: B; None of one without. written: int64 [B, T], the documents as they are written,
    with a placeholder wherever ``TrainingBatch.token_ids`` may have a picture's row.
    axes: int64 [3, B, T], the positions of all tokens; None where they have one axis.
    """

    documents: tuple[DocumentPictures | None, ...]
    written: Tensor
    axes: Tensor | None

    @classmethod
    def of(
        cls, documents: Sequence[DocumentPictures | None], token_ids: Tensor
    ) -> BatchPictures | None:
        """None where no document has any. token_ids: int64 [B, T], as they are written."""
        seen = [one for one in documents if one is not None]
        if not seen:
            return None
        axes = None
        if seen[0].axes:
            plain = torch.arange(token_ids.shape[1]).expand(NUM_AXES, -1)
            rows = [plain if one is None else one.positions(plain.shape[1]) for one in documents]
            axes = torch.stack(rows, 1)
        return cls(tuple(documents), token_ids, axes)

    def to(self, device: Any) -> BatchPictures:
        """The same on ``device``."""
        axes = None if self.axes is None else self.axes.to(device, non_blocking=True)
        return self._replace(written=self.written.to(device, non_blocking=True), axes=axes)
