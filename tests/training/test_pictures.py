"""Records with pictures: states are those of the stock model, and drafts are served."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor
from transformers import AutoProcessor

from guided_spec.engine.chats.picture_reader import PictureReader
from guided_spec.engine.chats.pictures import PictureRules
from guided_spec.engine.llm import LLM
from guided_spec.errors import ConfigError, ModelError, PromptError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.models.causal_lm import make_causal_lm
from guided_spec.models.heads.slot_head import SlotHead, SlotLimits
from guided_spec.models.pictures.vision import split_vision
from guided_spec.models.target import capture_hidden
from guided_spec.training.data.batches import Collator
from guided_spec.training.data.dataset import (
    encode_prompt,
    encode_record,
    load_examples,
    make_encoder,
)
from guided_spec.training.data.pictures import (
    TargetSight,
    read_pictures_text,
    write_pictures_text,
)
from guided_spec.training.data.records import read_example, read_lines
from guided_spec.training.features import OnlineFeatures
from guided_spec.training.pictures import BatchRows, TrainingTarget
from guided_spec.training.registry import find_algorithm
from guided_spec.training.run import TrainingReport, train
from guided_spec.training.target_rows import TargetHead
from guided_spec.types import SamplingParams
from tests.models.heads.fresh import spread
from tests.models.heads.heads import write_eagle3
from tests.pictures.filmed import filmed
from tests.pictures.sighted import FAMILIES, ask, picture, png, sighted
from tests.training.toy_algorithm import make_options, write_target

STOP = 0
ANSWER = "The name of the cat is Ada"
SAVED = ("idefics3", "llava", "gemma3")  # whose processors transformers can load here


def image(name: str) -> dict[str, Any]:
    return {"type": "image", "image": name}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def address(seed: int, size: tuple[int, int] = (16, 16)) -> str:
    return "data:image/png;base64," + base64.b64encode(png(picture(seed, size))).decode()


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def answer(said: str = ANSWER) -> dict[str, Any]:
    return {"role": "assistant", "content": said}


def records() -> list[dict[str, Any]]:
    """With one picture, with several in several turns, and with none."""
    url = {"type": "image_url", "image_url": {"url": address(2, (16, 32))}}
    return [
        {"messages": [user(image("cat.png"), text("What is it?")), answer()]},
        {
            "messages": [
                user(text("the cat"), image("pictures/../cat.png"), text("and"), url),
                answer("Bob"),
                user(text("and"), image("dog.png"), text("who?")),
                answer(),
            ]
        },
        {"messages": [{"role": "user", "content": "The name?"}, answer("The name of the dog")]},
        {"messages": [user(url, text("Name it.")), answer("Bob and Ada")]},
    ]


def write(folder: Path, lines: Sequence[Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "pictures").mkdir(exist_ok=True)
    (folder / "cat.png").write_bytes(png(picture(1, (24, 16))))
    (folder / "dog.png").write_bytes(png(picture(3)))
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines or records()))
    return path


def options(**changes: Any) -> Any:
    settings = {"max_length": 512, "batch_tokens": 512, **changes}
    return make_options("target", "data", Path("output"), **settings)


def documents(target: TrainingTarget, data: Path) -> Any:
    tokenizer = target.tokenizer(options())
    return load_examples([data], tokenizer, stop_ids=[STOP], max_length=512, sight=target.sight)


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives processors of tests instead of those of folders."""

    def give(family: str) -> None:
        found = sighted(family).processor
        monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda *_, **__: found)

    return give


