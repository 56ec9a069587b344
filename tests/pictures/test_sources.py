"""Where pictures come from: what is read of a message's part, and what is refused by name."""

from __future__ import annotations

import base64
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from guided_spec.engine.chats import pictures
from guided_spec.engine.chats.picture_reader import PictureReader
from guided_spec.engine.chats.pictures import OpenPicture, PictureRules
from guided_spec.engine.llm import LLM
from guided_spec.errors import ConfigError, GuidedSpecError, PromptError
from guided_spec.models.pictures.picture import Sight
from guided_spec.types import SamplingParams
from tests.pictures.sighted import ask, picture, png, sighted

RULES = PictureRules(None)
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
RED_ABOVE = Image.fromarray(np.array([[[255, 0, 0]], [[0, 0, 255]]], dtype=np.uint8))


def url_part(data: bytes, kind: str = "png") -> dict[str, Any]:
    text = base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{text}"}}


def said(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


def colours(found: OpenPicture) -> Any:
    image = found.image()
    assert image.mode == "RGB"
    return np.asarray(image).tolist()


def read(image: Image.Image, form: str = "PNG", **options: Any) -> Any:
    return colours(OpenPicture.of("p", png(image, form, **options)))


def test_every_source_is_the_same_picture(tmp_path: Path) -> None:
    one, data = picture(3), png(picture(3))
    file = tmp_path / "one.png"
    file.write_bytes(data)
    sources = [
        {"type": "image", "image": one},
        {"type": "image", "image": str(file)},
        {"type": "image", "image": file},
        url_part(data),
        {**url_part(data), "detail": "low"},
        {"type": "input_image", "image_url": url_part(data)["image_url"]["url"]},
        {"type": "image_url", "image_url": {"url": "https://a.example/b", "detail": "auto"}},
    ]
    sought: list[str] = []

    def fetch(address: str) -> bytes:
        sought.append(address)
        return data

    with sighted("llava").llm() as llm:
        wanted = sighted("llava").expected(ask(one, "What is it?"), 8)
        for part in sources:
            output = llm.chat(said(part), params=GREEDY, fetch_image=fetch)
            assert output.completion.token_ids == wanted
    assert sought == ["https://a.example/b"]


def test_messages_are_a_prompt_too() -> None:
    with sighted("llava").llm() as llm:
        (output,) = llm.generate([ask(picture(3), "What is it?")], GREEDY)
        wanted = sighted("llava").expected(ask(picture(3), "What is it?"), 8)
        assert output.completions[0].token_ids == wanted
        chosen = [llm.choose(ask(picture(seed), "What is it?"), ["cat", "dog"]) for seed in (3, 4)]
    assert chosen[0].probabilities != chosen[1].probabilities


def test_other_forms_of_pictures() -> None:
    whole = [[[255, 0, 0]], [[0, 0, 255]]]
    assert read(RED_ABOVE) == read(RED_ABOVE, "BMP") == whole
    assert read(RED_ABOVE.convert("P")) == whole
    half = RED_ABOVE.convert("RGBA")
    half.putalpha(0)
    assert read(half) == [[[255, 255, 255]], [[255, 255, 255]]]
    assert read(Image.new("CMYK", (1, 1), (0, 0, 0, 0)), "TIFF") == [[[255, 255, 255]]]
    assert read(Image.new("L", (1, 1), 7)) == [[[7, 7, 7]]]
    assert read(Image.fromarray(np.array([[256 * 7]], dtype=np.uint16))) == [[[7, 7, 7]]]
    assert read(RED_ABOVE, "GIF", save_all=True, append_images=[half.convert("RGB")] * 2) == whole
    assert read(RED_ABOVE.convert("LA"))[0][0][0] == RED_ABOVE.convert("L").getpixel((0, 0))


@pytest.mark.parametrize(("orientation", "turned"), [(3, "down"), (6, "right"), (8, "left")])
def test_turned_pictures_are_upright(orientation: int, turned: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = np.array(read(RED_ABOVE, exif=exif))
    red = found[..., 0] == 255
    assert {"down": red[-1, 0], "right": red[0, -1], "left": red[0, 0]}[turned]
    assert found.shape == ((2, 1, 3) if turned == "down" else (1, 2, 3))


DEEP = np.full((2, 2), 256 * 7, dtype=np.uint16)


def test_every_mode_of_pil_is_read() -> None:
    """Sixteen bits in either order, and colours that their transparency has been taken into."""
    for mode, raw in (("I;16", "<u2"), ("I;16L", "<u2"), ("I;16B", ">u2")):
        deep = Image.frombytes(mode, (2, 2), DEEP.astype(raw).tobytes())
        assert colours(OpenPicture("p", deep)) == [[[7, 7, 7]] * 2] * 2
    for mode, plain in (("RGBa", "RGB"), ("La", "L")):
        blended = RED_ABOVE.convert(plain).convert(plain + "A").convert(mode)
        assert (
            colours(OpenPicture("p", blended))
            == np.asarray(RED_ABOVE.convert(plain).convert("RGB")).tolist()
        )


def local(given: Any) -> None:
    RULES.read("messages[0].content[0]", {"type": "image", "image": given}).image()


def test_pictures_of_pil_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    """They may be closed by their owner, and are read from their files when they are wanted."""
    whole, cut = tmp_path / "whole.png", tmp_path / "cut.jpg"
    whole.write_bytes(png(picture(1)))
    cut.write_bytes(png(picture(1, (99, 99)), "JPEG")[:2000])
    with Image.open(whole) as closed, Image.open(cut) as short:
        closed.close()
        for given_, reason in ((closed, "closed image"), (short, "truncated")):
            wanted = rf"^messages\[0\]\.content\[0\]\.image='a picture of PIL': .*{reason}"
            with pytest.raises(ConfigError, match=wanted):
                local(given_)


def test_faults_show_neither_addresses_of_memory_nor_what_was_sent() -> None:
    with pytest.raises(ConfigError) as caught:
        OpenPicture.of("p", b"no picture")
    assert " at 0x" not in str(caught.value)
    text = "no/such/" * 500
    for given_ in (text, f"https://a.example/{text}"):
        with pytest.raises(ConfigError) as caught:
            local(given_)
        assert len(str(caught.value)) < 400


LINES = base64.encodebytes(png(picture(1, (30, 30)))).decode()
WHOLE = LINES.replace("\n", "")
SPELLINGS = [
    f"data:image/png;base64,{LINES}",
    f"data:image/png;base64,{LINES.replace(chr(10), '%0D%0A')}",
    f"DATA:IMAGE/PNG;BASE64,{WHOLE}",
    f" data:image/png;name=a.png; base64,{WHOLE}\n",
    f"data:;base64,{WHOLE.rstrip('=')}",
    f"data:image/png;base64,{WHOLE.replace('+', '-').replace('/', '_')}",
    f"data:image/png;base64,{WHOLE.replace('+', '%2B').replace('/', '%2F').replace('=', '%3D')}",
]


@pytest.mark.parametrize("url", SPELLINGS)
def test_data_addresses_of_other_programs(url: str) -> None:
    assert {"+", "/"} < set(WHOLE)
    wanted = np.asarray(picture(1, (30, 30))).tolist()
    for part in ({"type": "image_url", "image_url": url}, {"type": "image", "image": url}):
        assert colours(RULES.read("p", part)) == wanted


def test_what_the_processor_refuses_is_named() -> None:
    one, thin = sighted("qwen2_vl"), Image.new("RGB", (3000, 1))
    with (
        one.llm() as llm,
        pytest.raises(
            ConfigError,
            match=r"messages\[0\]\.content\[1\]\.image='a picture of 3000 x 1': .*another size",
        ),
    ):
        llm.chat(ask("and", thin, "?"))


BAD = {
    "empty": (b"", "is no picture that can be read"),
    "text": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no picture .*; send one of BMP"),
    "cut": (png(picture(1, (64, 64)))[:900], "is no picture that can be read"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is no picture"),
    "wide": (png(Image.new("1", (9000, 9000))), "9000 x 9000': has more than 40 million pixels"),
    "huge": (png(Image.new("1", (14000, 14000))), "has more than 40 million pixels"),
    "float": (png(Image.new("F", (2, 2)), "TIFF"), "mode F': has numbers of no known range"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_picture_is_refused(case: str) -> None:
    data, reason = BAD[case]
    with pytest.raises(
        ConfigError, match=rf"^messages\[0\]\.content\[0\]\.image_url\.url=.*{reason}"
    ):
        RULES.read("messages[0].content[0]", url_part(data)).image()


@given(st.binary(max_size=400), st.integers(0, 500), st.integers(0, 255))
def test_damaged_files_are_read_or_refused(rest: bytes, at: int, value: int) -> None:
    data = bytearray(png(picture(1, (9, 9))))
    data[at % len(data)] = value
    for one in (bytes(data), bytes(data) + rest, rest, bytes(data[: at % len(data)])):
        with suppress(ConfigError):
            assert OpenPicture.of("p", one).image().mode == "RGB"


PARTS: list[tuple[dict[str, Any], str]] = [
    (
        {"type": "image_url", "image_url": {"url": "http://a/b.png"}},
        r"image_url\.url=.*no address is",
    ),
    ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "no address is fetched"),
    ({"type": "image_url", "image_url": "/etc/passwd"}, r"image_url='/etc/passwd': no address is"),
    ({"type": "image_url"}, r"\.image_url=None: must be the address"),
    ({"type": "image_url", "image_url": {"url": 3}}, r"\.image_url\.url=3: must be the address"),
    ({"type": "image_url", "image_url": {"urk": ""}}, r"image_url\.urk='': is not known here"),
    ({"type": "image_url", "image_url": {"url": "data:x,y"}}, "must be in base64"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%"}}, "must be in base64"),
    ({"type": "input_image", "file_id": "x"}, r"\.file_id='x': no files are kept"),
    ({"type": "image", "image": 3}, r"\.image='int': must be a picture of PIL"),
    ({"type": "image", "image": "/no/such.png"}, r"\.image='/no/such.png': cannot be read"),
    ({"type": "image_url", "image_url": "data:", "detail": "lo"}, r"\.detail='lo': must be one of"),
    *(
        ({"type": kind}, rf"\.type='{kind}': no model reads this here")
        for kind in ("input_audio", "document", "file")
    ),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("part", "reason"), PARTS)
def test_other_parts_are_refused_by_name(part: dict[str, Any], reason: str) -> None:
    with (
        sighted("llava").llm() as llm,
        pytest.raises(ConfigError, match=r"^messages\[0\]\.content\[0\]" + f".*{reason}"),
    ):
        llm.chat(said(part))


def test_a_server_reads_no_files(tmp_path: Path) -> None:
    file = tmp_path / "one.png"
    file.write_bytes(png(picture(1)))
    for given_ in (str(file), file, picture(1)):
        with pytest.raises(ConfigError, match=r"p\.image=.*must come as"):
            PictureRules(None, takes_files=False).read("p", {"type": "image", "image": given_})


def test_limits_of_bytes_and_pictures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with sighted("llava").llm(picture_tokens=400) as llm:
        with pytest.raises(ConfigError, match="messages='17 pictures': at most 16 are read"):
            llm.chat(ask(*[picture(1)] * 17, "and?"))
        assert llm.chat(ask(*[picture(1)] * 16, "and?"), params=GREEDY).text is not None
        monkeypatch.setattr(pictures, "MOST_BYTES", 100)
        file = tmp_path / "one.png"
        file.write_bytes(png(picture(1)))
        for part in (url_part(png(picture(1))), {"type": "image", "image": str(file)}):
            with pytest.raises(ConfigError, match="has more than 0 MiB; send a smaller picture"):
                llm.chat(said(part))


def test_text_may_not_stand_for_pictures() -> None:
    with sighted("llava").llm() as llm:
        for words in ("<image> and", "<image><image>"):
            with pytest.raises(PromptError, match="write no <image> in messages"):
                llm.chat(ask(words, picture(1), "and?"))
        alone = llm.prepare_chat(ask(picture(1), "and?")).prompt_ids
        for prompt in (ask("<image> and no picture"), "an <image>", alone):
            with pytest.raises(PromptError, match="holds token 380 at .*, a picture's place: pass"):
                llm.generate([prompt], GREEDY)


PART = url_part(png(picture(1)))
IN_PARTS = (
    "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}"
)
TEMPLATES: list[tuple[str, type[GuidedSpecError], str]] = [
    ("{{ messages[0]['content'] }}:", ConfigError, "has no places for pictures"),
    (IN_PARTS, PromptError, "has 0 places for 1 pictures"),
    (IN_PARTS + "{{ '<image>' }}", PromptError, "the prompt ends with a picture; end it with text"),
]


@pytest.mark.parametrize(("template", "error", "reason"), TEMPLATES)
def test_templates_without_places(template: str, error: type[GuidedSpecError], reason: str) -> None:
    with sighted("llava").llm() as llm, pytest.raises(error, match=reason):
        llm.chat(said(PART), chat_template_kwargs={"chat_template": template})


def test_models_of_text_say_so() -> None:
    with LLM() as llm, pytest.raises(ConfigError) as caught:
        llm.chat(said(url_part(png(picture(1)))))
    assert str(caught.value) == (
        "messages[0].content[0].type='image_url': this model reads text: target (llama) has no "
        "vision tower; leave pictures out, or load a model that reads them"
    )


def test_a_processor_that_cannot_be_loaded(tmp_path: Path) -> None:
    one = sighted("llava")
    one.model.save_pretrained(tmp_path)
    one.processor.tokenizer.save_pretrained(tmp_path)
    with LLM(str(tmp_path), "none", max_model_len=256) as llm:
        assert llm.chat(ask("a cat"), params=GREEDY).completion.token_ids == one.expected(
            ask("a cat"), 8
        )
        with pytest.raises(GuidedSpecError, match="its processor cannot be loaded"):
            llm.chat(ask(picture(1), "and?"))


def test_a_processor_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers says then names every package that a processor could need."""
    monkeypatch.setattr("guided_spec.engine.chats.picture_reader.find_spec", lambda _name: None)
    monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", _needs_much)
    found = PictureReader.load("a-model", Sight(None), None, {})
    reason, fix = "Pillow is not installed", "pip install 'guided-spec[vision]'"
    assert found.sight.refusal == f"its processor cannot be loaded ({reason}): {fix}"


def _needs_much(*_args: object, **_kwargs: object) -> None:
    raise ImportError("torchvision: a page of advice")


def test_a_folder_is_loaded_with_its_processor(tmp_path: Path) -> None:
    one, prompt = sighted("idefics3"), ask(picture(5, (20, 12)), "What is it?")
    one.model.save_pretrained(tmp_path)
    one.processor.save_pretrained(tmp_path)
    with LLM(str(tmp_path), "ngram", max_model_len=512) as llm:
        assert llm.chat(prompt, params=GREEDY).completion.token_ids == one.expected(prompt, 8)


LLAVA = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' ' }}{% endfor %}{% endfor %}ASSISTANT:"
)


def test_text_in_one_string_is_shown_by_templates_of_parts() -> None:
    variables = {"chat_template": LLAVA}
    with sighted("llava").llm() as llm:
        whole, parts = (
            llm.prepare_chat([{"role": "user", "content": content}], chat_template_kwargs=variables)
            for content in ("a cat", [{"type": "text", "text": "a cat"}])
        )
        seen = llm.prepare_chat(ask("a cat", picture(1)), chat_template_kwargs=variables)
    assert llm.tokenizer.decode(whole.prompt_ids) == "USER: a cat ASSISTANT:"
    assert whole.prompt_ids == parts.prompt_ids
    assert seen.pictures is not None
    assert seen.prompt_ids.count(380) == seen.pictures.pictures[0].count
