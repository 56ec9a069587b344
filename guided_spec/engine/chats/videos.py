"""The videos of a conversation, which come as frames: where a message has one, and what is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from guided_spec.engine.chats.pictures import (
    MOST_BYTES,
    MOST_PIXELS,
    Frame,
    OpenPicture,
    PictureRules,
    base64_bytes,
)
from guided_spec.errors import ConfigError
from guided_spec.kinds import require_known_fields

if TYPE_CHECKING:  # an extra
    from PIL import Image

MOST_FRAMES = 768  # of a video, as in the processors of Qwen
_LEAST_FPS, _MOST_FPS = 0.001, 1000.0
_DEFAULT_FPS = 2.0  # of frames that come alone, as in qwen-vl-utils
_STILL_FPS = 10.0  # of an animation that does not say how long it shows a frame, as in browsers
_CONTAINER = re.compile(r"\.(mp4|m4v|mov|mkv|webm|avi|mpe?g|wmv|flv|3gp|ts|ogv)$", re.IGNORECASE)
_PICTURE = re.compile(r"\s*data:image/[^,]*,[^,]*,", re.IGNORECASE)  # of more than one
_FRAMES_IN_ONE = "data:video/jpeg;base64,<frame>,<frame>,..."
_FIX = 'send its frames: {"type": "video", "video": [frame, ...], "fps": 2.0}'


class Frames(NamedTuple):
    """images: [T] of one size, upright, in RGB. fps: of them in a second."""

    images: list[Image.Image]
    fps: float


@dataclass(frozen=True, slots=True, eq=False)
class OpenVideo:
    """A video that can be read.

    path: where it is in the messages. source: its frames, or an animation that holds them.
    fps: frames in a second; None is as the animation has it.
    """

    path: str
    source: tuple[OpenPicture, ...] | OpenPicture
    fps: float | None

    def read(self) -> Frames:
        """All of its frames.

        Raises ConfigError for those that cannot be read, that differ in size, or that are more
        frames or pixels than the limits.
        """
        images, num_pixels, seconds = list[Any](), 0, 0.0
        for path, frame in self._frames():
            width, height = frame.image.size
            if images and frame.image.size != images[0].size:
                first = "{} x {}".format(*images[0].size)
                fix = f"the first frame has {first}; send frames of one size"
                raise ConfigError(path, f"{width} x {height}", fix)
            _require_few(self.path, len(images) + 1)
            num_pixels += width * height
            if num_pixels > MOST_PIXELS:
                most = f"{MOST_PIXELS // 10**6} million pixels"
                fix = f"frames have at most {most} together; send fewer or smaller ones"
                raise ConfigError(self.path, f"{len(images) + 1} of {width} x {height}", fix)
            images.append(frame.image)
            seconds += frame.seconds
        fps = self.fps or (len(images) / seconds if seconds else _STILL_FPS)
        return Frames(images, min(max(fps, _LEAST_FPS), _MOST_FPS))

    def _frames(self) -> Iterator[tuple[str, Frame]]:
        """Each with its place."""
        if isinstance(self.source, OpenPicture):
            yield from ((self.path, frame) for frame in self.source.frames())
        else:
            yield from ((one.path, Frame(one.image())) for one in self.source)


OpenMedia = OpenPicture | OpenVideo


def read_video(rules: PictureRules, path: str, part: Mapping[str, Any]) -> OpenVideo:
    """The video of a part. Raises ConfigError that names its place in the messages."""
    kind = part["type"]
    known = part.get("video")
    if kind == "video" and isinstance(known, OpenVideo):
        return known
    rules.require_read(path, kind, "videos")
    if rules.videos is not None:
        fix = f"this model reads pictures, no videos: {rules.videos}; send its frames as pictures"
        raise ConfigError(f"{path}.type", kind, fix)
    name = "video" if kind == "video" else "video_url"
    require_known_fields(path, part, ("type", name, "fps", "cache_control"))
    fps, given, place = part.get("fps"), part.get(name), f"{path}.{name}"
    if fps is not None:
        _require_fps(f"{path}.fps", fps)
    if isinstance(given, Mapping) and name == "video_url":
        require_known_fields(place, given, ("url",))
        given, place = given.get("url"), f"{place}.url"
    if isinstance(given, list | tuple):
        found = _opened(place, given, rules.frame)
    elif isinstance(given, str) and given.lstrip()[:11].lower() == "data:video/":
        found = _opened(place, _encoded_frames(place, given.strip()), _decoded)
    elif isinstance(given, str | Path):
        if _CONTAINER.search(str(given).partition("?")[0]):
            raise ConfigError(place, f"{given!s:.80}", f"no file of video is decoded: {_FIX}")
        if _PICTURE.match(str(given)):
            fix = f"holds one picture, and several in base64 come as {_FRAMES_IN_ONE}"
            raise ConfigError(place, f"{given!s:.80}", fix)
        return OpenVideo(place, rules.frame(place, given), fps)
    else:
        raise ConfigError(place, f"{given!r:.80}", f"must be a list of frames: {_FIX}")
    return OpenVideo(place, found, _DEFAULT_FPS if fps is None else fps)


def _opened(path: str, given: Sequence[Any], read: Any) -> tuple[OpenPicture, ...]:
    """read: gives the picture of a frame and its place."""
    if not given:
        raise ConfigError(path, given, f"must hold at least one frame: {_FIX}")
    _require_few(path, len(given))
    found, num_bytes = list[OpenPicture](), 0
    for at, one in enumerate(given):
        found.append(read(f"{path}[{at}]", one))
        num_bytes += found[-1].num_bytes
        if num_bytes > MOST_BYTES:
            fix = f"frames have at most {MOST_BYTES // 2**20} MiB together; send smaller ones"
            raise ConfigError(path, f"{num_bytes} bytes", fix)
    return tuple(found)


def _encoded_frames(path: str, url: str) -> list[str]:
    """The base64 of each frame, with commas between them, as vLLM takes them."""
    head, _, body = url.partition(",")
    if head.lower().replace(" ", "") != "data:video/jpeg;base64":
        fix = f"no file of video is decoded: send {_FRAMES_IN_ONE}"
        raise ConfigError(path, f"{head:.80}", fix)
    return unquote(body).split(",", MOST_FRAMES)  # one more is too many


def _decoded(path: str, text: str) -> OpenPicture:
    return OpenPicture.of(path, base64_bytes(path, text))


def _require_few(path: str, count: int) -> None:
    if count > MOST_FRAMES:
        fix = f"at most {MOST_FRAMES} are read; send fewer, and a lower fps"
        raise ConfigError(path, f"{count} frames", fix)


def _require_fps(path: str, given: object) -> None:
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not _LEAST_FPS <= given <= _MOST_FPS:  # type: ignore[operator]
        fix = f"must be a number of frames per second, from {_LEAST_FPS} to {_MOST_FPS:.0f}"
        raise ConfigError(path, given, fix)
