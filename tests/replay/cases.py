"""The cases: which requests run together, on which model, drafted by whom, in which waves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from guided_spec import GrammarSpec, SamplingParams

BLOCK_BYTES = 64 * 512  # of the tiny llama's keys and values: tokens of a block, bytes of each


class Ask(NamedTuple):
    """One request. Its seed is given by its place."""

    prompt: str | list[int]
    params: SamplingParams


Wave = Sequence[Ask]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One LLM and the requests that it serves.

    waves: each is submitted together, when the one before it has ended.
    model: the architecture of a tiny target, or "bundled". head: the method of a learned head, with
        a tiny target of its own. options: of the LLM. is_quick: whether the quick tests run it.
    """

    name: str
    proposer: str
    waves: Sequence[Wave]
    model: str = "llama"
    head: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    is_quick: bool = False


def ask(prompt: str | list[int], grammar: GrammarSpec | None = None, **params: Any) -> Ask:
    """A request of 32 tokens at most, with the log-probabilities of its tokens unless told."""
    return Ask(
        prompt, SamplingParams(grammar=grammar, **{"max_tokens": 32, "logprobs": 0, **params})
    )


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 200},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
PATTERN_KEYS = {
    "type": "object",
    "patternProperties": {"^[a-c]$": {"type": "boolean"}},
    "additionalProperties": False,
}
PICK = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"kind": {"enum": ["cat", "dog"]}},
            "required": ["kind"],
        },
    },
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<"],
        "tags": [
            {"begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]{3}"}, "end": "</a>"}
        ],
        "at_least_one": True,
    },
}
JSON = GrammarSpec.json_schema(PERSON)
SPACED = GrammarSpec.json_schema(PERSON, any_whitespace=True)
CALL = GrammarSpec.regex("[0-9]{3}-[a-z]{4,8}")
LONG = GrammarSpec.regex("[0-9]{3}(-[a-z]{2}){18}")
FORCED = GrammarSpec.regex("(?:abcdef){4}[0-9](?:xyz){3}")
PET = GrammarSpec.choice(["a cat", "a dog", "a caterpillar"])
SUM = GrammarSpec.ebnf('root ::= num ("+" num)* "="\nnum ::= [0-9] | "(" num "-" num ")"')
LARK = GrammarSpec.lark('start: WORD ("," WORD)*\nWORD: /[a-f]{2,4}/')
WORDS = GrammarSpec.regex("([a-z]+,)*end")
ITEMS = GrammarSpec.json_schema({"type": "array", "items": {"enum": ["cat", 3, None]}})

CAT, CALLS, ON = "The name of the cat", "call 123-abcd call 123-abcd", "on and on and on and on"
ADA = '{"name": "Ada", "age": 36, "kind": "cat", "tags": [true]} and once more: '
MARIA = "Please call Maria Lopez at 555-0100.\n\nJSON: "
SYSTEM = [5 + at * 7 % 300 for at in range(133)]  # two blocks and a little more
MIXED = (ask(CAT, JSON), ask(CALLS, CALL, temperature=1.0), ask(ON, max_tokens=14, temperature=0.7))
SHORT = (ask(ADA, JSON, max_tokens=40), ask("cat or dog?", PET, temperature=1.0))

