"""Whether a value is of the kind that its type hint says, and an error that names it if not."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache, lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from guided_spec.errors import ConfigError, UnknownOptionError


def require_one_of(name: str, value: object, known: Iterable[str]) -> None:
    """Raise ConfigError, naming the argument, for what is none of the known names."""
    names = list(known)
    if not isinstance(value, str) or value not in names:
        raise ConfigError(
            name, value, f"must be one of {', '.join(names)}{did_you_mean(value, names)}"
        )


def require_known_fields(path: str, value: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise UnknownOptionError, with its path, for a field that is neither known nor None."""
    for name in value:
        if name not in known and value[name] is not None:
            fix = f"is not known here, leave it out{_nearest(name, known)}"
            raise UnknownOptionError(f"{path}.{name}" if path else name, value[name], fix)


_ELSEWHERE = {
    theirs: ours
    for ours, listed in {
        "assistant": "ai bot",
        "choice": "choices guided_choice",
        "draft": "assistant_model draft_model speculative_draft_model speculative_model",
        "dtype": "torch_dtype",
        "grammar": "choice ebnf guided_grammar lark output_type regex response_format schema "
        "structured_outputs",
        "grammar_backend": "guided_decoding_backend",
        "integer": "int",
        "kv_dtype": "cache_dtype kv_cache_dtype",
        "kv_memory_bytes": "gpu_memory_utilization",
        "lora": "adapter adapter_name lora_name lora_request",
        "loras": "adapters enable_lora lora_modules lora_paths",
        "max_batch_size": "max_num_seqs",
        "max_model_len": "context_length max_seq_len max_seq_length n_ctx",
        "max_tokens": "max_completion_tokens max_length max_new_tokens max_output_tokens",
        "model": "model_id model_name model_name_or_path model_path",
        "n": "num_return_sequences",
        "num_draft_tokens": "num_assistant_tokens num_speculative_tokens",
        "params": "sampling_params",
        "prefill_tokens": "max_num_batched_tokens",
        "prefix_cache": "enable_prefix_caching",
        "progress": "use_tqdm",
        "prompts": "prompt",
        "regex": "guided_regex pattern",
        "schema": "guided_json json_schema response_model",
        "stop": "stop_strings",
        "stop_token_ids": "eos_token_id",
        "string": "str",
        "tool": "function",
        "tool_choice": "function_call",
        "tools": "functions",
        "user": "human",
    }.items()
    for theirs in listed.split()
}
"""What others call an option, a role or a type, and its name here, or one that leads there."""

_MOST = 3  # names that are suggested: what is like more of them is like none
_LONG = 4  # letters, from which a name may be the beginning of a word in another
SHORT = 5  # letters, below which another letter is another word: "text" and "test"
_ADDED, _OTHER = 2, 3  # of a letter too many, too few or swapped with the next; of a replaced one
_TWICE = 9  # letters, from which two slips leave a name what it was


def did_you_mean(name: object, known: Iterable[str], *, lead: str = "; ") -> str:
    """``lead`` and the names that an unknown one may stand for, as a question; "" for none."""
    near = nearest_names(name, known)
    return f"{lead}did you mean {' or '.join(near)}?" if near else ""


def nearest_names(name: object, known: Iterable[str]) -> list[str]:
    """The known names that an unknown one may stand for: a few, or none."""
    if not isinstance(name, str) or len(name) > 100:  # no name of ours
        return []
    names = [one for one in known if isinstance(one, str)]
    ours = _ELSEWHERE.get(name.strip("-").replace("-", "_"))
    while ours is not None:
        if same := [one for one in names if slips_of(ours, one) == 0]:
            return same
        ours = _ELSEWHERE.get(ours)
    far = {one: found for one in names if (found := slips_of(name, one)) is not None}
    least = min(far.values(), default=0)
    near = [one for one, found in far.items() if found == least]
    if not near and len(name) >= _LONG:
        begins = re.compile(rf"(?<![^\W_]){re.escape(name)}", re.IGNORECASE)
        near = [one for one in names if begins.search(one)]
    return near if len(near) <= _MOST else []


