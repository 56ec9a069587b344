"""Documents ready to train on, as a ``datasets.Dataset``.

The columns ``input_ids``, ``loss_mask`` and ``seq_len`` are named as in the prepared datasets of
speculators.

One record as token ids, and which of them belong to responses.

Prompts and responses are tokenized apart, as in serving: the prompt first, the response after it.
So no token spans the border between them.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

from guided_spec.engine.chats.messages import pictures_of, plain_text
from guided_spec.engine.prompt import Message, Prompt, PromptEncoder, ReadPrompt, text_ids
from guided_spec.errors import ConfigError, GuidedSpecError, PromptError
from guided_spec.grammar.spec import GrammarSpec, Start
from guided_spec.models.pictures.picture import Picture, PicturePrompt
from guided_spec.training.data.pictures import (
    DocumentPictures,
    TargetSight,
    addresses_of,
    write_pictures_text,
)
from guided_spec.training.data.records import (
    RECORD_KEYS,
    Example,
    read_example,
    read_grammar,
    read_lines,
    refuse_unknown,
    require_datasets,
)

if TYPE_CHECKING:
    from datasets import Dataset

# Some tokenizers put a space before a text; after one of these they cannot.
ANCHORS = ("\n", "a", '"')

UNTRAINED = -100  # the label of a token without a loss, as torch and transformers have it

MARKS = re.compile(r"{%-?\s*generation\b")  # in a chat template: what follows is generated


class Encoded(NamedTuple):
    """A document of T tokens.

    loss_mask: T entries, whether a token belongs to a response; never the first token.
    response_start: where the last response begins, T if there is none.
    grammar: what the last response has to match, None for free text.
    pictures: None without any.
    """

    input_ids: list[int]
    loss_mask: list[bool]
    response_start: int
    grammar: GrammarSpec | None
    pictures: DocumentPictures | None = None


class Segment(NamedTuple):
    """A piece of a document that is tokenized by itself. pictures: the same with its pictures."""

    token_ids: list[int]
    is_response: bool
    pictures: PicturePrompt | None = None

    @classmethod
    def unanswered(cls, read: ReadPrompt) -> Segment:
        """One that is no response."""
        return cls(read.token_ids, is_response=False, pictures=read.pictures)


def encode_record(
    record: Mapping[str, Any],
    tokenizer: Any,
    stop_ids: Sequence[int],
    sight: TargetSight | None = None,
) -> Encoded:
    """Tokenize a record of one of the shapes that ``read_example`` reads, or read its tokens.

    stop_ids: the tokens that end a response, at least one. The last response is cut after its first
        stop token; one without a stop token gets one. In earlier responses the tokens after the
        first stop token are not trained on.
    sight: how the target reads pictures; None refuses them.

    Every response of a chat is trained on. The chat template says which text that is, if it marks
    what is generated. If it does not, and if it writes earlier turns differently once later turns
    exist, only the last response is trained on: earlier ones have other tokens than were generated.

    ``input_ids`` are taken as they are, up to the end of the last response. ``loss_mask`` says
    which of them are responses, or ``labels``, which are -100 elsewhere; a grammar is that of the
    last run. Raises ConfigError for a record that cannot be read, PromptError for a prompt without
    tokens and for a chat that the template refuses.
    """
    if record.get("input_ids") is not None:
        encoded = _encode_tokens(record, len(tokenizer), _Stops(tokenizer, stop_ids))
        if sight is not None:
            _refuse_places(encoded.input_ids, sight.reader.sight.placeholder)
        return encoded
    example = read_example(record)
    encoder = make_encoder(tokenizer, sight)
    if example.prompt is None:
        segments = _text_segments(str(example.response), tokenizer)
    elif isinstance(example.prompt, str):
        segments = [Segment(encoder.encode(example.prompt), is_response=False)]
        if isinstance(example.response, str):
            response = _continuation(tokenizer, example.response)
            segments.append(Segment(response, is_response=True))
    else:
        segments = _chat_segments(example, encoder, tokenizer)
    # The chat may end with a question that has no response.
    grammar = None if example.response is None else example.grammar
    for segment in segments:
        if not segment.is_response and segment.pictures is None:
            _refuse_places(segment.token_ids, encoder.sight.placeholder)
    encoded = _join(segments, grammar, _Stops(tokenizer, stop_ids))
    prompt = _join_pictures(segments, encoded.input_ids)
    if prompt is None or sight is None:
        return encoded
    addresses = addresses_of(example.messages)[: len(prompt.pictures)]
    return encoded._replace(pictures=DocumentPictures.of(prompt, addresses, sight.tower))


def make_encoder(tokenizer: Any, sight: TargetSight | None = None) -> PromptEncoder:
    """For prompts of any length. sight: how the target reads pictures; None refuses them."""
    pictures = None if sight is None else sight.reader
    return PromptEncoder(tokenizer, len(tokenizer), sys.maxsize, pictures)


def encode_prompt(example: Example, encoder: PromptEncoder) -> Prompt:
    """The prompt as an engine reads it, in tokens; the template gets the example's tools.

    The example has a prompt. Raises PromptError, and ConfigError for messages.
    """
    assert example.prompt is not None
    if isinstance(example.prompt, list) and example.tools is not None:
        read = encoder.read_chat(example.prompt, {"tools": example.tools})
        found = encoder.encode_chat(encoder.render(read, tools=example.tools), read)
    else:
        found = encoder.read(example.prompt)
    return found.token_ids if found.pictures is None else found.pictures


class _Stops:
    """The tokens that end a response, and which of them to write."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int]) -> None:
        if not stop_ids:
            raise ConfigError(
                "stop_ids", stop_ids, "must be at least one token: responses end in it"
            )
        preferred = getattr(tokenizer, "eos_token_id", None)
        self._ids = frozenset(stop_ids)
        self.written = preferred if preferred in self._ids else min(self._ids)

    def length(self, token_ids: Sequence[int]) -> int | None:
        """Tokens up to the first one that ends the text, itself included; None if none does."""
        return next((at for at, token in enumerate(token_ids, 1) if token in self._ids), None)


