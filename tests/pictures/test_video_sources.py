"""Where videos come from: what is read of a message's part, and what is refused by name."""

from __future__ import annotations

import base64
import copy
import io
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from guided_spec.engine.chats import videos
from guided_spec.engine.chats.messages import read_messages
from guided_spec.engine.chats.pictures import MOST_BYTES, MOST_PICTURES, PictureRules
from guided_spec.engine.chats.videos import MOST_FRAMES, Frames, OpenVideo, read_video
from guided_spec.engine.llm import LLM
from guided_spec.errors import ConfigError, PromptError, UnknownOptionError
from guided_spec.models.pictures.vision import SERVED
from guided_spec.types import SamplingParams
from tests.pictures.filmed import FILMED, Film, expected, film, filmed, show
from tests.pictures.sighted import ask, picture, png, sighted
from tests.tiny_llm import make_llm

FAMILY = "qwen2_5_vl"  # its positions depend on the rate
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
CAT = film(1)
NO_PLACE = "{% for part in messages[0]['content'] %}{{ part['text'] }}{% endfor %}:"
PLACE = "messages[0].content[0]"
LOCAL, REMOTE = PictureRules(None), PictureRules(None, takes_files=False)
FILES = [png(one) for one in CAT.frames]
JPEGS = [base64.b64encode(png(one, "JPEG")).decode() for one in CAT.frames]
JPEG_URL = "data:video/jpeg;base64," + ",".join(JPEGS)


def data(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def said(part: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]


def read(part: Any, rules: PictureRules = LOCAL) -> Frames:
    return read_video(rules, PLACE, part).read()


def pixels(frames: Frames) -> Any:
    return np.stack([*map(np.asarray, frames.images)])


def animation(frames: list[Image.Image], form: str, milliseconds: Any = 250) -> bytes:
    shown = {"duration": milliseconds} if milliseconds else {}
    lossless = {"lossless": True} if form == "WEBP" else {}
    more = {"save_all": True, "append_images": frames[1:]}
    return png(frames[0], form, **more, **shown, **lossless)


@pytest.fixture(scope="module")
def llm() -> Any:
    with filmed(FAMILY).llm() as made:
        yield made


def test_every_source_is_the_same_video(llm: LLM, tmp_path: Path) -> None:
    paths = [tmp_path / f"{at}.png" for at in range(len(FILES))]
    for path, file in zip(paths, FILES, strict=True):
        path.write_bytes(file)
    moving = tmp_path / "all.png"
    moving.write_bytes(animation(CAT.frames, "PNG"))
    sources: list[tuple[dict[str, Any], float]] = [
        ({"type": "video", "video": CAT.frames}, 2.0),
        ({"type": "video", "video": tuple(CAT.frames), "fps": 4}, 4.0),
        ({"type": "video", "video": [str(paths[0]), paths[1], *CAT.frames[2:]]}, 2.0),
        ({"type": "video", "video": [*map(data, FILES)], "fps": 0.5}, 0.5),
        ({"type": "video", "video": [f"https://a.example/{at}" for at in range(4)]}, 2.0),
        ({"type": "video", "video": str(moving)}, 4.0),
        ({"type": "video", "video": moving, "fps": 1.5}, 1.5),
        ({"type": "video_url", "video_url": {"url": data(moving.read_bytes())}}, 4.0),
        ({"type": "video_url", "video_url": "https://a.example/all"}, 4.0),
    ]

    def fetch(address: str) -> bytes:
        name = address.rpartition("/")[2]
        return moving.read_bytes() if name == "all" else FILES[int(name)]

    for part, fps in sources:
        output = llm.chat(said(part), params=GREEDY, fetch_image=fetch)
        wanted = expected(FAMILY, show(CAT._replace(fps=fps), "What is it?"), 8)
        assert output.completion.token_ids == wanted


def test_messages_are_a_prompt_too(llm: LLM) -> None:
    asked = show(CAT, "What is it?")
    (output,) = llm.generate([asked], GREEDY)
    assert output.completions[0].token_ids == expected(FAMILY, asked, 8)
    once = read_messages(asked, NO_PLACE, LOCAL)
    assert read_messages(once, NO_PLACE, LOCAL) == once


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video_url", "video_url": {"url": JPEG_URL}, "fps": 3.0},
        {"type": "input_video", "video_url": JPEG_URL, "fps": 3},
        {"type": "video_url", "video_url": " " + JPEG_URL.replace("base64,", "BASE64,"), "fps": 3},
        {"type": "video", "video": JPEG_URL, "fps": 3, "cache_control": {"type": "ephemeral"}},
        {"type": "video_url", "video_url": {"url": JPEG_URL.replace("=", "%3D")}, "fps": 3},
    ],
)
def test_frames_in_one_address_are_as_vllm_takes_them(part: dict[str, Any]) -> None:
    found = read(part, REMOTE)
    wanted = [Image.open(io.BytesIO(base64.b64decode(one))) for one in JPEGS]
    assert found.fps == 3
    np.testing.assert_array_equal(pixels(found), np.stack([*map(np.asarray, wanted)]))


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
@pytest.mark.parametrize(("milliseconds", "fps"), [([100, 300, 200, 200], 5.0), (None, 10.0)])
def test_an_animation_has_its_own_rate(form: str, milliseconds: Any, fps: float) -> None:
    colours = [Image.new("RGB", (16, 8), one) for one in ("red", "green", "blue", "white")]
    part = {"type": "video", "video": data(animation(colours, form, milliseconds), "image/webp")}
    found = read(part, REMOTE)
    assert found.fps == pytest.approx(fps)
    np.testing.assert_array_equal(pixels(found), np.stack([*map(np.asarray, colours)]))


