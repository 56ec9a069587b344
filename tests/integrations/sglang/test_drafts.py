"""What is ours alone in the drafts for SGLang: places to draft from, and drafts as trees."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.integrations.host_drafter import HostDrafter
from guided_spec.integrations.sglang.backend import GuidedGrammar
from guided_spec.integrations.sglang.plugin import Drafts, chains
from tests.tiers import examples
from tests.tiny_llm import VOCAB_SIZE as TINY_SIZE
from tests.tiny_llm import tiny_tokenizer
from tests.toys import EOS, TEXTS, VOCAB_SIZE, ToyCompiled, text_rule

NUM_NODES = 6


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 10_000))
def test_a_constraint_stands_where_its_place_stands(seed: int) -> None:
    """However the place is moved between two drafts, back before the last one or over it."""
    dice = random.Random(seed)
    rule = text_rule([b"ab", b'{"a":1}', b'{"a":0}', b"abcd"])
    matcher, text = GuidedGrammar.at_start(ToyCompiled(rule)), list[int]()
    for _ in range(20):
        if dice.random() < 0.3:
            number = dice.randint(0, len(text))
            matcher.rollback(number)
            del text[len(text) - number :]
        elif EOS not in text:
            text.append(dice.choice(sorted(rule(tuple(text)))))
            matcher.accept_token(text[-1])
        if dice.random() < 0.5:
            constraint = matcher.constraint()
            assert (constraint is None) == (EOS in text)
            if constraint is not None:
                assert constraint.committed == text
                constraint.fork().text.accept_token(
                    dice.randrange(VOCAB_SIZE)
                )  # a draft moves a fork alone
        if dice.random() < 0.2:
            matcher = matcher.copy()


def test_a_place_that_cannot_be_followed_is_not_drafted_from() -> None:
    compiled = ToyCompiled(text_rule([b"ab"]))
    matcher = GuidedGrammar.at_start(compiled)
    matcher.accept_token(TEXTS.index(b"a"))
    compiled.refused = frozenset({TEXTS.index(b"a")})  # by matchers made from here on
    assert matcher.constraint() is None


@pytest.mark.parametrize("drafts", [[[], [7, 8, 9]], [[1, 2, 3, 4, 5], [6]]])
def test_a_draft_is_a_chain_and_what_is_left_over_hangs_nowhere(drafts: list[list[int]]) -> None:
    trees = chains([3, 4], drafts, NUM_NODES)
    token_ids = trees.token_ids.reshape(2, NUM_NODES)
    mask = trees.mask.reshape(2, NUM_NODES, NUM_NODES)
    for row, (root, draft) in enumerate(zip([3, 4], drafts, strict=True)):
        size = 1 + len(draft)
        assert token_ids[row, :size].tolist() == [root, *draft]
        for node in range(NUM_NODES):
            ancestors = list(range(node + 1)) if node < size else [node]
            assert np.flatnonzero(mask[row, node]).tolist() == ancestors


class Server:
    """``Drafts`` as SGLang's worker asks it, for requests with the fields that it reads."""

    def __init__(self) -> None:
        self.tokenizer = tiny_tokenizer()
        ends = [int(str(self.tokenizer.eos_token_id))]
        self.vocabulary = Vocabulary.from_tokenizer(self.tokenizer, TINY_SIZE, ends)
        self.drafter = HostDrafter(self.vocabulary, self.tokenizer, NUM_NODES - 1, 2)
        self.drafts = Drafts(self.drafter, NUM_NODES)
        self.prompt = self.encode("the cat is the dog; ")
        self.shown: list[int] | None = None  # as the prompt of its requests

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def grammar(self, spec: GrammarSpec) -> GuidedGrammar:
        compiled = BackendChoice("xgrammar", self.vocabulary).compile(spec)
        return GuidedGrammar.at_start(compiled, "xgrammar")

    def draft(self, outputs: dict[str, str], grammars: Sequence[object]) -> list[list[int]]:
        """The chain of each request, without its root."""
        written = [self.encode(output) for output in outputs.values()]
        return self.draft_behind([*outputs], written, grammars)

    def draft_behind(
        self, names: Sequence[str], outputs: Sequence[list[int]], grammars: Sequence[object]
    ) -> list[list[int]]:
        """``draft``, as the worker calls it: with the ends of the texts."""
        self.drafts.see(
            [
                SimpleNamespace(
                    origin_input_ids_unpadded=self.prompt if self.shown is None else self.shown,
                    output_ids=output,
                    grammar=grammar,
                )
                for output, grammar in zip(outputs, grammars, strict=True)
            ]
        )
        texts = [[*self.prompt, *output] for output in outputs]
        self.drafts.synchronize()
        ends = [text[-self.drafts.end_length :] for text in texts]
        trees = self.drafts.batch_get(names, ends, [len(text) for text in texts])
        sizes = trees.mask.reshape(-1, NUM_NODES, NUM_NODES)[:, :, 0].sum(1)
        rows = trees.token_ids.reshape(-1, NUM_NODES)
        assert rows[:, 0].tolist() == [text[-1] for text in texts]
        return [row[1:size].tolist() for row, size in zip(rows, sizes, strict=True)]


def test_requests_come_and_go() -> None:
    server = Server()
    grammar = server.grammar(GrammarSpec.regex("temperature is [0-9]+"))
    first, free = server.draft({"a": "", "b": "the cat"}, [grammar, None])
    assert first == server.encode("temperature is ")[: NUM_NODES - 1]
    assert str(server.tokenizer.decode(free)).startswith(" is the")
    server.drafts.erase_match_state(["a", "never seen"])
    assert server.draft({"b": "the cat"}, [None]) == [free]
    server.drafts.reset()
    assert server.draft({"c": "", "a": ""}, [server.grammar(GrammarSpec.choice(["yes"])), None])[
        0
    ] == [*server.encode("yes"), int(str(server.tokenizer.eos_token_id))]


class Counted(list[int]):
    """A prompt that counts how often all of it is read."""

    reads = 0

    def __iter__(self) -> Iterator[int]:
        self.reads += 1
        return super().__iter__()


def test_a_step_reads_what_is_new() -> None:
    """A text that was set aside for a while, or begins anew, is read once more."""
    server, other = Server(), Server()
    server.prompt = other.prompt = server.prompt * 5
    server.shown = shown = Counted(server.prompt)
    words, output, reads = server.prompt, list[int](), list[bool]()
    for kept, new in ((0, 0), (0, 1), (1, 6), (7, 3), (10, 40), (50, 2), (20, 1), (21, 6), (5, 30)):
        output = [*output[:kept], *(words[3 * (new + at) % len(words)] for at in range(new))]
        before = shown.reads
        found = server.draft_behind(["a"], [output], [None])
        reads.append(shown.reads > before)
        other.drafts.reset()
        assert found == other.draft_behind(["a"], [output], [None])
    assert reads == [True, False, False, False, True, False, True, False, True]


def test_a_grammar_of_another_backend_is_drafted_without() -> None:
    """SGLang's verification masks its text; a draft is only less often right."""
    server = Server()
    assert server.draft({"a": "the cat"}, [object()]) == server.draft({"b": "the cat"}, [None])


def test_a_complete_text_is_left_to_the_engine() -> None:
    server = Server()
    grammar = server.grammar(GrammarSpec.choice(["yes"]))
    for token in [*server.encode("yes"), int(str(server.tokenizer.eos_token_id))]:
        grammar.accept_token(token)
    assert grammar.constraint() is None
    assert server.draft({"a": "yes"}, [grammar]) == server.draft({"b": "yes"}, [None])