def stock_states(family: str, row: Any, layers: Sequence[int]) -> Tensor:
    """[S, A, H] of the stock model, which is given pixels by the processor itself."""
    whole: Any = sighted(family).model
    processor = sighted(family).processor
    ids = torch.tensor([row["input_ids"].tolist()])
    given: dict[str, Any] = {}
    is_picture = torch.zeros_like(ids)
    found = read_pictures_text(row["pictures"])
    if found is not None:
        rules, images = PictureRules(None), list[Any]()
        for one in found.kept:
            part = {"type": "image", "image": one.address}
            images.append(rules.read("", part).image())
        shown = "x".join([processor.image_token] * len(images))
        given = dict(processor(text=[shown], images=[images], return_tensors="pt"))
        is_picture[0, found.places] = 1
    given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    given.pop("token_type_ids", None)
    if family.startswith(("gemma", "qwen")):
        given["token_type_ids" if family == "gemma3" else "mm_token_type_ids"] = is_picture
    decoder = getattr(whole.model, "language_model", None) or whole.model.text_model
    with torch.no_grad(), capture_hidden(decoder, layers) as captured:
        whole(use_cache=False, **given)
    return torch.stack([one[0] for one in captured], 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_the_stock_model(family: str, tmp_path: Path, no_loading: Any) -> None:
    no_loading(family)
    whole: Any = sighted(family).model
    target = TrainingTarget.of(whole, options())
    assert target.rows is not None
    dataset = documents(target, write(tmp_path))
    layers = (1, 2)
    features, place = OnlineFeatures(target.language, layers), target.place()
    rows = [dataset[at] for at in range(4)]
    for _ in range(2):  # again, from rows that are kept
        batch = place(Collator(None, vocab_size=9)(rows))
        states = features(batch)
        for at, row in enumerate(rows):
            length = len(row["input_ids"])
            found = torch.cat([states.aux[at], states.last[at, :, None]], 1)[:length]
            wanted = stock_states(family, row, (*layers, 3))
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert target.rows.num_read == 3


def save(family: str, folder: Path) -> str:
    one = sighted(family)
    one.model.save_pretrained(folder)
    one.processor.save_pretrained(folder) if family in SAVED else None
    one.processor.tokenizer.save_pretrained(folder)
    return str(folder)


def run(target: str, data: Path, output: Path, own: Any = None, **changes: Any) -> TrainingReport:
    settings: dict[str, Any] = {"algorithm": "eagle3", "max_steps": 3, "tracker": ["none"]}
    settings |= {"heldout_share": 0.3, "decode_limit": 2, "decode_max_tokens": 8}
    settings |= {"max_length": 512, "batch_tokens": 512, **changes}
    return train(make_options(target, str(data), output, **settings), own or {})


PROMPTS = [ask(picture(1, (24, 16)), "What is it?"), ask("the cat", picture(3), "and"), ask("Hi")]


def served(target: str, draft: str, **settings: Any) -> list[list[int]]:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(target, draft=draft, max_model_len=512, max_batch_size=4, **settings) as llm:
        asked = [llm.prepare_chat(one, params=params) for one in PROMPTS]
        found = llm.generate([one.prompt for one in asked], params)
    assert any(one.completions[0].stats.drafted for one in found)
    return [one.completions[0].token_ids for one in found]


@pytest.mark.parametrize(
    ("family", "algorithm"),
    [
        ("idefics3", "eagle3"),
        ("llava", "dspark"),
        ("gemma3", "eagle"),
        ("qwen2_vl", "mtp"),
        ("qwen3_vl", "p_eagle"),
        ("qwen3_5", "mtp"),
        ("llava", "draft_model"),
    ],
)
def test_a_draft_of_pictures_is_served(
    tmp_path: Path, family: str, algorithm: str, no_loading: Any
) -> None:
    no_loading(family)
    target = save(family, tmp_path / "target")
    output = tmp_path / "head"
    report = run(target, write(tmp_path / "data"), output, algorithm=algorithm)
    known = json.loads((output / "config.json").read_text()).get("speculators_config")
    if known is not None:  # other engines find the target so
        assert known["verifier"]["architectures"] == [type(sighted(family).model).__name__]
    assert report.decoded is not None
    assert report.decoded["failed"] == 0
    wanted = [sighted(family).expected(one, 12) for one in PROMPTS]
    assert served(target, str(output)) == wanted


@pytest.mark.parametrize(
    ("family", "algorithm"), [("qwen2_vl", "mtp"), ("llava", "eagle3"), ("qwen3_5", "mtp")]
)
def test_what_is_trained_is_what_drafts(
    tmp_path: Path, family: str, algorithm: str, no_loading: Any
) -> None:
    """By tokens, states and positions, each likeliest token of an unroll is what is drafted."""
    no_loading(family)
    whole = copy.deepcopy(sighted(family).model)
    target = TrainingTarget.of(whole, options())
    row, language = documents(target, write(tmp_path))[1], target.language
    batch = target.place()(Collator(None, vocab_size=9)([row]))
    kind = find_algorithm(algorithm)
    forward = kind.get_trainer_kwargs(masked=False, ttt_steps=3)[0]
    torch.manual_seed(3)
    made = {"initialize": "random"} if algorithm == "mtp" else {}
    model: Any = kind.from_training_args(
        language.config, target=language, vocabulary=None, ttt_steps=3, **made
    )
    spread(model.head)
    states = OnlineFeatures(language, tuple(model.feature_layers))(batch)
    output = model(batch, states, **forward).output[:, 0]
    read = states.aux[0].flatten(-2)
    if algorithm == "mtp":
        read = TargetHead(language).normed(states.last[0])
    with torch.inference_mode():
        lm = make_causal_lm(language, num_slots=2, max_length=256)
        found = read_pictures_text(row["pictures"])
        assert found is not None
        if lm.axes is not None:
            lm.axes.put(1, found.positions(len(row["input_ids"])))
        ids, at = batch.token_ids[0].tolist(), int(row["response_start"])
        where: Any = {"device": lm.device, "dtype": torch.float32}
        head = SlotHead(model.head.eval(), SlotLimits(2, 256), axes=lm.axes, **where)
        head.read([1], [ids[1 : at + 1]], [read[:at]])
        drafted = [int(head.logits([1])[0].argmax())]
        for token in ids[at + 1 : at + 3]:
            head.append([1], torch.tensor([token]))
            drafted.append(int(head.logits([1])[0].argmax()))
    assert drafted == output[:, at - 1].tolist()


def test_prompts_are_those_of_chat(tmp_path: Path, no_loading: Any) -> None:
    one = sighted("idefics3")
    no_loading("idefics3")
    sight = TrainingTarget.of(copy.deepcopy(one.model), options()).sight
    (line, *_) = read_lines([write(tmp_path, records()[1:])])
    example = read_example(line.record)
    with one.llm() as llm:
        asked = llm.prepare_chat(example.messages[:-1])
        assert encode_prompt(example, make_encoder(llm.tokenizer, sight)) == asked.prompt
        encoded = encode_record(line.record, llm.tokenizer, [STOP], sight)
    assert encoded.pictures is not None
    assert encoded.pictures.prompt(asked.prompt_ids, sight.reader) == asked.prompt
    assert encoded.input_ids[: encoded.response_start] == asked.prompt_ids
    answers = [token for token, is_one in zip(*encoded[:2], strict=True) if is_one]
    assert llm.tokenizer.decode(answers, skip_special_tokens=True).count("Bob") == 1
    assert not {encoded.input_ids[place] for place in encoded.pictures.places} & {*answers}


def test_answers_are_written_anew_with_pictures(tmp_path: Path) -> None:
    """Greedily, each is what the engine says of its pictures."""
    target, data = save("llava", tmp_path / "target"), write(tmp_path / "data", records()[:2])
    params = {"regenerate_max_tokens": 6, "regenerate_temperature": 0.0}
    lines = list(read_lines([data]))
    ruled = [{**one.record, "regex": "(yes|no|maybe)"} for one in lines]
    data.write_text("".join(json.dumps(one) + "\n" for one in ruled))
    settings = {"regenerate": True, "decode_limit": 0, **params}
    run(target, data, tmp_path / "head", **settings)
    (part,) = (tmp_path / "head" / "regenerated").glob("*.jsonl")
    found = [json.loads(line)["messages"] for line in part.read_text().splitlines()]
    greedy = SamplingParams(max_tokens=6, grammar=GrammarSpec.regex("(yes|no|maybe)"))
    with LLM(target, max_model_len=512) as llm:
        wanted = [llm.chat(one["messages"][:-1], params=greedy).text for one in ruled]
    assert [one[-1]["content"] for one in found] == wanted
    assert all(Path(part["image"]).is_absolute() for part in found[0][0]["content"][:1])


def test_files_of_states_know_their_pictures(tmp_path: Path) -> None:
    target, data = save("llava", tmp_path / "target"), write(tmp_path / "data")
    settings: dict[str, Any] = {"features": str(tmp_path / "features"), "decode_limit": 0}
    first = run(target, data, tmp_path / "first", **settings)
    names, size = [], len(sighted("llava").processor.tokenizer)
    for path in sorted((tmp_path / "features").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names.append((file.metadata() or {}).get("pictures", "").count(" ") + 1)
            assert int(file.get_tensor("token_ids").max()) < size
    assert names == [1, 3, 1, 1]
    again = run(target, data, tmp_path / "again", **settings)  # by the files
    assert again.metrics == first.metrics
    (data.parent / "cat.png").write_bytes(png(picture(7, (24, 16))))
    with pytest.raises(ConfigError, match="is of other pictures than the dataset's row"):
        run(target, data, tmp_path / "other", **settings)


BAD = [
    (image("none.png"), r"messages\[0\].content\[1\].image=.*cannot be read: No such"),
    (image("data.jsonl"), r"messages\[0\].content\[1\].image=.*is no picture that can be read"),
    (
        {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
        r"messages\[0\].content\[1\].image_url.url=.*no address is fetched",
    ),
    (image("data:image/png;base64,%%%"), r"messages\[0\].content\[1\].image=.*must be in base64"),
    (
        {"type": "input_audio", "input_audio": {}},
        r"content\[1\].type='input_audio': no model reads",
    ),
    (text("<image>"), "has 2 places for 1 pictures: write no <image> in messages"),
]


@pytest.mark.parametrize("settings", [{}, {"regenerate": True}])
@pytest.mark.parametrize(("part", "message"), BAD)
@pytest.mark.every_case
def test_what_is_wrong_is_named(
    tmp_path: Path, part: Any, message: str, settings: dict[str, Any]
) -> None:
    good, other = records()[0], {"messages": [user(image("cat.png"), part), answer()]}
    data = write(tmp_path / "data", [good, other])
    target = save("llava", tmp_path / "target")
    with pytest.raises(ConfigError, match=f"data='data.jsonl:2': .*{message}"):
        run(target, data, tmp_path / "head", **settings)


def test_a_response_is_text(tmp_path: Path) -> None:
    reply = {"role": "assistant", "content": [image("cat.png"), text("this")]}
    data = write(tmp_path / "data", [{"messages": [user(text("Hi")), reply]}])
    target = save("llava", tmp_path / "target")
    with pytest.raises(ConfigError, match="data.jsonl:1.*a response holds a picture"):
        run(target, data, tmp_path / "head")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"features_url": "http://127.0.0.1:9/v1"}, "with features_url no pictures"),
        ({"device_map": "auto"}, "with device_map no pictures"),
    ],
)
def test_what_excludes_pictures(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    data, target = write(tmp_path / "data"), save("llava", tmp_path / "target")
    match = f"data.jsonl:1.*messages.*this model reads text: {reason}"
    with pytest.raises(ConfigError, match=match):
        run(target, data, tmp_path / "head", **changes)


def test_a_target_that_sees_nothing_says_so(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    target, data = write_target(tmp_path / "target"), write(tmp_path / "data", records()[2:])
    tokenizer = copy.deepcopy(sighted("llava").processor.tokenizer)
    tokenizer.save_pretrained(tmp_path / "target")
    match = r"data.jsonl:2.*messages\[0\].content\[0\].type='image_url': this model reads text: "
    with pytest.raises(ConfigError, match=f"{match}target \\(llama\\) has no vision tower"):
        run(target, data, tmp_path / "head")


def test_a_head_with_its_own_table(tmp_path: Path) -> None:
    """It reads placeholders, and is written as wide as its vocabulary."""
    target, language = (
        save("llava", tmp_path / "target"),
        split_vision(copy.deepcopy(sighted("llava").model), 8).language,
    )
    write_eagle3(tmp_path / "init", language, draft_vocab_size=300, own_embedding=True)
    own = {"init": str(tmp_path / "init")}
    run(target, write(tmp_path / "data"), tmp_path / "head", own, layout="safeailab")
    wanted = [sighted("llava").expected(one, 12) for one in PROMPTS]
    assert served(target, str(tmp_path / "head")) == wanted


def test_a_head_of_three_axes_is_refused(tmp_path: Path, no_loading: Any) -> None:
    no_loading("qwen2_vl")
    target = save("qwen2_vl", tmp_path / "target")
    language = split_vision(copy.deepcopy(sighted("qwen2_vl").model), 8).language
    changes = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    write_eagle3(tmp_path / "init", language, draft_vocab_size=300, changes=changes)
    with pytest.raises(ModelError, match="init: a head with mrope_section is not trained with"):
        run(target, write(tmp_path / "data"), tmp_path / "head", {"init": str(tmp_path / "init")})


ROOM = 14  # rows: the largest two of the pictures together
STRAY = [
    {"messages": [{"role": "user", "content": "<image> Hi"}, answer()]},
    {"prompt": "<image> Hi", "response": "Ho"},
]


@pytest.mark.parametrize("record", STRAY)
def test_a_place_wants_a_picture(record: Any, no_loading: Any) -> None:
    no_loading("llava")
    target = TrainingTarget.of(copy.deepcopy(sighted("llava").model), options())
    tokenizer = target.tokenizer(options())
    with pytest.raises(PromptError, match="token 380"):
        encode_record(record, tokenizer, [STOP], target.sight)
    tokens = {"input_ids": [85, 380, 4, 5], "loss_mask": [0, 0, 1, 1]}
    with pytest.raises(PromptError, match="holds token 380, a picture's place"):
        encode_record(tokens, tokenizer, [STOP], target.sight)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=2), min_size=1, max_size=9))
