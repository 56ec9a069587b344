"""The pictures of a conversation: where a message has one, and what of it may be read."""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from guided_spec.errors import ConfigError, reason_of
from guided_spec.kinds import require_known_fields, require_one_of

if TYPE_CHECKING:  # an extra
    from PIL import Image

FetchImage = Callable[[str], bytes]

MOST_BYTES = 20 * 2**20  # of a picture's file
MOST_PIXELS = 40 * 10**6
MOST_PICTURES = 16  # of a conversation
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")  # others run programs, or are rare
PICTURE_PARTS = ("image_url", "image", "input_image")
VIDEO_PARTS = ("video_url", "video", "input_video")
OTHER_MEDIA = (*VIDEO_PARTS, "input_audio", "audio", "audio_url", "document", "file", "input_file")
_OF_PART = {
    "image_url": frozenset({"type", "image_url", "detail"}),
    "input_image": frozenset({"type", "image_url", "detail", "file_id"}),
    "image": frozenset({"type", "image"}),
}
_DETAILS = ("auto", "low", "high", "original")
_ADDRESS = re.compile(r"\s*(data:|\w+://)", re.IGNORECASE)
_PLAIN_ALPHABET = str.maketrans("-_", "+/")
_FIX = 'pass {"url": "data:image/png;base64,..."}'


class Frame(NamedTuple):
    """seconds: how long an animation shows the image; 0 where it does not say."""

    image: Image.Image
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class OpenPicture:
    """A picture that can be read.

    path: where it is in the messages. source: a file's bytes, which take less than pixels, or
    PIL's. file: its path, for errors; None where it came otherwise.
    """

    path: str
    source: bytes | Image.Image
    file: str | None = None

    @classmethod
    def of(cls, path: str, source: bytes | Image.Image, file: str | None = None) -> OpenPicture:
        """One whose format and size are looked at, and no pixel. Raises ConfigError."""
        picture = cls(path, source, file)
        if isinstance(source, bytes) and len(source) > MOST_BYTES:
            raise picture._error(f"{len(source)} bytes", _too_many_bytes())
        with picture._opened():
            return picture

    @property
    def num_bytes(self) -> int:
        """Of its file; 0 for one of PIL."""
        return len(self.source) if isinstance(self.source, bytes) else 0

    def image(self) -> Image.Image:
        """Its first frame, upright, in RGB over white.

        Raises ConfigError for what is no picture, is cut off, or is larger than the limits.
        """
        with self._opened() as found:
            if found is not self.source:
                found.seek(0)
                found.load()
            return _upright(self.path, found)

    def frames(self) -> Iterator[Frame]:
        """Those of an animation, each as ``image`` has the first. Raises ConfigError likewise."""
        with self._opened() as found:
            # A PNG's picture for programs that show no animation is no frame of it.
            first = int(found.info.get("default_image", False))
            for at in count(first):
                try:
                    found.seek(at)
                except EOFError:
                    if at == first:
                        raise ConfigError(
                            self.path, "no frames", "is cut off; send it again"
                        ) from None
                    return
                found.load()
                seconds = float(found.info.get("duration", 0)) / 1000
                yield Frame(_upright(self.path, found), seconds)

    @contextmanager
    def _opened(self) -> Iterator[Image.Image]:
        """As far as its header; what is raised inside names its place in the messages."""
        image, name = require_pillow(), "a picture of PIL"
        try:
            with ExitStack() as stack:
                found = self.source
                if isinstance(found, bytes):
                    name = f"{len(found)} bytes"
                    found = stack.enter_context(image.open(io.BytesIO(found), formats=FORMATS))
                _require_size(self.path, found)
                yield found
        except ConfigError as error:
            raise self._error(str(error.value), error.fix) from None
        except (image.DecompressionBombError, image.DecompressionBombWarning):
            raise self._error(name, _too_many_pixels()) from None
        except Exception as error:  # decoders raise nearly every class of exception
            # What is of no known format is told by the address of an object in memory.
            reason = "" if isinstance(error, image.UnidentifiedImageError) else f" ({error})"
            fix = f"is no picture that can be read{reason}; send one of {', '.join(FORMATS)}"
            raise self._error(name, fix) from None

    def _error(self, shown: str, fix: str) -> ConfigError:
        fix = f"of {shown}, {fix}" if self.file else fix
        return ConfigError(self.path, self.file or shown, fix)