@lru_cache(maxsize=1024)
def _words(name: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[^\W_]+", name.lower()))


def slips_of(name: str, known: str) -> int | None:
    """How far a name is from the known one that it may stand for; None where it is another name.

    Words of one are compared with those of the other: ``min_tokens`` is not ``max_tokens``. They
    may be cut short.
    """
    own, others = _words(name), _words(known)
    if len(own) != len(others):
        own, others = ("".join(own),), ("".join(others),)
    total = 0
    for a, b in zip(own, others, strict=True):
        least = min(len(a), len(b))
        if len(own) > 1 and least >= 3 and a[:least] == b[:least]:
            continue
        if a != b:
            if least < 2 or abs(len(a) - len(b)) > 2 or len({*a} ^ {*b}) > 4:
                return None
            total += (slips := _slips(a, b))
            if slips > (_ADDED if least < SHORT else _OTHER * (1 + (least >= _TWICE))):
                return None
    return total


def _slips(a: str, b: str) -> int:
    older, before, row = list[int](), list[int](), [_ADDED * at for at in range(len(b) + 1)]
    for i, x in enumerate(a, 1):
        older, before, row = before, row, [_ADDED * i]
        for j, y in enumerate(b, 1):
            row.append(min(min(before[j], row[-1]) + _ADDED, before[j - 1] + _OTHER * (x != y)))
            if min(i, j) > 1 and (x, y) == (b[j - 2], a[i - 2]):
                row[-1] = min(row[-1], older[j - 2] + _ADDED)
    return row[-1]


def _nearest(name: str, known: Collection[str]) -> str:
    return f"{did_you_mean(name, known) or ';'} the names are {', '.join(sorted(known))}"


def require_known(name: str, value: object, known: Collection[str]) -> None:
    """Raise UnknownOptionError, with the nearest known names, for an option that is not known."""
    if name not in known:
        raise UnknownOptionError(name, value, f"is no option{_nearest(name, known)}")


def require_kind(name: str, value: object, kind: Any) -> None:
    """Raise ConfigError, naming the argument, for a value that a type hint does not admit.

    kind: a class, None, Any, a Literal of strings, a list or tuple of any length, or a union. Of
        lists and tuples either will do, and their items are looked at; those of others are not. An
        int is a float too, and a bool is neither.
    """
    if not _admits(kind, value):
        raise ConfigError(name, value, f"must be {described(kind)}")


def require_kinds(values: Mapping[str, object], kinds: Mapping[str, Any]) -> None:
    """``require_kind`` of each value, by its name; UnknownOptionError for one without a kind."""
    for name, value in values.items():
        require_known(name, value, kinds)
        require_kind(name, value, kinds[name])


def require_field_kinds(record: object) -> None:
    """``require_kind`` of each field of a dataclass, by its type hint."""
    kind_of_record: Any = type(record)
    for name, kind in _hints_of(kind_of_record).items():
        require_kind(name, getattr(record, name), kind)


@cache
def _hints_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


_WORDS: dict[Any, str] = {
    NoneType: "None",
    bool: "True or False",
    float: "a number",
    int: "an int",
    str: "a str",
}


def _admits(kind: Any, value: object) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, UnionType):
        return any(_admits(one, value) for one in inner)
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if origin in (list, tuple):
        return isinstance(value, list | tuple) and all(_admits(inner[0], each) for each in value)
    if isinstance(value, bool) and kind in (int, float):
        return False
    return isinstance(value, int | float if kind is float else origin or kind)


def described(kind: Any) -> str:
    """A type hint in words, as in "an int", or "a list, of which each is a str"."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return ", or ".join(described(one) for one in inner)
    if origin is Literal:
        return f"one of {', '.join(inner)}"
    if origin in (list, tuple):
        return f"a list, of which each is {described(inner[0])}"
    if origin is not None:
        return described(origin)
    return _WORDS.get(kind, f"a {kind.__name__}")