def test_rows_go_round(pictures: list[list[str]]) -> None:
    """In a table with room for one batch, however often a picture is there."""
    seeds, one = {"a": (1, (24, 16)), "b": (2, (16, 32)), "c": (3, (16, 16))}, sighted("qwen2_vl")
    split = split_vision(copy.deepcopy(one.model), ROOM)
    assert split.pictures is not None
    assert split.tower is not None
    reader = PictureReader(one.processor, split.sight)
    place = BatchRows(split.pictures, reader).place
    table: Any = split.language.get_input_embeddings()
    for names in pictures:
        parts = [image(address(*seeds[name])) for name in names]
        record = {"messages": [user(*parts, text("?")), answer()]}
        sight = TargetSight(reader, split.tower)
        encoded = encode_record(record, one.processor.tokenizer, [STOP], sight)
        row = {**encoded._asdict(), "pictures": write_pictures_text(encoded.pictures)}
        row |= {"index": 0, "grammar": ""}
        batch = place(Collator(None, vocab_size=9)([row]))
        assert encoded.pictures is not None
        found = table(batch.token_ids[0, encoded.pictures.places])
        wanted = [
            split.tower.features([kept.read(reader)])[0][:, 0] for kept in encoded.pictures.kept
        ]
        torch.testing.assert_close(found, torch.cat(wanted))