class PictureRules(NamedTuple):
    """What a model and a caller take of pictures.

    refusal: why the model reads none; None where it does. takes_files: whether a part may hold a
    path, or a picture of PIL: not one that came over a network. fetch: gives the bytes at another
    address than ``data:``, or raises; None refuses them. videos: why the model reads no videos;
    None where it reads them.
    """

    refusal: str | None = "pictures are not read here"
    takes_files: bool = True
    fetch: FetchImage | None = None
    videos: str | None = None

    def require_read(self, path: str, kind: str, media: str) -> None:
        """Raise ConfigError for a part of this type where the model reads text alone."""
        if self.refusal is not None:
            fix = f"this model reads text: {self.refusal}; leave {media} out"
            raise ConfigError(f"{path}.type", kind, f"{fix}, or load a model that reads them")

    def read(self, path: str, part: Mapping[str, Any]) -> OpenPicture:
        """The picture of a part. Raises ConfigError that names its place in the messages."""
        kind = part["type"]
        known = part.get("image")
        if kind == "image" and isinstance(known, OpenPicture):
            return known
        self.require_read(path, kind, "pictures")
        require_known_fields(path, part, _OF_PART[kind] | {"cache_control"})
        if kind == "image":
            if self.takes_files:
                return self.frame(f"{path}.image", known)
            fix = 'must come as {"type": "image_url", "image_url": {"url": "data:..."}}'
            raise ConfigError(f"{path}.image", f"{known!r:.80}", fix)
        url, place = part.get("image_url"), f"{path}.image_url"
        if part.get("file_id") is not None:
            raise ConfigError(f"{path}.file_id", part["file_id"], f"no files are kept; {_FIX}")
        if isinstance(url, Mapping):
            require_known_fields(place, url, ("url", "detail"))
            _require_detail(f"{place}.detail", url.get("detail"))
            url, place = url.get("url"), f"{place}.url"
        _require_detail(f"{path}.detail", part.get("detail"))
        if not isinstance(url, str):
            raise ConfigError(place, url, f"must be the address of a picture: {_FIX}")
        return OpenPicture.of(place, self._bytes_at(place, url))

    def _bytes_at(self, path: str, url: str) -> bytes:
        url = url.strip()
        if url[:5].lower() == "data:":
            return data_bytes(path, url)
        if self.fetch is None:
            own = ", or fetch_image=, which gets its bytes" if self.takes_files else ""
            fix = f"no address is fetched; send the picture as data:image/png;base64,...{own}"
            raise ConfigError(path, f"{url:.80}", fix)
        found = self.fetch(url)
        if not isinstance(found, bytes | bytearray):
            raise ConfigError("fetch_image", type(found).__name__, "must return bytes")
        return bytes(found)

    def frame(self, path: str, given: Any) -> OpenPicture:
        """What stands at an address, in a file or in a picture of PIL. Raises ConfigError."""
        if isinstance(given, str) and _ADDRESS.match(given):
            return OpenPicture.of(path, self._bytes_at(path, given))
        if not self.takes_files:
            fix = "must be an address: data:image/jpeg;base64,..."
            raise ConfigError(path, f"{given!r:.80}", fix)
        if isinstance(given, require_pillow().Image):
            return OpenPicture.of(path, given)
        if not isinstance(given, str | Path):
            shown = type(given).__name__
            raise ConfigError(path, shown, "must be a picture of PIL, or the path of a file")
        try:
            with Path(given).open("rb") as file:
                data = file.read(MOST_BYTES + 1)
        except (OSError, ValueError) as error:
            raise ConfigError(path, str(given), f"cannot be read: {reason_of(error)}") from error
        return OpenPicture.of(path, data, str(given))


TEXT_ALONE = PictureRules()


def address_of(part: Mapping[str, Any]) -> Any:
    """What a part of a picture names: a path or an address, if it is well formed."""
    found = part.get("image" if part["type"] == "image" else "image_url")
    return found.get("url") if isinstance(found, Mapping) else found


