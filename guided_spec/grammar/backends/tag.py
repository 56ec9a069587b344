"""Structural tags with the schemas and regexes in them prepared as those of their own kinds are.

A model writes ``<tool_call>`` as the one token it was trained on. The backend knows no bytes of
such tokens, so as a string it would have to be spelled out, and xgrammar's own token formats admit
none of them. Here they become token formats, and the backend learns of those that a tag names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from pydantic import BaseModel
from xgrammar import Grammar, structural_tag

from guided_spec.errors import GrammarCompileError, UnsupportedSchemaError
from guided_spec.grammar.backends.ebnf import regex_ebnf, schema_ebnf
from guided_spec.grammar.backends.free_text import text_without
from guided_spec.grammar.backends.printed import json_text_ebnf
from guided_spec.grammar.languages import to_whole
from guided_spec.grammar.schema.lowered import all_parts, change_parts
from guided_spec.grammar.schema.prepare import (
    examine_schema,
    lower_checked,
    prepare_schema,
    require_enforced,
)
from guided_spec.grammar.schema.values import values_within
from guided_spec.grammar.steps import spend_on_value
from guided_spec.grammar.tools.format import OWNER, either, in_sequence, literal
from guided_spec.grammar.vocabulary import Vocabulary

_PLAIN = {"type", "json_schema", "style"}
_COUNTED = {"type", "minLength", "maxLength", "title", "description", "default", "examples"}
_TEXT = "text_without"
"""A kind of part of our own: free text of characters in which none of ``excludes`` stands."""


_FIELDS: dict[str, frozenset[str]] = {
    kind.model_fields["type"].default: frozenset(kind.model_fields)
    for kind in vars(structural_tag).values()
    if isinstance(kind, type) and issubclass(kind, BaseModel) and "type" in kind.model_fields
}
"""What each kind of format has. xgrammar 0.2.9 leaves other fields out without a word."""


def prepare_tag(tag: Any, path: str = "", *, prepare: Callable[[Any], Any] = prepare_schema) -> Any:
    """The tag as the backend enforces it. Raises GrammarCompileError and what is below it.

    path: of the tag, for errors. ``OWNER`` of a schema says in them whose schema it is.
    prepare: makes a schema one that the backend enforces.
    """
    if isinstance(tag, list):
        return [prepare_tag(part, f"{path}[{at}]", prepare=prepare) for at, part in enumerate(tag)]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") == "json_text":
        return _prepared_text(tag)
    if tag.get("type") == _TEXT:
        raise GrammarCompileError(f"not a structural_tag: it has no part of the type {_TEXT}")
    _check_fields(tag, path)
    prepared = {}
    for key, value in tag.items():
        if key in ("json_schema", "schema") and isinstance(value, dict | bool):
            with _blamed_on(tag.get(OWNER)):
                prepared[key] = prepare(value)
            _check_options(tag)
        elif key == "pattern" and tag.get("type") == "regex" and isinstance(value, str):
            prepared[key] = to_whole(value)
        elif key != OWNER:
            inner = f"{path}.{key}" if path else key
            prepared[key] = prepare_tag(value, inner, prepare=prepare)
    return prepared


def _prepared_text(content: dict[str, Any]) -> dict[str, Any]:
    with _blamed_on(content.get(OWNER)):
        return {"type": "grammar", "grammar": json_text_ebnf(content)}


@contextmanager
def _blamed_on(owner: Any) -> Iterator[None]:
    """Errors say whose schema or grammar it is."""
    try:
        yield
    except GrammarCompileError as error:
        if isinstance(owner, list):
            shown = [str(word) if at % 2 == 0 else repr(word) for at, word in enumerate(owner)]
            pairs = [" ".join(shown[at : at + 2]) for at in range(0, len(shown), 2)]
            error.args = (f"{', '.join(pairs)}: {error}",)
            error.owner = tuple(owner)
        raise


def _check_fields(tag: dict[str, Any], path: str) -> None:
    kind = tag.get("type", "tag")
    known = _FIELDS.get(kind, frozenset()) if isinstance(kind, str) else frozenset()
    unknown = [name for name in tag if known and name not in known and name != OWNER]
    if unknown:
        listed = ", ".join(sorted(known))
        raise GrammarCompileError(
            f"the structural_tag has {path and f'{path}.'}{unknown[0]}, which a {kind} does not "
            f"have; leave it out: it has {listed}"
        )


def bound_whitespace(tag: Any) -> Any:
    """The prepared tag with JSON written as ``json_schema`` writes it: ``", "`` and ``": "``.

    xgrammar has no such option inside a tag, so plain JSON becomes the grammar of its schema. A
    regex becomes a grammar too, see ``regex_ebnf``.
    Content with options of its own, and XML, get one whitespace character in a row at most. Raises
    RuntimeError and ValueError for a schema that xgrammar does not take.
    """
    if isinstance(tag, list):
        return [bound_whitespace(part) for part in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.keys() == {"type", "pattern"} and tag["type"] == "regex":
        return {"type": "grammar", "grammar": regex_ebnf(tag["pattern"])}
    if tag.get("type") == "qwen_xml_parameter":  # an old spelling, without the option
        tag = {**tag, "type": "json_schema", "style": "qwen_xml"}
    if tag.get("type") != "json_schema" or not isinstance(tag.get("json_schema"), dict | bool):
        return {key: bound_whitespace(value) for key, value in tag.items()}
    is_plain = tag.get("style", "json") == "json" and tag.keys() <= _PLAIN
    if not is_plain:
        return {"max_whitespace_cnt": 1, **tag}
    return {"type": "grammar", "grammar": schema_ebnf(tag["json_schema"], any_whitespace=False)}


def _check_options(content: dict[str, Any]) -> None:
    reason = None
    if content.get("any_order"):
        reason = "any_order: xgrammar then checks neither required keys nor repeated ones"
    elif content.get("excludes") and any(
        isinstance(part, dict) and ("minLength" in part or "maxLength" in part)
        for part in values_within(content)
    ):
        reason = "excludes: xgrammar then drops minLength and maxLength"
    if reason is not None:
        raise UnsupportedSchemaError(
            f"the structural_tag cannot be enforced in full: {reason}; leave it out"
        )


def ending_rules(tag: Any, vocabulary: Vocabulary) -> str:
    """xgrammar's print of a tag whose texts end as they do here, though they may be longer.

    Strings have no ``maxLength``: the shortest end of a text, and what it takes, is the same, and
    xgrammar counts for seconds. Raises GrammarCompileError where it does not take the tag.
    """
    prepared = bound_whitespace(prepare_tag(tag, prepare=_prepare_unbounded))
    rules = with_rules_for_text(with_tokens(prepared, vocabulary).tag)
    spend_on_value(rules)
    try:
        return str(Grammar.from_structural_tag(json.dumps(rules)))
    except (RuntimeError, ValueError) as error:
        raise GrammarCompileError(f"the structural_tag does not compile: {error}") from error


def _prepare_unbounded(schema: Any) -> Any:
    lowered = lower_checked(schema, filtered=False)
    if all("allOf" not in part for part in all_parts(lowered.schema) if isinstance(part, dict)):
        lowered = lowered._replace(schema=_unbounded(lowered.schema))
    return require_enforced(examine_schema(lowered))


def _unbounded(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    changed = change_parts(schema, lambda part, _: _unbounded(part))
    if "$defs" in schema:
        changed["$defs"] = {name: _unbounded(part) for name, part in schema["$defs"].items()}
    if changed.keys() <= _COUNTED:
        changed.pop("maxLength", None)
    return changed


_REGIONS = ("dispatch", "triggered_tags")
_TOKEN_LISTS = ("exclude_tokens", "trigger_tokens")


class TokenTag(NamedTuple):
    """A tag whose added tokens are token formats, and which tokens it names."""

    tag: Any
    token_ids: frozenset[int]


def with_tokens(tag: Any, vocabulary: Vocabulary) -> TokenTag:
    """Turn the names of added tokens in the strings of a structural tag into token formats.

    Free text next to them becomes a part of the type ``text_without``.

    Raises GrammarCompileError for a tag that names a token which ends the text, one where xgrammar
    cannot keep it out of free text, and one that is none.
    """
    writer = _Writer(vocabulary)
    try:
        rewritten = writer.rewrite(tag)
        if writer.named:
            # Which tokens free text must leave out is known only now that all are.
            writer.is_final = True
            rewritten = writer.rewrite(tag)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"a member is missing or of the wrong type: {error!r}"
        raise GrammarCompileError(f"not a structural_tag: {reason}") from error
    return TokenTag(rewritten, frozenset(writer.named))


class _Writer:
    """named: the added tokens seen so far. is_final: whether these are all."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = dict(vocabulary.added_tokens)
        self._stops = frozenset(vocabulary.stop_token_ids)
        names = sorted((name for name in self._ids if name), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, names))) if names else None
        self.named: set[int] = set()
        self.is_final = False

    def rewrite(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.rewrite(part) for part in node]
        if not isinstance(node, dict):
            return node
        match node.get("type"):
            case "json_schema" | "regex" | "grammar" | "qwen_xml_parameter":
                return node  # made of bytes
            case "const_string" if isinstance(node.get("value"), str):
                return in_sequence(*self._parts(node["value"]))
            case "tag":
                return self._tag(node)
            case "triggered_tags" | "token_triggered_tags":
                return self._triggered(node)
            case "any_text":
                return self._any_text(node)
            case "any_tokens":
                hidden = [*map(self._id, node.get("exclude_tokens", [])), *sorted(self._stops)]
                return {**node, "exclude_tokens": hidden}  # else end-of-text is part of the text
            case "token":
                return {**node, "token": self._id(node.get("token"))}
        self._refuse_leaks(node)
        return {key: self._value(key, value) for key, value in node.items()}

    def _value(self, key: str, value: Any) -> Any:
        if key in _TOKEN_LISTS and isinstance(value, list):
            return [self._id(token) for token in value]
        return self.rewrite(value)

    def _tag(self, tag: dict[str, Any]) -> dict[str, Any]:
        """``begin`` and ``end`` as one string or token each; the rest of them joins the content."""
        begin, end = self._ends(tag.get("begin")), self._ends(tag.get("end"))
        content = self._inside(tag.get("content"), tag.get("end"))
        if begin is None or end is None:
            return {**tag, "content": content}
        first, last = begin[:1], end[-1:]
        inner = [*begin[1:], content, *end[:-1]]
        return {
            **tag,
            "begin": _edge(first),
            "content": in_sequence(*inner),
            "end": _edge(last),
        }

    def _inside(self, content: Any, end: Any) -> Any:
        """The content of a tag. Free text goes on to where the end of the tag first stands."""
        if not isinstance(content, dict) or content.get("type") != "any_text":
            return self.rewrite(content)
        ends = [end] if isinstance(end, str) else _texts(end)
        return self._any_text(content, [end for end in ends if not self._has_token(end)])

    def _ends(self, edge: Any) -> list[dict[str, Any]] | None:
        """The parts of a tag's ``begin`` or ``end``; None for what stays as it is."""
        if isinstance(edge, str):
            return self._parts(edge)
        if isinstance(edge, dict):
            return [self.rewrite(edge)]
        if any(map(self._has_token, _texts(edge))):
            raise GrammarCompileError(
                "the structural_tag has several ends with added tokens; choose one end"
            )
        return None

    def _triggered(self, node: dict[str, Any]) -> dict[str, Any]:
        triggers = [self._parts(trigger) for trigger in node.get("triggers", [])]
        triggers += [[_token(self._id(t))] for t in node.get("trigger_tokens", [])]
        tags = [self._tag(tag) for tag in node.get("tags", [])]
        has_tokens = any(part["type"] == "token" for trigger in triggers for part in trigger)
        if not tags or not (has_tokens or self.named):
            return {**node, "tags": tags, "excludes": self._spelled(node)} if tags else node
        ids: list[Any] = [*dict.fromkeys(trigger[0].get("token") for trigger in triggers)]
        starts = [tag["begin"] for tag in tags]
        if None in ids or any(not isinstance(s, dict) or s["token"] not in ids for s in starts):
            return self._after_text(node, triggers, tags)
        if self._spelled(node):
            raise GrammarCompileError(
                f"the structural_tag excludes {self._spelled(node)[0]!r}, which cannot be kept out "
                "of text that a token ends; leave it out"
            )
        return self._dispatch(node, ids, tags)

    def _after_text(
        self, node: dict[str, Any], triggers: list[list[dict[str, Any]]], tags: list[Any]
    ) -> dict[str, Any]:
        """Free text of characters, in which no trigger stands, before each of the tags."""
        texts = [part["value"] for trigger in triggers for part in trigger if "value" in part]
        is_spelled = len(texts) == len(triggers) and all(len(trigger) == 1 for trigger in triggers)
        excluded = [*texts * is_spelled, *self._spelled(node)]
        if not is_spelled and any(len(trigger) == 1 for trigger in triggers):
            raise GrammarCompileError(
                "the structural_tag has triggers with and without added tokens in one format; "
                "let all hold one, or none"
            )
        free = _free_text(excluded)
        call = either(tags)
        if node.get("stop_after_first"):
            once = in_sequence(free, {"type": "optional", "content": call})
            return call if node.get("at_least_one") else once
        more = in_sequence({"type": "star", "content": in_sequence(free, call)}, free)
        return in_sequence(call, more) if node.get("at_least_one") else more

    def _dispatch(self, node: dict[str, Any], ids: list[int], tags: list[Any]) -> dict[str, Any]:
        # Not token_triggered_tags: xgrammar 0.2.8 forgets its exclude_tokens.
        hidden = {self._id(token) for token in node.get("exclude_tokens", [])} | self.named
        once = bool(node.get("stop_after_first"))
        rules = [
            [token, either([_after_token(tag) for tag in tags if tag["begin"]["token"] == token])]
            for token in ids
        ]
        free = {
            "type": "token_dispatch",
            "rules": rules,
            "loop": not once,
            "exclude_tokens": sorted(hidden - set(ids)),
        }
        if not node.get("at_least_one"):
            return free
        first = either(tags)
        return first if once else in_sequence(first, free)

    def _any_text(self, node: dict[str, Any], ends: Sequence[str] = ()) -> dict[str, Any]:
        """Free text; where tokens are named it is of characters, for bytes would hold them.

        ends: what follows it, one of these.
        """
        spelled = self._spelled(node)
        if self.named:
            return _free_text([*ends, *spelled])
        return {**node, "excludes": spelled}

    def _spelled(self, node: dict[str, Any]) -> list[str]:
        """The excluded strings that are no added token; those are never admitted anyway."""
        if not self.named:
            return list(node.get("excludes", []))
        return [text for text in node.get("excludes", []) if text not in self._ids]

    def _refuse_leaks(self, node: dict[str, Any]) -> None:
        is_region = node.get("type") in _REGIONS or bool(node.get("excludes"))
        if self.is_final and is_region and (node.get("type") in _REGIONS or self._spelled(node)):
            names = [name for name, token in self._ids.items() if token in self.named]
            raise GrammarCompileError(
                f"the structural_tag cannot keep {names[0]!r} out of its {node['type']}; let its "
                "triggers begin with an added token, and exclude no other text"
            )

    def _has_token(self, text: str) -> bool:
        return any(part["type"] == "token" for part in self._parts(text))

    def _parts(self, text: str) -> list[dict[str, Any]]:
        """The text as strings and tokens in turn; one empty string for no text."""
        parts: list[dict[str, Any]] = []
        at = 0
        for found in self._pattern.finditer(text) if self._pattern else ():
            if found.start() > at:
                parts.append(literal(text[at : found.start()]))
            parts.append(_token(self._id(found[0])))
            at = found.end()
        return [*parts, literal(text[at:])] if at < len(text) or not parts else parts

    def _id(self, token: Any) -> int:
        token_id = self._ids.get(token) if isinstance(token, str) else token
        if not isinstance(token_id, int):
            raise GrammarCompileError(f"the structural_tag names {token!r}, no added token")
        if token_id in self._stops:
            raise GrammarCompileError(
                f"the structural_tag holds {token!r}, which ends the text of this model; leave it "
                "out"
            )
        if token_id in self._ids.values():
            self.named.add(token_id)
        return token_id


