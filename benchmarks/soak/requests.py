"""What the soak asks for: requests of many kinds, and how each of them has to end."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.soak.model import CONTEXT
from guided_spec.errors import (
    BudgetTooSmallError,
    ConfigError,
    GrammarCompileError,
    GrammarDeadEndError,
    GuidedSpecError,
    NoTokenLeftError,
    PromptError,
    UnsatisfiableGrammarError,
    UnsupportedSchemaError,
)
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.types import DRAFT_POLICIES, SamplingParams

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "boss": {"$ref": "#"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
_ITEMS = {"type": "array", "items": {"enum": ["cat", 3, None, True]}, "maxItems": 4}
_CHOICE = {"oneOf": [{"const": "yes"}, {"type": "integer", "minimum": -5, "maximum": 5}]}
_OPEN = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
_NUMBER = 'root ::= "(" [0-9]{1,3} ")"'
GRAMMARS: Mapping[str, tuple[GrammarSpec, ...]] = {
    "json": (
        GrammarSpec.json_schema(_PERSON),
        GrammarSpec.json_schema(_PERSON, any_whitespace=True),
        GrammarSpec.json_schema(_ITEMS),
        GrammarSpec.json_schema(_CHOICE),
    ),
    "regex": (
        GrammarSpec.regex("[a-f]{3,9}"),
        GrammarSpec.regex(r"\d{3}-[a-z]*(yes|no){2,}"),
        GrammarSpec.regex("(?:abc|[d-k]+ )+x?"),
    ),
    "choice": (GrammarSpec.choice(["a cat", "a dog", "the end"]),),
    "object": (GrammarSpec.json_object(),),
    "ebnf": (GrammarSpec.ebnf(_NUMBER),),
    "llguidance": (
        GrammarSpec.json_schema(_ITEMS).with_backend("llguidance"),
        GrammarSpec.json_schema(_CHOICE).with_backend("llguidance"),
        GrammarSpec.regex("[a-f]{3,9}").with_backend("llguidance"),
    ),
    "after": (
        GrammarSpec.json_schema(_ITEMS).after("<think>", reasoning_budget=12),
        GrammarSpec.regex("[a-f]{3}").after("the end:"),
    ),
}
"""Those that are asked for again and again, by kind. Others are new with each request."""

_SAME_AS_EBNF = GrammarSpec.regex(r"\([0-9]{1,3}\)")
_BROKEN: tuple[tuple[GrammarSpec, type[GuidedSpecError]], ...] = (
    (GrammarSpec.json_schema({"type": 5}), GrammarCompileError),
    (GrammarSpec.json_schema("{not json"), GrammarCompileError),
    (GrammarSpec.json_schema({"not": {"multipleOf": 2}}), UnsupportedSchemaError),
    (GrammarSpec.json_schema("false"), UnsatisfiableGrammarError),
    (GrammarSpec.regex(r"(a)\1"), GrammarCompileError),
    (GrammarSpec.ebnf("root ::= undefined_rule"), GrammarCompileError),
    (GrammarSpec.json_schema("[" * 300 + "]" * 300), GrammarCompileError),
)
_PROMPTS = ("A", "The name of the cat is", '{"name": ', "The age of the dog: 3")
_WEIGHTS = {
    "json": 26,
    "regex": 13,
    "choice": 7,
    "object": 2,
    "ebnf": 4,
    "llguidance": 4,
    "after": 4,
    "new schema": 4,
    "new regex": 5,
    "open object": 1,
    "free": 10,
    "cut": 6,
    "stop string": 3,
    "broken grammar": 4,
    "small budget": 4,
    "bad prompt": 3,
    "bad token": 1,
    "bans": 2,
    "dead end": 1,
}


class Case(NamedTuple):
    """One request and how it has to end.

    error: the type of its error; None where it is served. reasons: of which ``finish_reason`` is
        one then. judged_by: what a text that ends by an end-of-text token has to match.
    is_cancelled: whether it is cancelled at some time, so that it may end with that error too.
    """

    kind: str
    prompt: Any
    params: SamplingParams
    error: type[GuidedSpecError] | None = None
    reasons: Sequence[str] = ("stop",)
    judged_by: GrammarSpec | None = None
    is_cancelled: bool = False


class CaseSource:
    """Draws cases: the same ones for the same seed.

    least: of each of ``GRAMMARS``, the smallest ``max_tokens`` that the engine takes.
    cancelled: the share of the requests that are cancelled.
    """

    def __init__(
        self, seed: int, least: Mapping[GrammarSpec, int], *, cancelled: float = 0.05
    ) -> None:
        self._dice = random.Random(seed)
        self._least = least
        self._cancelled = cancelled
        self._kinds = tuple(_WEIGHTS)
        self._weights = tuple(_WEIGHTS.values())
        self._makers: Mapping[str, Callable[[str], Case]] = {
            "new schema": self._new_schema,
            "new regex": self._new_regex,
            "open object": self._open_object,
            "free": self._free,
            "cut": self._cut,
            "stop string": self._stop_string,
            "broken grammar": self._broken,
            "small budget": self._small_budget,
            "bad prompt": self._bad_prompt,
            "bad token": self._bad_token,
            "bans": self._bans,
            "dead end": self._dead_end,
        }

    def draw(self) -> Case:
        """The next case."""
        dice = self._dice
        kind = dice.choices(self._kinds, self._weights)[0]
        make = self._makers.get(kind, self._known)
        return make(kind)._replace(is_cancelled=dice.random() < self._cancelled)

    def _known(self, kind: str) -> Case:
        """A grammar that recurs, with a budget from the smallest possible one on."""
        spec = self._dice.choice(GRAMMARS[kind])
        budget = self._least[spec] + self._dice.randrange(40)
        judge = _SAME_AS_EBNF if kind == "ebnf" else spec
        return self._case(kind, grammar=spec, max_tokens=budget)._replace(judged_by=judge)

    def _new_schema(self, kind: str) -> Case:
        dice = self._dice
        names = dice.sample(string.ascii_lowercase, dice.randint(1, 3))
        parts = ({"type": "boolean"}, _ITEMS, {"type": "string", "maxLength": dice.randint(1, 9)})
        schema = {
            "type": "object",
            "properties": {name + dice.choice("xyz"): dice.choice(parts) for name in names},
            "additionalProperties": False,
        }
        spec = GrammarSpec.json_schema(schema)
        return self._case(kind, grammar=spec, max_tokens=80)._replace(judged_by=spec)

    def _new_regex(self, kind: str) -> Case:
        dice = self._dice
        first, last = sorted(dice.sample(string.ascii_lowercase, 2))
        low = dice.randint(1, 6)
        tail = "".join(dice.choices(string.ascii_uppercase, k=dice.randint(0, 3)))
        spec = GrammarSpec.regex(f"[{first}-{last}]{{{low},{low + dice.randint(0, 9)}}}{tail}")
        return self._case(kind, grammar=spec, max_tokens=40)._replace(judged_by=spec)

    def _open_object(self, kind: str) -> Case:
        """Any further keys, which only llguidance allows; it may not end by itself."""
        spec = GrammarSpec.json_schema(_OPEN)
        case = self._case(kind, grammar=spec, max_tokens=40)
        params = replace(case.params, complete=False)
        return case._replace(params=params, reasons=("stop", "length"), judged_by=spec)

    def _free(self, kind: str) -> Case:
        dice = self._dice
        case = self._case(kind, max_tokens=dice.randint(1, 40), ignore_eos=dice.random() < 0.3)
        if dice.random() < 0.05:  # up to the end of the context
            case = case._replace(prompt=[5] * (CONTEXT - dice.randint(1, 12)))
        return case._replace(reasons=("stop", "length"))

    def _cut(self, kind: str) -> Case:
        spec = self._dice.choice(GRAMMARS[self._dice.choice(("json", "regex", "after"))])
        case = self._case(kind, grammar=spec, max_tokens=self._dice.randint(1, 30))
        params = replace(case.params, complete=False)
        return case._replace(params=params, reasons=("stop", "length"), judged_by=spec)

    def _stop_string(self, kind: str) -> Case:
        spec = GrammarSpec.regex("(?:abcdef|[a-f]){12}")
        stop = self._dice.sample(("ab", "fa", "cde", "ee", "abcdefabc"), 2)
        case = self._case(kind, grammar=spec, max_tokens=80, stop=stop)
        return case._replace(judged_by=spec)

    def _broken(self, kind: str) -> Case:
        spec, error = self._dice.choice(_BROKEN)
        return self._case(kind, grammar=spec, max_tokens=40)._replace(error=error)

    def _small_budget(self, kind: str) -> Case:
        specs = [spec for spec, least in self._least.items() if least > 1]
        spec = self._dice.choice(specs)
        case = self._case(kind, grammar=spec, max_tokens=self._dice.randrange(1, self._least[spec]))
        params = replace(case.params, complete=True)
        return case._replace(params=params, error=BudgetTooSmallError)

    def _bad_prompt(self, kind: str) -> Case:
        prompt = self._dice.choice(([], [5] * CONTEXT, "cat " * CONTEXT, None, [1, 2.5], [-1]))
        case = self._case(kind, grammar=GRAMMARS["regex"][0], max_tokens=20)
        return case._replace(prompt=prompt, error=PromptError)

    def _bad_token(self, kind: str) -> Case:
        case = self._case(kind, max_tokens=9, stop_token_ids=[10**6])
        return case._replace(error=ConfigError)

    def _bans(self, kind: str) -> Case:
        """A grammar that must end before ``min_tokens``, or none of whose tokens is allowed."""
        choice = GRAMMARS["choice"][0]
        if self._dice.random() < 0.5:
            case = self._case(kind, grammar=choice, max_tokens=60, min_tokens=40)
        else:
            case = self._case(kind, grammar=choice, max_tokens=20, allowed_token_ids=[0])
        return case._replace(error=NoTokenLeftError)

    def _dead_end(self, kind: str) -> Case:
        """The vocabulary cannot write what the grammar asks for."""
        spec = GrammarSpec.regex(f"a{self._dice.choice('bcd')}~[xyz]")
        case = self._case(kind, grammar=spec, max_tokens=30)
        return case._replace(error=GrammarDeadEndError)

    def _case(self, kind: str, **fixed: Any) -> Case:
        """A case with random settings, of which ``fixed`` are given."""
        dice = self._dice
        wishes: dict[str, Any] = {
            "temperature": dice.choice((0.0, 0.0, 0.7, 1.0, 1.5)),
            "top_k": dice.choice((0, 0, 20)),
            "top_p": dice.choice((1.0, 0.9)),
            "min_p": dice.choice((0.0, 0.0, 0.05)),
            "seed": dice.randrange(2**63),
            "draft_policy": dice.choice((None, *DRAFT_POLICIES)),
            "logprobs": dice.choice((None, None, None, 0, 3)),
            "logprobs_mode": dice.choice(("raw", "masked", "processed")),
            "n": dice.choice((1,) * 19 + (2,)),
            "echo": dice.random() < 0.1,
        }
        if dice.random() < 0.2:
            wishes["repetition_penalty"] = dice.choice((0.8, 1.2))
            wishes["frequency_penalty"] = dice.choice((-0.5, 0.5))
            wishes["presence_penalty"] = dice.choice((0.0, 0.5))
        if dice.random() < 0.2:
            wishes["logit_bias"] = {dice.randrange(300): dice.uniform(-4, 4) for _ in range(5)}
        return Case(kind, dice.choice(_PROMPTS), SamplingParams(**{**wishes, **fixed}))