def test_a_picture_in_place_of_an_animation_is_no_frame_of_it() -> None:
    shown = [Image.new("RGB", (16, 8), one) for one in ("white", "red", "green")]
    file = png(shown[0], "PNG", save_all=True, append_images=shown[1:], duration=250)
    spare = png(
        shown[0],
        "PNG",
        save_all=True,
        append_images=shown[1:],
        duration=250,
        default_image=True,
    )
    for written, wanted in ((file, shown), (spare, shown[1:])):
        found = read({"type": "video", "video": data(written)}, REMOTE)
        assert found.fps == pytest.approx(4.0)
        np.testing.assert_array_equal(pixels(found), np.stack([*map(np.asarray, wanted)]))
    for cut in range(len(spare) - 21):  # after the last pixels
        broken = {"type": "video", "video": data(spare[:cut])}
        with pytest.raises(ConfigError, match=r"\.video='"):
            read(broken, REMOTE)


def test_a_picture_is_a_video_of_one_frame() -> None:
    found = read({"type": "video", "video": data(FILES[0])}, REMOTE)
    assert len(found.images) == 1
    with filmed("qwen3_vl").llm() as timed:  # whose processor takes it twice
        asked = show(Film(CAT.frames[:1], 2.0), "What?")
        output = timed.chat(asked, params=GREEDY)
    assert output.completion.token_ids == expected("qwen3_vl", asked, 8)


CUT = data(png(picture(3, (64, 64)))[:900])
FAULTS: list[tuple[Any, str, str]] = [
    ({"video": []}, ".video", "must hold at least one frame"),
    ({"video": None}, ".video", "must be a list of frames"),
    ({"video": 7}, ".video", "must be a list of frames"),
    ({"video": {"frames": []}}, ".video", "must be a list of frames"),
    ({"video": CAT.frames[0]}, ".video", "must be a list of frames"),
    ({"video": [7]}, ".video[0]", "must be a picture of PIL, or the path of a file"),
    ({"video": [CAT.frames[0], None]}, ".video[1]", "must be a picture of PIL"),
    ({"video": [CAT.frames[0], "no/such.png"]}, ".video[1]", "cannot be read: No such file"),
    ({"video": [CAT.frames[0], "http://a/b"]}, ".video[1]", "no address is fetched"),
    ({"video": [data(FILES[0]), data(b"no picture")]}, ".video[1]", "no picture that can be read"),
    ({"video": [data(FILES[0]), CUT]}, ".video[1]", "no picture that can be read"),
    ({"video": [data(FILES[0]), data(png(picture(1, (16, 8))))]}, ".video[1]", "of one size"),
    ({"video": [data(FILES[0])] * (MOST_FRAMES + 1)}, ".video", f"at most {MOST_FRAMES} are read"),
    ({"video": JPEG_URL + "," * MOST_FRAMES}, ".video", f"at most {MOST_FRAMES} are read"),
    ({"video": "clip.mp4"}, ".video", "no file of video is decoded: send its frames"),
    ({"video": Path("a/clip.WEBM")}, ".video", "no file of video is decoded: send its frames"),
    ({"video": "https://a/clip.mov?x=1"}, ".video", "no file of video is decoded"),
    ({"video": data(b"\0\0\0\x18ftypmp42", "video/mp4")}, ".video", "no file of video is decoded"),
    ({"video": data(b"\0\0\0\x18ftypmp42", "image/gif")}, ".video", "no picture that can be read"),
    ({"video": f"{data(FILES[0])},{JPEGS[1]}"}, ".video", "several in base64 come as data:video"),
    ({"video": "data:video/jpeg,abc"}, ".video", "no file of video is decoded"),
    ({"video": "data:video/jpeg;base64,"}, ".video[0]", "no picture that can be read"),
    ({"video": f"data:video/jpeg;base64,{JPEGS[0]},"}, ".video[1]", "no picture that can be read"),
    ({"video": "data:video/jpeg;base64,!!"}, ".video[0]", "must be in base64"),
    *(
        ({"video": CAT.frames, "fps": fps}, ".fps", "must be a number of frames per second")
        for fps in (0, -1, math.nan, math.inf, -math.inf, "2", True, [2], 1e-9, 1e9, 10**400)
    ),
    ({"video": CAT.frames, "frames": 3}, ".frames", "is not known here"),
    ({"video": CAT.frames, "nframes": 3}, ".nframes", "is not known here"),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("fields", "place", "reason"), FAULTS)
