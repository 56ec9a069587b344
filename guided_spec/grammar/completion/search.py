"""Finds how a text of any grammar can end, by search: a matcher says which tokens are legal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import compress, islice, takewhile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.completion.endings import NEVER, Endings
from guided_spec.grammar.completion.spelling import Spelling
from guided_spec.grammar.protocol import CompiledGrammar, legal_row
from guided_spec.grammar.text.row_filter import Probe
from guided_spec.grammar.text.state import new_text
from guided_spec.grammar.text.unique_keys import UniqueKeysGrammar
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.ops.mask_words import add_tokens, bits_of, first_tokens, pack_row, spread_tokens

RISE = 64  # tokens to spare, beyond which a row is not looked at
_RISE_PER_TOKEN = 16  # that a few tokens are taken to add at most, each
_FIRST_STEPS = 2048  # of the search from the start, which is made where grammars are compiled
_STEPS = 256  # of any other
_TRIED = 6  # steps of one position
_LEFT_OUT = 3  # values at a way's beginning that a search may leave out
_PROBES = 24  # tokens without structure that are tested, and if all fit, taken for all
_TESTED = 96  # where not all fit: how many are tested
_KINDS = 32  # of other tokens that are tested
_HEAD = 48  # bytes of a long way that are tried first
_ALIKE = 3  # tokens of a kind that are tested, and if all fit, taken for the kind
_TRIALS = 12  # tests of one row that may need a search of their own
_VALUES = (  # that a text may lack before a known way goes on
    *(b'""', b' ""', b"0", b" 0", b'"":""', b'"": ""', b'":""', b'": ""', b'"', b"{}", b"[]"),
    *(b"]", b"}", b'"]', b'"}', b'":""}', b'": ""}'),
)


_CLOSING = b'"}]'  # quotes first: brackets close no string
_LEADING = b":,"
_RANK_OF_REST = 16
_WORN = 512  # above all ranks
_BLANK = re.compile(rb"[ \t\r\n]+")
_WORD = re.compile(rb'[^\[\]{},:"\\ \t\r\n]+')
_PARTIAL_TEXTS = b"\xff"
_PART = re.compile(rb"[\xc2-\xdf]$|[\xe0-\xef][\x80-\xbf]?$|[\xf0-\xf4][\x80-\xbf]{0,2}$")


class SearchTokens:
    """Made once for a vocabulary.

    steps: int64, the tokens that a search goes by: those of a single byte.
    stops: int64, the tokens that end a text.
    content: int32 [W], a row of the tokens of whole characters without quotes and backslashes: in a
    JSON string they neither end nor escape anything.
    turns: int64, all other tokens that write anything. kinds: int64 [turns], equal for tokens that
    differ in JSON only in their words; short ones come first. num_plain: kinds below it contain no
    backslash.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        data = vocabulary.token_bytes[: vocabulary.vocab_size]
        self.stops = np.array(sorted(vocabulary.stop_token_ids), dtype=np.int64)
        is_content = np.array([bool(text) and _is_content(text) for text in data])
        self.content = pack_row(is_content)
        written = [token for token, text in enumerate(data) if text]
        self.turns = np.array([t for t in written if not is_content[t]], dtype=np.int64)
        kinds = [_kind(data[token]) for token in self.turns.tolist()]
        order = sorted(dict.fromkeys(kinds), key=_order_of_kinds)
        self.num_plain = sum(b"\\" not in kind for kind in order)
        numbers = {kind: number for number, kind in enumerate(order)}
        self.kinds = np.array([numbers[kind] for kind in kinds], dtype=np.int64)
        singles = vocabulary.single_byte_ids
        steps = singles[singles >= 0].tolist()
        self.steps = np.array(steps, dtype=np.int64)
        self._rank = np.array([_rank(data[token]) for token in steps], dtype=np.int64)
        self._is_worn = self._rank >= _RANK_OF_REST

    def next_steps(
        self, row: NDArray[np.int32], used: NDArray[np.int64], count: int
    ) -> NDArray[np.int64]:
        """The first ``count`` indices into ``steps`` to try, of those in ``row``.

        Closing bytes, those between values, what was used least so far; blanks last. A search that
        prefers the same byte again and again never leaves a loop of the grammar.

        used: int64 [steps], how often the search has used each of them.
        """
        legal = np.flatnonzero(bits_of(row, self.steps))
        order = self._rank[legal] + np.where(self._is_worn[legal], used[legal] * _WORN, 0)
        found: NDArray[np.int64] = legal[np.argsort(order, kind="stable")[:count]]
        return found


