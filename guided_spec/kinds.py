"""Whether a value is of the kind that its type hint says, and an error that names it if not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from guided_spec.errors import ConfigError, UnknownOptionError


def require_one_of(name: str, value: object, known: Iterable[str]) -> None:
    """Raise ConfigError, naming the argument, for what is none of the known names."""
    names = list(known)
    if not isinstance(value, str) or value not in names:
        near = nearest_names(value, names)[:1] if isinstance(value, str) else []
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(name, value, f"must be one of {', '.join(names)}{meant}")


def require_known_fields(path: str, value: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise UnknownOptionError, with its path, for a field that is neither known nor None."""
    for name in value:
        if name not in known and value[name] is not None:
            fix = f"is not known here, leave it out; {_nearest(name, known)}"
            raise UnknownOptionError(f"{path}.{name}" if path else name, value[name], fix)


_ELSEWHERE = {
    "ai": "assistant",
    "bot": "assistant",
    "enable_prefix_caching": "prefix_cache",
    "eos_token_id": "stop_token_ids",
    "function": "tool",
    "gpu_memory_utilization": "kv_memory_bytes",
    "guided_choice": "grammar",
    "guided_decoding_backend": "grammar_backend",
    "guided_json": "grammar",
    "guided_regex": "grammar",
    "human": "user",
    "json_schema": "grammar",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_num_batched_tokens": "prefill_tokens",
    "max_num_seqs": "max_batch_size",
    "num_assistant_tokens": "num_draft_tokens",
    "num_return_sequences": "n",
    "num_speculative_tokens": "num_draft_tokens",
    "output_type": "grammar",
    "prompt": "prompts",
    "response_format": "grammar",
    "response_model": "grammar",
    "sampling_params": "params",
    "schema": "grammar",
    "speculative_model": "draft",
    "stop_strings": "stop",
    "structured_outputs": "grammar",
    "torch_dtype": "dtype",
    "use_tqdm": "progress",
}
"""What other libraries call an option or a role, and its name here."""


_LONG = 4  # letters, from which a name may be a part of another


def nearest_names(name: str, known: Collection[str], *, cutoff: float = 0.6) -> list[str]:
    """The known names that an unknown one may stand for, the likeliest first.

    cutoff: how alike they must be at least, up to 1.
    """
    ours = _ELSEWHERE.get(name)
    near = get_close_matches(str(name), known, cutoff=cutoff)
    near = near or [one for one in known if len(name) >= _LONG and name in one]
    return [ours] if ours in known and ours else near


def _nearest(name: str, known: Collection[str]) -> str:
    near = nearest_names(name, known)
    listed = f"the names are {', '.join(sorted(known))}"
    return f"did you mean {' or '.join(near)}? {listed}" if near else listed


def require_known(name: str, value: object, known: Collection[str]) -> None:
    """Raise UnknownOptionError, with the nearest known names, for an option that is not known."""
    if name not in known:
        raise UnknownOptionError(name, value, f"is no option; {_nearest(name, known)}")


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
