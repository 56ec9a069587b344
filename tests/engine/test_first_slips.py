"""What a newcomer writes first: taken where it has one meaning, else refused in words that help."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
import logging
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from guided_spec.engine.llm import LLM
from guided_spec.errors import (
    BudgetTooSmallError,
    ConfigError,
    GuidedSpecError,
    ModelError,
    PromptError,
    UnknownOptionError,
)
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.proposers import PROPOSERS, register_proposer, require_draft, takes_draft
from guided_spec.types import SamplingParams
from tests.tiny_llm import make_llm, near_copy, tiny_model


class _Any:
    """Classes that a type checker does not look at."""

    LLM: Any = LLM
    SamplingParams: Any = SamplingParams


class Contact(BaseModel):
    """A grammar by its type."""

    is_on: bool


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm("llama") as made:
        yield made


@pytest.mark.every_case
@pytest.mark.parametrize(
    "given",
    [Contact, GrammarSpec.json_schema(Contact), Literal["a", "b"], re.compile("a+"), list[bool]],
    ids=str,
)
def test_a_grammar_may_stand_for_the_parameters(llm: LLM, given: Any) -> None:
    outputs = {
        llm.generate("on", given)[0].text,
        llm.generate("on", grammar=given)[0].text,
        llm.generate("on", SamplingParams(grammar=given))[0].text,
        llm.generate("on", SamplingParams(), grammar=given)[0].text,
        llm.generate(["on"], [SamplingParams()], grammar=given)[0].text,
        "".join(chunk.text for chunk in llm.stream("on", given)),
        "".join(chunk.text for chunk in llm.stream("on", grammar=given)),
    }
    assert len(outputs) == 1


def test_its_value_is_parsed(llm: LLM) -> None:
    assert isinstance(llm.generate("on", Contact)[0].parsed, Contact)


def test_asyncio_takes_them_too(llm: LLM) -> None:
    async def both() -> list[Any]:
        (output,) = await llm.agenerate("on", grammar=Contact)
        return [output.parsed, *[chunk.parsed async for chunk in llm.astream("on", Contact)][-1:]]

    one, other = asyncio.run(both())
    assert one == other
    assert isinstance(one, Contact)


def test_arguments_are_known_by_their_kind(llm: LLM) -> None:
    """Type checkers, of which one reads this, take the first of these calls too."""
    any_llm: Any = llm
    short = SamplingParams(max_tokens=40)
    chat: Any = [{"role": "user", "content": "on"}]
    plain: Any = {"chat_template_kwargs": {"chat_template": "{{ messages[0].content }}"}}
    outputs = {
        llm.generate("on", grammar=Contact, params=short)[0].text,
        llm.generate("on", Contact, short)[0].text,
        llm.generate("on", short, Contact)[0].text,
        any_llm.generate("on", Contact, params=short)[0].text,
        llm.generate("on", short, response_format=Contact)[0].text,
        next(llm.map(["on"], Contact, short)).text,
        next(llm.map([{"word": "on"}], short, Contact, prompt="{word}")).text,
        next(llm.map(["on"], short, response_format=Contact)).text,
        "".join(chunk.text for chunk in llm.stream("on", Contact, short)),
        asyncio.run(llm.agenerate("on", Contact, short))[0].text,
        any_llm.chat(chat, None, Contact, params=short, **plain).text,
        any_llm.chat(chat, Contact, short, **plain).text,
        any_llm.chat(chat, short, response_format=Contact, **plain).text,
        "".join(chunk.text for chunk in any_llm.stream_chat(chat, Contact, short, **plain)),
        asyncio.run(any_llm.achat(chat, Contact, short, **plain)).text,
    }
    assert len(outputs) == 1
    assert llm.generate("on", ["yes", "no"])[0].text in ("yes", "no")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda llm: llm.generate(), "^prompts=None: is missing: generate needs it"),
        (lambda llm: llm.map(), "^rows=None: is missing: map needs it"),
        (lambda llm: llm.stream(), "^prompts=None: is missing: stream needs it"),
        (lambda llm: asyncio.run(llm.agenerate()), "^prompts=None: is missing"),
        (lambda llm: llm.chat(), "^messages=None: is missing: chat needs it"),
        (lambda llm: llm.stream_chat(), "^messages=None: is missing: stream_chat needs it"),
        (lambda llm: asyncio.run(llm.achat()), "^messages=None: is missing: achat needs it"),
        (lambda llm: llm.choose("a"), "^choices=None: is missing"),
        (lambda llm: llm.choose("a", ["b"], "all"), "^choose='all': takes prompts, choices; give"),
        (lambda llm: llm.generate("a", prompts="b"), "^prompts='a': is given twice"),
        (lambda llm: llm.generate("a", Contact, Contact), "^grammar=.*: is given twice"),
        (lambda llm: llm.generate("a", 3, 4), "^params=4: is given twice"),
        (lambda llm: llm.chat([], [], [], []), r"^chat=\[\]: takes messages, tools; give"),
        (
            lambda _: _Any.LLM("a", "ngram", 5, "b"),
            "^LLM='b': takes model, proposer, num_draft_tok",
        ),
        (lambda _: _Any.SamplingParams(5), "^params=5: SamplingParams takes its values by name"),
        (lambda llm: llm.generate("a", response_fromat=Contact), "did you mean response_format"),
    ],
)
def test_no_call_ends_in_a_type_error(llm: LLM, call: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        call(llm)


def test_two_grammars_are_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match=r"^grammar=.*params is a grammar too"):
        llm.generate("on", Contact, grammar=Contact)
    with pytest.raises(ConfigError, match=r"^grammar=.*params have one too"):
        llm.generate("on", SamplingParams(grammar=Contact), grammar=Contact)


def test_strings_are_a_choice(llm: LLM) -> None:
    spec = GrammarSpec.choice(["yes", "no"])
    assert GrammarSpec.of(["yes", "no"]) == GrammarSpec.of(("yes", "no")) == spec
    assert GrammarSpec.of({"yes", "no"}) == GrammarSpec.choice(["no", "yes"])
    assert llm.generate("on", grammar=["yes", "no"])[0].text in ("yes", "no")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: SamplingParams(grammar=5), r"^grammar=5: is not a grammar: pass a GrammarSpec"),
        (lambda: SamplingParams(grammar=len), r"^grammar=<built-in .*: is a function, which goes"),
        (lambda: SamplingParams(grammar=lambda text: text), r"is a function, which goes into"),
        (lambda: SamplingParams(grammar=partial(print, 1)), r"is a function, which goes into"),
        (lambda: SamplingParams(grammar=["a", 3]), r"^grammar=.*a list means one of its strings"),
        (lambda: SamplingParams(grammar=[]), r"^grammar=\[\]: a list means one of its strings"),
        (lambda: SamplingParams(stop=5), r"^stop=5: must be a str, or a list of them$"),  # type: ignore[arg-type]
        (lambda: SamplingParams(stop=b"x"), r"^stop=b'x': must be a str"),  # type: ignore[arg-type]
        (
            lambda: GrammarSpec.from_response_format({"type": "json_schem"}),
            r"^response_format.type='json_schem': .*; did you mean json_schema\?",
        ),
        (
            lambda: GrammarSpec.from_response_format({"type": "object", "properties": {}}),
            r"a JSON schema goes into \{\"type\": \"json_schema\"",
        ),
        (
            lambda: GrammarSpec.from_response_format({"type": "json_object", "schemas": {}}),
            r"^response_format.schemas=\{\}: is not known here.*did you mean schema\?",
        ),
    ],
)
def test_values_that_mean_nothing(make: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        make()
    assert "pydantic-core" not in str(caught.value)


def test_a_type_that_is_none_is_named(llm: LLM) -> None:
    wrong = {"type": "object", "properties": {"a": {"type": ["strnig", "null"]}}}
    with pytest.raises(GuidedSpecError, match="'/properties/a/type': 'strnig' is no type, did you"):
        llm.generate("on", grammar=wrong)
    with pytest.raises(GuidedSpecError, match="at '/type': 'text' is no type: the types are array"):
        llm.generate("on", grammar={"type": "text"})


def test_a_response_format_is_a_grammar() -> None:
    schema = {"type": "boolean"}
    nested = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert GrammarSpec.of(nested) == GrammarSpec.json_schema(schema)
    assert GrammarSpec.of({"type": "json_object"}) == GrammarSpec.json_object()
    with pytest.raises(ConfigError, match=r"json_schema\.schem={}: is not known here"):
        GrammarSpec.of({"type": "json_schema", "json_schema": {"schem": {}}})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"gpu_memory_utilization": 0.5}, r"=0.5: is no option; did you mean kv_memory_bytes\?"),
        ({"max_num_seqs": 4}, r"did you mean max_batch_size\?"),
        ({"torch_dtype": "auto"}, r"did you mean dtype\?"),
        ({"max_model_length": 4}, r"did you mean max_model_len\?"),
        ({"batch": 4}, r"did you mean max_batch_size\?"),
        ({"propser": "ngram"}, r"did you mean proposer\?"),
        ({"drft": "org/draft"}, r"did you mean draft\?"),
        ({"assistant_model": "org/draft"}, r"did you mean draft\?"),
        ({"engne": "vllm"}, r"did you mean engine\?"),
        ({"model_path": "org/model"}, r"did you mean model\?"),
        ({"n_ctx": 4}, r"did you mean max_model_len\?"),
        ({"max_new_tokens": 4}, r"=4: belongs to a request: pass params=SamplingParams\(max_to"),
        ({"temperature": 1}, r"=1: belongs to a request: pass params=SamplingParams\(temperature="),
        ({"nothing_like_it": 4}, r"=4: is no option; the names are attn_implementation, "),
    ],
)
def test_options_by_other_names(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnknownOptionError, match=reason):
        LLM("./nowhere", **options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_tokens": 4}, r"pass params=SamplingParams\(max_tokens=\.\.\.\)"),
        ({"response_fromat": Contact}, r"did you mean response_format\?"),
        ({"toolz": []}, r"did you mean tools\?"),
        ({"functions": []}, r"did you mean tools\?"),
        ({"function_call": "auto"}, r"did you mean tool_choice\?"),
    ],
)
def test_options_of_a_chat(llm: LLM, options: Any, reason: str) -> None:
    with pytest.raises(UnknownOptionError, match=reason):
        llm.chat([{"role": "user", "content": "on"}], **options)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"max_tokens": 4},
            r"^max_tokens=4: belongs to a request: pass params=SamplingParams\(max_",
        ),
        (
            {"max_new_tokens": 4},
            r"^max_new_tokens=4: .* pass params=SamplingParams\(max_tokens=\.\.",
        ),
        ({"grammer": Contact}, r"^grammer=.*: is no option; did you mean grammar\?"),
        ({"schema": Contact}, r"^schema=.*: is no option; did you mean grammar\?"),
        ({"regex": "[0-9]"}, r"^regex=.*: is no option; did you mean grammar\?"),
        ({"choices": ["a"]}, r"^choices=.*: is no option; did you mean grammar\?"),
        ({"sampling_params": None}, r"^sampling_params=None: is no option; did you mean params\?"),
        ({"on_errors": "raise"}, r"^on_errors='raise': is no option; did you mean on_error\?"),
    ],
)
def test_options_of_other_calls(llm: LLM, options: Any, reason: str) -> None:
    async def ask() -> Any:
        return await llm.agenerate("on", **options)

    async def astream() -> Any:
        return [chunk async for chunk in llm.astream("on", **options)]

    calls: list[Any] = [llm.generate, llm.stream, llm.map]
    for call in calls:
        with pytest.raises(UnknownOptionError, match=reason):
            call(["on"], **options)
    for found in (ask, astream):
        with pytest.raises(UnknownOptionError, match=reason):
            asyncio.run(found())


@pytest.mark.parametrize("name", ["progress", "trace"])
def test_a_switch_takes_true_or_false(llm: LLM, name: str) -> None:
    options: Any = {name: "no"}
    with pytest.raises(ConfigError, match=f"^{name}='no': must be True or False"):
        llm.generate("on", **options)


@pytest.mark.parametrize("proposer", [None, 5, "", "ngrm"])
def test_another_proposer_has_a_name(llm: LLM, proposer: Any) -> None:
    with pytest.raises(ConfigError, match=f"^proposer={proposer!r}: must be"):
        llm.with_proposer(proposer)


@pytest.mark.parametrize("name", ["messages", "tools"])
def test_variables_of_a_template_are_no_arguments_of_the_chat(llm: LLM, name: str) -> None:
    given = {"chat_template": "{{ messages }}{{ tools }}", name: []}
    with pytest.raises(PromptError, match=rf"^chat_template_kwargs\.{name}=\[\]: "):
        llm.chat([{"role": "user", "content": "on"}], chat_template_kwargs=given)


def test_a_context_that_is_too_small_is_named() -> None:
    params = SamplingParams(max_tokens=40, grammar=GrammarSpec.regex("[0-9]{60}"))
    with make_llm("llama", max_model_len=16) as made:
        (output,) = made.generate("on", params, on_error="return")
    assert isinstance(output.error, BudgetTooSmallError)
    assert output.error.max_tokens == 40
    context = f"but the context has room for {output.error.room} tokens: send a shorter prompt"
    assert context in output.error.reason
    assert output.error.room < 16
    assert "allow at least" in output.error.reason


def test_options_of_a_choice(llm: LLM) -> None:
    choose: Any = llm.choose
    with pytest.raises(UnknownOptionError, match=r"^path='all': .*; did you mean paths\?"):
        choose("on", ["a", "b"], path="all")
    with pytest.raises(UnknownOptionError, match="^seed=1: belongs to a request"):
        choose("on", ["a", "b"], seed=1)


@pytest.mark.parametrize(
    ("field", "near"),
    [("max_new_tokens", "max_tokens"), ("temprature", "temperature"), ("schema", "grammar")],
)
def test_fields_of_sampling_parameters(field: str, near: str) -> None:
    options: Any = {field: 5}
    with pytest.raises(UnknownOptionError, match=f"^{field}=5: is no option; did you mean {near}"):
        SamplingParams(**options)
    assert [*inspect.signature(SamplingParams).parameters] == [
        one.name for one in dataclasses.fields(SamplingParams)
    ]


def test_a_chat_without_a_template(llm: LLM) -> None:
    with pytest.raises(GuidedSpecError, match=r"no chat template: take a model .* or pass chat_t"):
        llm.chat([{"role": "user", "content": "on"}])


def test_a_marker_that_nobody_names(llm: LLM) -> None:
    with pytest.raises(GuidedSpecError, match=r"after\(\) names no marker.*not there to name one"):
        llm.generate("on", grammar=GrammarSpec.choice(["a"]).after())


class _Nothing:
    """A proposer that forgets its return."""

    aux_hidden_layers = ()

    def __init__(self, context: Any) -> None:
        del context

    def propose(self, batch: Any, lookahead: Any) -> Any:
        del batch, lookahead

    def release(self, slots: Any) -> None:
        del slots


def test_a_proposer_that_returns_nothing_is_named() -> None:
    make: Any = _Nothing
    register_proposer("nothing", make)
    try:
        with make_llm("llama", "nothing") as made:
            (output,) = made.generate("on", on_error="return")
        assert "_Nothing.propose(...)=None: propose must return a Draft" in str(output.error)
    finally:
        del PROPOSERS["nothing"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("org/model", "ngram", "org/draft"), "^draft='org/draft': ngram drafts without a model"),
        (("org/model", "chain:grammar_forced+suffix", "x"), "^draft='x': chain:grammar_forced"),
        (("org/model", "eagle3", None), "^draft=None: eagle3 drafts with a model: name its folder"),
        (("org/model", "chain:ngram+draft_model", None), "^draft=None: draft_model drafts with"),
        (("./nowhere", None, None), "^model='./nowhere': there is no such folder"),
        (("org/model", None, "./nowhere"), "^draft='./nowhere': there is no such folder"),
        (("bundled", None, "bundled-reader"), "^draft='bundled-reader': drafts for no model"),
    ],
)
def test_what_is_missing_is_known_before_loading(
    monkeypatch: pytest.MonkeyPatch, arguments: Any, reason: str
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("it was loaded")

    monkeypatch.setattr("guided_spec.engine.setup.load_model", load)
    model, proposer, draft = arguments
    with pytest.raises((ConfigError, ModelError), match=reason):
        LLM(model, proposer, draft=draft)


@pytest.mark.parametrize("tokenizer", [5, ["org/model"]])
def test_a_tokenizer_of_a_wrong_kind(tokenizer: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^tokenizer=.*: must be a hub id, a folder, or a loaded tokenizer"
    ):
        LLM("org/model", tokenizer=tokenizer)


def test_a_missing_tokenizer_is_known_before_loading(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^tokenizer=.*there is no such folder"):
        LLM("org/model", tokenizer=str(tmp_path / "none"))


def test_another_proposer_takes_the_draft_only_where_it_needs_one() -> None:
    with make_llm("llama", "draft_model", near_copy("llama")) as made:
        with made.with_proposer("ngram") as other:
            assert other.generate("on", SamplingParams(max_tokens=3))[0].text
        with made.with_proposer("chain:ngram+draft_model") as other:
            assert other.generate("on", SamplingParams(max_tokens=3))[0].text


@pytest.mark.every_case
@pytest.mark.parametrize("spec", ["none", *PROPOSERS, "chain:ngram+draft_model"])
def test_who_takes_a_draft_is_decided_in_one_place(spec: str) -> None:
    if takes_draft(spec):
        require_draft(spec, "org/draft")
    else:
        with pytest.raises(ConfigError, match="drafts without a model"):
            require_draft(spec, "org/draft")
    assert takes_draft("none")


def test_plain_decoding_keeps_the_draft_that_it_is_compared_with() -> None:
    with (
        make_llm("llama", "draft_model", near_copy("llama")) as made,
        made.with_proposer("none") as plain,
        plain.with_proposer("draft_model") as other,
    ):
        assert other.generate("on", SamplingParams(max_tokens=3))[0].text


@pytest.mark.parametrize("num_more", [-100, 3_000])
def test_a_tokenizer_of_another_model(num_more: int) -> None:
    """Fewer rows than it has tokens, or far more: models pad by some hundreds at most."""
    model = copy.deepcopy(tiny_model("llama"))
    model.resize_token_embeddings(380 + num_more, mean_resizing=False)
    reason = f"it has 380 tokens and the model writes {380 + num_more}, so it is another model's"
    with pytest.raises(ModelError, match=reason):
        make_llm(model)


def test_what_an_llm_shows(llm: LLM) -> None:
    shown = repr(llm)
    assert shown.startswith("LLM('")
    assert "proposer='none', device='cpu', dtype='float32': " in shown
    assert re.search(r"[\d,]+ MiB of weights, \d+ (slots|blocks) of \d+ tokens", shown)


def test_nothing_but_what_is_asked_for_reaches_a_terminal(
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No bars of weights, and no warning of a tokenizer about a prompt that is refused anyway."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with LLM(max_model_len=64, max_batch_size=1) as llm:
        for prompt in ("word " * 4000, [{"role": "user", "content": "word " * 4000}]):
            with pytest.raises(GuidedSpecError, match="only 63 fit"):
                llm.generate(prompt)
    shown = capfd.readouterr()
    assert (shown.out, shown.err, caplog.messages) == ("", "", [])