def _join(segments: list[Segment], grammar: GrammarSpec | None, stops: _Stops) -> Encoded:
    input_ids: list[int] = []
    loss_mask: list[bool] = []
    response_start = sum(len(segment.token_ids) for segment in segments)
    for index, (token_ids, is_response, _) in enumerate(segments):
        length = len(token_ids)
        if is_response:
            length = stops.length(token_ids) or length
            if index == len(segments) - 1:
                response_start = len(input_ids)
                token_ids = token_ids[:length]
                if stops.length(token_ids) is None:
                    token_ids = [*token_ids, stops.written]
                length = len(token_ids)
        input_ids += token_ids
        loss_mask += [is_response and at < length for at in range(len(token_ids))]
    loss_mask[:1] = [False]
    return Encoded(input_ids, loss_mask, response_start, grammar)


def _refuse_places(token_ids: Sequence[int], placeholder: int) -> None:
    """Raise PromptError for tokens that stand for a picture where there is none."""
    if placeholder in token_ids:
        fix = "write messages with parts of the type image"
        raise PromptError(f"the text holds token {placeholder}, a picture's place: {fix}")


def _join_pictures(segments: Sequence[Segment], input_ids: list[int]) -> PicturePrompt | None:
    """The whole document with the pictures of its segments; None without any."""
    pictures, places, start = list[Picture](), list[int](), 0
    for segment in segments:
        if segment.pictures is not None:
            pictures += segment.pictures.pictures
            places += [start + place for place in segment.pictures.places]
        start += len(segment.token_ids)
    return PicturePrompt(input_ids, tuple(pictures), places) if pictures else None


