"""Markers: found in every split, never overrun, and spelled the tokenizer's way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.spec import GrammarSpec, Start
from guided_spec.grammar.text.markers import BYTES, Marker, Markers, symbols_of
from guided_spec.grammar.tools.reasoning import DEFAULT_MARKERS
from guided_spec.grammar.vocabulary import Vocabulary
from tests.grammar.completion.spelled import (
    EOS,
    HIDDEN,
    MARKERS,
    OTHER,
    SPELLED,
    boundary,
    encode,
    splits,
    token,
)
from tests.tiny_llm import tiny_tokenizer

WORDS = st.text("abc", min_size=1, max_size=5)
TOKENS = st.lists(st.integers(0, EOS - 1), max_size=8)
REGEX = GrammarSpec.regex("[ab]+")


def find(marker: str | tuple[int, ...]) -> Marker:
    return MARKERS.find(Start(marker))


@given(WORDS | st.sampled_from(["a<s>b", "<s>", "<s>ab<t>", "aé", "é", "ab<s>ab"]), TOKENS)
def test_a_marker_is_found_where_the_whole_text_holds_it(text: str, token_ids: list[int]) -> None:
    marker = find(text)
    state: int | None = 0
    for count in range(1, len(token_ids) + 1):
        assert state is not None
        row = np.unpackbits(marker.row(state).view(np.uint8), bitorder="little")
        taken = {t for t in range(EOS + 1) if marker.step(state, t) is not None}
        assert taken == set(np.flatnonzero(row[: EOS + 1]).tolist())
        state = marker.step(state, token_ids[count - 1])
        found = boundary(marker, token_ids[:count])
        assert (state is None) == (found == -1)
        assert (state == len(marker)) == (found == count)
        if found is not None:
            break


@given(WORDS, TOKENS)
def test_every_split_of_a_marker_is_found(text: str, before: list[int]) -> None:
    marker = find(text)
    assume(boundary(marker, before) is None)
    for split in splits(text.encode()):
        state: int | None = 0
        for token_id in [*before, *split]:
            assert state is not None
            state = marker.step(state, token_id)
            if state is None or state == len(marker):
                break
        # What stands before may complete it sooner, or make a token of the split run past its end.
        assert state == len(marker) or boundary(marker, [*before, *split]) == -1


@given(WORDS | st.sampled_from(["a<s>b", "é<t>é", "<s><s>"]))
def test_from_every_state_the_spelling_leads_to_the_end(text: str) -> None:
    marker = find(text)
    for start in range(len(marker)):
        state: int = start
        written: list[int] = []
        while state < len(marker):
            written.append(marker.spelling[state])
            after = marker.step(state, written[-1])
            assert after is not None
            assert after > state
            state = after
        shown = [symbol for token_id in written for symbol in symbols_of(token_id, SPELLED)]
        assert tuple(shown) == marker.symbols[start:]
        if start == 0:
            assert written == encode(text)


def test_token_ids_stand_for_what_they_show() -> None:
    assert find((token("ab"), token("a"))).symbols == tuple(b"aba") == find("aba").symbols
    assert find((HIDDEN, token("ab"))).symbols == (BYTES + HIDDEN, *b"ab") == find("<s>ab").symbols
    assert find((OTHER,)).spelling == (OTHER,)


def test_special_tokens_are_found_by_id_and_others_skipped() -> None:
    marker = find("a<s>b")
    assert marker.step(0, token("a")) == 1
    assert marker.step(1, OTHER) == 1
    assert marker.step(1, HIDDEN) == 2
    assert marker.step(0, HIDDEN) == 0
    assert marker.step(2, token("ba")) is None
    assert marker.step(2, token("b")) == 3
    for refused in (EOS, EOS + 1, -1):
        assert marker.step(0, refused) is None


@pytest.mark.parametrize(
    ("marker", "reason"),
    [
        ("</s>", "ends the text"),
        ((token("a"), EOS), "ends the text"),
        ((EOS + 1,), "the vocabulary has"),
        ("xyz", "no token of the vocabulary writes 'xyz'"),
        ("\ud800", "not text"),
        (None, "chat template is not there.*after"),
    ],
)
def test_markers_that_cannot_be_written_are_refused(
    marker: str | tuple[int, ...] | None, reason: str
) -> None:
    unknown = Markers(
        SPELLED, lambda text: encode(text) if text.isascii() and "x" not in text else []
    )
    with pytest.raises(GrammarCompileError, match=reason):
        unknown.find(Start(marker))


@pytest.mark.parametrize("marker", DEFAULT_MARKERS)
def test_the_default_stands_in_the_chat_template(marker: str) -> None:
    data = tuple(bytes([i]) for i in range(256))
    vocabulary = Vocabulary((*data, b""), (256,), 257)
    markers = Markers(vocabulary, lambda text: list(text.encode()), "{{ x }}" + marker + "\n\n")
    assert markers.find(Start()).symbols == tuple(marker.encode())
    assert markers.find(Start()) is markers.find(Start(marker))


def test_a_hugging_face_tokenizer() -> None:
    tokenizer = tiny_tokenizer()
    vocabulary = Vocabulary.from_tokenizer(tokenizer, 403, [tokenizer.eos_token_id])
    markers = Markers.from_tokenizer(vocabulary, tokenizer)
    added = tokenizer.convert_tokens_to_ids("<think>")
    assert dict(vocabulary.added_tokens)["<think>"] == added
    marker = markers.find(Start("<think>"))
    assert marker.symbols == tuple(b"<think>")
    assert marker.step(0, added) == len(marker)
    assert marker.spelling[0] == added
    with pytest.raises(GrammarCompileError, match="ends the text"):
        markers.find(Start("<eos>"))


@given(TOKENS, WORDS, st.lists(st.sampled_from([token(" "), token("\n")]), max_size=4))
def test_a_prompt_that_ends_with_the_marker_binds_at_once(
    before: list[int], text: str, blank: list[int]
) -> None:
    spec = REGEX.after(text)
    for split in splits(text.encode()):
        assert MARKERS.bind(spec, [*before, *split, *blank]) == REGEX
        assert MARKERS.bind(spec, [*before, *split, OTHER, *blank]) == spec
        assert MARKERS.bind(spec, [*split[:-1], *blank]) in (spec, REGEX)
    assert MARKERS.bind(spec, [*blank, token("c"), *blank]) == (REGEX if text == "c" else spec)
    assert MARKERS.bind(REGEX, before) == REGEX


def test_whitespace_may_belong_to_the_marker() -> None:
    spec = REGEX.after("a\n")
    newline, a = token("\n"), token("a")
    assert MARKERS.bind(spec, [a, newline, newline]) == REGEX
    assert MARKERS.bind(spec, [a]) == spec
    assert MARKERS.bind(REGEX.after("<s>"), [a, HIDDEN, newline]) == REGEX
    assert MARKERS.bind(REGEX.after("\n"), [a, newline, newline]) == REGEX
