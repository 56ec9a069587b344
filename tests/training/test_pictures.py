"""Records with pictures: the target's states are those of the stock model, and drafts are served."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoProcessor

from guided_spec.engine.llm import LLM
from guided_spec.engine.chats.pictures import PictureRules
from guided_spec.errors import ConfigError, ModelError
from guided_spec.models.target import capture_hidden
from guided_spec.training.data.batches import Collator
from guided_spec.training.data.dataset import encode_prompt, load_examples, make_encoder
from guided_spec.training.data.pictures import read_pictures_text
from guided_spec.training.data.records import read_example
from guided_spec.training.features import KeptFeatures, OnlineFeatures, StoredFeatures
from guided_spec.training.pictures import TrainingTarget
from guided_spec.training.run import TrainingReport, train
from guided_spec.types import SamplingParams
from tests.pictures.sighted import FAMILIES, ask, picture, png, sighted
from tests.training.toy_algorithm import make_options

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


@pytest.mark.every_case
@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_the_stock_model(family: str, tmp_path: Path, no_loading: Any) -> None:
    no_loading(family)
    whole: Any = sighted(family).model
    target = TrainingTarget.of(whole, options())
    assert target.rows is not None
    tokenizer = target.tokenizer(options())
    dataset = load_examples(
        [write(tmp_path)], tokenizer, stop_ids=[STOP], max_length=512, sight=target.sight
    )
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


@pytest.mark.every_case
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
    assert report.decoded is not None
    assert report.decoded["failed"] == 0
    wanted = [sighted(family).expected(one, 12) for one in PROMPTS]
    assert served(target, str(output)) == wanted