def _encode_tokens(record: Mapping[str, Any], vocab_size: int, stops: _Stops) -> Encoded:
    """Encode a record of tokens; those of a run after its first stop token are not trained on."""
    refuse_unknown(record, RECORD_KEYS)
    input_ids = _numbers(record, "input_ids")
    wrong = [token for token in input_ids if not 0 <= token < vocab_size]
    if wrong:
        fix = f"holds token {wrong[0]}, and the target's tokenizer has {vocab_size}"
        raise ConfigError("input_ids", f"{len(input_ids)} of them", fix)
    loss_mask = _token_loss_mask(record, input_ids)
    loss_mask[:1] = [False]
    starts = [at for at, here in enumerate(loss_mask) if here and not loss_mask[at - 1]]
    end = 0
    for start in starts:
        end = next((at for at in range(start, len(input_ids)) if not loss_mask[at]), len(input_ids))
        kept = start + (stops.length(input_ids[start:end]) or end - start)
        loss_mask[kept:end] = [False] * (end - kept)
        end = kept
    response_start = starts[-1] if starts else 0
    return Encoded(input_ids[:end], loss_mask[:end], response_start, read_grammar(record))


def _token_loss_mask(record: Mapping[str, Any], input_ids: list[int]) -> list[bool]:
    given = [name for name in ("loss_mask", "labels") if record.get(name) is not None]
    if len(given) != 1:
        fix = "need one of loss_mask and labels next to them, which says what is trained on"
        raise ConfigError("input_ids", f"{len(input_ids)} of them", fix)
    values = _numbers(record, given[0])
    if len(values) != len(input_ids):
        fix = f"must have a number for each of the {len(input_ids)} input_ids"
        raise ConfigError(given[0], f"{len(values)} of them", fix)
    if given == ["loss_mask"]:
        return [bool(value) for value in values]
    shifted = [at for at, value in enumerate(values) if value not in (UNTRAINED, input_ids[at])]
    if shifted:
        fix = f"must be the tokens of input_ids at the same positions, or {UNTRAINED}"
        raise ConfigError("labels", values[shifted[0]], fix)
    return [value != UNTRAINED for value in values]


def _numbers(record: Mapping[str, Any], name: str) -> list[int]:
    values = record[name]
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise ConfigError(name, values, "must be a list of whole numbers")
    return values


def _text_segments(text: str, tokenizer: Any) -> list[Segment]:
    token_ids = text_ids(tokenizer, text)
    start = int(bool(token_ids) and token_ids[0] == getattr(tokenizer, "bos_token_id", None))
    return [
        Segment(token_ids[:start], is_response=False),
        Segment(token_ids[start:], is_response=True),
    ]


def _chat_segments(example: Example, encoder: PromptEncoder, tokenizer: Any) -> list[Segment]:
    messages: list[Any] = example.messages
    known = {} if example.tools is None else {"tools": example.tools}
    read = encoder.read_chat(messages, known)
    if pictures_of(read):
        messages = read  # so that each is opened once

    def prompt_segment(until: int) -> Segment:
        text = encoder.render(messages[:until], **known)
        return Segment.unanswered(encoder.encode_chat(text, read[:until]))

    # A chat cannot begin with a response: it would have no prompt.
    turns = [at for at, message in enumerate(messages) if at and message["role"] == "assistant"]
    if not turns:
        return [prompt_segment(len(messages))]
    messages, read = messages[: turns[-1] + 1], read[: turns[-1] + 1]
    pieces = _Pieces(encoder, tokenizer, read)
    if MARKS.search(str(tokenizer.chat_template)):
        return _marked_segments(messages, pieces, tokenizer, known)
    settings = {"add_generation_prompt": False, **known}
    whole = encoder.render(messages, **settings)
    starts = [encoder.render(messages[:turn], **known) for turn in turns]
    ends = [encoder.render(messages[: turn + 1], **settings) for turn in turns[:-1]] + [whole]
    borders = [text for pair in zip(starts, ends, strict=True) for text in pair]
    if not _are_prefixes(borders, whole):
        response = _last_response(messages[-1], starts[-1], whole)
        return [prompt_segment(len(messages) - 1), pieces.response(response)]
    return pieces.cut(whole, [len(text) for text in borders])


