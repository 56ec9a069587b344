"""Any split of any text into tokens, with any stop strings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from guided_spec.engine.request import OutputText
from guided_spec.grammar.vocabulary import Vocabulary

texts = st.text("aab.é你\n", max_size=20)
stops = st.lists(st.text("aab.é", min_size=1, max_size=7), max_size=4)


def cut_at(text: str, stop: list[str]) -> tuple[str, bool]:
    """The text before the stop string that is complete first, found character by character."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def may_become(text: str, stop: list[str]) -> int:
    """How many letters at the end of the text begin a stop string."""
    lengths = range(len(text), 0, -1)
    return next((n for n in lengths if any(s.startswith(text[-n:]) for s in stop)), 0)


@st.composite
def splits(draw: st.DrawFn) -> list[bytes]:
    """A text's bytes in pieces of any lengths, characters cut in the middle."""
    data = draw(texts).encode()
    pieces: list[bytes] = []
    while data:
        length = draw(st.integers(1, 5))
        pieces.append(data[:length])
        data = data[length:]
    return pieces


def vocabulary_of(pieces: list[bytes]) -> Vocabulary:
    return Vocabulary((b"", *pieces), (0,), len(pieces) + 1)


@given(splits(), stops)
def test_text_up_to_the_first_stop(pieces: list[bytes], stop: list[str]) -> None:
    expected, is_stopped = cut_at(b"".join(pieces).decode(), stop)
    output = OutputText(vocabulary_of(pieces), stop)
    released = [""]
    for token in range(1, len(pieces) + 1):
        ended = output.feed(token)
        released.append(output.text)
        assert ended == output.is_stopped
        if ended:
            break
        written = b"".join(pieces[:token]).decode(errors="ignore")
        assert output.text == written[: len(written) - may_become(written, stop)]
    output.finish()
    assert output.text == expected
    assert output.is_stopped == is_stopped
    for earlier, later in zip(released, released[1:], strict=False):
        assert later.startswith(earlier)  # what was streamed is never taken back
    assert expected.startswith(released[-1])
    assert "\ufffd" not in output.text


@given(splits())
def test_without_stop_strings_only_half_characters_wait(pieces: list[bytes]) -> None:
    output = OutputText(vocabulary_of(pieces), ())
    data = b""
    for token, piece in enumerate(pieces, 1):
        output.feed(token)
        data += piece
        assert output.text == data.decode(errors="ignore")


UTF8_OR_NOT = st.lists(
    st.one_of(
        st.binary(max_size=3),  # b"" is what a special token shows
        st.sampled_from([b"\xf0", b"\x9f\x98", b"\x80", b"\xe4\xbd", b"\xed\xa0", b"\xc3", b"a"]),
    ),
    max_size=10,
)


@given(UTF8_OR_NOT, st.sets(st.integers(0, 9)), st.sampled_from(["", "\u00e9"]))
def test_when_the_text_is_read_changes_nothing(
    pieces: list[bytes], read_at: set[int], prefix: str
) -> None:
    vocabulary = vocabulary_of(pieces)
    ids = list(range(1, len(pieces) + 1))
    at_the_end, now_and_then = (OutputText(vocabulary, (), prefix) for _ in range(2))
    at_once = OutputText(vocabulary, ["no such text"], prefix)  # decodes whatever is fed
    outputs = (at_the_end, now_and_then, at_once)
    for at, token in enumerate(ids):
        for output in outputs:
            assert not output.feed(token)
        if at in read_at:
            assert (prefix + vocabulary.decode(ids[: at + 1])).startswith(now_and_then.text)
    for output in outputs:
        output.finish()
        assert output.text == prefix + vocabulary.decode(ids)


def test_text_that_ends_in_half_a_character_or_half_a_stop() -> None:
    output = OutputText(Vocabulary((b"", b"ab", b"\xe4\xbd"), (0,), 3), ["bc"])
    output.feed(1)
    assert output.text == "a"
    output.feed(2)
    assert output.text == "a"  # "b" may begin "bc", the bytes a character
    output.finish()
    assert output.text == "ab\ufffd"


def test_one_token_may_hold_two_stop_strings() -> None:
    """The first one to be complete counts, as if the text had come letter by letter."""
    vocabulary = Vocabulary((b"", b"abcd"), (0,), 2)
    for stop, expected in ((["abcd", "bc"], "a"), (["cd", "abcd"], ""), (["d", "b"], "a")):
        output = OutputText(vocabulary, stop)
        assert output.feed(1)
        assert output.text == expected


def test_a_prefix_is_text_but_not_searched() -> None:
    output = OutputText(Vocabulary((b"", b"ab"), (0,), 2), ["xa", "x"], prefix="xx")
    assert output.text == "xx"
    assert not output.feed(1)
    output.finish()
    assert output.text == "xxab"


def test_nothing_follows_a_stop() -> None:
    output = OutputText(Vocabulary((b"", b"a.b"), (0,), 2), ["."])
    assert output.feed(1)
    output.finish()
    assert output.text == "a"
