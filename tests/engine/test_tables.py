"""Texts are the same with tables and without, whoever drafts; and who judged them is counted."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from guided_spec.config import EngineConfig
from guided_spec.engine.outputs import Completion
from guided_spec.errors import ConfigError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.types import SamplingParams
from tests.learned_heads import HeadedTarget, write_head
from tests.tiny_llm import VOCAB_SIZE, make_llm, near_copy, tiny_model

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "kind"],
}
OPEN = {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1}
GRAMMARS = (
    GrammarSpec.json_schema(RECORD),
    GrammarSpec.json_schema(OPEN, additional_properties="schema").with_backend("xgrammar"),
    GrammarSpec.regex("[a-z]{2,6}-[0-9]{3}"),
    GrammarSpec.choice(["yes", "no", "not now"]).after("e"),
    GrammarSpec.json_schema(RECORD).with_backend("llguidance"),
)

ENDS = (True, False, None, None, False)  # whether they keep to their budget, for whole texts


def write(proposer: str, tables: str, **options: Any) -> list[Completion]:
    draft = near_copy("llama") if "draft_model" in proposer else None
    params = [
        SamplingParams(
            max_tokens=30, grammar=grammar, temperature=heat, seed=5, complete=ends, bad_words=words
        )
        for grammar, ends in zip(GRAMMARS, ENDS, strict=True)
        for heat, words in ((0.0, []), (0.9, ["a", "1"]))
    ]
    with make_llm("llama", proposer, draft, grammar_tables=tables, **options) as llm:
        outputs = llm.generate(["The name"] * len(params), params, on_error="return")
    return [output.completions[0] for output in outputs]


@pytest.mark.parametrize("proposer", ["ngram", "chain:grammar_forced+draft_model"])
def test_texts_do_not_depend_on_tables(proposer: str) -> None:
    plain, tabled = (write(proposer, tables) for tables in ("off", "always"))
    for one, other in zip(plain, tabled, strict=True):
        assert one.error is None
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert one.stats.steered == other.stats.steered
        assert one.stats.tabled == 0
    judged = [one.stats.tabled for one in tabled]
    lengths = [len(one.token_ids) for one in tabled]
    assert judged[:6] == lengths[:6]  # every token, the end among them
    assert all(0 < few <= many for few, many in zip(judged[6:8], lengths[6:8], strict=True))
    assert judged[8:] == [0, 0]


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> HeadedTarget:
    return write_head(tmp_path_factory.mktemp("head"), "eagle3", VOCAB_SIZE)


LISTS = {"$defs": {"l": {"type": "array", "items": {"$ref": "#/$defs/l"}}}, "$ref": "#/$defs/l"}
DEVICE_GRAMMARS = (
    GRAMMARS[0],
    GrammarSpec.json_schema(LISTS),
    GRAMMARS[2],
    GrammarSpec.regex("[a-z]{20,40}").after("e"),
    None,
)


@pytest.mark.slow
@pytest.mark.usefixtures("drafted_from_the_start")
@pytest.mark.parametrize(
    ("heat", "verifier", "at_a_time"), [(0.9, "rejection", 1), (0.0, "coupled", 3)]
)
def test_a_device_that_walks_along_tables_writes_the_same(
    headed: HeadedTarget, heat: float, verifier: str, at_a_time: int
) -> None:
    """Behind markers, far from the end of a budget, in a part of a table, and beside others."""
    params = [
        SamplingParams(max_tokens=120, grammar=grammar, temperature=heat, seed=5)
        for grammar in DEVICE_GRAMMARS
    ]
    assert_same_on_device(headed, "eagle3:mask", params, verifier, at_a_time)


def assert_same_on_device(
    headed: HeadedTarget,
    proposer: str,
    params: list[SamplingParams],
    verifier: str,
    at_a_time: int,
    *,
    is_loop: bool = False,
) -> None:
    """Texts and counts, with tables on the host and with them on the device.

    is_loop: whether drafts are made token by token.
    """
    options: dict[str, Any] = {"max_batch_size": at_a_time, "verifier": verifier}
    found = []
    for size in (0, 2**24):
        options |= {"grammar_tables": "always", "device_table_bytes": size}
        with make_llm(headed.target, proposer, headed.draft, **options) as llm:
            outputs = llm.generate(["The name"] * len(params), params)
        found.append([output.completions[0] for output in outputs])
    for host, device in zip(*found, strict=True):
        assert host.error is None
        assert (host.token_ids, host.finish_reason) == (device.token_ids, device.finish_reason)
        one, other = host.stats.as_dict(), device.stats.as_dict()
        counted = [name for name in one if "second" not in name and name != "device_steps"]
        assert [one[name] for name in counted] == [other[name] for name in counted]
        assert host.stats.device_steps == 0
    steps = [done.stats.device_steps for done in found[1]]
    assert steps[4] == 0  # a free text
    if at_a_time == 1 or is_loop:  # in one go on a CPU, all who draft together need tables
        policies = [one.draft_policy for one in params[:4]]
        expected = [policy != "validate" for policy in policies]
        assert [count > 0 for count in steps[:4]] == expected, steps


@pytest.mark.slow
@pytest.mark.usefixtures("drafted_from_the_start")
@pytest.mark.parametrize(
    ("method", "heat", "verifier", "at_a_time"),
    [
        ("dflash", 0.9, "rejection", 1),
        ("dflash", 0.0, "coupled", 3),
        ("dspark", 0.9, "rejection", 1),
        ("p_eagle", 0.0, "coupled", 3),
    ],
)
def test_a_device_that_finds_paths_along_tables_writes_the_same(
    tmp_path: Path, method: str, heat: float, verifier: str, at_a_time: int
) -> None:
    headed = write_head(tmp_path, method, VOCAB_SIZE)
    biases: tuple[dict[int, float], ...] = ({}, {}, {40: 2.0}, {}, {})
    params = [
        SamplingParams(max_tokens=120, grammar=grammar, temperature=heat, seed=5, logit_bias=bias)
        for grammar, bias in zip(DEVICE_GRAMMARS, biases, strict=True)
    ]
    assert_same_on_device(headed, method, params, verifier, at_a_time)


@pytest.mark.slow
@pytest.mark.usefixtures("drafted_from_the_start")
@pytest.mark.parametrize(
    ("proposer", "heat", "verifier", "at_a_time"),
    [
        ("eagle3", 0.9, "rejection", 1),
        ("eagle3", 0.0, "coupled", 3),
        ("mtp", 0.0, "coupled", 3),
        ("dspark:mask", 0.9, "rejection", 1),
        ("draft_model", 0.9, "rejection", 1),
        ("draft_model", 0.0, "coupled", 3),
    ],
)
def test_a_loop_that_walks_along_tables_writes_the_same(
    tmp_path: Path, proposer: str, heat: float, verifier: str, at_a_time: int
) -> None:
    """Under penalties and bans, beside one that drafts freely; from a head and from a model."""
    if proposer == "draft_model":
        headed: Any = HeadedTarget(tiny_model("llama"), near_copy("llama"))  # type: ignore[arg-type]
    else:
        headed = write_head(tmp_path, proposer.split(":")[0], VOCAB_SIZE)
    changes: tuple[dict[str, Any], ...] = (
        {"repetition_penalty": 1.3},
        {"draft_policy": "validate"},
        {"bad_words": ["1", "ab"]},
        {"logit_bias": {40: 2.0}},
        {},
    )
    params = [
        SamplingParams(max_tokens=120, grammar=grammar, temperature=heat, seed=5, **change)
        for grammar, change in zip(DEVICE_GRAMMARS, changes, strict=True)
    ]
    assert_same_on_device(headed, proposer, params, verifier, at_a_time, is_loop=True)


def test_a_log_says_why_there_is_no_table(caplog: pytest.LogCaptureFixture) -> None:
    spec = GrammarSpec.ebnf('root ::= root "a" | "b"')  # its rules begin with themselves
    with (
        caplog.at_level(logging.INFO, "guided_spec.grammar.tables"),
        make_llm("llama", grammar_tables="always") as llm,
    ):
        done = llm.generate("A", SamplingParams(max_tokens=4, grammar=spec, complete=False))[0]
        llm.generate("A", SamplingParams(max_tokens=4, grammar=GRAMMARS[2], complete=False))
    assert done.stats.tabled == 0
    assert [record.message[:12] for record in caplog.records] == ["no table of ", "made the tab"]


def test_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="grammar_tables='never': must be one of auto, always"):
        EngineConfig(grammar_tables="never")  # type: ignore[arg-type]
