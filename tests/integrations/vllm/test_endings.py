"""Texts within ``max_tokens``, by masks of vLLM's own grammars: whole, whatever is drawn."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jsonschema
import numpy as np
import pytest
import xgrammar
from transformers import AutoTokenizer

from guided_spec.grammar.completion.completion import EndingsCache
from guided_spec.integrations.vllm import endings
from guided_spec.integrations.vllm.endings import EndingMatcher, bind_to_budget
from guided_spec.ops.mask_words import num_mask_words
from tests.integrations.vllm.fake import MODEL

TOKENIZER = AutoTokenizer.from_pretrained(str(MODEL))
SIZE = len(TOKENIZER)
PROMPT, LONGEST = 5, 400
FREE, FIXED = 'root ::= "a"*', f'root ::= "{"ab" * 40}"'
HAS_VLLM = importlib.util.find_spec("vllm") is not None
OPEN = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "of": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
DEEP = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"$ref": "#/$defs/node"}, "text": {"type": "string"}},
            "required": ["text"],
            "additionalProperties": False,
        }
    },
}


class Grammar:
    """As vLLM's XgrammarGrammar: a matcher that is moved and rolled back."""

    def __init__(self, ctx: Any) -> None:
        self.ctx, self.matcher = ctx, xgrammar.GrammarMatcher(ctx)


Grammar.__module__ = "vllm.v1.structured_output.backend_xgrammar"


class Manager:
    """As vLLM's StructuredOutputManager."""

    tokenizer: Any = TOKENIZER
    enable_in_reasoning = False

    def __init__(self, reasoner: Any = None) -> None:
        self.reasoner_cls = reasoner
        model = SimpleNamespace(max_model_len=LONGEST, get_vocab_size=lambda: SIZE)
        self.vllm_config = SimpleNamespace(model_config=model)
        self.compiler: Any = xgrammar.GrammarCompiler(
            xgrammar.TokenizerInfo.from_huggingface(TOKENIZER, vocab_size=SIZE)
        )

    def _create_grammar(self, request: Any) -> Any:
        kind, source = request.structured_output_request.structured_output_key
        return Grammar(getattr(self.compiler, f"compile_{kind}")(source))


create: Callable[[Any, Any], Any] = bind_to_budget(Manager._create_grammar)


class Written(NamedTuple):
    """tokens: of a text, with the one that ended it. is_whole: whether one did."""

    text: str
    tokens: int
    is_whole: bool


SETTINGS: dict[str, Any] = {
    "ignore_eos": False,
    "min_tokens": 0,
    "bad_words_token_ids": None,
    "allowed_token_ids": None,
    "extra_args": None,
}


def asked(kind: str, source: str, max_tokens: int, **sampling: Any) -> Any:
    return SimpleNamespace(
        structured_output_request=SimpleNamespace(structured_output_key=(kind, source)),
        max_tokens=max_tokens,
        num_prompt_tokens=PROMPT,
        sampling_params=SimpleNamespace(**{**SETTINGS, **sampling}),
    )


def write(grammar: Any, max_tokens: int, seed: int) -> Written:
    """Any legal text, drawn uniformly from its masks, with drafts that are taken back between."""
    drawn, tokens = random.Random(seed), list[int]()
    row = np.zeros((1, num_mask_words(SIZE)), dtype=np.int32)
    while len(tokens) < max_tokens and not grammar.matcher.is_terminated():
        grammar.matcher.fill_next_token_bitmask(row, 0)
        bits = np.unpackbits(row.view(np.uint8)[0], bitorder="little")[:SIZE]
        legal = np.flatnonzero(bits).tolist()
        draft = drawn.choice(legal)
        assert grammar.matcher.accept_token(draft)
        grammar.matcher.rollback(1)
        tokens.append(drawn.choice(legal))
        assert grammar.matcher.accept_token(tokens[-1])
    is_whole = grammar.matcher.is_terminated()
    text: Any = TOKENIZER.decode(tokens[: len(tokens) - is_whole])
    return Written(text, len(tokens), is_whole)


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The features that have done something; vLLM brings Prometheus's package."""
    found: list[str] = []
    monkeypatch.setattr(endings, "count", found.append)
    return found


@pytest.mark.parametrize("schema", [OPEN, DEEP], ids=["open", "deep"])
@pytest.mark.parametrize("max_tokens", [25, 40])
def test_every_text_is_whole(schema: dict[str, Any], max_tokens: int) -> None:
    manager, source = Manager(), json.dumps(schema)
    cut = 0
    for seed in range(6):
        request = asked("json_schema", source, max_tokens)
        found = write(create(manager, request), max_tokens, seed)
        assert found.is_whole
        assert found.tokens <= max_tokens
        jsonschema.validate(json.loads(found.text), schema)
        cut += not write(manager._create_grammar(request), max_tokens, seed).is_whole
    assert cut > 0  # without a budget


