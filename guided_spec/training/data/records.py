"""Training records: one document each, in the shapes people keep them in.

They come from JSON Lines, Parquet, datasets of the hub, and presets.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from guided_spec.engine.prompt import Message
from guided_spec.errors import ConfigError, reason_of
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.training.data.pictures import picture_parts, with_whole_paths

# How a record names its grammar: the constructor, of one argument or of several.
GRAMMARS: dict[str, Callable[..., GrammarSpec | None]] = {
    "schema": GrammarSpec.json_schema,
    "regex": GrammarSpec.regex,
    "choice": GrammarSpec.choice,
    "ebnf": GrammarSpec.ebnf,
    "lark": GrammarSpec.lark,
    "structural_tag": GrammarSpec.structural_tag,
    "response_format": GrammarSpec.from_response_format,
}
# The options of each of them.
SETTINGS = {
    "any_whitespace": "schema",
    "unsupported": "schema",
    "key_order": "schema",
    "additional_properties": "schema",
    "root": "ebnf",
}
GRAMMAR_KEYS = (*GRAMMARS, *SETTINGS, "after", "reasoning_budget")
"""The members of a record that ``read_grammar`` reads."""

NOTE_KEYS = ("id", "kind", "metadata", "source")
"""What a record may say of itself; nothing reads it."""

RESPONSE_NAMES = ("response", "completion", "answer")
"""The keys that may hold the response to a prompt; the first one that is there counts."""

CHAT_NAMES = ("messages", "conversations", "prompt")
"""The keys that may hold a chat; the first one that is there counts."""

TOKEN_KEYS = ("input_ids", "loss_mask", "labels", "seq_len")
"""What a record holds that is tokenized already; see ``encode_record``."""

REFUSED = {
    "after": "is not followed in training: write the grammar of the whole answer",
    "reasoning_budget": "is not followed in training: write the grammar of the whole answer",
}
"""What an engine could do, but not a training run; and what to do instead."""

RECORD_KEYS = frozenset(
    {
        *CHAT_NAMES,
        "text",
        "tools",
        *RESPONSE_NAMES,
        *TOKEN_KEYS,
        *GRAMMAR_KEYS,
        *NOTE_KEYS,
    }.difference(REFUSED)
)
"""All keys that a record may have."""

SHAREGPT_ROLES = {
    "assistant": "assistant",
    "function": "tool",
    "gpt": "assistant",
    "human": "user",
    "observation": "tool",
    "system": "system",
    "tool": "tool",
    "user": "user",
}
"""What ``from`` says in ShareGPT's form, as the role of a message."""


def read_grammar(record: Mapping[str, Any]) -> GrammarSpec | None:
    """The grammar of a record's response, from the keys ``GRAMMAR_KEYS``; None for free text.

    At most one of ``schema``, ``regex``, ``choice``, ``ebnf``, ``lark``, ``structural_tag`` and
    ``response_format``; each is the argument of its constructor of ``GrammarSpec``, and so are
    ``any_whitespace``, ``unsupported``, ``key_order`` and ``additional_properties`` with a schema
    and ``root`` next to EBNF.
    ``after`` and ``reasoning_budget``: of ``GrammarSpec.after``; ``after`` true is the model's own
    marker. Members that are null count as absent. Raises ConfigError for two grammars, for a
    setting without its grammar, and for one of the wrong type.
    """
    given = {key: record[key] for key in GRAMMAR_KEYS if record.get(key) is not None}
    asked = [key for key in GRAMMARS if key in given]
    if len(asked) > 1:
        raise ConfigError("grammar", asked, "a record has at most one; leave one of them")
    settings = {key: given[key] for key in SETTINGS if key in given}
    for key, value in settings.items():
        if SETTINGS[key] not in given:
            raise ConfigError(key, value, f"goes with {SETTINGS[key]} only; leave it out")
    spec = GRAMMARS[asked[0]](given[asked[0]], **settings) if asked else None
    if "after" not in given and "reasoning_budget" not in given:
        return spec
    if spec is None:
        raise ConfigError("after", given.get("after"), "needs a grammar; give one")
    marker = given.get("after", True)
    budget = given.get("reasoning_budget")
    return spec.after(None if marker is True else marker, reasoning_budget=budget)