def test_parquet_and_workers(tmp_path: Path) -> None:
    """Columns have all fields of all parts; batches come from another process."""
    target, data = save("llava", tmp_path / "target"), write(tmp_path / "data")
    named = [
        {"type": "image", "image": "cat.png", "text": None},
        {"type": "text", "image": None, "text": "What is it?"},
    ]
    said = [{"type": "text", "image": None, "text": ANSWER}]
    turns = [{"role": "user", "content": named}, {"role": "assistant", "content": said}]
    table = Dataset.from_list([{"messages": turns}] * 4)
    table.to_parquet(str(data.with_suffix(".parquet")))
    run(target, data.with_suffix(".parquet"), tmp_path / "head", workers=1, decode_limit=1)
    table.save_to_disk(str(tmp_path / "kept"))
    lines = list(read_lines([tmp_path / "kept", data.with_suffix(".parquet")]))
    folders = [Path(one.record["messages"][0]["content"][0]["image"]).parent for one in lines]
    assert folders == [tmp_path / "kept"] * 4 + [data.parent] * 4


def test_videos_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the model and its processor take them."""
    one = filmed("qwen2_vl")
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda *_, **__: one.processor)
    target = TrainingTarget.of(copy.deepcopy(one.model), options())
    video = {"type": "video", "video": [address(1), address(2)]}
    data = write(tmp_path, [{"messages": [user(video, text("What is it?")), answer()]}])
    reason = (
        "this model reads pictures, no videos: training takes none; send its frames as pictures"
    )
    with pytest.raises(ConfigError, match=rf"messages\[0\]\.content\[0\]\.type='video': {reason}"):
        documents(target, data)
