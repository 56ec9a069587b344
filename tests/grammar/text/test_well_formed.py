"""Every text of every grammar is UTF-8, however its tokens cut the characters."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.grammar.backends.registry import GRAMMAR_BACKENDS
from guided_spec.grammar.pipeline import GrammarPipeline
from guided_spec.grammar.protocol import accept_tokens, legal_row
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.masks.constraint import Constraint
from guided_spec.ops.mask_words import ids_of
from tests.tiers import examples

# All bytes, and parts of characters: whole surrogates, their halves, and what may stand beside one.
PARTS = [
    b"\xed\xa0\x80",
    b"a\xed",
    b"\xed\xb3",
    b"\xb3\xbb",
    b"\x95\x9c",
    b"\xed\x95",
    b'\xa0\x80"',
]
DATA = [b"", *(bytes([value]) for value in range(256)), *PARTS]
VOCABULARY = Vocabulary(tuple(DATA), (0,), len(DATA))
IDS = {data: token_id for token_id, data in enumerate(DATA)}
# Those between which a surrogate could be written come often.
OFTEN = [IDS[data] for data in (b"\xed", *PARTS)] + [IDS[bytes([v])] for v in range(0xA0, 0xA4)]

STRING = {"type": "string"}
OBJECT = {"type": "object", "additionalProperties": STRING}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "<"},
            {"type": "json_schema", "json_schema": OBJECT},
            {"type": "any_text"},
        ],
    },
}
SPECS = {
    "string": GrammarSpec.json_schema(STRING),
    "keys": GrammarSpec.json_schema(OBJECT),
    "counted": GrammarSpec.json_schema({**STRING, "minLength": 1, "maxLength": 9}),
    "pattern": GrammarSpec.json_schema({**STRING, "pattern": "^[^a]*b$"}),
    "object": GrammarSpec.json_object(),
    "regex": GrammarSpec.regex(r"[^a]{1,20}"),
    "ebnf": GrammarSpec.ebnf(r"root ::= [^a]+"),
    "ebnf surrogates": GrammarSpec.ebnf(r"root ::= [\ud000-\ue000]+"),
    "lark": GrammarSpec.lark("start: /[^a]+/"),
    "tag": GrammarSpec.structural_tag(json.dumps(TAG)),
}
BACKENDS = {name: GrammarPipeline.of(name, VOCABULARY) for name in ("xgrammar", "llguidance")}


def is_beginning(data: bytes) -> bool:
    """Whether UTF-8 may go on so: a character may be cut at the end."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


def compiled(backend: str, name: str) -> Any:
    try:
        return BACKENDS[backend].compile(SPECS[name])
    except Exception as error:  # noqa: BLE001 - a kind that the backend does not take
        pytest.skip(str(error)[:80])


def test_a_surrogate_is_no_beginning() -> None:
    assert is_beginning("한".encode()[:2])
    assert is_beginning(b"\xed")
    assert not is_beginning(b"\xed\xa0")
    assert VOCABULARY.token_bytes[IDS[PARTS[0]]] == b""
    assert "xgrammar" in GRAMMAR_BACKENDS


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=examples(20))
@given(dice=st.integers(0, 2**32))
def test_walks_write_utf8(backend: str, name: str, dice: int) -> None:
    source = random.Random(dice)
    matcher, text = compiled(backend, name).new_matcher(), b""
    for _ in range(24):
        if matcher.is_terminated():
            break
        legal = [*ids_of(legal_row(matcher, len(DATA)))]
        often = sorted({*OFTEN} & {*legal})
        token_id = source.choice(often if often and source.random() < 0.7 else legal)
        assert matcher.accept_token(token_id)
        text += DATA[token_id]
        assert is_beginning(text), text
        refused = [t for t in OFTEN if t not in legal and not matcher.is_terminated()]
        if refused:  # a token that the row lacks is refused, and changes nothing
            after = legal_row(matcher, len(DATA))
            bad = [t for t in refused if not after[t >> 5] >> (t & 31) & 1]
            assert not any(map(matcher.accept_token, bad))
            np.testing.assert_array_equal(legal_row(matcher, len(DATA)), after)


@pytest.mark.parametrize("name", ["string", "keys", "ebnf", "tag"])
def test_a_fork_that_goes_alone_writes_none_either(name: str) -> None:
    constraint = Constraint(compiled("xgrammar", name), {0})
    begun = {"string": b'"', "keys": b'{"', "ebnf": b"b", "tag": b'<{"'}[name]
    constraint.commit([IDS[bytes([byte])] for byte in begun])
    korean = ["한".encode()[at : at + 1] for at in range(3)]
    for taken in range(3):
        fork = constraint.fork()
        assert fork.advance([IDS[b"\xed"], IDS[b"\xa0"]]) == 1
        assert not fork.text.accept_token(IDS[PARTS[3]])
        row = np.full((1, -(-len(DATA) // 32)), -1, dtype=np.int32)
        fork.text.fill_next_token_bitmask(row, 0)
        assert not {*ids_of(row[0])} & {IDS[b"\xa0"], IDS[b"\xb3\xbb"]}
        assert {*ids_of(row[0])} & {IDS[b"\x95"]}
        fork.rollback_to(0)
        assert fork.advance([IDS[part] for part in korean]) == 3
        constraint.commit([IDS[part] for part in korean[: taken + 1]])
        constraint.commit([IDS[part] for part in korean[taken + 1 :]])
    assert constraint.resyncs == 0


def test_tables_agree() -> None:
    """Made from the rules, and compared with the matcher's rows."""
    pipeline = GrammarPipeline(BACKENDS["xgrammar"]._backend, tables="always")
    for name in ("string", "counted", "keys"):
        grammar: Any = pipeline.compile(SPECS[name])
        matcher = grammar.new_matcher()
        assert accept_tokens(matcher, [IDS[b'"' if name != "keys" else b"{"]]) == 1
    pipeline.close()