def path_within(folder: Path, address: str) -> str:
    """A path that may be relative to a folder, as a whole one; another address as it is."""
    return address if _ADDRESS.match(address) else str(folder / address)


def require_few(name: str, messages: Sequence[Any]) -> None:
    """Raise ConfigError for a conversation of more pictures and videos than ``MOST_PICTURES``.

    name: of the messages. They may be of any interface, and nothing else of them is looked at.
    """
    num = num_pictures(messages)
    if num > MOST_PICTURES:
        raise ConfigError(name, f"{num} pictures", f"at most {MOST_PICTURES} are read")


def num_pictures(messages: Sequence[Any]) -> int:
    """And videos, of a conversation in any interface, whether they can be read or not."""
    return _count(messages, 4)  # a message, a result of a tool, and their contents


def _count(part: Any, depth: int) -> int:
    if depth and isinstance(part, list | tuple):
        return sum(_count(one, depth - 1) for one in part)
    if not isinstance(part, Mapping):
        return 0
    kind = part.get("type")
    is_picture = isinstance(kind, str) and kind in (*PICTURE_PARTS, *VIDEO_PARTS)
    return is_picture + sum(_count(part.get(name), depth) for name in ("content", "output"))


def refuse_media(path: str, kind: str) -> None:
    """Raise ConfigError for sound and the like."""
    if kind in OTHER_MEDIA:
        if kind in VIDEO_PARTS:
            fix = "this interface has no videos: send its frames as pictures"
        else:
            fix = "no model reads this here: send text or pictures"
        raise ConfigError(f"{path}.type", kind, fix)


def data_bytes(path: str, url: str) -> bytes:
    """The bytes of a ``data:`` address in base64. Raises ConfigError."""
    head, comma, body = url.partition(",")
    if not comma or not head.lower().replace(" ", "").endswith(";base64"):
        raise ConfigError(path, f"{head:.80}", f"must be in base64: {_FIX}")
    return base64_bytes(path, unquote(body))


def base64_bytes(path: str, text: str) -> bytes:
    """Of either alphabet, in lines or not, padded or not: programs write all of these.

    Raises ConfigError for what is no base64, or too long.
    """
    plain = "".join(text.split()).translate(_PLAIN_ALPHABET).rstrip("=")
    if len(plain) > MOST_BYTES * 4 // 3 + 4:
        raise ConfigError(path, f"{len(plain)} characters", _too_many_bytes())
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError(path, f"{text:.40}", f"must be in base64: {error}") from None


def require_pillow() -> Any:
    """The module ``PIL.Image``. Raises ConfigError where it is not installed."""
    try:
        from PIL import Image
    except ImportError:
        fix = "pictures need pillow: pip install 'guided-spec[vision]'"
        raise ConfigError("messages", "a picture", fix) from None
    return Image


def _upright(path: str, given: Any) -> Image.Image:
    from PIL import ImageOps

    image = require_pillow()
    turned = ImageOps.exif_transpose(given)
    if turned.mode.startswith("I;16"):  # else what is brighter than 255 is white
        turned = turned.convert("I").point(lambda value: value / 256).convert("L")
    elif turned.mode == "La":
        turned = turned.convert("LA")
    elif turned.mode in ("I", "F"):
        fix = "has numbers of no known range for colours; save it with 8 bits"
        raise ConfigError(path, f"mode {turned.mode}", fix)
    if turned.has_transparency_data:
        turned = turned.convert("RGBA")
        white: Image.Image = image.new("RGB", turned.size, "white")
        white.paste(turned, mask=turned)
        return white
    plain: Image.Image = turned.convert("RGB")
    return plain


def _require_size(path: str, image: Any) -> None:
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise ConfigError(path, f"{width} x {height}", _too_many_pixels())
    if not width or not height:
        raise ConfigError(path, f"{width} x {height}", "has no pixels")


def _require_detail(path: str, given: Any) -> None:
    if given is not None:  # a picture is always read as the model's own processor has it
        require_one_of(path, given, _DETAILS)


def _too_many_bytes() -> str:
    return f"has more than {MOST_BYTES // 2**20} MiB; send a smaller picture"


def _too_many_pixels() -> str:
    return f"has more than {MOST_PIXELS // 10**6} million pixels; send a smaller picture"
