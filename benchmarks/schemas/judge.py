"""One schema put to the test: is it accepted, are its instances judged right, are texts valid?

JSON values with their keys in the order in which a schema lists them.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jsonschema
import numpy as np
from numpy.typing import NDArray

from benchmarks.schemas.corpus import SchemaCase
from guided_spec.errors import (
    GrammarCompileError,
    UnsatisfiableGrammarError,
    UnsupportedSchemaError,
)
from guided_spec.grammar.protocol import CompiledGrammar, GrammarBackend
from guided_spec.grammar.schema.dialect import for_python
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.unique_keys import NotedGrammar
from guided_spec.grammar.vocabulary import Vocabulary


class KeyOrder:
    """The lists of properties that one schema holds, wherever they stand."""

    def __init__(self, schema: Any) -> None:
        self._lists: list[list[str]] = []
        stack = [schema]
        while stack:
            node = stack.pop()
            if isinstance(node, dict):
                if isinstance(node.get("properties"), dict):
                    self._lists.append(list(node["properties"]))
                stack.extend(node.values())
            elif isinstance(node, list):
                stack.extend(node)

    def sort(self, value: Any) -> Any:
        """A copy, each object in the order of the list that has most of its keys.

        Keys that are not listed come last, in their own order.
        """
        if isinstance(value, list):
            return [self.sort(item) for item in value]
        if not isinstance(value, dict):
            return value
        keys = list(value)
        listed = max(self._lists, key=lambda names: len(value.keys() & set(names)), default=[])
        places = {name: place for place, name in enumerate(listed)}
        keys.sort(key=lambda name: places.get(name, len(places)))
        return {name: self.sort(value[name]) for name in keys}


Outcome = Literal["accepted", "unsatisfiable", "unsupported", "failed"]

_LIMIT = 600  # tokens of one text
_WANDER = 40  # tokens before whatever closes is preferred
_CLOSING = b'"]}'
_STRUCTURE = b'",:]}{[0123456789 '


class SchemaVerdict(NamedTuple):
    """What became of one schema.

    backend: the library that took it. reason: why none did. seconds: of the compile, a refused one
        too. false_accepts, false_rejects: indices of instances. out_of_order: those of the false
        rejects that are taken once their keys stand in the schema's order. texts: random texts
        that ended; invalid_texts: those that the schema does not admit.
    """

    id: str
    split: str
    outcome: Outcome
    backend: str
    reason: str
    seconds: float
    false_accepts: tuple[int, ...] = ()
    false_rejects: tuple[int, ...] = ()
    out_of_order: tuple[int, ...] = ()
    texts: int = 0
    invalid_texts: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        """All of it in one word or two, to be compared with another run's."""
        if self.outcome != "accepted":
            return self.outcome
        if self.false_accepts or self.invalid_texts:
            return "wrong"
        if self.is_right:
            return "right"
        return "right in order" if self.is_right_in_order else "narrower"

    @property
    def is_right(self) -> bool:
        """Whether it was accepted, and everything about it is as the schema says."""
        wrong = self.false_accepts or self.false_rejects or self.invalid_texts
        return self.outcome == "accepted" and not wrong

    @property
    def is_right_in_order(self) -> bool:
        """The same, where the order of keys is the only thing that may be wrong."""
        return self._replace(
            false_rejects=tuple(set(self.false_rejects) - set(self.out_of_order))
        ).is_right


