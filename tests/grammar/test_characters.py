"""Sets of characters, and both cases of them under ``(?i)``."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.grammar.backends.auto import AutoBackend
from guided_spec.grammar.characters import any_case, complement, general_category
from guided_spec.grammar.regex import readable, to_fullmatch, to_search
from guided_spec.grammar.spec import GrammarSpec
from tests.masks.walks import BYTES, accepts

TURKISH = "ı"  # Python alone takes it for a case of i, and İ in classes but not by itself
LETTERS = "aAbBkK\u212asS\u017féÉßẞσςΣǆǅǄiI1_-" + TURKISH


def test_both_cases_are_those_of_re() -> None:
    """Of every character with another case, and every one that might be its other case."""
    near = defaultdict[str, set[str]](set)
    for code in range(0x110000):
        one = chr(code)
        for other in (one.lower(), one.upper(), one.casefold(), one.upper().lower()):
            if len(other) == 1 and other != one:
                near[one].add(other)
                near[other].add(one)
    groups = {one: {one}.union(others, *(near[o] for o in others)) for one, others in near.items()}
    for one, group in groups.items():
        same = {other for other in group if re.fullmatch(re.escape(one), other, re.IGNORECASE)}
        (found,) = [any_case(((ord(one), ord(one)),), 0, whole=True)]
        assert {chr(code) for low, high in found for code in range(low, high + 1)} == same


@pytest.mark.every_case
def test_categories_are_those_of_unicodedata() -> None:
    """Every character is in the categories that are its own, and in no other."""
    every = np.array([unicodedata.category(chr(code)) for code in range(0x110000)])
    kinds = sorted({*every.tolist()})
    for kind in [*kinds, *sorted({kind[0] for kind in kinds})]:
        ranges = general_category(kind)
        assert ranges is not None
        found = np.zeros(0x110000, dtype=bool)
        for low, high in ranges:
            assert not found[low : high + 1].any()
            found[low : high + 1] = True
        own = np.isin(every, [one for one in kinds if one.startswith(kind)])
        assert np.array_equal(found, own), kind


@pytest.mark.every_case
def test_categories_have_long_names_and_few_others() -> None:
    same = {"Letter": "L", "Uppercase_Letter": "Lu", "Decimal_Number": "Nd", "digit": "Nd"}
    same |= {"Punctuation": "P", "punct": "P", "Combining_Mark": "M", "Other": "C", "cntrl": "Cc"}
    for name, short in same.items():
        assert general_category(name) == general_category(short)
    cased = [general_category(kind) or () for kind in ("Lu", "Ll", "Lt")]
    letters = {code for part in cased for low, high in part for code in range(low, high + 1)}
    for name in ("LC", "Cased_Letter"):
        ranges = general_category(name) or ()
        assert {code for low, high in ranges for code in range(low, high + 1)} == letters
    assert general_category("ASCII") == ((0, 127),)
    assert general_category("Assigned") == complement(general_category("Cn") or ())
    for name in ("l", "letter", "Latin", "Script=Greek", "Alphabetic", "IsLetter", "", "L ", "Lx"):
        assert general_category(name) is None


def test_other_dialects_take_no_turkish_letter_for_an_i() -> None:
    assert any_case(((ord("i"), ord("i")),), 0) == ((73, 73), (105, 105))
    assert any_case(((ord("i"), ord("i")),), re.ASCII) == ((73, 73), (105, 105))
    assert any_case(((ord("k"), ord("k")),), re.ASCII) == ((75, 75), (107, 107))
    assert any_case((), 0) == ()
    assert any_case(complement(()), 0) == complement(())


PARTS = st.one_of(
    st.sampled_from(LETTERS).map(re.escape),
    st.lists(st.sampled_from(LETTERS), min_size=1, max_size=4).map(
        lambda all_of: f"[{''.join(map(re.escape, all_of))}]"
    ),
    st.lists(st.sampled_from(LETTERS), min_size=1, max_size=4).map(
        lambda all_of: f"[^{''.join(map(re.escape, all_of))}]"
    ),
    st.sampled_from(["[a-k]", "[^R-T]", "(?:ab|ß)", "(?-i:k)", "(?i:s)", r"[\da]", "(?a:[k-s])"]),
)


@given(
    st.lists(PARTS, min_size=1, max_size=3).map("".join),
    st.sampled_from(["(?i)", "(?i:{})", "(?ai)", ""]),
    st.text(st.sampled_from(LETTERS), max_size=4),
)
def test_patterns_match_as_in_re(body: str, form: str, text: str) -> None:
    pattern = form.format(body) if "{}" in form else form + body
    found = re.fullmatch(readable(to_fullmatch(pattern)), text) is not None
    expected = re.fullmatch(pattern, text) is not None
    assert found == expected or (expected and set(text) & set(TURKISH))
    whole = re.fullmatch(readable(to_search(pattern, most=True)), text) is not None
    assert whole or not re.search(pattern, text)


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("(?i)^(get|post)$", ["get", "Post", "GET"], ["put", "gets"]),
        ("^(?i:ab)c$", ["abc", "ABc"], ["abC"]),
        ("(?i)^[^a-y]+$", ["zZ1"], ["A", "y"]),
    ],
)
def test_a_schema_s_pattern_takes_both_cases(
    pattern: str, right: list[str], wrong: list[str]
) -> None:
    grammar = AutoBackend(BYTES).compile(
        GrammarSpec.json_schema({"type": "string", "pattern": pattern})
    )
    assert all(accepts(grammar, f'"{text}"') for text in right)
    assert not any(accepts(grammar, f'"{text}"') for text in wrong)