def refuse_unknown(record: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ConfigError for a member that nothing reads, naming it and ``known``.

    Members that are null count as absent.
    """
    for key, value in record.items():
        if key not in known and value is not None:
            raise ConfigError(key, value, f"is unknown; the keys are {', '.join(sorted(known))}")


class Example(NamedTuple):
    """One document: its prompt, its response, and the grammar that the response has to match.

    prompt: text, or chat messages without the response; None where all of the text is the response.
    response: text, or the assistant's last message of a chat; None where there is none yet.
    tools: those that the chat template offers to the assistant; None for none.
    """

    prompt: str | list[Message] | None
    response: str | Message | None
    grammar: GrammarSpec | None
    tools: list[Any] | None = None

    @property
    def messages(self) -> list[Message]:
        """Those of a chat, the response included; none of a text."""
        prompt = self.prompt if isinstance(self.prompt, list) else []
        return [*prompt, self.response] if isinstance(self.response, Mapping) else prompt


def read_example(record: Mapping[str, Any]) -> Example:
    """Read a record in any of its shapes.

    ``messages`` (or ``prompt``): a chat with roles. ``conversations``: a chat in ShareGPT's form.
    ``prompt``: text. Their response is the assistant's last message or, after the prompt, one
    of ``RESPONSE_NAMES``; one that is no text is written as JSON. ``text``:
    all of it is the response. ``tools``: of a chat, a list or its JSON. The grammar: see
    ``read_grammar``. Raises ConfigError, also for a key that is none of ``RECORD_KEYS`` and for a
    record of tokens, which has no text.
    """
    for key, fix in REFUSED.items():
        if record.get(key):
            raise ConfigError(key, record[key], fix)
    refuse_unknown({**record, **dict.fromkeys(REFUSED)}, RECORD_KEYS)
    tokens = record.get("input_ids")
    if tokens is not None:
        fix = "are tokens, which are trained on as they are: to have them answered, pass their text"
        raise ConfigError("input_ids", f"{len(tokens)} of them", fix)
    grammar = read_grammar(record)
    response = _response(record)
    chat, tools = _chat(record), _tools(record)
    if chat is not None:
        if chat[-1]["role"] == "assistant":
            return Example(chat[:-1], chat[-1], grammar, tools)
        reply = None if response is None else {"role": "assistant", "content": response}
        return Example(chat, reply, grammar, tools)
    if tools is not None:
        raise ConfigError("tools", tools, "go with a chat: write the prompt as messages")
    if record.get("prompt") is not None:
        return Example(_text("prompt", record["prompt"]), response, grammar)
    if record.get("text") is not None:
        return Example(None, _text("text", record["text"]), grammar)
    fix = "has none of prompt, messages, conversations and text"
    raise ConfigError("record", sorted(record), fix)


def _response(record: Mapping[str, Any]) -> str | None:
    for name in RESPONSE_NAMES:
        response = record.get(name)
        if response is not None:
            return (
                response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)
            )
    return None


def _chat(record: Mapping[str, Any]) -> list[Message] | None:
    for name in CHAT_NAMES:
        turns = record.get(name)
        if turns is None or (name == "prompt" and isinstance(turns, str)):
            continue
        if not isinstance(turns, list) or not turns:
            raise ConfigError(name, turns, "must be a list of messages, at least one")
        return [_message(name, turn) for turn in turns]
    return None


def _tools(record: Mapping[str, Any]) -> list[Any] | None:
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ConfigError("tools", tools, f"is not JSON: {error}") from error
    if not isinstance(tools, list | None):
        raise ConfigError("tools", tools, "must be a list of tools, or its JSON")
    return tools or None


def _message(name: str, turn: Any) -> Message:
    if isinstance(turn, Mapping):
        if isinstance(turn.get("role"), str):
            return turn
        role = SHAREGPT_ROLES.get(str(turn.get("from")))
        if role is not None and isinstance(turn.get("value"), str):
            return {"role": role, "content": turn["value"]}
    fix = f"each message needs role and content, or from ({', '.join(SHAREGPT_ROLES)}) and value"
    raise ConfigError(name, turn, fix)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(name, value, "must be a str")
    return value


logger = logging.getLogger(__name__)

Record = dict[str, Any]


class Line(NamedTuple):
    """One record. source: where it is from, as ``name:number``, for error messages."""

    source: str
    record: Record


class Preset(NamedTuple):
    """A dataset of the hub, and how one of its rows is read as a record."""

    dataset: str
    split: str
    convert: Callable[[Mapping[str, Any]], Record]


def _chat_of(name: str) -> Callable[[Mapping[str, Any]], Record]:
    return lambda row: {name: row[name]}


def _tool_calls(row: Mapping[str, Any]) -> Record:
    """A row of xLAM as a record: calls as a JSON list, of the tools that were offered."""
    tools = json.loads(row["tools"])
    call = {
        "type": "object",
        "properties": {
            "name": {"enum": [tool["name"] for tool in tools]},
            "arguments": {"type": "object"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    return {
        "messages": [{"role": "user", "content": row["query"]}],
        "tools": [{"type": "function", "function": tool} for tool in tools],
        "response": row["answers"],
        "schema": {"type": "array", "items": call},
    }


def _document(row: Mapping[str, Any]) -> Record:
    """A row of JSONSchemaBench as a record: a schema alone, whose text the target writes."""
    prompt = f"Write a JSON document that satisfies this schema:\n{row['json_schema']}\n"
    message = {"role": "user", "content": prompt}
    return {"messages": [message], "schema": json.loads(row["json_schema"])}


PRESETS = {
    "jsonschemabench": Preset("epfl-dlab/JSONSchemaBench", "train", _document),
    "sharegpt": Preset("Aeala/ShareGPT_Vicuna_unfiltered", "train", _chat_of("conversations")),
    "ultrachat": Preset("HuggingFaceH4/ultrachat_200k", "train_sft", _chat_of("messages")),
    "xlam": Preset("Salesforce/xlam-function-calling-60k", "train", _tool_calls),
}
HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<split>[^:]+))?(:(?P<config>[^:]+))?")
LINES = (".json", ".jsonl")
PARQUET = ".parquet"
SAVED = "dataset_info.json"  # in a folder that ``Dataset.save_to_disk`` wrote


def check_sources(sources: Sequence[str | Path]) -> None:
    """Raise ConfigError for a source that is no file, no preset and no name of a dataset."""
    for source in sources:
        _reader(source)


def read_lines(sources: Sequence[str | Path]) -> Iterator[Line]:
    """Every record of the sources, in order, read as they are asked for.

    A source is a file of JSON Lines, whose blank lines are skipped, a Parquet file, a folder that
    ``Dataset.save_to_disk`` wrote, a dataset of the hub (``org/name``, ``org/name:split`` or
    ``org/name:split:config``; the split is "train" by default), or one of ``PRESETS``. What else
    a Parquet file or a dataset holds next to ``RECORD_KEYS`` is left out, and a warning names it.

    Raises ConfigError naming the source, or file and line, where one cannot be read.
    """
    for source in sources:
        yield from _reader(source)()


def have_pictures(sources: Sequence[str | Path]) -> bool:
    """Whether any record has pictures, all being read until one has. Raises as ``read_lines``."""
    chats = (record.get(name) for _, record in read_lines(sources) for name in CHAT_NAMES)
    return any(next(picture_parts(chat), None) is not None for chat in chats)


def require_datasets() -> Any:
    """The library ``datasets``. Raises ConfigError where it is not installed."""
    if importlib.util.find_spec("datasets") is None:
        fix = "reading it needs the datasets library: pip install 'guided-spec[train]'"
        raise ConfigError("data", "training data", fix)
    import datasets

    return datasets


def read_file(path: Path, argument: str = "data") -> Iterator[Line]:
    """Every record of a file of JSON Lines, next to which the pictures are.

    Raises ConfigError, about ``argument``, naming the file and the line.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    source = f"{path.name}:{number}"
                    record = _read_object(text, argument, source)
                    yield Line(source, with_whole_paths(record, CHAT_NAMES, path.parent))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(argument, str(path), f"cannot be read: {reason_of(error)}") from error


def _read_object(text: str, argument: str, source: str) -> Record:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(argument, source, f"is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(argument, source, "must be a JSON object")
    return record


def _reader(source: str | Path) -> Callable[[], Iterator[Line]]:
    path, name = Path(source), str(source)
    if (path / SAVED).is_file():
        # Lists, whatever it was saved to give.
        return lambda: _read_rows(
            name, lambda: require_datasets().load_from_disk(name).with_format(None), _beside(path)
        )
    if path.suffix == PARQUET and path.is_file():
        opened = partial(_stream, "parquet", data_files=name, split="train")
        return lambda: _read_rows(name, opened, _beside(path.parent))
    if path.is_file():
        return lambda: read_file(path)
    if name in PRESETS:
        preset = PRESETS[name]
        opened = partial(_stream, preset.dataset, split=preset.split)
        return lambda: _read_rows(name, opened, preset.convert, of_records=False)
    found = HUB.fullmatch(name)
    if found is None or path.suffix in (*LINES, PARQUET):
        known = ", ".join(PRESETS)
        fix = f"cannot be read: there is no such file, and it is no dataset org/name nor {known}"
        raise ConfigError("data", name, fix)
    dataset, config = found["name"], found["config"]
    opened = partial(_stream, dataset, split=found["split"] or "train", name=config)
    return lambda: _read_rows(name, opened, dict)


def _beside(folder: Path) -> Callable[[Mapping[str, Any]], Record]:
    return lambda row: with_whole_paths(row, CHAT_NAMES, folder)


def _stream(dataset: str, **arguments: Any) -> Any:
    """arguments: of ``load_dataset``."""
    return require_datasets().load_dataset(dataset, streaming=True, **arguments)


def _read_rows(
    source: str,
    opened: Callable[[], Any],
    convert: Callable[[Mapping[str, Any]], Record],
    *,
    of_records: bool = True,
) -> Iterator[Line]:
    """of_records: whether a column that no record has is left out."""
    require_datasets()
    try:
        rows = iter(opened())
        first = next(rows, None)
    except Exception as error:  # the library raises nearly every class of exception here
        raise ConfigError("data", source, f"cannot be read: {error}") from error
    if first is None:
        return
    unread = sorted(set(first) - RECORD_KEYS) if of_records else []
    if unread:
        logger.warning("data=%r: its columns %s are not read", source, ", ".join(unread))
    number = 0
    while first is not None:
        number += 1
        known = {key: value for key, value in first.items() if key not in unread}
        yield Line(f"{source}:{number}", convert(known))
        first = next(rows, None)