def test_faults_name_the_part(fields: Any, place: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read({"type": "video", **fields})
    assert str(caught.value).startswith(f"{PLACE}{place}=")
    assert reason in str(caught.value)


def test_faults_of_addresses_name_them() -> None:
    for value, place in (
        ({"url": [data(FILES[0]), "x"]}, ".video_url.url[1]"),
        ([data(FILES[0]), "/etc/passwd"], ".video_url[1]"),
        ({"url": "/etc/passwd"}, ".video_url.url"),
        ({"url": JPEG_URL, "detail": "low"}, ".video_url.detail"),
        ({"url": None}, ".video_url.url"),
        (None, ".video_url"),
    ):
        with pytest.raises((ConfigError, UnknownOptionError)) as caught:
            read({"type": "video_url", "video_url": value}, REMOTE)
        assert str(caught.value).startswith(f"{PLACE}{place}=")


def bomb(width: int) -> str:
    """A PNG of one colour, far smaller than its pixels."""
    return data(png(Image.new("1", (width, width))))


def test_pixels_and_bytes_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"\.video\[1\]=.*more than 40 million pixels"):
        read({"type": "video", "video": [data(FILES[0]), bomb(7000)]})
    decoded: list[Any] = []
    kind: Any = PngImagePlugin.PngImageFile
    prepare = kind.load_prepare

    def noted(self: Any) -> None:
        decoded.append(self)
        prepare(self)

    monkeypatch.setattr(kind, "load_prepare", noted)
    with pytest.raises(ConfigError, match=r"\.video='3 of 4000 x 4000'.*40 million pixels togeth"):
        read({"type": "video", "video": [bomb(4000)] * 9})
    assert len(decoded) == 3
    size = MOST_BYTES // 3
    padded = data(FILES[0] + b"\0" * size)
    with pytest.raises(ConfigError, match=r"\.video='.* bytes'.*at most 20 MiB together"):
        read({"type": "video", "video": [padded] * 9})


