"""Whole workloads for an engine: requests with any features, at any time, under any settings.

``draw`` makes one from a seed. ``check`` runs it step by step and compares each text with the same
request alone in a plain engine: no drafts, no prefix cache, no tables, and memory for everything.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from guided_spec.engine.outputs import Manner
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.models.packed.blocks import BLOCK
from guided_spec.types import SamplingParams
from tests.engine.test_tables import OPEN, RECORD
from tests.learned_heads import HeadedTarget, write_head
from tests.tiny_llm import VOCAB_SIZE, near_copy, tiny_model

LENGTH = 4 * BLOCK  # tokens of a text
SHORT, LONG = (1, 2, 5, 12, 20, 30), (2, 40, 70, 100)  # tokens to write at most
LAST_STEP = 12  # before which the last request comes

LISTS = {"$defs": {"l": {"type": "array", "items": {"$ref": "#/$defs/l"}}}, "$ref": "#/$defs/l"}
GRAMMARS = (
    GrammarSpec.json_schema(RECORD),
    GrammarSpec.json_schema(RECORD, any_whitespace=True),
    GrammarSpec.json_schema(RECORD).with_backend("llguidance"),
    GrammarSpec.json_schema(LISTS),
    GrammarSpec.json_schema(OPEN, additional_properties="schema").with_backend("xgrammar"),
    GrammarSpec.json_object(),
    GrammarSpec.regex("[0-9]{3}-[a-z]{4,8}"),
    GrammarSpec.regex("[ab]{2,30}"),
    GrammarSpec.regex("[01]{20,90}"),
    GrammarSpec.regex("[a-z ]{30,80}"),
    GrammarSpec.regex("(xyxz){6}[a-c]"),
    GrammarSpec.regex("(ab|ac)*d").with_backend("llguidance"),
    GrammarSpec.regex("[0-9]{3}(-[a-z]{2}){18}"),
    GrammarSpec.choice(["a cat", "a dog", "a caterpillar"]),
    GrammarSpec.ebnf('root ::= "(" root ")" | [0-9]{1,3}'),
    GrammarSpec.regex("[a-f]{3,9}").after("e"),
    GrammarSpec.json_schema(RECORD).after("<think>", reasoning_budget=6),
    GrammarSpec.choice(["yes", "no", "not now"]).after("a", reasoning_budget=20),
)
BROKEN = (
    GrammarSpec.regex("(ab"),
    GrammarSpec.json_schema("false"),
    GrammarSpec.ebnf("root ::= undefined_rule"),
)
CHOICES = ("a cat", "a dog, a cat", "a dog", "b")
WORDS = ("a", "e", "1", "ab", "cat", '"', ":", "e{", "\n", "0-")
SYSTEM = [5 + at * 7 % 300 for at in range(3 * BLOCK)]
CUTS = (1, 9, 40, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 30, 2 * BLOCK, 2 * BLOCK + 9, 3 * BLOCK - 4)
TEXTS = ("A", "The name of the cat", '{"name": "Ada", "age": 36}', "on and on and on and on")

WITHOUT_HEADS = (
    *("none", "ngram", "suffix", "grammar_forced", "draft_model", "draft_model:validate"),
    *("chain:grammar_forced+ngram", "chain:grammar_forced+suffix", "chain:ngram+draft_model"),
    "chain:grammar_forced+ngram+draft_model",
)
HEADS = ("eagle3", "dflash", "dspark", "p_eagle", "dflash2", "domino", "lilicorr", "mtp", "eagle")
HYBRID = "qwen3_5_mtp"  # a head of the hybrid target
STOCK_HEADS = ("deepseek_mtp", "glm4_moe_mtp")


class Ask(NamedTuple):
    """A request.

    params: None has ``CHOICES`` scored behind the prompt. joins: before which step it comes.
    leaves: before which it is cancelled. manner: how it is reported.
    """

    prompt: Any
    params: SamplingParams | None
    joins: int = 0
    leaves: int | None = None
    manner: Manner = Manner(is_streamed=False, is_traced=False)

    @property
    def num_samples(self) -> int:
        """Texts that it writes."""
        return 0 if self.params is None else self.params.n


class Workload(NamedTuple):
    """target: by its architecture, or that of a head. num_blocks: of all texts; None: enough.

    options: of the LLM. late_tables: how many texts of a grammar begin before it has a table,
    which then comes between two steps; None where ``options`` say all.
    """

    proposer: str
    target: str
    options: Mapping[str, Any]
    num_blocks: int | None
    late_tables: int | None
    asks: Sequence[Ask]


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@cache
def headed(name: str) -> HeadedTarget:
    """A tiny target with a head of a method, or an architecture's target and a near copy."""
    if name in (*HEADS, *STOCK_HEADS, HYBRID):
        return write_head(Path(_folder().name) / name, name, VOCAB_SIZE)
    return HeadedTarget(tiny_model(name), near_copy(name))  # type: ignore[arg-type]


