"""What becomes of every family: ``python -m tests.models.family_sweep docs/models.md``.

Each family's tiny model writes a ragged, speculative, greedy batch over slots, in stock and in
packed form, and what it writes is compared with transformers' own generate.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedModel

from guided_spec.errors import ModelError
from guided_spec.models.causal_lm import CausalLM, make_causal_lm
from guided_spec.models.heads.loading import METHODS
from guided_spec.models.text_lm import TextLM
from tests.models.families import ENCODER, NOT_BUILT, all_families, build_family
from tests.models.speculation import Row, generate_alone, prefill, prompts_of, speculate

EQUAL = "equal"
ALONE = "equal, one text at a time"
NO_PACKED_FORM = "has no packed form"
PROMPTS = (5, 23)  # tokens; windows have 8
NUM_TOKENS = 24
MAX_LENGTH = 80
SEEDS = 4
MARK = "<!-- below: what the command writes -->\n"
GRAPHED = ("packed forwards", "stock modules over blocks")  # on a GPU
DRAFTERS = {kind: method for method, (_, kinds) in METHODS.items() for kind in kinds}


class Outcome(NamedTuple):
    """EQUAL, ALONE, NO_PACKED_FORM, or the message of the ModelError, in each form.

    runs_as: what computes where nothing is asked for; "" of what is refused.
    """

    stock: str
    packed: str
    runs_as: str = ""


def outcome_of(family: str) -> Outcome:
    """Build the family's model and run it in both forms.

    Raises AssertionError where it writes other texts than ``generate`` without a ModelError.
    """
    try:
        lm = make_causal_lm(build_family(family), num_slots=2, max_length=MAX_LENGTH)
    except ModelError as error:
        return Outcome(str(error), str(error))
    model, expected = _reference(family)
    stock, packed = (_run(model, expected, kernels) for kernels in ("stock", "packed"))
    return Outcome(stock, packed, lm.runs_as)


def write_text(lm: CausalLM, expected: list[Row]) -> list[list[int]]:
    """What ``lm`` writes for the rows, which are made anew: their prompts, slots and lengths."""
    rows = [Row(row.slot, row.prompt, row.expected) for row in expected]
    prefill(lm, rows)
    source = random.Random(0)
    while running := [row for row in rows if not row.is_done]:
        speculate(lm, running, source)
    return [row.tokens[: len(row.expected)] for row in rows]


def _run(model: PreTrainedModel, expected: list[Row], kernels: Any) -> str:
    try:
        lm = make_causal_lm(model, num_slots=4, max_length=MAX_LENGTH, kernels=kernels)
    except ModelError as error:
        return str(error)
    if kernels == "packed" and not lm.is_packed:
        return NO_PACKED_FORM
    found = write_text(lm, expected)
    if found != [row.expected for row in expected]:
        # ``generate`` has rules of its own for some: a forced last token, other positions.
        assert found == [_without_cache(model, row.prompt) for row in expected]
    return ALONE if isinstance(lm, TextLM) else EQUAL


def _reference(family: str) -> tuple[PreTrainedModel, list[Row]]:
    """A model, and texts that ``generate`` writes with and without a cache, if there are any.

    Some models choose keys by scores that tie, and then write one text or another.
    """
    for seed in range(SEEDS):
        model = build_family(family, seed)
        prompts = prompts_of(PROMPTS, min(64, model.config.get_text_config().vocab_size), seed)
        plain = [_without_cache(model, prompt) for prompt in prompts]
        try:
            found = [generate_alone(model, prompt, NUM_TOKENS) for prompt in prompts]
        except Exception:  # of all kinds: some cannot generate with a cache
            found = plain
        rows = [Row(slot, *row) for slot, *row in zip((2, 0), prompts, found, strict=True)]
        if found == plain:
            break
    return model, rows


def _without_cache(model: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def table(outcomes: dict[str, Outcome]) -> str:
    """What docs/models.md says behind MARK: nothing of families as encoders, which few want."""
    rows = [("model_type", "graphs", "its own drafter", "runs as")]
    for name, found in outcomes.items():
        if name.endswith(ENCODER):
            continue
        form = found.runs_as or f"refused: {_reason(found.stock)}"
        rows.append((name, "yes" if form in GRAPHED else "-", DRAFTERS.get(name, "-"), form))
    rows += [(name, "-", "-", "not tried") for name in NOT_BUILT if ENCODER not in name]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [rows[0], *sorted(rows[1:])]
    )
    version = f"With transformers {transformers.__version__}:"
    return "\n".join(["", version, "", "```text", *lines, "```", ""])


def _reason(message: str) -> str:
    """The part of a refusal that does not differ from model to model."""
    text = message.split(": ", 1)[1].split(";")[0]
    known = re.search(r"\bfor (its? [^:]*)", text)
    return known[1] if known else text


def main() -> None:
    """Write the tables anew in the page at the path given, behind its MARK."""
    parser = argparse.ArgumentParser(prog="python -m tests.models.family_sweep")
    parser.add_argument("page", type=Path, help="whose end is written anew: docs/models.md")
    page: Path = parser.parse_args().page
    head, _ = page.read_text().split(MARK)  # before the many minutes that follow
    outcomes = {}
    for family in all_families():
        if family not in NOT_BUILT:
            outcomes[family] = outcome_of(family)
            sys.stderr.write(f"{family}: {outcomes[family]}\n")
    page.write_text(head + MARK + table(outcomes))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    main()