def _texts(edge: Any) -> Sequence[str]:
    return [text for text in edge if isinstance(text, str)] if isinstance(edge, list) else []


def _token(token_id: int) -> dict[str, Any]:
    return {"type": "token", "token": token_id}


def _edge(parts: list[dict[str, Any]]) -> Any:
    (part,) = parts
    return part["value"] if part["type"] == "const_string" else part


def _free_text(excluded: list[str]) -> dict[str, Any]:
    if not all(excluded):
        raise GrammarCompileError("the structural_tag excludes the empty text; leave it out")
    return {"type": _TEXT, "excludes": list(excluded)}


def with_rules_for_text(tag: Any) -> Any:
    """A tag of ``with_tokens`` as xgrammar reads it, with rules for free text of characters."""
    if isinstance(tag, list):
        return [with_rules_for_text(part) for part in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") == _TEXT:
        return {"type": "grammar", "grammar": text_without(tag["excludes"])}
    return {key: with_rules_for_text(value) for key, value in tag.items()}


def _after_token(tag: dict[str, Any]) -> dict[str, Any]:
    """What follows the token that a tag begins with."""
    end = tag["end"]
    if isinstance(end, list):
        ends: Any = either([literal(text) for text in end])
    else:
        ends = end if isinstance(end, dict) else literal(end)
    return in_sequence(tag["content"], ends)
