"""GrammarLogitsProcessor: the same mask as a fresh matcher, whichever way transformers calls it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from guided_spec.errors import ConfigError, GrammarCompileError, UnsupportedSchemaError
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.integrations.transformers.params import list_grammars
from guided_spec.integrations.transformers.processor import GrammarLogitsProcessor
from guided_spec.ops.bitmask import unpack_bitmask
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.types import SamplingParams
from tests.integrations.transformers import assisted
from tests.models import tiny
from tests.tiers import examples
from tests.tiny_llm import VOCAB_SIZE, make_llm, tiny_model, tiny_tokenizer
from tests.toys import chi_square_p_value

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
JSON = GrammarSpec.json_schema(SCHEMA)
LETTERS = GrammarSpec.regex("[a-z ]{8,16}")
EOS = 0
PROMPT = "The name of the cat is on and on"
SIZE = max(tiny_tokenizer().get_vocab().values()) + 1


def encode(text: str) -> list[int]:
    return list(tiny_tokenizer()(text)["input_ids"])


def tiny_llama() -> Any:
    return tiny_model("llama")


def processor(*grammars: GrammarSpec | None) -> GrammarLogitsProcessor:
    return GrammarLogitsProcessor(list(grammars), tiny_tokenizer())


def legal(of: GrammarLogitsProcessor, *rows: Sequence[int], width: int = SIZE) -> Tensor:
    """Bool [R, width]: what the processor leaves of scores that are all alike."""
    scores = torch.zeros(len(rows), width)
    masked = of(torch.tensor([list(row) for row in rows]), scores)
    assert masked.data_ptr() != scores.data_ptr()
    assert not scores.any()  # left as they were
    assert set(masked.unique().tolist()) <= {0.0, float("-inf")}
    return masked == 0


@cache
def compiled(spec: GrammarSpec) -> CompiledGrammar:
    vocabulary = Vocabulary.from_tokenizer(tiny_tokenizer(), SIZE, [EOS])
    return XGrammarBackend(vocabulary).compile(spec)


def expected(spec: GrammarSpec, tokens: Sequence[int]) -> Tensor:
    """Bool [V]: what may follow, from a fresh matcher; behind ends and nonsense, the end."""
    matcher = compiled(spec).new_matcher()
    end = torch.arange(SIZE) == EOS
    for token in tokens:
        if matcher.is_terminated() or not matcher.accept_token(token):
            return end
    if matcher.is_terminated():
        return end
    row = torch.zeros(1, num_mask_words(SIZE), dtype=torch.int32)
    matcher.fill_next_token_bitmask(row, 0)
    return unpack_bitmask(row, SIZE)[0]


def is_whole(spec: GrammarSpec, tokens: Tensor) -> bool:
    """Whether the tokens are a text of the grammar and its end."""
    *text, last = tokens.tolist()
    return last == EOS and bool(expected(spec, text)[EOS])


# --- in generate ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", assisted.KINDS)
def test_assisted_generation(kind: str, tmp_path: Path) -> None:
    """Greedy it writes the plain text; what it samples is valid."""
    setup = assisted.build(kind, tmp_path)
    plain = assisted.run(setup, JSON, PROMPT, is_plain=True, max_new_tokens=24)
    found = assisted.run(setup, JSON, PROMPT, max_new_tokens=24)
    assert found.tolist() == plain.tolist()
    assert is_whole(JSON, found)
    torch.manual_seed(0)
    try:
        sampled = assisted.run(setup, LETTERS, PROMPT, max_new_tokens=24, do_sample=True)
    except RuntimeError as error:
        # docs/transformers.md: transformers refuses a draft, and nothing is left of the target's
        # distribution, where both sides know the same single token and the draft is another one.
        assert kind == "other_tokenizer"  # noqa: PT017
        assert "probability tensor" in str(error)  # noqa: PT017
    else:
        assert is_whole(LETTERS, sampled)


def test_plain_generation_writes_what_the_engine_writes() -> None:
    """Which shares no code with the processor's way over a text."""
    kind = assisted.Assisted(tiny_model("llama"), {})
    with make_llm("llama") as llm:
        for grammar in (JSON, LETTERS):
            params = SamplingParams(max_tokens=32, grammar=grammar, complete=False)
            found = assisted.run(kind, grammar, PROMPT, max_new_tokens=32)
            assert found.tolist() == llm.generate(PROMPT, params)[0].token_ids


