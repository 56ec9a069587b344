"""Prompts as token ids, of a tokenizer that begins every text with a token of its own."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from guided_spec.engine.prompt import PromptEncoder
from guided_spec.training.data.dataset import encode_record

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role + ' ' + message.content + ' ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)
CHAT = [{"role": "user", "content": "hello"}]
BOS, END = 0, 1


@pytest.fixture
def tokenizer() -> Any:
    words = ["<s>", "</s>", "user", "assistant", "hello", "bye", "?"]
    table = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(table, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    made.chat_template = TEMPLATE
    return made


def test_there_is_one_beginning(tokenizer: Any) -> None:
    encoder = PromptEncoder(tokenizer, len(tokenizer), sys.maxsize)
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert rendered.startswith("<s>user")
    expected = [BOS, 2, 4, 3]
    assert encoder.encode(CHAT) == expected
    assert encoder.encode(rendered) == expected
    assert encoder.encode("user hello assistant") == expected
    assert encoder.encode("hello <s>") == [BOS, 4, BOS]
    assert encoder.encode("") == [BOS]
    assert encoder.text(rendered) == rendered


def test_a_tokenizer_without_one_changes_nothing(tokenizer: Any) -> None:
    tokenizer.bos_token = None
    encoder = PromptEncoder(tokenizer, len(tokenizer), sys.maxsize)
    assert encoder.encode("hello") == [BOS, 4]


@pytest.mark.parametrize("name", ["messages", "prompt", "rendered", "text"])
def test_documents_have_one_beginning(tokenizer: Any, name: str) -> None:
    reply = {"role": "assistant", "content": "bye"}
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    records: dict[str, dict[str, Any]] = {
        "messages": {"messages": [*CHAT, reply]},
        "prompt": {"prompt": CHAT, "response": "bye"},
        "rendered": {"prompt": rendered, "response": "bye"},
        "text": {"text": rendered + "bye"},
    }
    encoded = encode_record(records[name], tokenizer, [END])
    assert encoded.input_ids == [BOS, 2, 4, 3, 5, END]
    assert not encoded.loss_mask[0]