def _rank(text: bytes) -> int:
    first = text[0]
    if first in _CLOSING:
        return _CLOSING.index(first)
    if first in _LEADING:
        return len(_CLOSING) + _LEADING.index(first)
    if text.isspace():
        return _WORN - 1
    is_digit = chr(first).isdigit()
    return _RANK_OF_REST + (0 if is_digit else 128) + first // 2


def _is_content(data: bytes) -> bool:
    return b'"' not in data and b"\\" not in data and _is_utf8(data)


def _kind(data: bytes) -> bytes:
    """The token with words and blanks shortened, and what it lacks of a character at its end."""
    found = _PART.search(data)
    part = found[0] if found else b""
    whole = _WORD.sub(b"a", _BLANK.sub(b" ", data[: len(data) - len(part)]))
    if not part and _is_utf8(data):
        return whole
    return _PARTIAL_TEXTS + whole + _lead(part[:1]) + b"." * len(part)


def _lead(byte: bytes) -> bytes:
    """Stands for all first bytes of characters that have the same legal continuations."""
    if byte in (b"\xe0", b"\xed", b"\xf0", b"\xf4") or byte < b"\xc2":
        return byte
    return b"\xc2" if byte < b"\xe0" else b"\xe1" if byte < b"\xf0" else b"\xf1"


def _order_of_kinds(kind: bytes) -> tuple[bool, bool, int]:
    is_part = kind.startswith(_PARTIAL_TEXTS)
    return b"\\" in kind, is_part, len(kind) - 2 * kind.startswith(b'"')


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class Path:
    """A known way to the end of one text. Made for one text, and dropped with it.

    text: the bytes that are missing. after: the ways after tokens that were asked for. turns:
    ways found after other tokens. scan: what was found out about the next token, here or where
    the same way was known before. rows: by what remained, rows that were made. So a fork and its
    original look once.
    """

    __slots__ = ("after", "rows", "scan", "text", "turns")

    def __init__(self, text: bytes, scan: Scan | None = None) -> None:
        self.text = text
        self.scan = scan
        self.after: dict[tuple[int, ...], Path | None] = {}
        self.turns: list[bytes] = []
        self.rows: dict[int, NDArray[np.int32]] = {}