def draw(seed: int) -> Workload:
    """The workload of a seed."""
    dice = random.Random(seed)
    proposer, target = _proposer(dice)
    verifier = dice.choice(["rejection", "coupled"])
    kernels = "stock" if dice.random() < 0.15 else dice.choice(["auto", "packed"])
    if target in STOCK_HEADS:
        kernels = "auto"
    options: dict[str, Any] = {
        "num_draft_tokens": dice.choice([0, 1, 3, 4, 4, 7]),
        "max_forced_tokens": dice.choice([0, 8, 8, 20]),
        "max_batch_size": dice.choice([1, 2, 3, 4, 6]),
        "max_model_len": LENGTH,
        "prefill_tokens": dice.choice([1, 7, 33, BLOCK, 100, 4096]),
        "prefix_cache": dice.random() < 0.8,
        "device_table_bytes": dice.choice([0, 2**24]),
        "verifier": verifier,
        "kernels": kernels,
        "grammar_tables": dice.choice(["off", "off", "always", "auto"]),
    }
    late = dice.choice([1, 2, 3]) if options["grammar_tables"] == "auto" else None
    blocks = dice.choice([None, 4, 5, 6, 8]) if kernels != "stock" else None
    is_long = blocks is not None and dice.random() < 0.6
    asks = [_ask(dice, is_long=is_long) for _ in range(dice.choice([2, 4, 6]))]
    again = [dice.choice(asks) for _ in range(dice.choice([0, 0, 2]))]
    asks += [ask._replace(joins=dice.randrange(LAST_STEP), leaves=None) for ask in again]
    return Workload(proposer, target, options, blocks, late, asks)


def _proposer(dice: random.Random) -> tuple[str, str]:
    """A proposer, and the target that it fits."""
    if dice.random() < 0.35:
        target = dice.choice(["llama", "llama", "qwen3", "gemma3", "qwen3_5"])
        return dice.choice(WITHOUT_HEADS), target
    head = dice.choice([*HEADS, *HEADS, HYBRID, *STOCK_HEADS])
    form = dice.choice(["{}", "{}", "{}:validate", "chain:grammar_forced+{}", "chain:ngram+{}"])
    return form.format(head), head


def _ask(dice: random.Random, *, is_long: bool) -> Ask:
    manner = Manner(is_streamed=dice.random() < 0.5, is_traced=dice.random() < 0.2)
    leaves = dice.randrange(1, 30) if dice.random() < 0.1 else None
    joins = 0 if dice.random() < 0.5 else dice.randrange(LAST_STEP)
    is_choice = dice.random() < 0.08
    params = None if is_choice else _params(dice, LONG if is_long else SHORT)
    return Ask(_prompt(dice), params, joins, leaves, manner)


def _prompt(dice: random.Random) -> Any:
    if dice.random() < 0.2:
        return dice.choice(TEXTS)
    tail = [dice.choice([40, 41]) for _ in range(dice.choice([0, 0, 1, 2, 5]))]
    return SYSTEM[: dice.choice(CUTS)] + tail


def _params(dice: random.Random, lengths: Sequence[int]) -> SamplingParams:
    """Few features at a time, mostly; and sometimes many."""
    rate = dice.choice([0.05, 0.15, 0.4])

    def some(value: Any, default: Any) -> Any:
        return value if dice.random() < rate else default

    most = dice.choice(lengths)
    values: dict[str, Any] = {"max_tokens": most, "ignore_eos": dice.random() < most / 100}
    if dice.random() < 0.5:
        values |= {"temperature": dice.choice([0.7, 1.0, 2.0]), "seed": dice.randrange(50)}
        values |= {"top_k": some(dice.choice([1, 5, 20]), 0), "top_p": some(0.9, 1.0)}
        values |= {"min_p": some(0.05, 0.0)}
    if dice.random() < 0.6:
        values["grammar"] = dice.choice(GRAMMARS) if dice.random() < 0.95 else dice.choice(BROKEN)
        values["complete"] = dice.choice([None, None, most > 20 or None, False])
    bias = {dice.randrange(VOCAB_SIZE): dice.choice([-5.0, 3.0, float("-inf")]) for _ in range(4)}
    values |= {
        "n": some(dice.choice([2, 3, 5]), 1),
        "stop": some(dice.sample(WORDS, dice.choice([1, 2])), ()),
        "stop_token_ids": some([dice.randrange(VOCAB_SIZE) for _ in range(9)], ()),
        "logit_bias": some(bias, ()),
        "bad_words": some([dice.choice(WORDS), [dice.randrange(5, 300)], [45, 46]], ()),
        "allowed_token_ids": some([0, *range(5, 380, dice.choice([1, 2, 90]))], None),
        "min_tokens": some(min(most, dice.choice([1, 3, 9])), 0),
        "repetition_penalty": some(dice.choice([0.7, 1.4]), 1.0),
        "frequency_penalty": some(dice.choice([-0.5, 0.8]), 0.0),
        "presence_penalty": some(dice.choice([-1.0, 1.5]), 0.0),
        "draft_policy": some(dice.choice(["mask", "validate"]), None),
        "cache_salt": some(dice.choice(["a", "b"]), None),
        "logprobs": some(dice.choice([0, 1, 5]), None),
        "logprobs_mode": dice.choice(["raw", "masked", "processed"]),
        "echo": some(True, False),  # noqa: FBT003 - a value of the field
    }
    return SamplingParams(**values)