def test_a_batch_writes_what_each_row_writes_alone() -> None:
    """Prompts of different lengths, texts that end at different times, one of them free."""
    tokenizer, model = tiny_tokenizer(), tiny_llama()
    grammars = (LETTERS, None, GrammarSpec.choice(["yes", "no"]), JSON)
    prompts = ("A", "The name of the cat is", "on and on", "a")
    names: dict[str, Any] = {"eos_token_id": EOS, "pad_token_id": 7, "max_new_tokens": 22}
    inputs = assisted.left_padded(prompts)
    of_all = processor(*grammars)
    together = model.generate(**inputs, logits_processor=[of_all], **names)
    for row, (prompt, grammar) in enumerate(zip(prompts, grammars, strict=True)):
        one = tokenizer(prompt, return_tensors="pt")
        alone = model.generate(**one, logits_processor=[processor(grammar)], **names)
        alone = alone[0, one["input_ids"].shape[1] :]
        found = together[row, inputs["input_ids"].shape[1] :]
        assert found[: len(alone)].tolist() == alone.tolist()
        assert set(found[len(alone) :].tolist()) <= {7}
    # The next call of generate, with the same object.
    assert torch.equal(model.generate(**inputs, logits_processor=[of_all], **names), together)


def test_beams_and_samples_are_valid() -> None:
    model = tiny_llama()
    inputs = assisted.left_padded(["A", "on and"])
    grammars = (LETTERS, GrammarSpec.regex("[0-9]{3,5}"))
    for names in ({"num_beams": 3}, {"do_sample": True}, {"num_beams": 3, "do_sample": True}):
        torch.manual_seed(0)
        found = model.generate(
            **inputs,
            logits_processor=[processor(*grammars)],
            num_return_sequences=3,
            max_new_tokens=24,
            eos_token_id=EOS,
            pad_token_id=EOS,
            **names,
        )
        for row, tokens in enumerate(found[:, inputs["input_ids"].shape[1] :].tolist()):
            text = tokens[: tokens.index(EOS)]
            assert bool(expected(grammars[row // 3], text)[EOS])


# --- the law of sampled texts --------------------------------------------------------------------

LAW = GrammarSpec.regex("[ab][cd]?")
NUM_SAMPLES = 40


def exact_law(model: Any, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """The probability of every text of LAW, from the model's own logits."""
    law: dict[tuple[int, ...], float] = {}
    open_texts: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while open_texts:
        tokens, mass = open_texts.pop()
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1, :SIZE].double()
        probs = logits.masked_fill(~expected(LAW, tokens), -torch.inf).softmax(-1)
        for token in probs.nonzero().flatten().tolist():
            text, share = (*tokens, token), mass * float(probs[token])
            if token == EOS:
                law[text] = share
            else:
                open_texts.append((text, share))
    return law


def p_value(law: dict[tuple[int, ...], float], texts: Counter[tuple[int, ...]]) -> float:
    assert set(texts) <= set(law)
    observed = torch.tensor([float(texts[text]) for text in law])
    return chi_square_p_value(observed, torch.tensor(list(law.values()), dtype=torch.float64))


def test_assisted_sampling_has_the_law_of_plain_sampling() -> None:
    """The assistant's own law is another one: as many texts of its would be noticed."""
    model = tiny.build("llama", 1, VOCAB_SIZE, num_hidden_layers=1)
    assistant = tiny.build("llama", 2, VOCAB_SIZE, num_hidden_layers=1)
    setup, prompt = assisted.Assisted(model, {"assistant_model": assistant}), "The age is"
    law, other = (exact_law(one, encode(prompt)) for one in (model, assistant))
    torch.manual_seed(0)
    settings: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": 6}
    texts = Counter(
        tuple(assisted.run(setup, LAW, prompt, **settings).tolist()) for _ in range(NUM_SAMPLES)
    )
    assert p_value(law, texts) > 1e-4
    assert p_value(other, texts) < 1e-9


# --- by itself -----------------------------------------------------------------------------------


@settings(max_examples=examples(25))
@given(st.data())
def test_any_way_back_and_forth_gives_the_mask_of_a_fresh_matcher(data: st.DataObject) -> None:
    """Texts grow by a token, legal or not, behind any part of what they were."""
    of = processor(JSON)
    prompt, text = encode("Ada"), list[int]()
    for _ in range(data.draw(st.integers(1, 12))):
        text = text[: data.draw(st.integers(0, len(text)))]
        row = legal(of, [*prompt, *text])[0]
        assert torch.equal(row, expected(JSON, text))
        allowed = row.nonzero().flatten().tolist()
        text.append(data.draw(st.sampled_from([*allowed, EOS, 5, 70, SIZE - 1])))


@settings(max_examples=examples(25))
@given(st.data())
def test_rows_that_change_places_keep_their_masks(data: st.DataObject) -> None:
    of = processor(JSON)
    prompt, texts = encode("Ada"), [list[int]()] * 3
    for _ in range(data.draw(st.integers(1, 8))):
        rows = legal(of, *([*prompt, *text] for text in texts))
        for row, text in zip(rows, texts, strict=True):
            assert torch.equal(row, expected(JSON, text))
        places = [data.draw(st.integers(0, 2)) for _ in texts]
        texts = [
            [*texts[at], data.draw(st.sampled_from(rows[at].nonzero().flatten().tolist()))]
            for at in places
        ]


def test_padding_behind_the_end_and_illegal_tokens_leave_only_the_end() -> None:
    of, prompt, (a,) = processor(GrammarSpec.choice(["a"])), encode("Ada"), encode("a")
    end = (torch.arange(SIZE) == EOS).tolist()
    assert legal(of, prompt)[0].nonzero().flatten().tolist() == [a]
    for text in ([a], [a, EOS], [a, EOS, 7], [a, EOS, 7, 7], [7], [7, a], [-1], [SIZE + 50]):
        assert legal(of, [*prompt, *text])[0].tolist() == end
    assert legal(of, prompt)[0].nonzero().flatten().tolist() == [a]


def test_another_prompt_begins_a_text_of_its_own() -> None:
    """Also one that begins with the last one and what was written, or with a part of it."""
    of, first = processor(JSON), expected(JSON, [])
    written = encode('{"name": "Ada"')
    for length in range(len(written)):
        legal(of, [*encode("A"), *written[:length]])
    for prompt in (encode("B"), [*encode("A"), *written, 9, 9], [*encode("A"), written[0], 9, 9]):
        assert torch.equal(legal(of, prompt)[0], first)
        assert not torch.equal(legal(of, [*prompt, *written[:1]])[0], first)


def test_two_vocabularies_in_turn_are_two_texts() -> None:
    """An assistant with another tokenizer asks about tokens of its own."""
    of, text = processor(JSON), list[int]()
    for length in range(6):
        row = legal(of, [*encode("Ada"), *text])[0]
        assert torch.equal(row, expected(JSON, text))
        for ahead in range(3):
            legal(of, [*range(20, 20 + length + ahead)], width=310)
        text.append(int(row.int().argmax()))


def test_scores_of_any_width() -> None:
    of, prompt = processor(JSON), encode("Ada")
    first = expected(JSON, [])
    wide = legal(of, prompt, width=VOCAB_SIZE + 40)[0]
    assert torch.equal(wide[:SIZE], first)
    assert not wide[SIZE:].any()
    least = int(first.int().argmax())
    assert torch.equal(legal(of, prompt, width=least + 1)[0], first[: least + 1])
    assert legal(of, prompt, width=least)[0].nonzero().flatten().tolist() == [EOS]
    free = processor(None)
    assert legal(free, prompt, width=VOCAB_SIZE).all()
    other = GrammarLogitsProcessor(JSON, tiny_tokenizer(), stop_token_ids=[SIZE - 1])
    assert legal(other, prompt, width=least).all()  # not even an end is among them


def test_the_tokens_that_end_a_text() -> None:
    prompt, choice = encode("Ada"), GrammarSpec.choice(["!"])
    model = tiny.build("llama", 0, VOCAB_SIZE, num_hidden_layers=1)
    model.generation_config.eos_token_id = [4, 9]
    named: tuple[tuple[dict[str, Any], list[int]], ...] = (
        ({}, [EOS]),
        ({"model": model}, [EOS, 4, 9]),
        ({"stop_token_ids": [4, 9]}, [4, 9]),
    )
    for names, ends in named:
        of = GrammarLogitsProcessor(choice, tiny_tokenizer(), **names)
        (mark,) = encode("!")
        legal(of, prompt)
        assert legal(of, [*prompt, mark])[0].nonzero().flatten().tolist() == ends


@pytest.mark.parametrize(
    ("grammar", "error", "message"),
    [
        (None, ConfigError, r"grammar=None: .*GrammarSpec.json_schema\(schema\)"),
        ([], ConfigError, "grammar=.*a list of them"),
        ([JSON, 5], ConfigError, "grammar=5: .*pass a GrammarSpec, a type"),
        (GrammarSpec.regex("("), GrammarCompileError, "unterminated subpattern"),
        (
            GrammarSpec.json_schema({"not": {"multipleOf": 2}}),
            UnsupportedSchemaError,
            "positive spelling",
        ),
    ],
)
def test_what_is_wrong_is_said_before_the_first_token(
    grammar: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        GrammarLogitsProcessor(grammar, tiny_tokenizer())


def test_types_and_schemas_are_grammars() -> None:
    assert list_grammars(SCHEMA) == list_grammars([JSON]) == [JSON]
    assert list_grammars([bool, None]) == [GrammarSpec.of(bool), None]


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ConfigError, match="tokenizer=None: pass the model's tokenizer"):
        GrammarLogitsProcessor(JSON, None)
    with pytest.raises(ConfigError, match="grammar='2 of them'.*3 rows"):
        legal(processor(JSON, None), [1], [2], [3])
