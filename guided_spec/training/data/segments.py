"""One record as token ids, and which of them are answers.

Prompts and answers are tokenized apart, as they are when the target is served: the prompt alone
first, the answer token by token behind it. A token that would reach across the border never occurs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from guided_spec.engine.prompt import Message, PromptEncoder, text_ids
from guided_spec.errors import ConfigError, PromptError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.training.data.records import Example, read_example

__all__ = ["Encoded", "encode_record"]

# Some tokenizers put a space before a text; behind one of these they cannot.
ANCHORS = ("\n", "a", '"')


class Encoded(NamedTuple):
    """A document of T tokens.

    loss_mask: T entries, whether a token belongs to an answer; never the first token.
    answer_start: where the last answer begins, T if there is none.
    grammar: what the last answer has to match, None for free text.
    """

    input_ids: list[int]
    loss_mask: list[bool]
    answer_start: int
    grammar: GrammarSpec | None


class Segment(NamedTuple):
    """A piece of a document that is tokenized by itself."""

    token_ids: list[int]
    is_answer: bool


def encode_record(record: Mapping[str, Any], tokenizer: Any, stop_ids: Sequence[int]) -> Encoded:
    """Tokenize a record of one of the shapes that ``read_example`` reads.

    stop_ids: the tokens that end an answer, at least one. The last answer is cut behind its first
        one, and gets one where it has none. In earlier answers what follows it is no answer.

    Every answer of a chat counts. Only the last one does where the chat template writes earlier
    turns in another way once later ones follow: their tokens are not those that were generated.
    Raises ConfigError for a record that cannot be read, PromptError for a prompt without tokens
    and for a chat that the template refuses.
    """
    example = read_example(record)
    encoder = PromptEncoder(tokenizer, len(tokenizer), sys.maxsize)
    if example.prompt is None:
        segments = _text_segments(str(example.answer), tokenizer)
    elif isinstance(example.prompt, str):
        segments = [Segment(encoder.encode(example.prompt), is_answer=False)]
        if isinstance(example.answer, str):
            answer = _continuation(tokenizer, example.answer)
            segments.append(Segment(answer, is_answer=True))
    else:
        segments = _chat_segments(example, encoder, tokenizer)
    # Behind the last answer there may be a question that nobody answered.
    grammar = None if example.answer is None else example.grammar
    return _join(segments, grammar, _Stops(tokenizer, stop_ids))


class _Stops:
    """The tokens that end an answer, and which of them to write."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int]) -> None:
        if not stop_ids:
            raise ConfigError("stop_ids", stop_ids, "must be at least one token: answers end in it")
        preferred = getattr(tokenizer, "eos_token_id", None)
        self._ids = frozenset(stop_ids)
        self.written = preferred if preferred in self._ids else min(self._ids)

    def length(self, token_ids: Sequence[int]) -> int | None:
        """Tokens up to the first one that ends the text, itself included; None if none does."""
        return next((at for at, token in enumerate(token_ids, 1) if token in self._ids), None)


def _join(segments: list[Segment], grammar: GrammarSpec | None, stops: _Stops) -> Encoded:
    input_ids: list[int] = []
    loss_mask: list[bool] = []
    answer_start = sum(len(segment.token_ids) for segment in segments)
    for index, (token_ids, is_answer) in enumerate(segments):
        length = len(token_ids)
        if is_answer:
            length = stops.length(token_ids) or length
            if index == len(segments) - 1:
                answer_start = len(input_ids)
                token_ids = token_ids[:length]
                if stops.length(token_ids) is None:
                    token_ids = [*token_ids, stops.written]
                length = len(token_ids)
        input_ids += token_ids
        loss_mask += [is_answer and at < length for at in range(len(token_ids))]
    loss_mask[:1] = [False]
    return Encoded(input_ids, loss_mask, answer_start, grammar)


def _text_segments(text: str, tokenizer: Any) -> list[Segment]:
    token_ids = text_ids(tokenizer, text)
    start = int(bool(token_ids) and token_ids[0] == getattr(tokenizer, "bos_token_id", None))
    return [
        Segment(token_ids[:start], is_answer=False),
        Segment(token_ids[start:], is_answer=True),
    ]


def _chat_segments(example: Example, encoder: PromptEncoder, tokenizer: Any) -> list[Segment]:
    assert isinstance(example.prompt, list)
    messages = [*example.prompt]
    if isinstance(example.answer, Mapping):
        messages.append(example.answer)
    # A chat cannot begin with an answer: nothing would be asked.
    turns = [at for at, message in enumerate(messages) if at and message["role"] == "assistant"]
    if not turns:
        return [Segment(encoder.encode(messages), is_answer=False)]
    messages = messages[: turns[-1] + 1]
    whole = _render(tokenizer, messages)
    starts = [encoder.text(messages[:turn]) or "" for turn in turns]
    ends = [_render(tokenizer, messages[: turn + 1]) for turn in turns[:-1]] + [whole]
    borders = [text for pair in zip(starts, ends, strict=True) for text in pair]
    if not _are_prefixes(borders, whole):
        answer = _last_answer(messages[-1], starts[-1], whole)
        return [
            Segment(encoder.encode(messages[:-1]), is_answer=False),
            Segment(_continuation(tokenizer, answer), is_answer=True),
        ]
    segments = [Segment(encoder.encode(messages[: turns[0]]), is_answer=False)]
    at = len(starts[0])
    for index, border in enumerate(borders[1:]):
        piece = _continuation(tokenizer, whole[at : len(border)])
        segments.append(Segment(piece, is_answer=index % 2 == 0))
        at = len(border)
    return segments


def _are_prefixes(texts: Sequence[str], whole: str) -> bool:
    lengths = [len(text) for text in texts]
    return lengths == sorted(lengths) and all(whole.startswith(text) for text in texts)


def _last_answer(message: Message, prompt: str, whole: str) -> str:
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    content = message.get("content")
    if not isinstance(content, str):
        fix = "must be text: the chat template writes the prompt in another way once it is answered"
        raise ConfigError("content", content, fix)
    return content


def _render(tokenizer: Any, messages: Sequence[Message]) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False
        )
    except Exception as error:  # a template may raise anything
        raise PromptError(f"messages: the chat template refused them: {error}") from error
    return text


def _continuation(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text that stands behind another one."""

    def encode(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False)["input_ids"])

    alone, behind = encode("x"), encode("\nx")
    if behind[-len(alone) :] != alone:
        for anchor in ANCHORS:
            head, both = encode(anchor), encode(anchor + text)
            if both[: len(head)] == head:
                return both[len(head) :]
    return encode(text)
