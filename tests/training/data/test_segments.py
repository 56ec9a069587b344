"""Records as tokens: what is trained on is what the target would have been asked and answered."""

from __future__ import annotations

import copy
from itertools import compress
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from guided_spec.engine.prompt import PromptEncoder
from guided_spec.errors import ConfigError, PromptError
from guided_spec.training.data.dataset import Encoded, encode_record

EOS = 0
CHAT = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1 it is"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": '{"n": 2}'},
]
# Removes what stands before ">>" from all answers but the last.
FORGETFUL = (
    "{% for m in messages %}{% set text = m.content if loop.last else m.content.split('>>')[-1] %}"
    "<{{ m.role }}>{{ text }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def prompt_ids(tokenizer: Any, prompt: Any) -> list[int]:
    return PromptEncoder(tokenizer, len(tokenizer), 10_000).encode(prompt)


def answers(encoded: Encoded, tokenizer: Any) -> str:
    text: str = tokenizer.decode(list(compress(encoded.input_ids, encoded.loss_mask)))
    return text


def test_held_out_documents(records: list[dict[str, Any]], tokenizer: Any) -> None:
    for record in records[:60]:
        ids, mask, start, grammar, _ = encode_record(record, tokenizer, [EOS])
        assert ids[:start] == prompt_ids(tokenizer, record["prompt"])
        assert tokenizer.decode(ids[start:-1]) == record["answer"]
        assert ids[-1] == EOS
        assert ids.count(EOS) == 1
        assert mask == [at >= start for at in range(len(ids))]
        assert grammar is not None
        assert grammar.kind == ("regex" if record["schema"] is None else "json_schema")


def test_prompt_and_answer_are_tokenized_apart(tokenizer: Any) -> None:
    together = tokenizer("The customer")["input_ids"]
    encoded = encode_record({"prompt": "The cust", "response": "omer"}, tokenizer, [EOS])
    assert encoded.input_ids[:-1] != together
    assert encoded.input_ids[: encoded.response_start] == tokenizer("The cust")["input_ids"]


def test_every_answer_of_a_chat(chat_tokenizer: Any) -> None:
    encoded = encode_record({"messages": CHAT, "schema": {}}, chat_tokenizer, [EOS])
    whole = chat_tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert chat_tokenizer.decode(encoded.input_ids) == whole[:-1]  # cut behind the last <eos>
    eos = chat_tokenizer.eos_token
    assert answers(encoded, chat_tokenizer) == f'1 it is{eos}{{"n": 2}}{eos}'
    assert encoded.input_ids[: encoded.response_start] == prompt_ids(chat_tokenizer, CHAT[:3])
    assert encoded.grammar is not None


def test_sharegpt_is_the_same_chat(chat_tokenizer: Any) -> None:
    roles = {"user": "human", "assistant": "gpt"}
    turns = [{"from": roles[turn["role"]], "value": turn["content"]} for turn in CHAT]
    assert encode_record({"conversations": turns}, chat_tokenizer, [EOS]) == encode_record(
        {"messages": CHAT}, chat_tokenizer, [EOS]
    )


def test_a_template_that_changes_the_question(tokenizer: Any) -> None:
    """Only the last answer counts, behind the prompt as it is served."""
    encoded = encode_record({"messages": CHAT}, tokenizer, [EOS])
    start = encoded.response_start
    assert encoded.input_ids[:start] == prompt_ids(tokenizer, CHAT[:-1])
    assert not any(encoded.loss_mask[:start])
    assert answers(encoded, tokenizer) == '{"n": 2}' + tokenizer.eos_token
    with pytest.raises(ConfigError, match="content=None: must be text"):
        encode_record(
            {"messages": [CHAT[0], {"role": "assistant", "content": None}]},
            _with_template(
                "{{ messages[-1].content or '' }}{% if add_generation_prompt %}?{% endif %}"
            ),
            [EOS],
        )


def test_a_template_that_forgets_thoughts() -> None:
    tokenizer = _with_template(FORGETFUL)
    chat = [*CHAT[:1], {"role": "assistant", "content": "hm>>1"}, *CHAT[2:]]
    chat[-1] = {"role": "assistant", "content": "well>>2"}
    encoded = encode_record({"messages": chat}, tokenizer, [EOS])
    assert answers(encoded, tokenizer) == "well>>2" + tokenizer.eos_token
    assert tokenizer.decode(encoded.input_ids[: encoded.response_start]).endswith("<assistant>")
    assert "hm" not in tokenizer.decode(encoded.input_ids)


def test_an_unanswered_question_is_cut_with_its_grammar(chat_tokenizer: Any) -> None:
    record = {"messages": CHAT[:3], "regex": "[0-9]"}
    encoded = encode_record(record, chat_tokenizer, [EOS])
    assert encoded == encode_record({"messages": CHAT[:2]}, chat_tokenizer, [EOS])
    assert encoded.grammar is None
    answered = encode_record({**record, "answer": "2"}, chat_tokenizer, [EOS])
    assert answers(answered, chat_tokenizer).endswith("2" + chat_tokenizer.eos_token)
    assert answered.grammar is not None
    for unanswered in ({"messages": CHAT[:1]}, {"messages": CHAT[1:2]}, {"prompt": "a"}):
        encoded = encode_record(unanswered, chat_tokenizer, [EOS])
        assert not any(encoded.loss_mask)
        assert encoded.response_start == len(encoded.input_ids) > 0


def test_plain_text_is_all_answer(tokenizer: Any) -> None:
    encoded = encode_record({"text": "Dear Ada"}, tokenizer, [EOS])
    assert encoded.input_ids == [*tokenizer("Dear Ada")["input_ids"], EOS]
    assert encoded.loss_mask == [False] + [True] * (len(encoded.input_ids) - 1)
    assert encoded.response_start == 0


def test_the_answer_ends_at_its_first_stop_token(tokenizer: Any) -> None:
    eos = tokenizer.eos_token
    cut = encode_record({"prompt": "a", "response": f"b{eos}c{eos}"}, tokenizer, [EOS])
    assert cut == encode_record({"prompt": "a", "response": "b"}, tokenizer, [EOS])
    assert answers(cut, tokenizer) == f"b{eos}"
    (dot,) = tokenizer(".")["input_ids"]
    ended = encode_record({"prompt": "a", "response": "b.c"}, tokenizer, [EOS, dot])
    assert answers(ended, tokenizer) == "b."
    written = encode_record({"prompt": "a", "response": "b"}, tokenizer, [dot, EOS])
    assert written.input_ids[-1] == EOS  # the tokenizer's own, where it is among them
    assert encode_record({"prompt": "a", "response": "b"}, tokenizer, [dot]).input_ids[-1] == dot
    with pytest.raises(ConfigError, match="stop_ids"):
        encode_record({"prompt": "a", "response": "b"}, tokenizer, [])


def test_a_tokenizer_that_puts_a_space_before_a_text() -> None:
    tokenizer = _spaced_tokenizer()
    encoded = encode_record({"prompt": "a cat", "response": "cat a"}, tokenizer, [EOS])
    tokens = tokenizer.convert_ids_to_tokens(encoded.input_ids)
    start = encoded.response_start
    assert "".join(tokens[:start]) == "<s>▁a▁cat"
    assert "".join(tokens[start:]) == "cat▁a</s>"
    text = encode_record({"text": "a cat"}, tokenizer, [EOS])
    assert text.response_start == 1  # behind <s>
    assert text.loss_mask[:2] == [False, True]


def test_what_cannot_be_encoded(tokenizer: Any) -> None:
    with pytest.raises(PromptError, match="no tokens"):
        encode_record({"prompt": "", "response": "b"}, tokenizer, [EOS])
    with pytest.raises(PromptError, match="template refused"):
        encode_record({"messages": CHAT}, _with_template("{{ raise_exception('no') }}"), [EOS])


def _with_template(template: str) -> Any:
    tokenizer = _spaced_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def _spaced_tokenizer() -> Any:
    """As SentencePiece tokenizers are: "▁" stands before every text, and <s> before a prompt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=120, special_tokens=["</s>", "<s>"], show_progress=False
    )
    letters = "".join(map(chr, range(33, 127))) + "\n"
    tokenizer.train_from_iterator(["a cat a cat", letters], trainer)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>")


MARKED = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{%- generation %}{{ m.content if loop.last else 'then' }}{{ eos_token }}{% endgeneration %}\n"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def test_the_template_says_what_is_generated(chat_tokenizer: Any) -> None:
    """Where it writes earlier answers in another way too: it marks them."""
    tokenizer = copy.deepcopy(chat_tokenizer)
    tokenizer.chat_template = MARKED
    encoded = encode_record({"messages": CHAT, "schema": {}}, tokenizer, [EOS])
    assert (
        answers(encoded, tokenizer) == f'then{tokenizer.eos_token}{{"n": 2}}{tokenizer.eos_token}'
    )
    start = encoded.response_start
    assert encoded.input_ids[-1] == EOS
    assert tokenizer.decode(encoded.input_ids[start:-1]) == '{"n": 2}'
    assert encoded.grammar is not None
    tokenizer.chat_template = MARKED.replace("== 'assistant'", "== 'nobody'")
    with pytest.raises(PromptError, match="marks no response of it as generated"):
        encode_record({"messages": CHAT}, tokenizer, [EOS])


@pytest.mark.parametrize("is_marked", [False, True])
def test_tools_stand_in_the_prompt(chat_tokenizer: Any, *, is_marked: bool) -> None:
    tokenizer = copy.deepcopy(chat_tokenizer)
    plain = MARKED.replace("{%- generation %}", "").replace("{% endgeneration %}", "")
    tokenizer.chat_template = MARKED if is_marked else plain
    record = {"messages": CHAT[:2], "tools": TOOLS}
    encoded = encode_record(record, tokenizer, [EOS])
    assert tokenizer.decode(encoded.input_ids[: encoded.response_start]) == (
        "add;<user>One?<assistant>"
    )
    asked = encode_record({**record, "messages": CHAT[:1]}, tokenizer, [EOS])
    assert asked.input_ids == encoded.input_ids[: encoded.response_start]
