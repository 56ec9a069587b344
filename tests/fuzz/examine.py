"""What a grammar must do, whoever wrote it: fail with an error of ours, or write what it says."""

from __future__ import annotations

import json
import random
import re
import signal
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np

from guided_spec.errors import GrammarCompileError, GuidedSpecError
from guided_spec.grammar.completion.completion import EndingsCache
from guided_spec.grammar.completion.endings import EndLostError
from guided_spec.grammar.document import SpecDocument
from guided_spec.grammar.limits import GrammarLimits, check_limits
from guided_spec.grammar.pipeline import GrammarPipeline
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from tests.fuzz.targets import Target
from tests.grammar.tools.test_tools import SPECIAL
from tests.masks.walks import accepts, walk

LIMITS = GrammarLimits(compile_seconds=3.0, compile_bytes=2**29)
LONGEST_MESSAGE = 4_000
JUDGE_SECONDS = 1.0
_STEPS = 60
_FREE = ("structural_tag", "ebnf", "lark")  # without an independent judge


class FuzzFailureError(AssertionError):
    """A grammar that breaks its promise."""


class Examiner:
    """Puts inputs to every backend of ``names``, behind the limits that requests have.

    most_large: how many inputs that are large at sight are tried out in a worker, which takes
        seconds; of the others only the size is checked.
    counts: how often each backend compiled an input, or which error it raised.
    """

    def __init__(
        self, names: Sequence[str] = ("xgrammar", "llguidance", "auto"), most_large: int = 0
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._left = most_large
        self._endings = EndingsCache(SPECIAL)
        self.backends = {name: GrammarPipeline.of(name, SPECIAL, LIMITS) for name in names}

    def close(self) -> None:
        """End the workers."""
        for backend in self.backends.values():
            backend.close()

    def text(self, target: Target, text: str, seed: int = 0) -> None:
        """Raises FuzzFailureError, or whatever else ``text`` brings about by mistake."""
        try:
            spec = target.make(text)
        except GuidedSpecError as error:
            self._refused("", error)
            return
        if spec is not None:
            self.spec(spec, seed)

    def spec(self, spec: GrammarSpec, seed: int = 0, values: Sequence[Any] = ()) -> None:
        """Compile by each backend and look at what comes of it.

        values: JSON values that a grammar for a JSON schema must reject where jsonschema does.
        """
        if self._is_too_large(spec):
            return
        for name, backend in self.backends.items():
            try:
                grammar = backend.compile(spec)
            except GuidedSpecError as error:
                self._refused(name, error)
                continue
            self.counts[f"{name}: compiled"] += 1
            self.judge(name, spec, grammar, seed, values)

    def _is_too_large(self, spec: GrammarSpec) -> bool:
        try:
            if not check_limits(SpecDocument(spec), LIMITS).large:
                return False
        except GrammarCompileError as error:
            self._refused("limits", error)
            return True
        self._left -= 1
        self.counts["large"] += 1
        return self._left < 0

    def _refused(self, name: str, error: GuidedSpecError) -> None:
        self.counts[f"{name}: {type(error).__name__}".removeprefix(": ")] += 1
        if not 0 < len(str(error)) < LONGEST_MESSAGE:
            raise FuzzFailureError(f"a message of {len(str(error))} characters") from error

    def judge(
        self,
        name: str,
        spec: GrammarSpec,
        grammar: CompiledGrammar,
        seed: int = 0,
        values: Sequence[Any] = (),
    ) -> None:
        """Let ``grammar`` write, and offer it JSON that ``spec`` forbids."""
        written = [self._write(name, spec, grammar, seed + number) for number in range(3)]
        found = [text for text in written if text is not None]
        for text in found:
            if not _satisfies(text, spec):
                raise FuzzFailureError(f"{name} wrote {text!r}")
        if spec.kind in ("json_schema", "json_object"):
            self._reject(name, spec, grammar, [*values, *_mutants(found, random.Random(seed))])
        try:
            endings = self._endings.of(grammar)
            endings.cost(endings.start)
        except EndLostError:
            self.counts[f"{name}: no end known"] += 1

    def _write(
        self, name: str, spec: GrammarSpec, grammar: CompiledGrammar, seed: int
    ) -> str | None:
        """A random text; None where it is not judged, or not whole."""
        if spec.kind in _FREE:
            self._wander(name, grammar, random.Random(seed))
            return None
        try:
            text = walk(grammar, seed, wander=30, limit=400)
        except AssertionError as error:
            raise FuzzFailureError(f"{name}: {error}") from error
        self.counts[f"{name}: texts"] += text.finished
        return text.text if text.finished else None

    def _wander(self, name: str, grammar: CompiledGrammar, dice: random.Random) -> None:
        """Tokens at random; such a grammar can be a dead end, which is an error of its own."""
        matcher = grammar.new_matcher()
        bitmask = np.zeros((1, -(-SPECIAL.vocab_size // 32)), dtype=np.int32)
        for _ in range(_STEPS):
            matcher.fill_next_token_bitmask(bitmask)
            bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")
            legal = np.flatnonzero(bits[: SPECIAL.vocab_size]).tolist()
            if not legal:
                self.counts[f"{name}: dead end"] += 1
                return
            token = dice.choice(legal)
            if not matcher.accept_token(token):
                raise FuzzFailureError(f"{name} refuses {token}, which its mask admits")
            if matcher.is_terminated():
                self.counts[f"{name}: texts"] += 1
                return

    def _reject(
        self, name: str, spec: GrammarSpec, grammar: CompiledGrammar, values: Sequence[Any]
    ) -> None:
        schema = json.loads(spec.source) if spec.source else {"type": "object"}
        for value in values:
            if _is_valid(value, schema) is False:
                self.counts[f"{name}: invalid instances"] += 1
                for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
                    if accepts(grammar, text.encode("utf-8", "surrogatepass")):
                        raise FuzzFailureError(f"{name} admits {text!r}")


def _satisfies(text: str, spec: GrammarSpec) -> bool:
    match spec.kind:
        case "regex":
            return _matches(spec.source, text)
        case "json_schema":
            return _is_valid(json.loads(text), json.loads(spec.source)) is not False
        case "json_object":
            return isinstance(json.loads(text), dict)
    return True


def _matches(pattern: str, text: str) -> bool:
    """By ``re``; True where that takes far too long, which is its defect and not the grammar's."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, JUDGE_SECONDS)
    try:
        return re.fullmatch(pattern, text) is not None
    except TimeoutError:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _is_valid(value: Any, schema: Any) -> bool | None:
    """jsonschema's word, formats included; None where it has none."""
    draft = jsonschema.Draft202012Validator
    try:
        kind = jsonschema.validators.validator_for(schema, default=draft)
        return bool(kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(value))
    except Exception:  # a schema that is beyond the judge: endless references, broken patterns
        return None


def _mutants(texts: Sequence[str], dice: random.Random) -> list[Any]:
    """JSON values that differ little from those written: often just outside of a schema."""
    found: list[Any] = [None, True, 0, -1, 1.5, "", "a", [], {}, [1, 1], {"a": 1}, {"": None}]
    for text in texts:
        for _ in range(6):
            try:
                found.append(_mutate(json.loads(text), dice))
            except (ValueError, RecursionError):
                break
    return found


def _mutate(value: Any, dice: random.Random) -> Any:
    if isinstance(value, dict) and value and dice.random() < 0.8:
        key = dice.choice(list(value))
        match dice.randrange(4):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, "extra": 0}
        return {**value, key: _mutate(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.8:
        at = dice.randrange(len(value))
        match dice.randrange(4):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return [*value, value[at]]
        return [*value[:at], _mutate(value[at], dice), *value[at + 1 :]]
    if isinstance(value, str):
        return dice.choice([value + "a", value[1:], value + "\n", "", 0, value.swapcase()])
    if isinstance(value, int | float) and not isinstance(value, bool):
        return dice.choice([value + 1, value - 1, -value, value * 10, str(value), 0.5])
    return dice.choice([None, False, 0, "a", [], {}, [value], {"a": value}])
