"""A hub that does not answer: said at once and in one line, whatever names the model."""

from __future__ import annotations

import logging
import uuid
from typing import Any

import pytest
from huggingface_hub import HfApi, constants

from guided_spec import LLM
from guided_spec.errors import ModelError
from guided_spec.models.checkpoint import Checkpoint, check_hub


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The repositories that the hub, which does not answer, was asked for."""
    found: list[str] = []

    def model_info(_self: HfApi, repo: str, **_options: Any) -> None:
        found.append(repo)
        if repo.startswith("known/"):
            return
        raise ConnectionError("no such host")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "model_info", model_info)
    return found


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("options", "argument", "repo"),
    [
        ({"model": "no/model"}, "model='no/model'", "no/model"),
        ({"model": "modle"}, "model='modle'", "modle"),
        ({"model": "no/model/some.gguf"}, "model='no/model/some.gguf'", "no/model"),
        ({"tokenizer": "no/tokenizer"}, "tokenizer='no/tokenizer'", "no/tokenizer"),
        ({"proposer": "eagle3", "draft": "no/head"}, "draft='no/head'", "no/head"),
        ({"proposer": "draft_model", "draft": "no/draft"}, "draft='no/draft'", "no/draft"),
    ],
)
def test_it_is_said_at_once(
    options: Any, argument: str, repo: str, asked: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(ModelError) as caught:
        LLM(**options)
    assert f"{argument}: there is no such folder" in str(caught.value)
    assert "does not answer: no such host; pass a folder" in str(caught.value)
    assert asked == [repo]
    assert [record.message for record in caplog.records] == [
        f"asking {constants.ENDPOINT} for {repo}"
    ]


@pytest.mark.parametrize("name", ["bundled_reader", "bundled-readr"])
def test_the_packages_own_models_are_named(name: str, asked: list[str]) -> None:
    with pytest.raises(ModelError, match="did you mean bundled-reader"):
        LLM(name)
    assert asked == [name]


def test_checkpoints_too(asked: list[str]) -> None:
    with pytest.raises(ModelError, match="checkpoint='no/head': there is no such folder"):
        Checkpoint.open("no/head")
    assert asked == ["no/head"]


def test_a_hub_that_answers_is_asked_once(asked: list[str]) -> None:
    repo = f"known/{uuid.uuid4().hex}"
    for source in (repo, repo, f"{repo}/some.gguf", "wrong name"):
        check_hub(f"model={source!r}", source, None)
    assert asked == [repo]


@pytest.mark.parametrize("source", ["-7", "a b", "a--b", "x/y/z", "x" * 100])
def test_what_no_hub_can_have(
    source: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    del asked
    for offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        for name in ("model", "tokenizer", "draft"):
            options: Any = {name: source} | ({"proposer": "draft_model"} if name == "draft" else {})
            with pytest.raises(ModelError, match=f"^{name}='{source}'"):
                LLM(**options)


def test_offline_nothing_is_asked(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    check_hub("model='no/model'", "no/model", None)
    assert asked == []
