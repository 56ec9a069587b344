"""What a grammar costs or brings in accuracy: the same prompts answered in three ways.

``free`` asks for JSON and reads what it finds, ``grammar`` has the schema from the first token on,
and ``reasoning`` writes free text up to a marker and the schema's text after it, in one call. Each
may write as many tokens. The prompts are the package's tasks ``arithmetic`` (GSM8K) and ``tools``
(BFCL, by BFCL's own rules).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Completion
from guided_spec.evaluate.measurement import WorkItem, is_valid, load_tasks, time_items
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.types import SamplingParams

WAYS = ("free", "grammar", "reasoning")
TASKS = ("arithmetic", "tools")
MARKER = "Answer:"
ANSWER = {  # of arithmetic after a reasoning, which is then no part of the JSON
    "type": "object",
    "properties": {"answer": {"type": "number"}},
    "required": ["answer"],
    "additionalProperties": False,
}
THINK = (
    f" First think step by step in a few sentences. Then write {MARKER} and after it only the JSON."
)
ONLY_ANSWER = ', such as {"answer": 5}.'
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_IGNORED = re.compile(r"[ ,./\-_*^]")


class Quality(NamedTuple):
    """One way on one task.

    valid: answers that are JSON of the schema, as jsonschema judges. exact: that are right; of
    ``free`` the first JSON of the text counts, and for arithmetic without any its last number.
    cut: that their tokens ended. tokens: of all; forwards: of the target for them.
    """

    task: str
    way: str
    temperature: float
    requests: int
    valid: int
    exact: int
    cut: int
    tokens: int
    forwards: int
    seconds: float


def measure_quality(
    llm: LLM, items: Sequence[WorkItem], way: str, params: SamplingParams
) -> Quality:
    """Answer ``items`` of one task. way: of ``WAYS``."""
    asked = [ask(item, way) for item in items]
    completions, seconds = time_items(llm, asked, params)
    judged = [judge(c, i) for c, i in zip(completions, items, strict=True)]
    return Quality(
        task=items[0].task,
        way=way,
        temperature=params.temperature,
        requests=len(items),
        valid=sum(valid for valid, _ in judged),
        exact=sum(exact for _, exact in judged),
        cut=sum(completion.finish_reason == "length" for completion in completions),
        tokens=sum(completion.stats.output_tokens for completion in completions),
        forwards=sum(completion.stats.steps for completion in completions),
        seconds=seconds,
    )


def ask(item: WorkItem, way: str) -> WorkItem:
    """The request of ``way`` for an item of a task with a schema."""
    if way == "free":
        return item._replace(grammar=None)
    if way == "grammar":
        return item
    assert item.grammar is not None
    *before, last = item.prompt
    text, grammar = str(last["content"]), item.grammar
    if item.task == "arithmetic":
        grammar = GrammarSpec.json_schema(ANSWER)
        text = text.partition("\n\nThink step by step")[0] + "\n\nGive the answer as JSON"
        text += ONLY_ANSWER
    prompt = [*before, {**last, "content": text + THINK}]
    return item._replace(prompt=prompt, grammar=grammar.after(MARKER, reasoning_budget=200))


class Verdict(NamedTuple):
    """Whether an answer is of the schema, and whether it is right."""

    valid: bool
    exact: bool


def judge(completion: Completion, item: WorkItem) -> Verdict:
    """completion: of ``ask(item, way)``; item: as the task has it."""
    grammar = completion.grammar
    if grammar is None:
        found, text = first_json(completion.text), completion.text
        valid = found is not None and is_valid(json.dumps(found), item.grammar)
    else:
        text = completion.answer
        found = first_json(text)
        valid = completion.is_complete and is_valid(text, replace(grammar, start=None))
    if item.task == "arithmetic":
        return Verdict(valid, is_number(found, text, float(str(item.answer).replace(",", ""))))
    return Verdict(valid, is_call(found, item.answer))


def first_json(text: str) -> Any:
    """The first object or array that stands in ``text``; None where there is none."""
    decoder = json.JSONDecoder()
    for found in re.finditer(r"[{\[]", text):
        try:
            return decoder.raw_decode(text, found.start())[0]
        except ValueError:
            continue
    return None


def is_number(found: Any, text: str, expected: float) -> bool:
    """Whether the member ``answer``, or without JSON the last number of the text, is right."""
    value = found.get("answer") if isinstance(found, Mapping) else None
    if found is None and (numbers := _NUMBER.findall(text)):
        value = numbers[-1]
    try:
        return abs(float(str(value).replace(",", "").lstrip("$")) - expected) < 1e-6
    except ValueError:
        return False


def is_call(found: Any, truth: Sequence[Mapping[str, Mapping[str, Sequence[Any]]]]) -> bool:
    """Whether a call, or an array of calls in any order, is right by BFCL's rules.

    truth: for each call, its function and for each parameter the accepted values; "" among them
    says that it may be left out.
    """
    calls = found if isinstance(found, list) else [found]
    if len(calls) != len(truth) or not all(isinstance(call, Mapping) for call in calls):
        return False
    left = list(truth)
    for call in calls:
        match = next((one for one in left if _is_one_call(call, one)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _is_one_call(call: Mapping[str, Any], truth: Mapping[str, Mapping[str, Sequence[Any]]]) -> bool:
    ((name, accepted),) = truth.items()
    arguments = call.get("arguments")
    if call.get("name") != name or not isinstance(arguments, Mapping):
        return False
    if any(key not in accepted for key in arguments):
        return False
    return all(
        any(_equal(arguments[key], one) for one in values) if key in arguments else "" in values
        for key, values in accepted.items()
    )


def _equal(value: Any, accepted: Any) -> bool:
    """Texts by their letters and digits, numbers by value; an object's members have lists."""
    if isinstance(value, bool) or isinstance(accepted, bool):
        return value is accepted
    if isinstance(value, str) and isinstance(accepted, str):
        return _plain(value) == _plain(accepted)
    if isinstance(value, list) and isinstance(accepted, list):
        pairs = zip(value, accepted, strict=False)
        return len(value) == len(accepted) and all(_equal(a, b) for a, b in pairs)
    if isinstance(value, Mapping) and isinstance(accepted, Mapping):
        return all(key in accepted for key in value) and all(
            any(_equal(value[key], one) for one in _listed(values))
            if key in value
            else "" in _listed(values)
            for key, values in accepted.items()
        )
    return bool(value == accepted)


