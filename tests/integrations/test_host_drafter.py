"""Drafts for another engine's requests: whose, how long, and out of what."""

from __future__ import annotations

import pytest

from guided_spec.errors import ConfigError
from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.integrations.host_drafter import HostDrafter, HostRequest, HostTexts
from guided_spec.masks.constraint import Constraint
from tests.tiny_llm import VOCAB_SIZE, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
VOCABULARY = Vocabulary.from_tokenizer(TOKENIZER, VOCAB_SIZE, [int(str(TOKENIZER.eos_token_id))])
SCHEMA = {
    "type": "object",
    "properties": {"temperature": {"type": "integer"}},
    "required": ["temperature"],
    "additionalProperties": False,
}
PROMPT = "the cat is an answer: "


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def constraint_at(text: str) -> Constraint:
    compiled = BackendChoice("xgrammar", VOCABULARY).compile(GrammarSpec.json_schema(SCHEMA))
    constraint = Constraint(compiled)
    constraint.commit(encode(text))
    return constraint


def request(slot: int, output: str, constraint: Constraint | None, limit: int = 64) -> HostRequest:
    prompt = encode(PROMPT)
    return HostRequest(slot, [*prompt, *encode(output)], len(prompt), limit, constraint)


def decode(token_ids: list[int]) -> str:
    return str(TOKENIZER.decode(token_ids))


def test_each_request_is_drafted_by_its_own_grammar_in_the_order_given() -> None:
    drafter = HostDrafter(VOCABULARY, TOKENIZER, num_draft=16, num_requests=3)
    opened, named = constraint_at("{"), constraint_at('{"temp')
    requests = [
        request(7, "{", opened),
        request(2, "the cat", None),
        request(5, '{"temp', named),
    ]
    drafts = [decode(draft) for draft in drafter.draft(requests)]
    assert drafts[0] == '"temperature": '
    assert drafts[1].startswith(" is an answer")
    assert drafts[2] == 'erature": '
    assert opened.committed == encode("{"), "the original moves on committed tokens alone"


@pytest.mark.parametrize("limit", [0, 3, 8])
def test_no_draft_is_longer_than_its_limit(limit: int) -> None:
    drafter = HostDrafter(VOCABULARY, TOKENIZER, num_draft=4, num_requests=2)
    requests = [request(0, "{", constraint_at("{"), limit), request(1, "the cat", None, limit)]
    assert [len(draft) for draft in drafter.draft(requests)] == [min(limit, 4)] * 2


def test_a_lookup_is_cut_where_the_grammar_refuses() -> None:
    """The prompt says that a word follows a 3; the grammar says a digit or the object's end."""
    drafter = HostDrafter(VOCABULARY, TOKENIZER, num_draft=8, num_requests=1)
    text = '{"temperature": 3'
    prompt = encode("a 3 cat, ")
    free = HostRequest(0, [*prompt, *encode(text)], len(prompt), 8, None)
    assert decode(drafter.draft([free])[0]).startswith(" cat")
    drafter.release([0])
    assert drafter.draft([free._replace(constraint=constraint_at(text))]) == [[]]


def test_a_draft_can_be_too_long() -> None:
    with pytest.raises(ConfigError, match="num_draft_tokens=65"):
        HostDrafter(VOCABULARY, TOKENIZER, num_draft=65, num_requests=1)


def test_a_text_that_does_not_grow_gets_another_slot() -> None:
    ended = list[int]()
    texts = HostTexts(ended.extend)
    first = texts.write("a", 0, [1, 2, 3])
    assert texts.write("a", None, [4]) is first
    assert texts.write("a", 4, [5]) is first
    assert texts["a"].token_ids == [1, 2, 3, 4, 5]
    assert ended == []
    other = texts.write("a", 2, [9])
    assert (other.token_ids, ended) == ([1, 2, 9], [first.slot])
    assert other.slot != first.slot
    assert first.token_ids == [1, 2, 3, 4, 5]
    whole = [1, 2, 9, 7]
    assert texts.update("a", 4, lambda start, end: whole[start:end]) is other
    whole[1] = 8
    assert texts.update("a", 4, lambda start, end: whole[start:end]).token_ids == whole
    assert ended == [first.slot, other.slot]
