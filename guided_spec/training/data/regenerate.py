"""Answers written anew by the target, under each record's own grammar.

A draft learns most from texts that its target would write; ``guided-spec`` trains on what comes out
here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from guided_spec.engine.llm import LLM
from guided_spec.errors import ConfigError, GuidedSpecError
from guided_spec.training.data.records import (
    ANSWER_NAMES,
    CHAT_NAMES,
    SHAREGPT_ROLES,
    Example,
    Line,
    read_example,
    read_lines,
)
from guided_spec.types import MAX_SEED, SamplingParams

__all__ = ["Regenerated", "regenerate"]

logger = logging.getLogger(__name__)

CALL_BATCHES = 16  # a call's last requests run alone: it is worth many batches


class Regenerated(NamedTuple):
    """How many records were written, failed, and were cut by ``max_tokens`` or by the context."""

    written: int
    failed: int
    cut: int


def regenerate(
    paths: Sequence[str | Path],
    output: Path,
    llm: LLM,
    params: SamplingParams,
    *,
    limit: int | None = None,
) -> Regenerated:
    """Write the records of JSON Lines files to ``output`` with answers of ``llm``.

    The answer of a prompt becomes its ``response``; in a chat it replaces the assistant's last
    message, or follows the user's. Everything else is kept, and so is the order. Only whole answers
    are written: requests that fail and texts that were cut are left out and counted.

    params: for every request; the grammar is the record's where it has one, and a seed is that of
        the first record, from which the others count on. ``n`` must be 1, ``echo`` False.
    limit: records to read at most.

    Every record is read before anything is generated. Raises ConfigError naming file and line for
    one without a prompt.
    """
    if params.n != 1 or params.echo:
        raise ConfigError("params", params, "must have n=1 and echo=False")
    if output.resolve() in [Path(path).resolve() for path in paths]:
        raise ConfigError("output", str(output), "is one of the inputs; write to another file")
    for line in islice(read_lines(paths), limit):
        _read(line)
    lines = islice(read_lines(paths), limit)
    counts = dict.fromkeys(("stop", "error", "length"), 0)
    done = 0
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w", encoding="utf-8") as file:
        while chunk := list(islice(lines, CALL_BATCHES * llm.config.max_batch_size)):
            for reason, record, problem in _answer(chunk, llm, params, done):
                if problem and not counts["error"]:
                    logger.warning("left out, and maybe others after it: %s", problem)
                counts[reason] += 1
                if record is not None:
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
            done += len(chunk)
    return Regenerated(counts["stop"], counts["error"], counts["length"])


class _Answered(NamedTuple):
    """reason: the request's finish reason. record: None unless it is "stop". problem: the error."""

    reason: str
    record: dict[str, Any] | None
    problem: str


def _answer(
    lines: Sequence[Line], llm: LLM, params: SamplingParams, done: int
) -> Iterator[_Answered]:
    examples = [_read(line) for line in lines]
    prompts: list[Any] = [example.prompt for example in examples]
    asked = [
        replace(
            params,
            grammar=example.grammar or params.grammar,
            seed=None if params.seed is None else (params.seed + done + at) % (MAX_SEED + 1),
        )
        for at, example in enumerate(examples)
    ]
    outputs = llm.generate(prompts, asked, on_error="return")
    for line, output in zip(lines, outputs, strict=True):
        is_whole = output.is_complete
        record = _with_answer(line.record, output.text) if is_whole else None
        problem = "" if output.error is None else f"{line.place}: {output.error}"
        yield _Answered(output.finish_reason, record, problem)


def _read(line: Line) -> Example:
    try:
        example = read_example(line.record)
    except GuidedSpecError as error:
        raise ConfigError("data", line.place, str(error)) from error
    if example.prompt is None:
        raise ConfigError("data", line.place, "has no prompt: there is nothing to answer")
    return example


def _with_answer(record: dict[str, Any], text: str) -> dict[str, Any]:
    name = next(name for name in CHAT_NAMES if record.get(name) is not None)
    turns = record[name]
    kept = {key: value for key, value in record.items() if key not in ANSWER_NAMES}
    if isinstance(turns, str):
        return {**kept, "response": text}
    last = turns[-1]
    role = last["role"] if "role" in last else SHAREGPT_ROLES[last["from"]]
    turn = {"role": "assistant", "content": text}
    if "role" not in last:
        turn = {"from": "gpt", "value": text}
    if role == "assistant":
        return {**record, name: [*turns[:-1], turn]}
    return {**kept, name: [*turns, turn]}