class SearchEndings(Endings):
    """``Endings`` of any grammar: a state is a known ``Path``, the bytes to the end.

    The path after some tokens is the first of these that exists: the rest of the previous path, if
    the tokens began it; the previous path itself, if the grammar allows it there; the result of a
    bounded search. The search adds one byte at a time and prefers closing bytes, until a stop token
    or part of the previous path fits. Where any key is legal, it tries the keys that the object
    requires, since single bytes would never spell them. A cost is the fewest tokens that spell the
    path, so each token of the path lowers it by one. What is found depends on the text and its
    budget alone.

    A known path proves that a text can end; finding none proves nothing. So costs are upper bounds.
    Rows are the grammar's own while ``RISE`` tokens are to spare, and the path is then computed
    every few tokens only; in a grammar where few tokens add more than that, a text may lose its
    end. With fewer to spare, a row holds the tokens that begin a known path, the tokens after which
    a path still fits, and a few that need a search. Tokens of one kind mostly agree: where a path
    fits after all of a few probes, it is taken to fit after every legal token of their kind.
    """

    is_exact = False  # another way may be shorter

    def __init__(
        self,
        compiled: CompiledGrammar,
        vocabulary: Vocabulary,
        spelling: Spelling | None = None,
        tokens: SearchTokens | None = None,
    ) -> None:
        self.vocab_size = vocabulary.vocab_size
        self.spelling = spelling or Spelling(vocabulary)
        self.tokens = tokens or SearchTokens(vocabulary)
        self._stop = int(self.tokens.stops[0])
        required = compiled.required if isinstance(compiled, UniqueKeysGrammar) else ()
        keys = (json.dumps(key, ensure_ascii=False)[1:].encode() + b":" for key in required)
        self.keys = [written for key in keys if (written := self.spelling.write(key))]
        probe = new_text(compiled).without_budget()
        self._start = None if probe.is_terminated() else self._find(probe, b"", _FIRST_STEPS)

    @property
    def memory_size_bytes(self) -> int:
        """Bytes of the path from the start; the other paths belong to texts."""
        return len(self._start or b"")

    @property
    def start(self) -> Path | None:
        """A path from the start to the end; None if none was found."""
        return None if self._start is None else Path(self._start)

    def cost(self, state: Path | None) -> int:
        """The number of tokens that spell the known path, plus one for the stop token."""
        if state is None:
            return NEVER
        return min(NEVER, self.spelling.num_tokens(state.text) + 1)

    def stride(self, state: Path, remaining: int) -> int:
        """A number of tokens that surely does not use up what is to spare."""
        return max(1, (remaining - self.cost(state) - RISE) // _RISE_PER_TOKEN)

    def after(self, state: Path, token_ids: Sequence[int], probe: Probe) -> Path | None:
        """A path from the state after some tokens; None if none was found."""
        key = tuple(token_ids)
        if key not in state.after:
            data = b"".join(map(self.spelling.token_bytes.__getitem__, key))
            self._keep(state, key, self._after(state, data, probe))
        # The row may have the token for the sake of another way, found later and shorter.
        seen = None if state.scan is None else state.scan.path_after(key)
        least = self.cost(state.after[key])
        if seen is not None and self.cost(Path(seen)) < least and self.completes(probe, seen):
            self._keep(state, key, seen)
        return state.after[key]

    def _keep(self, state: Path, key: tuple[int, ...], found: bytes | None) -> None:
        scan = state.scan if found == state.text else None
        state.after[key] = None if found is None else Path(found, scan)

    def is_free(self, state: Path, remaining: int) -> bool:
        """Whether much is to spare."""
        return self.cost(state) + RISE < remaining

    def row(
        self, state: Path, remaining: int, probe: Probe, legal: NDArray[np.int32] | None = None
    ) -> NDArray[np.int32]:
        """int32 [W]: tokens after which a path is known that costs less than ``remaining``."""
        row = state.rows.get(remaining)
        if row is None:
            row = self._scan(state, remaining, probe, legal).row(remaining)
            state.rows = {remaining: row}
        return row

    def _scan(
        self, state: Path, remaining: int, probe: Probe, row: NDArray[np.int32] | None
    ) -> Scan:
        """The scan of the next token; inside a string, mostly that of the token before."""
        known, row = state.scan, legal_row(probe, self.vocab_size) if row is None else row
        legal = _Legal(row, probe.interchangeable(row))
        if known is not None and self.fits(state.text, remaining):
            if known.legal.is_like(legal):
                return known
            # As at the end of a string of limited length, where each token leaves fewer.
            state.scan = known.narrowed(legal, probe)
            if state.scan is not None:
                return state.scan
        state.scan = scan = Scan(self, state, remaining, legal)
        scan.look(probe)
        return scan

    def admits(self, state: Path, token_id: int, remaining: int, probe: Probe) -> bool:
        """Whether ``row`` has the bit of a token that the grammar allows."""
        if not 0 <= token_id < self.spelling.vocab_size:
            return False
        return bool(self.row(state, remaining, probe)[token_id >> 5] >> (token_id & 31) & 1)

    def fits(self, text: bytes, remaining: int) -> bool:
        """Whether fewer than ``remaining`` tokens write a path and end the text."""
        return len(text) + 1 < remaining or self.spelling.num_tokens(text) + 1 < remaining

    def completes(self, probe: Probe, text: bytes) -> bool:
        """Whether this text and a stop token complete the text; does not move."""
        return bool(self._completed(probe, [()], text))

    def completed_by(self, probe: Probe, tokens: Sequence[int], text: bytes) -> list[int]:
        """Those of the tokens after which this text and a stop token complete the text."""
        return [token for (token,) in self._completed(probe, [(one,) for one in tokens], text)]

    def _completed(
        self, probe: Probe, starts: Sequence[tuple[int, ...]], text: bytes
    ) -> Sequence[tuple[int, ...]]:
        # Most that do not fit do not begin to, and cost little.
        for part in (text[:_HEAD], text) if len(text) > 2 * _HEAD else (text,):
            written = self.spelling.write(part)
            if written is None:
                return ()
            end = (*written, self._stop) if part is text else written
            starts = list(compress(starts, probe.takes_each([(*one, *end) for one in starts])))
        return starts

    def _after(self, state: Path, data: bytes, probe: Probe) -> bytes | None:
        if state.text.startswith(data):
            return state.text[len(data) :]
        # All of the path may still be missing, or all but as much.
        ways = [state.text, state.text[len(data) :], *state.turns]
        ways.sort(key=self.spelling.num_tokens)
        shortest = next((way for way in ways if self.completes(probe, way)), None)
        return self._find(probe, state.text, _STEPS) if shortest is None else shortest

    def _find(self, probe: Probe, before: bytes, most: int) -> bytes | None:
        """A path by depth-first search in at most ``most`` steps; None if none is found."""
        ends = list(_ends_of(before))
        quick = (value + end for end in ends for value in _VALUES)
        found = next((text for text in quick if self.completes(probe, text)), None)
        if found is not None:
            return found
        search = _Search(self, probe)
        for _ in range(most):
            found = search.end(ends)
            if found is not None or not search.step():
                break
        search.back()
        return found


class _Search:
    """A depth-first search for the end: its position, and the options left at each step."""

    def __init__(self, endings: SearchEndings, probe: Probe) -> None:
        self._endings, self._probe = endings, probe
        # Its rows cost far less, and every step is judged by the filters anyway.
        self._grammars = probe.unfiltered
        self._tokens = endings.tokens
        self._used = np.zeros(len(self._tokens.steps), dtype=np.int64)
        self._way: list[tuple[int, ...]] = []
        self._options: list[Iterator[tuple[int, ...]]] = []
        self._row: NDArray[np.int32] | None = None

    def end(self, ends: Sequence[bytes]) -> bytes | None:
        """The bytes of all steps, with one of ``ends`` where needed, if they complete the text."""
        if len(self._options) > len(self._way):
            return None  # back at a place that was looked at
        for end in ends:
            if self._endings.completes(self._probe, end):
                return self._text() + end
        self._row = legal_row(self._grammars, self._endings.vocab_size)
        return self._text() if bits_of(self._row, self._tokens.stops).any() else None

    def step(self) -> bool:
        """Advance, or backtrack where no option is left; False once the search is exhausted."""
        if len(self._options) == len(self._way):
            self._options.append(self._look())
        for tokens in self._options[-1]:
            count = sum(1 for _ in takewhile(self._probe.accept_token, tokens))
            if count == len(tokens):
                self._way.append(tokens)
                return True
            if count:
                self._probe.rollback(count)
        self._options.pop()
        if not self._way:
            return False
        self._probe.rollback(len(self._way.pop()))
        return True

    def back(self) -> None:
        """Roll the matcher back to where the search began."""
        if count := sum(map(len, self._way)):
            self._probe.rollback(count)

    def _text(self) -> bytes:
        data = self._endings.spelling.token_bytes
        return b"".join(data[token] for tokens in self._way for token in tokens)

    def _look(self) -> Iterator[tuple[int, ...]]:
        assert self._row is not None
        forced = self._grammars.forced_bytes()
        written = self._endings.spelling.write(forced) if forced else None
        if written:
            yield written
            return
        if not self._way or self._endings.spelling.token_bytes[self._way[-1][-1]].endswith(b'"'):
            yield from self._endings.keys  # one that is there already is refused
        for step in self._tokens.next_steps(self._row, self._used, _TRIED).tolist():
            self._used[step] += 1
            yield (int(self._tokens.steps[step]),)


class _Group(NamedTuple):
    """Tokens after which a path fits: ids, int64, or a row, int32 [W]."""

    tokens: NDArray[Any]
    way: bytes

    @property
    def is_row(self) -> bool:
        """Whether the tokens are given as a row."""
        return bool(self.tokens.dtype == np.int32)


class _Legal(NamedTuple):
    """The grammar's own row, and what ``Probe.interchangeable`` says of it; both int32 [W]."""

    row: NDArray[np.int32]
    alike: NDArray[np.int32]

    def is_like(self, other: _Legal) -> bool:
        """Whether both rows are the same."""
        are_all_alike = self.alike is self.row and other.alike is other.row
        pairs = [(self.row, other.row), (self.alike, other.alike)][: 1 if are_all_alike else 2]
        return all((one == another).all() for one, another in pairs)

    def holds(self, other: _Legal, content: NDArray[np.int32]) -> bool:
        """Whether the other one allows the same but for some of ``content``, int32 [W]."""
        lost = self.row & ~other.row
        is_less = not (other.row & ~self.row).any() and not (lost & ~content).any()
        return is_less and not ((self.alike ^ other.alike) & ~content).any()


class Scan:
    """What was found about the next token of a text near the end of its budget.

    A token is in a group if it begins a known path, if a known path still fits after it, or if a
    search finds one. Paths are kept as they are found, so tokens that begin them need no test.

    legal: what the grammar allows.
    """

    def __init__(self, endings: SearchEndings, state: Path, remaining: int, legal: _Legal) -> None:
        self.legal = legal
        self._endings, self._state, self._remaining = endings, state, remaining
        self._ways: dict[int, bytes] = {}
        self._groups: list[_Group] = []
        self._rows: dict[tuple[bool, ...], NDArray[np.int32]] = {}  # by the groups that fit
        self._trials = _TRIALS

    def path_after(self, token_ids: Sequence[int]) -> bytes | None:
        """The path because of which a row may allow this token; None where none was tried."""
        return self._ways.get(token_ids[0]) if len(token_ids) == 1 else None

    def row(self, remaining: int) -> NDArray[np.int32]:
        """int32 [W]: the tokens whose path costs less than ``remaining``, and the stop tokens."""
        fits = tuple(self._endings.fits(group.way, remaining) for group in self._groups)
        if fits not in self._rows:
            self._rows[fits] = self._row(fits)
        return self._rows[fits]

    def _row(self, fits: Sequence[bool]) -> NDArray[np.int32]:
        legal, stops = self.legal.row, self._endings.tokens.stops
        row, single = np.zeros_like(legal), list[NDArray[np.int64]]()
        for group in compress(self._groups, fits):
            if group.is_row:
                row |= group.tokens
            else:
                single.append(group.tokens)
        if single:
            add_tokens(row, np.concatenate(single))
        row &= legal
        add_tokens(row, stops[bits_of(legal, stops)])
        row.flags.writeable = False
        return row

    def look(self, probe: Probe) -> None:
        """Find out, once; the probe stands at the state, and does so again afterwards."""
        self.add_beginnings(b"", self._state.text)
        self._test_turns(probe)
        self._test_content(probe)
        by_way: dict[bytes, list[int]] = {}
        for token, way in self._ways.items():
            by_way.setdefault(way, []).append(token)
        for way, found in by_way.items():
            self._groups.append(_Group(np.array(found, dtype=np.int64), way))

    def narrowed(self, legal: _Legal, probe: Probe) -> Scan | None:
        """The scan where fewer tokens without structure are legal; None if one has to look.

        A look would find the same: it takes those tokens together, of which a few are tested.
        """
        if not self.legal.holds(legal, self._endings.tokens.content):
            return None
        for group in self._groups:
            tested = spread_tokens(group.tokens & legal.row, _ALIKE) if group.is_row else []
            if not self._complete(probe, tested, group.way):
                return None
        scan = Scan(self._endings, self._state, self._remaining, legal)
        scan._ways, scan._groups = self._ways, self._groups
        return scan

    def _test_content(self, probe: Probe) -> None:
        way, content = self._state.text, self._endings.tokens.content
        alike, rest = self.legal.alike & content, self.legal.row & content
        probes = spread_tokens(alike, _PROBES)
        if self._fits(way) and self._complete(probe, probes, way):
            self._groups.append(_Group(alike, way))
            rest &= ~alike
        self._test(first_tokens(rest, _TESTED), probe)

    def _test_turns(self, probe: Probe) -> None:
        tokens = self._endings.tokens
        is_legal = bits_of(self.legal.row, tokens.turns)
        turns, kinds = tokens.turns[is_legal], tokens.kinds[is_legal]
        is_alike = bits_of(self.legal.alike, turns)
        for kind in np.unique(kinds)[:_KINDS].tolist():
            of_kind = kinds == kind
            alike, single = turns[of_kind & is_alike], turns[of_kind & ~is_alike]
            first = alike[:_ALIKE].tolist()
            self._test(first, probe)
            if kind >= tokens.num_plain:
                self._test(alike[_ALIKE : 8 * _ALIKE].tolist(), probe)
            elif first and all(token in self._ways for token in first):
                self._groups.append(_Group(alike, self._ways[first[0]]))
            else:
                self._test(alike[_ALIKE : 2 * _ALIKE].tolist(), probe)
            self._test(single[: 8 * _ALIKE].tolist(), probe)

    def _test(self, token_ids: list[int], probe: Probe) -> None:
        data = self._endings.spelling.token_bytes
        unknown = [token for token in token_ids if token not in self._ways and data[token]]
        self._try_known(unknown, probe)
        for token in unknown:
            if token not in self._ways and self._trials:
                count = len(self._state.turns)
                self._search(token, probe)
                for way in self._state.turns[count:]:  # the others may need no search then
                    self._try(unknown, way, probe)

    def _try_known(self, token_ids: Sequence[int], probe: Probe) -> None:
        """Record paths that fit after tokens: a known one, or its rest after what they write."""
        text, data = self._state.text, self._endings.spelling.token_bytes
        self._try(token_ids, text, probe)
        for length in sorted({len(data[token]) for token in token_ids}):
            as_long = [token for token in token_ids if len(data[token]) == length]
            self._try(as_long, text[length:], probe)
        for way in self._state.turns:
            self._try(token_ids, way, probe)

    def _try(self, token_ids: Sequence[int], way: bytes, probe: Probe) -> None:
        left = [token for token in token_ids if token not in self._ways]
        if left and self._fits(way):
            completed = self._endings.completed_by(probe, left, way)
            self._ways.update(dict.fromkeys(completed, way))

    def _search(self, token: int, probe: Probe) -> None:
        if not probe.accept_token(token):
            return
        way = self._endings.after(self._state, (token,), probe)
        probe.rollback(1)
        self._trials -= 1
        if way is None or not self._fits(way.text):
            return
        if way.text not in self._state.turns:
            self._state.turns.append(way.text)
        self._ways[token] = way.text
        self.add_beginnings(self._endings.spelling.token_bytes[token], way.text)

    def add_beginnings(self, data: bytes, text: bytes) -> None:
        """Record the tokens that begin a known path, ``data`` and then ``text``."""
        for token, rest in self._endings.spelling.beginnings(data + text):
            if self.legal.row[token >> 5] >> (token & 31) & 1 and self._fits(rest):
                self._ways.setdefault(token, rest)
                self._state.after.setdefault((token,), Path(rest))

    def _fits(self, way: bytes) -> bool:
        return self._endings.fits(way, self._remaining)

    def _complete(self, probe: Probe, token_ids: Sequence[int], way: bytes) -> bool:
        return len(self._endings.completed_by(probe, token_ids, way)) == len(token_ids)


def _ends_of(text: bytes) -> Iterator[bytes]:
    """Yield what may be left of a path: all, all but its first byte, or from a later value on."""
    if text:
        yield text
        yield text[1:]
    starts = (at for at in range(2, len(text)) if text[at] in b",]}")
    for at in islice(starts, _LEFT_OUT):
        yield text[at:]