class _Pieces:
    """Tokenizes a rendered chat in pieces, each with its pictures. messages: as they were read."""

    def __init__(
        self, encoder: PromptEncoder, tokenizer: Any, messages: Sequence[Mapping[str, Any]]
    ) -> None:
        self._encoder, self._tokenizer = encoder, tokenizer
        self._left = pictures_of(messages)
        # The engine reads all of it; whatever is trained on without pictures needs no reader.
        self._reader = encoder.pictures if self._left else None

    def cut(self, whole: str, borders: Sequence[int]) -> list[Segment]:
        """What is before ``borders``, then the pieces between: every second is a response."""
        if self._reader is not None:
            self._reader.require_places(whole, self._left)
        segments = [self._begin(whole[: borders[0]])]
        for number, (start, end) in enumerate(pairwise(borders)):
            make = self._go_on if number % 2 else self.response
            segments.append(make(whole[start:end]))
        return segments

    def response(self, text: str) -> Segment:
        """Raises PromptError for one that holds a picture."""
        if self._reader is not None and self._reader.places_in(text):
            raise PromptError("messages: a response holds a picture: models write text")
        return Segment(_continuation(self._tokenizer, text), is_response=True)

    def _begin(self, text: str) -> Segment:
        if self._reader is None or not self._reader.places_in(text):
            return Segment(self._encoder.encode_rendered(text), is_response=False)
        return self._seen(text, None)

    def _go_on(self, text: str) -> Segment:
        tokenize = partial(_continuation, self._tokenizer)
        if self._reader is None or not self._reader.places_in(text):
            return Segment(tokenize(text), is_response=False)
        return self._seen(text, tokenize)

    def _seen(self, text: str, tokenize: Callable[[str], list[int]] | None) -> Segment:
        assert self._reader is not None
        count = self._reader.places_in(text)
        found = self._reader.encode(text, self._left[:count], tokenize)
        del self._left[:count]
        return Segment(found.token_ids, is_response=False, pictures=found)


def _marked_segments(
    messages: Sequence[Message], pieces: _Pieces, tokenizer: Any, known: Mapping[str, Any]
) -> list[Segment]:
    """The segments of a chat, by the spans that its template marks as generated.

    Raises PromptError for a template that marks none of a chat.
    """
    render: Any = render_jinja_template  # its annotation is that of one of its two results
    try:
        rendered, found = render(
            [[dict(message) for message in messages]],
            chat_template=tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **known,
            **tokenizer.special_tokens_map,
        )
    except Exception as error:  # a template may raise anything
        raise PromptError(f"prompt: the chat template refused it: {error}") from error
    whole, spans = rendered[0], found[0]
    if not spans:
        raise PromptError("prompt: the chat template marks no response of it as generated")
    return pieces.cut(whole, [border for span in spans for border in span])


def _are_prefixes(texts: Sequence[str], whole: str) -> bool:
    lengths = [len(text) for text in texts]
    return lengths == sorted(lengths) and all(whole.startswith(text) for text in texts)


def _last_response(message: Message, prompt: str, whole: str) -> str:
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    content = message.get("content")
    if isinstance(content, list):  # of a message that was read
        content = plain_text(content, "content")
    if not isinstance(content, str):
        fix = "must be text: the chat template writes the prompt in another way once it is answered"
        raise ConfigError("content", content, fix)
    return content