def test_texts_that_are_ended_early_are_counted_once(counted: list[str]) -> None:
    grammar = create(Manager(), asked("grammar", FREE, 1))  # for the token that ends it
    assert write(grammar, 1, 1) == Written("", 1, is_whole=True)
    assert counted == ["endings"]
    grammar.matcher.reset()
    assert not grammar.matcher.is_terminated()
    assert write(grammar, 1, 1) == Written("", 1, is_whole=True)
    assert counted == ["endings"]
    fits = create(Manager(), asked("grammar", FIXED, 90))
    assert write(fits, 90, 1).is_whole
    assert counted == ["endings"]


def test_the_models_length_is_a_budget_too() -> None:
    request = asked("grammar", 'root ::= "a" "b"*', 10**6)
    written = write(create(Manager(), request), 10**6, 0)
    assert written.is_whole
    assert written.tokens <= LONGEST - PROMPT


@pytest.mark.parametrize(
    "setting",
    [
        {"ignore_eos": True},
        {"min_tokens": 3},
        {"bad_words_token_ids": [[7]]},
        {"allowed_token_ids": [7, 8]},
        {"extra_args": {"guided_spec_endings": False}},
    ],
    ids=lambda one: next(iter(one)),
)
def test_who_forbids_what_would_end_a_text_gets_no_budget(setting: dict[str, Any]) -> None:
    assert not has_budget(Manager(), asked("grammar", FREE, 9, **setting))
    others = {"extra_args": {"other": False}}
    assert has_budget(Manager(), asked("grammar", FREE, 9, **others))


def test_no_budget_behind_reasoning_and_where_no_text_is_that_short() -> None:
    assert not has_budget(Manager(reasoner=object), asked("grammar", FREE, 9))
    assert not has_budget(Manager(), asked("grammar", FIXED, 9))
    assert has_budget(Manager(), asked("grammar", FIXED, 90))


def has_budget(manager: Manager, request: Any) -> bool:
    return isinstance(create(manager, request).matcher, EndingMatcher)


def test_a_tokenizer_that_cannot_be_read_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(endings, "warn", warned.append)
    manager = Manager()
    manager.tokenizer = object()
    for _ in range(2):
        assert not has_budget(manager, asked("grammar", FREE, 9))
    (text,) = warned
    assert text.startswith("texts are cut off at max_tokens: ")


def test_other_grammars_are_left_alone() -> None:
    other = SimpleNamespace(matcher=None)
    assert bind_to_budget(lambda *_: other)(Manager(), asked("grammar", "", 9)) is other


def test_endings_are_found_once_for_each_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = list[Any](), EndingsCache._make

    def counted(self: EndingsCache, *args: Any) -> Any:
        made.append(args)
        return make(self, *args)

    monkeypatch.setattr(EndingsCache, "_make", counted)
    manager = Manager()
    for source in ('root ::= "a"*', 'root ::= "b"*', 'root ::= "a"*'):
        create(manager, asked("grammar", source, 9))
    assert len(made) == 2


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
@pytest.mark.filterwarnings("ignore")  # vLLM's own
def test_vllms_scheduler_cuts_drafts_that_leave_no_way_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six tokens are one ``c``, up to four of ``a`` and the end; drafts know no budget."""
    from guided_spec.integrations.vllm.plugin import install
    from tests.integrations.vllm import parts

    parts.keep_functions(monkeypatch, endings.PATCHES)
    install("it", endings.PATCHES)
    scheduler = parts.make_scheduler(parts.make_config())
    request = parts.add_request(scheduler, "it", max_tokens=6, regex="ca*")
    step = parts.first_step(scheduler, 1)
    (c,), (a,) = (TOKENIZER.encode(text, add_special_tokens=False) for text in "ca")
    stop = request.structured_output_request.grammar.ctx.tokenizer_info.stop_token_ids[0]
    after = parts.next_step(scheduler, step, {"it": [c]}, {"it": [a] * parts.NUM_DRAFT})
    assert after.scheduled.scheduled_spec_decode_tokens["it"] == [a] * 4
    rows = np.unpackbits(after.grammar.grammar_bitmask.view(np.uint8), axis=1, bitorder="little")
    legal = [set(np.flatnonzero(row[:SIZE]).tolist()) for row in rows[:5]]
    assert a in legal[3]
    assert legal[4] == {stop}
    parts.end_step(scheduler, after.scheduled, {"it": [a, a, a, a, stop]}, {})
    assert request.is_finished()
    assert request.structured_output_request.grammar.is_terminated()
    assert request.num_output_tokens == 6
