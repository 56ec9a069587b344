"""What hostile and faulty clients send, and what a server may answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
REFUSED = frozenset({400, 413, 422})
ANSWERED = frozenset({200, *REFUSED})  # what ends, in either way
_AMBIGUOUS = 'root ::= a a a\na ::= a b | b | ""\nb ::= b a | "x" | [a-z]*'
_CUBIC = "start: start start start start | start start | /[a-z]/"


class Case(NamedTuple):
    """make: the body. statuses: of answers that are right."""

    name: str
    path: str
    make: Callable[[], bytes]
    statuses: frozenset[int] = REFUSED


def _body(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"max_tokens": 60, **fields}).encode()


def _completion(**fields: Any) -> Callable[[], bytes]:
    return _body(prompt="My name is", **fields)


def _schema(schema: Any) -> Callable[[], bytes]:
    return _completion(structured_outputs={"json": schema})


def _doubling(levels: int) -> dict[str, Any]:
    """Each definition is one of two references to the next one."""
    defs: dict[str, Any] = {
        f"d{at}": {"oneOf": [{"$ref": f"#/$defs/d{at + 1}"}, {"$ref": f"#/$defs/d{at + 1}"}]}
        for at in range(levels)
    }
    return {"$defs": {**defs, f"d{levels}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def _recursive_choices(keys: int) -> dict[str, Any]:
    """A oneOf in a oneOf, both of which lead back to the root."""
    inner = [
        {"type": "object", "properties": {f"k{at}": {"$ref": "#"}}, "required": [f"k{at}"]}
        for at in range(keys)
    ]
    return {"oneOf": [{"oneOf": inner}, {"oneOf": inner, "minProperties": 1}]}


def _properties(count: int) -> dict[str, Any]:
    names = {f"p{at}": {"type": "string"} for at in range(count)}
    return {"type": "object", "properties": names, "required": [*names][:3]}


def _wrong_messages() -> list[dict[str, Any]]:
    roles: list[Any] = [None, 5, [], "user"]
    contents: list[Any] = [None, 5, {"a": []}, [[]]]
    return [{"role": role, "content": content} for role in roles for content in contents]


def _nested(levels: int) -> Callable[[], bytes]:
    head = b'{"max_tokens": 5, "prompt": "a", "structured_outputs": {"json": '
    return lambda: head + b'{"items":' * levels + b"{}" + b"}" * levels + b"}}"


CASES = (
    Case(
        "minContains 10^9",
        COMPLETIONS,
        _schema({"type": "array", "contains": {"type": "integer"}, "minContains": 10**9}),
    ),
    Case(
        "minContains 10^6",
        COMPLETIONS,
        _schema({"type": "array", "contains": {"type": "integer"}, "minContains": 10**6}),
        ANSWERED,
    ),
    Case("oneOf of two $refs, 30 deep", COMPLETIONS, _schema(_doubling(30)), ANSWERED),
    Case("recursive oneOf in a oneOf", COMPLETIONS, _schema(_recursive_choices(6)), ANSWERED),
    Case("2,000 properties", COMPLETIONS, _schema(_properties(2000)), ANSWERED),
    Case(
        "anyOf of 5,000 constants",
        COMPLETIONS,
        _schema({"anyOf": [{"const": f"value {at}"} for at in range(5000)]}),
        ANSWERED,
    ),
    Case(
        "^(a?){200}a{200}$",
        COMPLETIONS,
        _completion(structured_outputs={"regex": "(a?){200}a{200}"}),
        ANSWERED,
    ),
    Case(
        "EBNF with many ways",
        COMPLETIONS,
        _completion(structured_outputs={"grammar": _AMBIGUOUS}, min_tokens=40),
        ANSWERED,
    ),
    Case(
        "Lark with many ways",
        COMPLETIONS,
        _completion(structured_outputs={"grammar": _CUBIC}, min_tokens=40),
        ANSWERED,
    ),
    Case("schemas 3,000 deep", COMPLETIONS, _nested(3000)),
    Case(
        "64 stop strings of 1,000 letters",
        COMPLETIONS,
        _completion(stop=["a" * 990 + f"{at:010}" for at in range(64)]),
        ANSWERED,
    ),
    Case("stop strings of 45,000 letters", COMPLETIONS, _completion(stop=["ab" * 22500])),
    Case("bad words of 45,000 letters", COMPLETIONS, _completion(bad_words=["ab" * 22500] * 4)),
    Case(
        "200 bad words",
        COMPLETIONS,
        _completion(bad_words=[f"word {at} of many" for at in range(200)]),
        ANSWERED,
    ),
    Case("top_k 2^63", COMPLETIONS, _completion(top_k=2**63, temperature=1.0), ANSWERED),
    Case("min_tokens 2^70", COMPLETIONS, _completion(min_tokens=2**70, max_tokens=2**71)),
    Case("samples in all slots", COMPLETIONS, _completion(n=16, temperature=1.0), ANSWERED),
    Case(
        "a list of nulls, 256 KB",
        COMPLETIONS,
        lambda: b'{"prompt":[' + b"null," * 52000 + b"null]}",
    ),
    Case(
        "unknown fields, 256 KB",
        COMPLETIONS,
        lambda: json.dumps({"prompt": "a", **{f"field {at}": at for at in range(12000)}}).encode(),
    ),
    Case(
        "a prompt of 512 KB",
        TOKENIZE,
        lambda: json.dumps({"prompt": "word and " * 57000}).encode(),
        ANSWERED,
    ),
    Case(
        "messages of every wrong kind",
        CHAT,
        _body(messages=_wrong_messages()),
    ),
    Case("no JSON", CHAT, lambda: b"\xff\xfe{" * 1000),
)
