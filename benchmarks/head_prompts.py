"""Prompts to train a published model's heads on: ``python -m benchmarks.head_prompts``.

They are made from public files (BFCL, GSM8K, Spec-Bench, drawn JSON schemas) in the words of the
package's tasks. What a task asks stays out: its prompts, the functions that they name, its schemas.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from guided_spec.bundled import bundled_asset
from guided_spec.cli.console import stderr
from guided_spec.evaluate.measurement import TASKS

ONE_CALL = 'Answer with one call: {"name": ..., "arguments": {...}}'
MANY_CALLS = 'Answer with a JSON array of calls, each {"name": ..., "arguments": {...}}'
NUMBER = (
    "Think step by step, then give the answer as a number. "
    "Answer with JSON: the reasoning, and the answer."
)
SUMMARY = "Answer with JSON: a summary in two sentences, and up to five keywords."
ANSWER = "Answer with JSON: the answer, and how sure you are."
LABEL = "What is this text about? Answer with JSON: a label, and the reason in one sentence."
EXAMPLE = "Write an example of this kind of document, with plausible values. Answer with JSON only."
MTBENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
TOPICS = ("sports", "politics", "science", "business", "entertainment", "health", "crime", "other")


class HeldOut(NamedTuple):
    """What the tasks ask. ids: of their prompts. functions: names that their calls may have."""

    ids: frozenset[str]
    functions: frozenset[str]


def held_out(folder: Path) -> HeldOut:
    """Read from the files of the tasks in ``folder``."""
    items = [item for task in TASKS for item in _lines(folder / f"{task}.jsonl")]
    names = frozenset(name for item in items for name in _constants(item.get("schema")))
    return HeldOut(frozenset(item["id"] for item in items), names)


def make_prompts(data: Path, out: HeldOut, seed: int) -> list[dict[str, Any]]:
    """Documents without responses, in a drawn order.

    data: a folder with prompts/bfcl.jsonl.gz, prompts/gsm8k.jsonl, prompts/spec_bench.jsonl and
    jsonschemabench/dev.jsonl.gz.
    """
    draw = random.Random(seed)
    prompts = [
        *_calls(_lines(data / "prompts/bfcl.jsonl.gz"), out),
        *_sums(_lines(data / "prompts/gsm8k.jsonl"), out),
        *_spec_bench(_lines(data / "prompts/spec_bench.jsonl"), out),
        *_examples(_lines(data / "jsonschemabench/dev.jsonl.gz")),
    ]
    draw.shuffle(prompts)
    return prompts


def _calls(rows: Sequence[Mapping[str, Any]], out: HeldOut) -> Iterator[dict[str, Any]]:
    for row in rows:
        if row["id"] in out.ids or out.functions & {tool["name"] for tool in row["tools"]}:
            continue
        tools = "\n".join(json.dumps(tool) for tool in row["tools"])
        how = MANY_CALLS if row["output_schema"].get("type") == "array" else ONE_CALL
        text = row["messages"][-1]["content"]
        asked = f"You can call these functions:\n{tools}\n\n{text}\n\n{how}"
        yield _document(row["id"], asked, row["output_schema"])


def _sums(rows: Sequence[Mapping[str, Any]], out: HeldOut) -> Iterator[dict[str, Any]]:
    for row in rows:
        if row["id"] not in out.ids:
            yield _document(row["id"], f"{row['question']}\n\n{NUMBER}", _REASONED)


def _spec_bench(rows: Sequence[Mapping[str, Any]], out: HeldOut) -> Iterator[dict[str, Any]]:
    """Each first turn as free text, and those of five kinds under a schema too."""
    for row in rows:
        name = f"spec_bench-{row['question_id']}"
        if name in out.ids:
            continue
        text, category = row["turns"][0], row["category"]
        yield _document(name, text, None)
        if category not in MTBENCH and category in _UNDER_SCHEMA:
            for number, (how, schema) in enumerate(_UNDER_SCHEMA[category]):
                yield _document(f"{name}-{number}", f"{text}\n\n{how}", schema)


def _examples(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Documents of drawn schemas; values of a valid instance are the text to extract from."""
    for row in rows:
        title = str(row["schema"].get("title") or row["id"].split("---")[0])
        yield _document(row["id"], f"{title}: {EXAMPLE}", row["schema"])
        valid = [test["data"] for test in row.get("tests", ()) if test["valid"]]
        if valid:
            words = ", ".join(_values(valid[0]))[:1500]
            asked = f"Extract the data from this text. Answer with JSON only.\n\n{words}"
            yield _document(f"{row['id']}-values", asked, row["schema"])


def _document(name: str, text: str, schema: Any) -> dict[str, Any]:
    document = {"id": name, "messages": [{"role": "user", "content": text}]}
    return document if schema is None else {**document, "schema": schema}


def _values(value: Any, name: str = "") -> Iterator[str]:
    """Leaves as "name value"."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _values(part, key)
    elif isinstance(value, list):
        for part in value:
            yield from _values(part, name)
    else:
        yield f"{name} {json.dumps(value)}"


def _constants(schema: Any) -> Iterator[str]:
    """The names of functions in a schema of calls."""
    if isinstance(schema, Mapping):
        name = schema.get("properties", {}).get("name", {})
        if isinstance(name, Mapping) and isinstance(name.get("const"), str):
            yield name["const"]
        for part in schema.values():
            yield from _constants(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _constants(part)


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_REASONED = _object(reasoning={"type": "string", "maxLength": 600}, answer={"type": "number"})
_SHORT = {"type": "string", "maxLength": 200}
_WORDS = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 5}
_TOPIC = (LABEL, _object(label={"enum": list(TOPICS)}, reason=_SHORT))
_SURE = (ANSWER, _object(answer=_SHORT, confidence={"enum": ["low", "medium", "high"]}))
_UNDER_SCHEMA = {
    "math_reasoning": [(NUMBER, _REASONED)],
    "summarization": [
        (SUMMARY, _object(summary={"type": "string", "maxLength": 400}, keywords=_WORDS)),
        _TOPIC,
    ],
    "qa": [_SURE, _TOPIC],
    "rag": [_SURE, _TOPIC],
    "translation": [_TOPIC],
}


def _lines(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [json.loads(line) for line in lines]


def main(
    data: Annotated[Path, typer.Option(help="Folder of the public files.")],
    output: Annotated[Path, typer.Option(help="JSON Lines are written here.")],
    copies: Annotated[int, typer.Option(help="Of each prompt, for sampled answers.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the order.")] = 0,
) -> None:
    """Write the documents, without responses."""
    prompts = make_prompts(data, held_out(Path(bundled_asset("tasks"))), seed) * copies
    output.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")
    stderr().print(f"{len(prompts)} prompts")


if __name__ == "__main__":
    typer.run(main)