class Judge(NamedTuple):
    """backend: compiles. tokenizer: a Hugging Face tokenizer of its vocabulary.

    settings: further arguments of ``GrammarSpec.json_schema``.
    """

    backend: GrammarBackend
    tokenizer: Any
    num_walks: int
    settings: Mapping[str, Any]

    def judge(self, case: SchemaCase) -> SchemaVerdict:
        """Compile the schema, judge its instances, and let it write ``num_walks`` texts."""
        began = time.perf_counter()
        try:
            spec = GrammarSpec.json_schema(json.dumps(case.schema), **self.settings)
            grammar = self.backend.compile(spec)
        except GrammarCompileError as error:
            seconds = time.perf_counter() - began
            return SchemaVerdict(case.id, case.split, _outcome(error), "", str(error), seconds)
        seconds = time.perf_counter() - began
        judged = [self._admits(grammar, instance.data) for instance in case.instances]
        pairs = [(i, instance.valid, judged[i]) for i, instance in enumerate(case.instances)]
        rejected = tuple(i for i, valid, admitted in pairs if valid and not admitted)
        sort = KeyOrder(case.schema).sort
        texts = [
            random_text(grammar, self.backend.vocabulary, seed) for seed in range(self.num_walks)
        ]
        ended = [text for text in texts if text is not None]
        return SchemaVerdict(
            case.id,
            case.split,
            "accepted",
            grammar.backend if isinstance(grammar, NotedGrammar) else "",
            "",
            seconds,
            tuple(i for i, valid, admitted in pairs if admitted and not valid),
            rejected,
            tuple(i for i in rejected if self._admits(grammar, sort(case.instances[i].data))),
            len(ended),
            tuple(_invalid(ended, case.schema)),
        )

    def _admits(self, grammar: CompiledGrammar, data: Any) -> bool:
        """Whether the grammar takes the value, written as it writes JSON itself."""
        text = json.dumps(data, ensure_ascii=False)
        try:
            text.encode()
        except UnicodeEncodeError:  # a lone surrogate
            text = json.dumps(data)
        token_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        vocabulary = self.backend.vocabulary
        matcher = grammar.new_matcher()
        return all(map(matcher.accept_token, token_ids)) and matcher.accept_token(
            vocabulary.stop_token_ids[0]
        )


def random_text(grammar: CompiledGrammar, vocabulary: Vocabulary, seed: int) -> str | None:
    """A text of a model with random weights; None where it has no end within 600 tokens.

    For 40 tokens the choice is the model's; from then on whatever closes is preferred.
    """
    dice = random.Random(seed)
    weights = np.random.default_rng(seed).normal(0.0, 2.0, vocabulary.vocab_size)
    matcher = grammar.new_matcher()
    bitmask = np.zeros((1, -(-vocabulary.vocab_size // 32)), dtype=np.int32)
    token_ids: list[int] = []
    while len(token_ids) < _LIMIT:
        matcher.fill_next_token_bitmask(bitmask)
        bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")
        legal = np.flatnonzero(bits[: vocabulary.vocab_size])
        token_id = _choose(legal, vocabulary, weights, dice, hurry=len(token_ids) > _WANDER)
        if not matcher.accept_token(token_id):
            return None
        if matcher.is_terminated():
            return vocabulary.decode(token_ids)
        token_ids.append(token_id)
    return None


def _choose(
    legal: NDArray[np.int64],
    vocabulary: Vocabulary,
    weights: NDArray[np.float64],
    dice: random.Random,
    *,
    hurry: bool,
) -> int:
    stop = vocabulary.stop_token_ids[0]
    if stop in legal and (hurry or len(legal) == 1 or dice.random() < 0.3):
        return stop
    legal = legal[legal != stop]
    single = vocabulary.single_byte_ids
    if hurry:
        for byte in _CLOSING:
            if single[byte] in legal:
                return int(single[byte])
    if hurry or dice.random() < 0.3:
        structure = np.intersect1d(legal, single[list(_STRUCTURE)])
        if len(structure):
            return int(dice.choice(structure.tolist()))
    noise = np.random.default_rng(dice.getrandbits(32)).gumbel(size=len(legal))
    return int(legal[np.argmax(weights[legal] + noise)])


def _invalid(texts: Sequence[str], schema: Any) -> list[str]:
    """The texts that are not valid under ``schema``, formats included."""
    draft = jsonschema.Draft202012Validator
    kind = jsonschema.validators.validator_for(schema, default=draft)
    validator = kind(for_python(schema), format_checker=kind.FORMAT_CHECKER)
    return [text for text in texts if not _is_valid(text, validator)]


def _is_valid(text: str, validator: Any) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return bool(validator.is_valid(value))


def _outcome(error: GrammarCompileError) -> Outcome:
    if isinstance(error, UnsatisfiableGrammarError):
        return "unsatisfiable"
    return "unsupported" if isinstance(error, UnsupportedSchemaError) else "failed"