def test_animations_are_bounded_while_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    dots = [Image.new("RGB", (8, 8), (at % 256, at // 256, 9)) for at in range(40)]
    part = {"type": "video", "video": data(animation(dots, "GIF"), "image/gif")}
    assert len(read(part).images) == 40
    monkeypatch.setattr(videos, "MOST_FRAMES", 39)
    with pytest.raises(ConfigError, match="='40 frames': at most 39 are read"):
        read(part)
    monkeypatch.setattr(videos, "MOST_PIXELS", 999)
    with pytest.raises(ConfigError, match="='16 of 8 x 8'.*together"):
        read(part)


@given(st.binary(max_size=200), st.sampled_from(["GIF", "PNG", "WEBP"]), st.integers(1, 400))
def test_no_animation_raises_another_error(noise: bytes, form: str, cut: int) -> None:
    file = animation([Image.new("RGB", (8, 8), one) for one in ("red", "blue", "white")], form)
    for broken in (noise, file[:cut], file[:cut] + noise):
        try:
            found = read({"type": "video", "video": data(broken, "image/gif")}, REMOTE)
        except ConfigError as error:
            assert str(error).startswith(f"{PLACE}.video=")  # noqa: PT017
        else:
            assert found.images


def test_pictures_and_videos_are_counted_together() -> None:
    part = {"type": "video", "video": [data(FILES[0])]}
    many = [*[part] * MOST_PICTURES, {"type": "image", "image": picture(1)}]
    with pytest.raises(ConfigError, match="'17 pictures': at most 16 are read"):
        read_messages([{"role": "user", "content": many}], NO_PLACE, LOCAL)


def test_what_the_processor_refuses_is_named(llm: LLM) -> None:
    flat = [Image.new("RGB", (1, 9)) for _ in range(2)]
    processor: Any = copy.copy(filmed(FAMILY).processor)

    def refuse(given: Any, **_: Any) -> Any:
        assert [one.shape for one in given] == [(2, 3, 9, 1)]  # no other order is told apart
        raise ValueError("too flat")

    processor.video_processor = refuse
    assert llm.sight.videos is None
    with type(filmed(FAMILY))(filmed(FAMILY).model, processor).llm() as other:
        with pytest.raises(ConfigError) as caught:
            other.chat(show(Film(flat, 2.0), "?"))
        assert other.chat(ask(picture(1), "?"), params=GREEDY).completion.token_ids
    wanted = "'a video of 2 times 1 x 9': the processor refused it: too flat; send other frames"
    assert str(caught.value) == f"{PLACE}.video={wanted}"


@pytest.mark.parametrize("family", ["llava", "gemma3", "qwen2_vl"])  # without a video processor
def test_models_that_read_pictures_alone_say_why(family: str) -> None:
    with sighted(family).llm() as llm:
        with pytest.raises(ConfigError) as caught:
            llm.chat(show(CAT, "What is it?"))
        assert llm.chat(ask(picture(1), "What is it?"), params=GREEDY).completion.token_ids
    reason = "this model reads pictures, no videos: its processor takes none; send its frames as"
    assert f"{PLACE}.type='video': {reason} pictures" in str(caught.value)


def test_models_of_text_say_why() -> None:
    with make_llm("llama") as llm, pytest.raises(ConfigError) as caught:
        llm.chat(show(CAT, "?"), chat_template_kwargs={"chat_template": "x:"})
    assert f"{PLACE}.type='video': this model reads text: " in str(caught.value)
    assert "leave videos out, or load a model that reads them" in str(caught.value)


def test_every_family_with_a_video_processor_is_tried() -> None:
    """A family that gets one later is tried too."""
    known: Any = import_module("transformers.models.auto.video_processing_auto")
    assert {*known.VIDEO_PROCESSOR_MAPPING_NAMES} & {*SERVED} == {*FILMED}


TWO_PLACES = "{{ messages[0]['content'][0]['type'] }}<img><video></img><img><video></img>:"


def test_templates_must_have_a_place_for_each_video(llm: LLM) -> None:
    for template, count in ((NO_PLACE, 0), (TWO_PLACES, 2)):
        with pytest.raises(PromptError, match=f"{count} places for 1 videos: write no <video>"):
            llm.chat(show(CAT, "?"), chat_template_kwargs={"chat_template": template})
    with pytest.raises(ConfigError, match="the chat template has no places for videos"):
        llm.chat(
            show(CAT, "?"), chat_template_kwargs={"chat_template": "{{ messages[0]['content'] }}"}
        )


def test_a_place_that_is_written_is_refused(llm: LLM) -> None:
    """Where the same token stands for the rows of a video; elsewhere it is text."""
    with pytest.raises(PromptError, match="1 places for 0 videos: write no <video> in messages"):
        llm.chat(ask(picture(1), "<video>"))
    with pytest.raises(PromptError, match="prompt holds token .* a picture's place"):
        llm.generate(["the <video>"], GREEDY)
    ends = "{% for part in messages[0]['content'] %}{{ part['type'] }}{% endfor %}<video>"
    with pytest.raises(PromptError, match="the prompt ends with a picture; end it with text"):
        llm.chat(show(CAT, "?"), chat_template_kwargs={"chat_template": ends})
    asked = ask("the <video>", picture(1), "?")
    with filmed("internvl").llm() as other:
        wanted = filmed("internvl").processor.tokenizer
        prompt = other.prepare_chat(asked).prompt_ids
    assert wanted.convert_tokens_to_ids("<video>") in prompt


def test_templates_may_move_videos(llm: LLM) -> None:
    """Each place has the next of its kind, as in transformers."""
    moved = "{{ messages[0]['content'][0]['type'] }}<img><image></img><img><video></img>?"
    first = llm.prepare_chat(
        show(CAT, picture(1), "?"), chat_template_kwargs={"chat_template": moved}
    )
    pictures: Any = first.pictures
    assert [len(one.inputs) for one in pictures.pictures] == [2, 3]
    assert "image_grid_thw" in pictures.pictures[0].inputs


def test_sound_is_refused_by_name(llm: LLM) -> None:
    for kind in ("input_audio", "audio", "audio_url"):
        with pytest.raises(
            ConfigError, match=f"type='{kind}': no model reads this here: send text"
        ):
            llm.chat(said({"type": kind, kind: {"url": "data:"}}))


def test_what_finds_no_room_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arrays of a video may take hundreds of megabytes."""
    sizes: list[int] = []
    original = OpenVideo.read

    def noted(self: OpenVideo) -> Frames:
        sizes.append(1)
        return original(self)

    monkeypatch.setattr(OpenVideo, "read", noted)
    asked = show(*(film(seed) for seed in range(9)), "?")
    reason = "take 24 tokens, and 20 are kept at a time"
    with filmed(FAMILY).llm(picture_tokens=20) as llm, pytest.raises(PromptError, match=reason):
        llm.chat(asked)
    assert len(sizes) == 3