def _listed(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]


def _plain(text: str) -> str:
    return _IGNORED.sub("", text).lower().replace("'", '"')


HEADS = "| task | temperature | way | valid | exact | cut | tokens an answer | tokens/forward |"
RULE = "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |"


def row(one: Quality) -> str:
    """Of a table of Markdown, below ``HEADS`` and ``RULE``."""
    shares = [f"{part / one.requests:.1%}" for part in (one.valid, one.exact, one.cut)]
    length = f"{one.tokens / one.requests:.0f}"
    speed = f"{one.tokens / one.forwards:.2f}" if one.forwards else ""
    cells = [one.task, f"{one.temperature:g}", one.way, *shares, length, speed]
    return "| " + " | ".join(cells) + " |"


def measure_all(
    llm: LLM, *, tasks: Sequence[str], limit: int | None, temperatures: Sequence[float], tokens: int
) -> Iterator[Quality]:
    """Every task in every way at every temperature, ``tokens`` an answer at most."""
    for task in tasks:
        items = load_tasks([task], limit)
        for temperature in temperatures:
            params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=0)
            for way in WAYS:
                yield measure_quality(llm, items, way, params)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--model", help="hub id, folder or GGUF file; the bundled one by default")
    parser.add_argument("--proposer", help="who drafts; as LLM chooses by default")
    parser.add_argument("--draft", help="draft model or head")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0])
    parser.add_argument("--limit", type=int, help="prompts of a task")
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--kv-memory-bytes", type=int, help="what keys and values may take")
    parser.add_argument("--output", type=Path, help="write JSON here")
    asked = parser.parse_args(arguments)
    options: dict[str, Any] = {"proposer": asked.proposer, "draft": asked.draft}
    options |= {"kv_memory_bytes": asked.kv_memory_bytes, "max_batch_size": asked.batch_size}
    with LLM(asked.model, **{k: v for k, v in options.items() if v is not None}) as llm:
        how = {"limit": asked.limit, "temperatures": asked.temperatures, "tokens": asked.max_tokens}
        records: list[dict[str, Any]] = []
        sys.stdout.write(f"{HEADS}\n{RULE}\n")
        for one in measure_all(llm, tasks=asked.tasks, **how):
            sys.stdout.write(f"{row(one)}\n")
            sys.stdout.flush()
            records.append(one._asdict())
            if asked.output is not None:  # what a run that is stopped has measured stays
                asked.output.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
