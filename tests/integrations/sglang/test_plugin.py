"""What is ours alone in the SGLang plugin; ``test_sglang_server.py`` runs it inside SGLang."""

from __future__ import annotations

import json
import logging
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.errors import ConfigError, GrammarCompileError
from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.integrations.sglang.backend import GuidedGrammar, spec_of
from guided_spec.integrations.sglang.plugin import BACKENDS, check_options, check_version, register
from tests.tiers import examples
from tests.toys import EOS, VOCAB_SIZE, VOCABULARY, ToyCompiled, text_rule

SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}}}'
TEXTS = [b"ab", b'{"a":1}', b"abcd"]


def test_keys_become_specs() -> None:
    assert spec_of("json", SCHEMA, any_whitespace=True) == GrammarSpec.json_schema(
        SCHEMA, any_whitespace=True
    )
    assert spec_of("json", "$$ANY$$", any_whitespace=False) == GrammarSpec.json_schema("true")
    assert spec_of("regex", "a+", any_whitespace=True) == GrammarSpec.regex("a+")
    assert spec_of("ebnf", 'root ::= "a"', any_whitespace=True).kind == "ebnf"


@pytest.mark.parametrize(
    ("key", "words"),
    [(("structural_tag", "{"), "is not JSON"), (("lark", "x"), "no grammar of the kind 'lark'")],
)
def test_keys_that_are_none(key: tuple[str, str], words: str) -> None:
    with pytest.raises(GrammarCompileError, match=words):
        spec_of(*key, any_whitespace=True)


def test_both_forms_of_tags_mean_the_same() -> None:
    """The older form, and a call without parameters, whose schema is null."""
    old = {
        "structures": [{"begin": "<f>", "schema": None, "end": "</f>"}],
        "triggers": ["<f"],
        "at_least_one": True,
    }
    content = {"type": "json_schema", "json_schema": None}
    tag = {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}
    new = {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<f"],
            "tags": [tag],
            "at_least_one": True,
        },
    }
    specs = [
        spec_of("structural_tag", json.dumps(form), any_whitespace=True) for form in (old, new)
    ]
    assert specs[0] == specs[1]
    compiled = BackendChoice("auto", letters()).compile(specs[0])
    matcher = GuidedGrammar.at_start(compiled)
    for letter in "<f>[1]</f>":
        matcher.accept_token(ord(letter))


def letters() -> Vocabulary:
    """A token for each byte of ASCII, and one that ends the text."""
    return Vocabulary((*(bytes([byte]) for byte in range(128)), b""), (128,), 129)


def row_of(matcher: GuidedGrammar, size: int) -> list[int]:
    bitmask = np.full((2, -(-size // 32)), -1, dtype=np.int32)
    matcher.fill_vocab_mask(bitmask, 1)
    assert (bitmask[0] == -1).all(), "another request's row"
    return np.flatnonzero(np.unpackbits(bitmask[1].view(np.uint8), bitorder="little")).tolist()


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("accept"), st.integers(0, VOCAB_SIZE - 1)),
        st.tuples(st.just("rollback"), st.integers(0, 4)),
        st.tuples(st.just("copy"), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=examples(30))
@given(moves=MOVES)
def test_a_place_is_a_list_of_tokens(moves: list[tuple[str, int]]) -> None:
    """Whatever was accepted behind the end of the text can be taken back as well."""
    rule = text_rule(TEXTS)
    matcher, taken = GuidedGrammar.at_start(ToyCompiled(rule)), list[int]()
    for move, number in moves:
        seen = taken[: taken.index(EOS) + 1] if EOS in taken else taken
        is_over = EOS in taken
        if move == "copy":
            left, matcher = matcher, matcher.copy()
            if not is_over:
                left.accept_token(min(rule(tuple(taken))))  # moves the other one alone
        elif move == "rollback":
            number = min(number, len(taken))
            matcher.rollback(number)
            del taken[len(taken) - number :]
        elif is_over or number in rule(tuple(seen)):
            matcher.accept_token(number)
            taken.append(number)
        else:
            with pytest.raises(ValueError, match=f"token {number} at position {len(seen)}"):
                matcher.accept_token(number)
        assert matcher.is_terminated() == (EOS in taken)
        if EOS not in taken:
            assert row_of(matcher, VOCAB_SIZE) == sorted(rule(tuple(taken)))


@pytest.mark.parametrize("kind", ["xgrammar", "llguidance"])
@settings(max_examples=examples(15))
@given(choice=st.data())
def test_both_libraries_roll_back(kind: str, choice: st.DataObject) -> None:
    pytest.importorskip(kind)
    compiled = BackendChoice(kind, VOCABULARY).compile(GrammarSpec.regex("a(b|cd)*[01]{0,3}"))
    matcher, rows = GuidedGrammar.at_start(compiled), list[list[int]]()
    while len(rows) < 8 and not matcher.is_terminated():
        rows.append(row_of(matcher, VOCAB_SIZE))
        matcher.accept_token(choice.draw(st.sampled_from(rows[-1])))
    while rows:
        matcher.rollback(1)
        assert row_of(matcher, VOCAB_SIZE) == rows.pop()


def test_the_row_of_a_complete_text_is_left_alone() -> None:
    matcher = GuidedGrammar.at_start(ToyCompiled(text_rule([b"a"])))
    matcher.accept_token(0)
    matcher.accept_token(EOS)
    bitmask = xgrammar.allocate_token_bitmask(1, VOCAB_SIZE)
    matcher.fill_vocab_mask(bitmask, 0)
    assert bool((bitmask == -1).all())


def test_another_version_is_refused_in_one_sentence() -> None:
    check_version("0.5.23")
    with pytest.raises(ConfigError) as caught:
        check_version("0.6.0")
    assert str(caught.value) == (
        "sglang='0.6.0': guided_spec was tested with 0.5.23: install that, or choose another "
        "--grammar-backend"
    )


@pytest.mark.parametrize(
    "name", ["constrained_json_max_whitespace_cnt", "constrained_json_whitespace_pattern"]
)
def test_options_that_would_not_be_kept_are_refused(name: str) -> None:
    check_options(SimpleNamespace(**{name: None}))
    with pytest.raises(ConfigError, match=f"{name}=.*pass --constrained-json-disable-any"):
        check_options(SimpleNamespace(**{name: 2}))


def test_an_sglang_without_the_registrations_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.choices", None)
    monkeypatch.setitem(sys.modules, "sglang.srt", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups", SimpleNamespace())
    with caplog.at_level(logging.WARNING):
        register()
    assert len(caplog.records) == 1
    assert "guided_spec is no grammar backend of this SGLang" in caplog.text


def test_the_names_are_those_of_the_backends() -> None:
    assert set(BACKENDS.values()) == {"auto", "xgrammar", "llguidance"}
    assert BACKENDS["guided_spec"] == "auto"
