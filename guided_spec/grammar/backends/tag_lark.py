"""Structural tags as grammars in llguidance's Lark dialect.

llguidance reads a text as lexemes, each as long as it can be: free text before ``<tool>`` would
take the mark too. So what is regular and stands together becomes one terminal, ended by its mark,
and a tag is written only if no lexeme can then go on where another one has to begin. All others
stay xgrammar's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from os.path import commonprefix
from typing import Any, NamedTuple, TypeAlias

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.backends.llguidance_schema import require_few_items
from guided_spec.grammar.backends.ordered_objects import (
    LARGE,
    OrderedObjects,
    Rules,
    ordered_object_rules,
)
from guided_spec.grammar.characters import ANY_CHARACTER, Ranges, code_points, intersect, normalize
from guided_spec.grammar.regex import RE_PARSER, readable
from guided_spec.grammar.steps import spend

_ANY, _SOME = "/(?s:.*)/", "/(?s:.+)/"
_NUMBERS: Ranges = normalize((ord(c), ord(c)) for c in "+-.0123456789Ee")
# By type, of the first character of a JSON value.
_FIRSTS = {"object": "{", "array": "[", "string": '"'}
_SCALARS = {"null": ("null",), "boolean": ("true", "false")}


class Literal(NamedTuple):
    """Exactly the characters of ``text``."""

    text: str


class Pattern(NamedTuple):
    """A regex, as ``to_fullmatch`` writes it."""

    regex: str


class Free(NamedTuple):
    """Any text that contains none of some others."""

    excluded: tuple[str, ...]


class Options(NamedTuple):
    """One of some regular parts."""

    parts: tuple[Literal | Pattern | Free, ...]


Regular: TypeAlias = Literal | Pattern | Free | Options


class Token(NamedTuple):
    """An added token."""

    token_id: int


class Json(NamedTuple):
    """A JSON value under a prepared schema. source: that schema as JSON. options: its spelling."""

    source: str
    kind: str
    options: str


class Chain(NamedTuple):
    """Parts one after another."""

    parts: tuple[Part, ...]


class Choice(NamedTuple):
    """One of some parts."""

    options: tuple[Part, ...]


class Star(NamedTuple):
    """Any number of a part."""

    part: Part


class Lexeme:
    """Regular parts one after another, which llguidance reads at once."""

    def __init__(self, parts: Sequence[Regular]) -> None:
        self.parts = tuple(_joined(parts))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lexeme) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(self.parts)

    @property
    def lead(self) -> str:
        """What every text begins with."""
        return self.parts[0].text if isinstance(self.parts[0], Literal) else ""

    @property
    def is_literal(self) -> bool:
        """Whether it is one text."""
        return len(self.parts) == 1 and isinstance(self.parts[0], Literal)

    @cached_property
    def can_be_empty(self) -> bool:
        """Whether the empty text is among its texts."""
        return all(map(_can_be_empty, self.parts))

    @cached_property
    def firsts(self) -> Ranges:
        """The characters that may come first, or more."""
        found: list[tuple[int, int]] = []
        for part in self.parts:
            found += _firsts(part)
            if not _can_be_empty(part):
                break
        return normalize(found)

    @cached_property
    def is_closed(self) -> bool:
        """Whether none of its texts is the beginning of another one, as far as that is seen."""
        body: list[Regular] = []
        for part in self.parts:
            if not isinstance(part, Literal):
                body.append(part)
            elif body:
                if not _ends(body, part.text):
                    return False
                body = []
        return not body or (len(body) == 1 and _is_closed(body[0]))

    def terminal(self) -> str:
        """As a terminal, whose texts are not empty."""
        if self.parts == (Free(()),):
            return _SOME
        written = " ".join(map(_written, self.parts))
        return f"({written}) & {_SOME}" if self.can_be_empty else written


Part: TypeAlias = Regular | Token | Json | Chain | Choice | Star | Lexeme
_Leaf: TypeAlias = Token | Json | Lexeme


def tag_lark(tag: Any, options: dict[str, Any]) -> str:
    """The rules of a tag whose schemas and regexes are prepared, and whose tokens are ids.

    options: ``x-guidance`` of every schema. Raises GrammarCompileError for what is not written.
    """
    if not isinstance(tag, dict) or not isinstance(tag.get("format"), dict):
        raise _refusal("without a format")
    root = _in_lexemes(_read(tag["format"], options))
    _Order(root).check()
    return _Writer().write(root)


def _refusal(what: str) -> GrammarCompileError:
    fix = "use the backend xgrammar, which compiles it"
    return GrammarCompileError(f"llguidance has no structural_tag {what}; {fix}")


def _read(node: dict[str, Any], options: dict[str, Any]) -> Part:
    spend(8)
    part = _read_leaf(node, options) or _read_compound(node, options)
    if part is None:
        raise _refusal(f"with this {node.get('type')}")
    return part


def _read_leaf(node: dict[str, Any], options: dict[str, Any]) -> Part | None:
    match node:
        case {"type": "const_string", "value": str(text)}:
            return Literal(text)
        case {"type": "regex", "pattern": str(regex), **rest} if not rest:
            return Pattern(regex)
        case {"type": "any_text" | "text_without", **rest} if rest.keys() <= {"excludes"}:
            return Free(tuple(rest.get("excludes", ())))
        case {"type": "token", "token": int(token_id)}:
            return Token(token_id)
        case {"type": "json_schema", "json_schema": schema, **rest} if rest.keys() <= {"style"}:
            return _json(schema, options) if rest.get("style", "json") == "json" else None
    return None


def _read_compound(node: dict[str, Any], options: dict[str, Any]) -> Part | None:
    def read(part: dict[str, Any]) -> Part:
        return _read(part, options)

    match node:
        case {"type": "sequence", "elements": [*parts]}:
            return Chain(tuple(map(read, parts)))
        case {"type": "or", "elements": [*parts]}:
            return Choice(tuple(map(read, parts)))
        case {"type": "optional", "content": part}:
            return Choice((read(part), Chain(())))
        case {"type": "star", "content": part}:
            return Star(read(part))
        case {"type": "plus", "content": part}:
            return Chain((read(part), Star(read(part))))
        case {"type": "tag", "begin": begin, "content": content, "end": end}:
            return _tag(_edge(begin), content, end, options)
        case {"type": "triggered_tags", "triggers": [*texts], "tags": [*tags]}:
            return _triggered(node, texts, [read(tag) for tag in tags])
        case {"type": "token_dispatch", "rules": [*rules], "loop": loop}:
            calls = Choice(tuple(Chain((Token(token), read(part))) for token, part in rules))
            return _calls_in_text(Free(()), calls, is_one=not loop)
    return None


def _json(schema: Any, options: dict[str, Any]) -> Part:
    kind = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(kind, str) and schema.keys() == {"type"} and kind in _SCALARS:
        return Options(tuple(map(Literal, _SCALARS[kind])))
    kind = kind if isinstance(kind, str) else ""
    return Json(json.dumps(schema), kind, json.dumps(options))


def _edge(edge: Any) -> Part:
    match edge:
        case str():
            return Literal(edge)
        case {"type": "token", "token": int(token_id)}:
            return Token(token_id)
        case {"type": "const_string", "value": str(text)}:
            return Literal(text)
        case [*texts] if texts and all(isinstance(text, str) for text in texts):
            return Options(tuple(map(Literal, texts)))
    raise _refusal("with such an edge")


def _tag(begin: Part, content: Any, end: Any, options: dict[str, Any]) -> Part:
    inner, last = _read(content, options), _edge(end)
    if isinstance(inner, Free):  # goes on to where the end first stands
        ends = [end] if isinstance(end, str) else end if isinstance(end, list) else []
        inner = Free(tuple(dict.fromkeys([*inner.excluded, *filter(None, ends)])))
    return Chain((begin, inner, last))


def _triggered(node: dict[str, Any], triggers: list[Any], tags: list[Part]) -> Part:
    if node.get("at_least_one") or not triggers or not all(map(bool, triggers)):
        raise _refusal("with these triggered_tags")
    free = Free((*triggers, *node.get("excludes", ())))
    return _calls_in_text(free, Choice(tuple(tags)), is_one=bool(node.get("stop_after_first")))


def _calls_in_text(free: Free, calls: Part, *, is_one: bool) -> Part:
    if is_one:
        return Choice((Chain((free, calls)), free))
    return Chain((Star(Chain((free, calls))), free))


def _in_lexemes(part: Part) -> Part:
    """The same with chains flat, and lexemes for what is regular and stands together."""
    spend(4)
    match part:
        case Literal() | Pattern() | Free() | Options():
            return _chain([part])
        case Chain():
            return _chain(_flat(part))
        case Choice():
            return Choice(tuple(map(_in_lexemes, part.options)))
        case Star():
            return Star(_in_lexemes(part.part))
    return part


def _flat(part: Part) -> list[Part]:
    if isinstance(part, Chain):
        return [one for inner in part.parts for one in _flat(inner)]
    if isinstance(part, Choice):
        options = [_flat(option) for option in part.options]
        if all(len(option) == 1 for option in options):
            parts = [one for [option] in options for one in _options_of(option)]
            plain = [one for one in parts if isinstance(one, Literal | Pattern | Free)]
            if len(plain) == len(parts):
                return [Options(tuple(plain))]
        return options[0] if len(options) == 1 else [part]
    return [part]


def _options_of(part: Part) -> Sequence[Part]:
    return part.parts if isinstance(part, Options) else (part,)


def _chain(parts: Sequence[Part]) -> Part:
    done: list[Part] = []
    run: list[Regular] = []
    for at, part in enumerate(parts):
        if isinstance(part, Literal | Pattern | Free | Options):
            run.append(part)
            continue
        if isinstance(part, Choice) and run and not Lexeme(run).is_closed:
            return Chain((*done, _after_open(run, part, parts[at + 1 :])))
        done += [Lexeme(run)] if _has_text(run) else []
        done.append(_in_lexemes(part))
        run = []
    done += [Lexeme(run)] if _has_text(run) else []
    return done[0] if len(done) == 1 else Chain(tuple(done))


def _has_text(run: list[Regular]) -> bool:
    return bool(Lexeme(run).parts) if run else False


def _after_open(run: list[Regular], choice: Choice, rest: Sequence[Part]) -> Part:
    """Parts that only what follows ends: it takes the beginning that all options share."""
    options = [_flat(option) for option in choice.options]
    whole = [option for option in options if option]
    firsts = [option[0] for option in whole]
    lead = commonprefix([first.text if isinstance(first, Literal) else "" for first in firsts])
    inner = tuple(
        Chain((Literal(option[0].text[len(lead) :]), *option[1:]))
        if lead and isinstance(option[0], Literal)
        else Chain(tuple(option))
        for option in whole
    )
    chosen = Choice(inner) if len(inner) > 1 else inner[0] if inner else Chain(())
    taken = [*run, Literal(lead)] if lead else run
    first = Chain((Lexeme(taken), _in_lexemes(chosen), _chain(rest)))
    if len(whole) == len(options):
        return first
    return Choice((first, _chain([*run, *rest])))


def _joined(parts: Iterable[Regular]) -> Iterator[Regular]:
    """Literals next to each other as one, and no empty ones."""
    text = ""
    for part in parts:
        if isinstance(part, Literal):
            text += part.text
            continue
        if text:
            yield Literal(text)
        text = ""
        yield part
    if text:
        yield Literal(text)


def _can_be_empty(part: Regular) -> bool:
    match part:
        case Literal():
            return not part.text
        case Pattern():
            return re.fullmatch(readable(part.regex), "") is not None
        case Options():
            return any(map(_can_be_empty, part.parts))
    return True


def _firsts(part: Regular) -> Ranges:
    match part:
        case Literal():
            return tuple((ord(first), ord(first)) for first in part.text[:1])
        case Pattern():
            return _characters(part)
        case Options():
            return normalize(pair for one in part.parts for pair in _firsts(one))
    return ((0, 0), *ANY_CHARACTER)


def _characters(part: Regular) -> Ranges:
    """All characters that its texts may hold, or more."""
    match part:
        case Literal():
            return normalize((ord(one), ord(one)) for one in part.text)
        case Pattern():
            return code_points(RE_PARSER.parse(readable(part.regex)))
        case Options():
            return normalize(pair for one in part.parts for pair in _characters(one))
    return ((0, 0), *ANY_CHARACTER)


def _ends(body: Sequence[Regular], mark: str) -> bool:
    """Whether the parts before a mark cannot hold what tells where it begins."""
    held = normalize(pair for part in body for pair in _characters(part))
    if any(not intersect(held, ((ord(one), ord(one)),)) for one in mark):
        return True
    (first, *more) = body
    return not more and isinstance(first, Free) and _is_told(first, mark)


def _is_told(free: Free, mark: str) -> bool:
    """Whether the mark begins with what the free text does not hold, not even in part with it."""
    return any(mark.startswith(one) and not _has_border(one) for one in free.excluded)


def _has_border(text: str) -> bool:
    return any(text.startswith(text[at:]) for at in range(1, len(text)))


def _is_closed(part: Regular) -> bool:
    if not isinstance(part, Options):
        return isinstance(part, Literal)
    texts = sorted(one.text for one in part.parts if isinstance(one, Literal))
    is_plain = len(texts) == len(part.parts)
    return is_plain and not any(b.startswith(a) and a != b for a, b in pairwise(texts))


def _written(part: Regular) -> str:
    match part:
        case Literal():
            return json.dumps(part.text, ensure_ascii=False)
        case Pattern():
            return f"/(?:{part.regex})/"
        case Options():
            return f"({' | '.join(map(_written, part.parts))})"
    if not part.excluded:
        return _ANY
    held = " | ".join(json.dumps(text, ensure_ascii=False) for text in part.excluded)
    return f"({_ANY} & ~({_ANY} ({held}) {_ANY}))"


class _Order:
    """What may follow what, and whether llguidance can tell where each lexeme ends.

    after: by the index of a leaf, the leaves that may come next; -1 where the text may end.
    """

    def __init__(self, root: Part) -> None:
        self.leaves: list[_Leaf] = []
        self.after: list[set[int]] = []
        firsts, lasts, can_be_empty = self._walk(root)
        for last in lasts:
            self.after[last].add(-1)
        self.start = firsts | ({-1} if can_be_empty else set())

    def check(self) -> None:
        """Raise GrammarCompileError where one cannot be told from another."""
        for leaf, after in zip(self.leaves, self.after, strict=True):
            for other in after - {-1}:
                self._require_end(leaf, self.leaves[other])
        checked = set[frozenset[int]]()
        for places in (self.start, *self.after):
            key = frozenset(places - {-1})
            if key not in checked:
                checked.add(key)
                self._require_apart(sorted(key))

    def _require_end(self, leaf: _Leaf, then: _Leaf) -> None:
        if isinstance(leaf, Token) or isinstance(then, Token):
            return
        if isinstance(leaf, Json):
            is_ended = leaf.kind in _FIRSTS or not intersect(_firsts_of(then), _NUMBERS)
        else:
            is_ended = leaf.is_closed
        if not is_ended:
            raise _refusal("in which a part has no certain end")

    def _require_apart(self, places: Sequence[int]) -> None:
        spend(len(places) ** 2 // 8)
        found = [self.leaves[at] for at in places]
        if all(isinstance(leaf, Lexeme) and leaf.is_literal for leaf in found):
            texts = sorted({leaf.lead for leaf in found if isinstance(leaf, Lexeme)})
            if any(b.startswith(a) for a, b in pairwise(texts)):
                raise _refusal("in which a part begins as another one")
            return
        for at, leaf in zip(places, found, strict=True):
            if self.after[at] <= {-1}:
                continue  # it never has to end for another one to begin
            if not all(leaf == other or _is_apart(leaf, other) for other in found):
                raise _refusal("in which a part begins as another one")

    def _walk(self, part: Part) -> tuple[set[int], set[int], bool]:
        match part:
            case Chain():
                return self._walk_chain(part)
            case Choice():
                walked = [self._walk(option) for option in part.options]
                return (
                    set().union(*(one[0] for one in walked)),
                    set().union(*(one[1] for one in walked)),
                    any(one[2] for one in walked),
                )
            case Star():
                firsts, lasts, _ = self._walk(part.part)
                for last in lasts:
                    self.after[last] |= firsts
                return firsts, lasts, True
            case Token() | Json() | Lexeme():
                self.leaves.append(part)
                self.after.append(set())
                at = {len(self.leaves) - 1}
                return at, at, isinstance(part, Lexeme) and part.can_be_empty
        raise TypeError(part)

    def _walk_chain(self, chain: Chain) -> tuple[set[int], set[int], bool]:
        firsts, lasts, can_be_empty = set[int](), set[int](), True
        for part in chain.parts:
            own_firsts, own_lasts, is_empty = self._walk(part)
            for last in lasts:
                self.after[last] |= own_firsts
            firsts |= own_firsts if can_be_empty else set()
            lasts = (lasts | own_lasts) if is_empty else own_lasts
            can_be_empty = can_be_empty and is_empty
        return firsts, lasts, can_be_empty


def _firsts_of(leaf: _Leaf) -> Ranges:
    if isinstance(leaf, Lexeme):
        return leaf.firsts
    begins = _FIRSTS.get(leaf.kind, '{["-0123456789tfn') if isinstance(leaf, Json) else ""
    return normalize((ord(one), ord(one)) for one in begins)


def _is_apart(one: _Leaf, other: _Leaf) -> bool:
    """Whether no text of ``one`` can be followed by more within a text of ``other``."""
    if isinstance(one, Token) or isinstance(other, Token):
        return True
    if not intersect(_firsts_of(one), _firsts_of(other)):
        return True
    if isinstance(one, Json) or isinstance(other, Json):
        return False
    if one.lead and other.lead:
        is_first = other.lead.startswith(one.lead) or one.lead.startswith(other.lead)
        return not is_first
    free, mark = one.parts[0], one.parts[1] if len(one.parts) > 1 else None
    is_told = isinstance(free, Free) and isinstance(mark, Literal) and _is_told(free, mark.text)
    return is_told and other.parts == (free,)


class _Writer:
    """Rules and terminals, each once."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._ordered: dict[Json, Rules | None] = {}

    def write(self, root: Part) -> str:
        start = self._rule(root)
        lines = [f"{name}: {text}" for text, name in self._names.items()]
        for rules in self._ordered.values():
            lines += rules.lines if rules is not None else ()
        return "\n".join([f"start: {start}", *lines])

    def _rule(self, part: Part) -> str:
        match part:
            case Lexeme():
                if part.is_literal:
                    return json.dumps(part.lead, ensure_ascii=False)
                return self._named(part.terminal(), "TEXT") + "?" * part.can_be_empty
            case Token():
                return f"<[{part.token_id}]>"
            case Json():
                return self._json(part)
            case Chain():
                return " ".join(map(self._rule, part.parts)) or '""'
            case Choice():
                options = [self._rule(option) for option in part.options if option != Chain(())]
                is_optional = len(options) < len(part.options)
                return f"({' | '.join(options)})" + "?" * is_optional
            case Star():
                return f"({self._rule(part.part)})*"
        raise TypeError(part)

    def _json(self, part: Json) -> str:
        schema, options = json.loads(part.source), json.loads(part.options)
        if part not in self._ordered:
            prefix = f"objects{len(self._ordered)}_"
            self._ordered[part] = ordered_object_rules(
                schema, options, prefix, OrderedObjects(repeats=True)
            )
        rules = self._ordered[part]
        require_few_items(schema, LARGE if rules is not None and rules.is_whole else None)
        if rules is None:
            return self._named(f"%json {json.dumps({**schema, 'x-guidance': options})}", "json")
        return rules.top

    def _named(self, text: str, kind: str) -> str:
        return self._names.setdefault(text, f"{kind}_{len(self._names)}")
