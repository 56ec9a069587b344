"""Whatever kind of value an argument gets: it is taken, or refused by an error that names it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.config import EngineConfig
from guided_spec.engine.llm import LLM
from guided_spec.engine.options import Options
from guided_spec.engine.process import EngineProcess
from guided_spec.errors import ConfigError, GuidedSpecError
from guided_spec.grammar.limits import GrammarLimits
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.kinds import nearest_names, slips_of
from guided_spec.server.service import ServerSettings
from guided_spec.training.options import TrainOptions
from guided_spec.training.run import train
from guided_spec.types import SamplingParams
from tests.tiny_llm import make_llm

TRAINING: dict[str, Any] = {
    "algorithm": "eagle3",
    "target": "bundled",
    "data": ["a.jsonl"],
    "output": "draft",
}
SPEC = {"kind": "json_schema", "source": "{}"}
RECORDS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    *((SamplingParams, {}), (EngineConfig, {}), (ServerSettings, {}), (GrammarLimits, {})),
    *((GrammarSpec, SPEC), (TrainOptions, TRAINING)),
]
CONSTRUCTORS: dict[str, dict[str, Any]] = {
    "of": {"wanted": {}},
    "json_schema": {"schema": {}},
    "json_object": {},
    "regex": {"pattern": "a"},
    "choice": {"options": ["a"]},
    "ebnf": {"text": "root ::= a"},
    "lark": {"text": "start: a"},
    "structural_tag": {"tag": {}},
    "tools": {"tools": []},
    "from_response_format": {"response_format": {"type": "text"}},
    "after": {},
    "with_backend": {"backend": None},
}


class Argument(NamedTuple):
    """One argument of a function, and what the others are."""

    function: Callable[..., Any]
    name: str
    others: dict[str, Any]


def arguments() -> Iterator[Argument]:
    for record, others in RECORDS:
        for field in fields(record):  # type: ignore[arg-type]
            yield Argument(record, field.name, others)
    for method, others in CONSTRUCTORS.items():
        function = getattr(GrammarSpec.regex("a"), method)
        for name in inspect.signature(function).parameters:
            yield Argument(function, name, others)
    for name in Options.LOAD_KINDS:
        yield Argument(lambda **options: Options.from_dict(options), name, {})


ARGUMENTS = list(arguments())
LEAVES = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    *(st.binary(max_size=3), st.builds(object), st.just(Path("a")), st.just(int), st.just(len)),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.tuples(inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=2),
    ),
    max_leaves=3,
)


@pytest.mark.parametrize("name", sorted({argument.name for argument in ARGUMENTS}))
@given(value=VALUES)
def test_a_value_is_taken_or_refused(name: str, value: object) -> None:
    for argument in ARGUMENTS:
        if argument.name == name:
            with suppress(GuidedSpecError):
                argument.function(**{**argument.others, name: value})


@pytest.mark.parametrize("name", [field.name for field in fields(TrainOptions)])
def test_a_training_knows_its_kinds(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}=.*: must be "):
        TrainOptions(**{**TRAINING, name: object()})


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("engine", ["vllm"], "must be one of guided_spec, vllm"),
        ("engine", {"vllm": 1}, "must be one of guided_spec, vllm"),
        ("engine_options", "", "must be a dict"),
        ("device", ["cpu"], "must be a str, or an int, or a device"),
        ("dtype", 16, "must be a str, or a dtype"),
        ("revision", 3, "must be a str"),
        ("trust_remote_code", "no", "must be True or False"),
        ("tp_plan", ["auto"], "must be a str, or a dict"),
    ],
)
def test_an_llm_of_a_wrong_kind(name: str, value: object, fix: str) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=rf"^{name}=.*{fix}"):
        LLM(**options)


def test_a_process_of_a_wrong_kind() -> None:
    with pytest.raises(ConfigError, match=r"^device=\['cpu'\]: must be a str"):
        EngineProcess(device=["cpu"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tool_choice", 3),
        ("tool_format", ["hermes"]),
        ("parallel_tool_calls", "no"),
        ("response_format", "json"),
        ("chat_template_kwargs", [1]),
        ("params", {"max_tokens": 3}),
        ("max_tokens", 3),
    ],
)
def test_a_chat_of_a_wrong_kind(name: str, value: object) -> None:
    with make_llm("llama") as llm, pytest.raises(ConfigError, match=f"^{name}="):
        llm.prepare_chat([{"role": "user", "content": "A"}], **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("keys", ["secret", ["secret", 3], 3])
def test_a_key_of_a_wrong_kind_is_not_shown(keys: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerSettings(api_keys=keys)
    assert str(caught.value).startswith("api_keys='***'")


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"ttt_steps": "3"}, "ttt_steps='3': must be an int"),
        ({"fc_norm": 1}, "fc_norm=1: must be True or False"),
        ({"tt_steps": 3}, r"tt_steps=3: is no option; did you mean ttt_steps\?"),
    ],
)
def test_options_of_an_algorithm(own: dict[str, Any], message: str, tmp_path: Path) -> None:
    options = TrainOptions(**{**TRAINING, "output": str(tmp_path / "draft")})
    with pytest.raises(ConfigError, match=f"^{message}"):
        train(options, own)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "known", "near"),
    [
        ("eagel3", ["eagle", "eagle3"], ["eagle3"]),
        ("maxTokens", ["max_tokens", "min_tokens"], ["max_tokens"]),
        ("freq_penalty", ["frequency_penalty", "presence_penalty"], ["frequency_penalty"]),
        ("batch", ["max_batch_size", "model"], ["max_batch_size"]),
        ("prampt", ["prompt", "params"], ["prompt"]),
        ("bool", ["boolean", "object"], ["boolean"]),
        ("min_tokens", ["max_tokens"], []),
        ("top_n", ["top_k", "top_p"], []),
        ("date", ["data"], []),
        ("user_name", ["user_id", "name"], []),
        ("text", ["text_a", "text_b", "text_c", "text_d"], []),
        ("nothing", ["note", 5, None], []),
        (5, ["5"], []),
        ("", ["a"], []),
    ],
)
def test_the_names_that_are_near_enough(name: Any, known: list[Any], near: list[str]) -> None:
    assert nearest_names(name, known) == near


@given(st.text(max_size=12), st.text(max_size=12))
def test_slips_go_both_ways(name: str, known: str) -> None:
    assert slips_of(name, known) == slips_of(known, name)
    assert slips_of(name, name) == 0