def _continuation(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text that comes after another one."""

    def encode(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False)["input_ids"])

    alone, joined = encode("x"), encode("\nx")
    if joined[-len(alone) :] != alone:
        for anchor in ANCHORS:
            head, both = encode(anchor), encode(anchor + text)
            if both[: len(head)] == head:
                return both[len(head) :]
    return encode(text)


logger = logging.getLogger(__name__)

CHUNK = 4096  # documents that are Python lists at a time; the others are Arrow's


class Split(NamedTuple):
    """A dataset in two. heldout: documents that are not trained on; it may be empty."""

    train: Dataset
    heldout: Dataset


def load_examples(
    paths: Sequence[str | Path],
    tokenizer: Any,
    *,
    stop_ids: Sequence[int],
    max_length: int,
    limit: int | None = None,
    sight: TargetSight | None = None,
) -> Dataset:
    """Read and tokenize the records of ``read_lines``; all tokens stay in memory.

    max_length: tokens that a document may have; longer ones, and those without a response, are left
        out, and a warning tells how many. limit: documents at most. sight: see ``encode_record``.

    Columns: ``input_ids`` int64 [T]; ``loss_mask`` bool [T], see ``Encoded``; ``seq_len`` T;
    ``response_start``; ``grammar``, a text for ``read_grammar_text``, "" for none; ``index``, the
    record's number in the data from 0 on, those that are left out counted; ``pictures``, a text for
    ``read_pictures_text``, "" for none. Rows hold numpy arrays.

    Raises ConfigError naming file and line for a record that cannot be used, and where no document
    is left or ``datasets`` is not installed.
    """
    library = require_datasets()
    chunks: list[Any] = []
    rows: list[dict[str, Any]] = []
    kept = too_long = unanswered = 0
    for index, encoded in enumerate(_encode_all(paths, tokenizer, stop_ids, sight)):
        if kept == limit:
            break
        if not any(encoded.loss_mask):
            unanswered += 1
        elif len(encoded.input_ids) > max_length:
            too_long += 1
        else:
            rows.append(_row(encoded, index))
            kept += 1
            if len(rows) == CHUNK:
                chunks.append(_chunk(library, rows))
                rows = []
    left_out = f"{too_long} longer than {max_length} tokens, {unanswered} without a response"
    if not kept:
        fix = f"no document to train on ({left_out}): pass other files, or raise max_length"
        raise ConfigError("data", [str(path) for path in paths], fix)
    if too_long or unanswered:
        total = kept + too_long + unanswered
        logger.warning("left out %d of %d documents: %s", total - kept, total, left_out)
    if rows:
        chunks.append(_chunk(library, rows))
    dataset: Dataset = library.concatenate_datasets(chunks).with_format("numpy")
    return dataset


def split_heldout(dataset: Dataset, share: float, seed: int) -> Split:
    """Keep ``share`` of the documents, in [0, 1), apart; a function of ``seed`` and their number.

    At least one is kept apart unless ``share`` is 0, and at least one is left to train on; both
    parts keep the order. Raises ConfigError where that cannot be.
    """
    if not 0 <= share < 1:
        raise ConfigError("share", share, "must be at least 0 and below 1")
    total = len(dataset)
    apart = max(1, round(share * total)) if share else 0
    if apart >= total:
        raise ConfigError("share", share, f"leaves nothing to train on of {total} documents")
    order = np.random.default_rng(seed).permutation(total)
    train, heldout = (sorted(part.tolist()) for part in (order[apart:], order[:apart]))
    return Split(dataset.select(train), dataset.select(heldout))


def write_grammar_text(grammar: GrammarSpec | None) -> str:
    """A grammar as one line of JSON, for a column of text; "" for None."""
    return "" if grammar is None else json.dumps(asdict(grammar), ensure_ascii=False)


def read_grammar_text(text: str) -> GrammarSpec | None:
    """The grammar in a text of ``write_grammar_text``; None for ""."""
    if not text:
        return None
    fields = json.loads(text)
    start = fields.pop("start")
    return GrammarSpec(**fields, start=None if start is None else Start(**start))


def _encode_all(
    paths: Sequence[str | Path],
    tokenizer: Any,
    stop_ids: Sequence[int],
    sight: TargetSight | None,
) -> Iterator[Encoded]:
    for source, record in read_lines(paths):
        try:
            yield encode_record(record, tokenizer, stop_ids, sight)
        except GuidedSpecError as error:
            raise ConfigError("data", source, str(error)) from error


def _row(encoded: Encoded, index: int) -> dict[str, Any]:
    return {
        "input_ids": encoded.input_ids,
        "loss_mask": encoded.loss_mask,
        "seq_len": len(encoded.input_ids),
        "response_start": encoded.response_start,
        "grammar": write_grammar_text(encoded.grammar),
        "index": index,
        "pictures": write_pictures_text(encoded.pictures),
    }


def _chunk(library: Any, rows: list[dict[str, Any]]) -> Any:
    number = library.Value("int64")
    features = library.Features(
        input_ids=library.List(number),
        loss_mask=library.List(library.Value("bool")),
        seq_len=number,
        response_start=number,
        grammar=library.Value("string"),
        index=number,
        pictures=library.Value("string"),
    )
    columns = {name: [row[name] for row in rows] for name in features}
    return library.Dataset.from_dict(columns, features=features)
