"""Which files a schema and a step go through: ``python -m tools.entered``.

A file counts when one of its functions is called: from a schema's ``GrammarSpec`` to its first mask
row, from a proposer to the commit of a step, and from the target's forward over a prompt to the
head that has read its hidden states. Toys stand for model and vocabulary there, but the head and
its target are the bundled ones. Last come whole steps of an engine with the bundled target, which
decode one text of a schema, with the number of changes from one file to another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import guided_spec
from guided_spec.bundled import bundled_asset
from guided_spec.config import EngineConfig
from guided_spec.core import PromptPiece, Proposer, from_propose
from guided_spec.engine.llm import LLM
from guided_spec.engine.target.target import make_target
from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.limits import GrammarLimits
from guided_spec.grammar.pipeline import GrammarPipeline
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead
from guided_spec.masks.rows import MaskRows
from guided_spec.models.causal_lm import make_causal_lm
from guided_spec.models.loading import load_model
from guided_spec.proposers import build_proposer
from guided_spec.proposers.ngram import NGram
from guided_spec.step import commit, speculative_step
from guided_spec.types import SamplingParams
from tests.toys import ToyCompiled, ToyDrafter, ToyTarget, text_rule, toy_batch, toy_context

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
LETTERS = Vocabulary((*(bytes([byte]) for byte in range(256)), b""), (256,), 257)

PACKAGE = f"{Path(guided_spec.__file__).parent}/"


class Trace(NamedTuple):
    """files: of the package that were entered, in the order of the first calls. changes: how often
    a call entered another file than the call before it. calls: of functions.
    """

    files: list[str]
    changes: int
    calls: int


def trace(work: Callable[[], object]) -> Trace:
    """What ``work`` enters in this thread."""
    found: list[str] = []

    def see(frame: FrameType, event: str, _: Any) -> None:
        _, is_own, name = frame.f_code.co_filename.partition(PACKAGE)
        if event == "call" and is_own:
            found.append(name)

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    changes = sum(one != other for one, other in pairwise(found))
    return Trace(list(dict.fromkeys(found)), changes, len(found))


def entered(work: Callable[[], object]) -> list[str]:
    """The files of the package that ``work`` enters in this thread, in the order of the calls."""
    return trace(work).files


def engine_steps(proposer: str) -> Trace:
    """A step of an engine in the middle of a text: the one with the median number of changes."""
    steps: list[Trace] = []
    with LLM(proposer=proposer, grammar_tables="off") as llm:
        engine = llm._runner.setup.engine  # type: ignore[attr-defined]
        step = engine.step
        engine.step = lambda: steps.append(trace(step))
        params = SamplingParams(max_tokens=60, grammar=GrammarSpec.json_schema(SCHEMA))
        llm.generate("A person as JSON: ", params)
    middle = sorted(steps[2:-1], key=lambda one: one.changes)
    return middle[len(middle) // 2]


def fill_row() -> None:
    """A schema becomes a mask row."""
    pipeline = GrammarPipeline(BackendChoice("auto", LETTERS), GrammarLimits())
    compiled = pipeline.compile(GrammarSpec.json_schema(SCHEMA))
    rows = MaskRows(1, 1, LETTERS.vocab_size, torch.device("cpu"))
    Lookahead.fork([Constraint(compiled)], rows, [0]).finish(0)


def take_step(proposer: Proposer) -> None:
    """A draft becomes committed tokens."""
    constraint = Constraint(ToyCompiled(text_rule([b'{"ab":1}', b'{"cd":0}'])))
    batch = toy_batch([[1]], [constraint])
    step = speculative_step(ToyTarget(2), proposer, batch)
    commit(batch, step.accepted, step.packed)


def head_reader() -> Callable[[], None]:
    """What lets a prompt's hidden states reach the head; loading is not part of it."""
    model = load_model(bundled_asset("target"), device="cpu")
    config = EngineConfig(num_draft_tokens=0)
    context = toy_context(target=model, draft=bundled_asset("eagle3"), config=config)
    head = build_proposer("eagle3", context)
    lm = make_causal_lm(model, num_slots=1, max_length=context.max_model_len)
    target = make_target(lm, head.aux_hidden_layers)
    prompt = [5, 6, 7, 8]
    batch = toy_batch([prompt], [None], k=0)
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)

    def read() -> None:
        target.read([PromptPiece(0, 0, prompt[:-1], prompt)])
        head.begin(replace(batch, states=target.states.take([0])), lookahead)

    return read


def main() -> None:
    """The command."""
    looked_up = from_propose(NGram(toy_context()))
    drafted = from_propose(ToyDrafter(ToyTarget(3)))
    for name, work in (
        ("schema to mask row", fill_row),
        ("n-grams to commit", lambda: take_step(looked_up)),
        ("a model's drafts to commit", lambda: take_step(drafted)),
        ("hidden states to head", head_reader()),
    ):
        files = entered(work)
        sys.stdout.write(f"{name}: {len(files)} files: {' '.join(files)}\n")
    for name in ("ngram", "eagle3"):
        found = engine_steps(name)
        counts = f"{len(found.files)} files, {found.calls} calls, {found.changes} changes of file"
        sys.stdout.write(f"a step of {name}: {counts}: {' '.join(found.files)}\n")


if __name__ == "__main__":
    main()