WITHOUT_A_MODEL = (
    Case(
        name="none",
        proposer="none",
        waves=[
            [
                *MIXED,
                ask("cat or dog?", PET, temperature=1.0),
                ask("1+", SUM, max_tokens=12, temperature=0.9, top_p=0.9),
                ask("A", max_tokens=12, ignore_eos=True, logprobs=None),
            ]
        ],
        options={"max_batch_size": 3, "prefill_tokens": 16},
        is_quick=True,
    ),
    Case(
        name="ngram",
        proposer="ngram",
        waves=[[ask(ADA, SPACED), ask(CALLS, CALL, temperature=0.8), ask(ON, max_tokens=17)]],
        is_quick=True,
    ),
    Case(
        name="ngram_coupled",
        proposer="ngram",
        waves=[[ask(CALLS, CALL, temperature=0.8), ask(ADA, JSON, temperature=0.5)]],
        options={"verifier": "coupled", "max_batch_size": 1},
    ),
    Case(
        name="ngram_hybrid",
        proposer="ngram",
        waves=[[ask(ADA, JSON), ask(ON, max_tokens=17, temperature=0.5)]],
        model="qwen3_5",
        options={"prefill_tokens": 7},
    ),
    Case(
        name="suffix_learns",
        proposer="suffix",
        waves=[[ask(CAT, JSON), ask(ON, max_tokens=20)], [ask(CAT, JSON, temperature=0.5)]],
    ),
    Case(
        name="grammar_forced",
        proposer="grammar_forced",
        waves=[[ask("x", FORCED, max_tokens=60), ask(CAT, JSON, temperature=1.0)]],
        is_quick=True,
    ),
)
DRAFT_MODELS = (
    Case(
        name="draft_model_mask",
        proposer="draft_model:mask",
        waves=[
            [
                ask(CAT, JSON, temperature=0.8, top_k=9),
                ask(CALLS, CALL, temperature=0.8, top_p=0.8),
                ask(ON, max_tokens=14, temperature=1.2, min_p=0.05),
            ]
        ],
        is_quick=True,
    ),
    Case(
        name="draft_model_policies",
        proposer="draft_model:validate",
        waves=[
            [
                ask(CAT, JSON, draft_policy="mask"),
                ask(CALLS, CALL, temperature=0.8, draft_policy="validate"),
                ask("cat or dog?", PET, temperature=1.0),
            ]
        ],
    ),
    Case(
        name="draft_model_coupled",
        proposer="draft_model",
        waves=[[ask(CAT, JSON, temperature=0.6), ask(ON, max_tokens=14, temperature=0.6)]],
        options={"verifier": "coupled", "kernels": "packed"},
    ),
    Case(name="pard", proposer="pard", waves=[[ask(CAT, JSON), ask(CALLS, CALL, temperature=1.0)]]),
)
HEADS = (
    *(
        Case(name=head, proposer=head, head=head, waves=[SHORT])
        for head in ("eagle", "mtp", "deepseek_mtp", "glm4_moe_mtp", "qwen3_5_mtp")
    ),
    *(
        Case(
            name=f"{head}_packed",
            proposer=head,
            head=head,
            waves=[SHORT],
            options={"kernels": "packed", "max_batch_size": 1 + len(head) % 2},
        )
        for head in ("dflash", "dflash2", "domino", "dspark", "lilicorr", "p_eagle")
    ),
    Case(
        name="eagle3",
        proposer="chain:grammar_forced:start+eagle3",
        head="eagle3",
        waves=[MIXED],
        options={"max_batch_size": 2},
    ),
    Case(
        name="eagle3_trained",
        proposer="eagle3:validate",
        model="bundled",
        waves=[[ask(MARIA, JSON, temperature=0.7), ask(MARIA, max_tokens=16)]],
    ),
    Case(
        name="eagle3_chain_tables",
        proposer="chain:grammar_forced+eagle3",
        model="bundled",
        waves=[[ask(MARIA, JSON), ask(MARIA, CALL, temperature=1.0), ask(MARIA, max_tokens=12)]],
        options={"kernels": "packed", "grammar_tables": "always", "max_batch_size": 2},
        is_quick=True,
    ),
    Case(
        name="eagle3_device_tables",
        proposer="eagle3",
        model="bundled",
        waves=[[ask(MARIA, JSON, max_tokens=120), ask(MARIA, CALL, temperature=0.7)]],
        options={"grammar_tables": "always", "max_batch_size": 1},
    ),
    Case(
        name="mtp_trained",
        proposer="mtp",
        model="bundled",
        waves=[[ask(MARIA, JSON), ask(MARIA, CALL, temperature=1.0)]],
    ),
    Case(
        name="auto",
        proposer="chain:grammar_forced+auto",
        model="bundled",
        waves=[[ask(MARIA, JSON)]],
        options={"verifier": "coupled"},
    ),
)
CHAINS = (
    Case(
        name="chain_of_three",
        proposer="chain:grammar_forced+ngram+draft_model",
        waves=[[ask(ADA, JSON), ask(CALLS, CALL, temperature=0.8), ask(ON, max_tokens=14)]],
    ),
    Case(
        name="chain_coupled",
        proposer="chain:suffix+draft_model:validate",
        waves=[[ask(CALLS, CALL, temperature=0.6)], [ask(CALLS, CALL, temperature=0.6)]],
        options={"verifier": "coupled"},
    ),
)
GRAMMARS = (
    Case(
        name="budgets",
        proposer="chain:grammar_forced+draft_model",
        waves=[
            [
                ask(CAT, WORDS, max_tokens=12),
                ask(CAT, GrammarSpec.json_object(), max_tokens=20, temperature=1.0),
                ask(CAT, ITEMS, max_tokens=9),
                ask(CAT, JSON, max_tokens=9, complete=False),
            ]
        ],
        is_quick=True,
    ),
    Case(
        name="markers",
        proposer="chain:grammar_forced+draft_model",
        waves=[
            [
                ask("x", CALL.after("=", reasoning_budget=6), max_tokens=40),
                ask("x", PET.after("<think>", reasoning_budget=4), temperature=1.0),
                ask("x =", CALL.after("=")),
            ]
        ],
        is_quick=True,
    ),
    Case(
        name="tables",
        proposer="chain:grammar_forced+draft_model",
        waves=[[ask(CAT, JSON), ask("x", CALL.after("=", reasoning_budget=5), temperature=1.0)]],
        options={"grammar_tables": "always"},
    ),
    Case(
        name="backends",
        proposer="draft_model",
        waves=[
            [
                ask(CALLS, CALL.with_backend("llguidance")),
                ask("ab", LARK, max_tokens=14, temperature=1.0),
                ask(CAT, GrammarSpec.json_schema(PERSON, key_order="any"), temperature=1.0),
                ask("x", GrammarSpec.structural_tag(TAG)),
                ask("x", GrammarSpec.tools([PICK], "required"), max_tokens=60),
            ]
        ],
    ),
    Case(
        name="unique_keys",
        proposer="chain:grammar_forced+draft_model",
        waves=[
            [
                ask(CAT, GrammarSpec.json_schema(PATTERN_KEYS), temperature=1.0),
                ask(CAT, GrammarSpec.json_object(), temperature=1.5),
            ]
        ],
    ),
)
REQUESTS = (
    Case(
        name="adjustments",
        proposer="draft_model",
        waves=[
            [
                ask(ON, max_tokens=14, repetition_penalty=1.5, frequency_penalty=0.5, logprobs=2),
                ask(CAT, JSON, temperature=0.9, presence_penalty=1.0, logprobs_mode="processed"),
                ask("A", max_tokens=12, logit_bias={5: 4.0, 60: -10.0}, bad_words=["on", [70]]),
                ask("A", WORDS, max_tokens=12, min_tokens=6, logprobs_mode="masked"),
                ask("A", max_tokens=8, allowed_token_ids=[65, 66, 67, 68], temperature=1.0),
            ]
        ],
    ),
    Case(
        name="stops",
        proposer="chain:grammar_forced+ngram",
        waves=[
            [
                ask("x", FORCED, stop=["dea"], max_tokens=60),
                ask(ON, stop_token_ids=range(100, 200), echo=True),
            ]
        ],
    ),
    Case(
        name="samples",
        proposer="draft_model",
        waves=[[ask(CALLS, CALL, temperature=1.0, n=3)]],
        options={"max_batch_size": 2},
        is_quick=True,
    ),
    Case(
        name="prefix_cache",
        proposer="chain:grammar_forced+draft_model",
        waves=[
            [ask([*SYSTEM, 40], max_tokens=8, ignore_eos=True), ask([*SYSTEM, 41, 41], CALL)],
            [ask([*SYSTEM, 42], CALL, temperature=1.0)],
        ],
        options={"kernels": "packed"},
        is_quick=True,
    ),
    Case(
        name="preemption",
        proposer="chain:grammar_forced+ngram",
        waves=[
            [
                ask(ON, max_tokens=48, ignore_eos=True, temperature=1.0),
                ask("x", LONG, max_tokens=64, temperature=1.0, logprobs=None),
                ask(CALLS, max_tokens=48, ignore_eos=True, temperature=1.0, logprobs=None),
            ]
        ],
        options={"kernels": "packed", "max_model_len": 192, "kv_memory_bytes": 3 * BLOCK_BYTES},
    ),
    Case(
        name="failures",
        proposer="ngram",
        waves=[
            [
                ask("A", GrammarSpec.regex("(")),
                ask("A", CALL, allowed_token_ids=[65]),
                ask("A", max_tokens=4),
            ]
        ],
        is_quick=True,
    ),
)
CASES = (*WITHOUT_A_MODEL, *DRAFT_MODELS, *HEADS, *CHAINS, *GRAMMARS, *REQUESTS)
