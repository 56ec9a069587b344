"""How many values are read right, on pages that training never showed."""

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guided_spec import LLM, GrammarSpec, SamplingParams
from tools.bundled_models.evaluate import leaves
from tools.drawn_documents.document import Document, sample_document

EXAMPLES = {"receipt": 137, "form": 449, "table": 64}  # seeds, of pages with common words


@dataclass
class Score:
    """Values and whole pages: right ones, and all."""

    right: Counter[str] = field(default_factory=Counter)
    values: Counter[str] = field(default_factory=Counter)
    whole: Counter[str] = field(default_factory=Counter)
    pages: Counter[str] = field(default_factory=Counter)

    def add(self, document: Document, text: str) -> None:
        """Count one answer."""
        wanted = leaves(document.answer)
        found = leaves(json.loads(text))
        for kind in (document.kind, "all"):
            self.pages[kind] += 1
            self.whole[kind] += wanted == found
            self.values[kind] += len(wanted)
            self.right[kind] += sum(found.get(at) == value for at, value in wanted.items())


def heldout_documents(count: int) -> list[Document]:
    """The first `count` held-out pages; their seed is none of a training."""
    rng = random.Random("held-out pages")
    return [sample_document(rng) for _ in range(count)]


def evaluate(folder: str, documents: Sequence[Document]) -> Score:
    """Let the model read the pages, greedily and under their schemas."""
    messages, params, score = [], [], Score()
    for document in documents:
        content = [{"type": "image", "image": document.page.image.convert("RGB")}]
        if document.question:
            content.append({"type": "text", "text": document.question})
        messages.append([{"role": "user", "content": content}])
        spec = GrammarSpec.json_schema(document.schema)
        params.append(SamplingParams(grammar=spec, max_tokens=512))
    with LLM(folder) as llm:
        for document, completion in zip(documents, llm.generate(messages, params), strict=True):
            score.add(document, completion.text)
    return score


def table_of(score: Score) -> Iterator[str]:
    """Lines of Markdown."""
    yield "| pages | values right | pages all right |"
    yield "|---|---:|---:|"
    for kind in sorted(score.pages, key=lambda kind: (kind == "all", kind)):
        right = score.right[kind] / score.values[kind]
        whole = score.whole[kind] / score.pages[kind]
        yield f"| {kind}, {score.pages[kind]} | {right:.1%} | {whole:.1%} |"


def write_pages(documents: Sequence[Document], folder: Path) -> None:
    """Write each page as PNG, and ``pages.jsonl`` with what to ask and what is right."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, document in enumerate(documents):
        name = f"{document.kind}_{number:02}.png"
        document.page.image.save(folder / name, optimize=True)
        told: dict[str, Any] = {"image": name, "question": document.question}
        told |= {"schema": document.schema, "answer": document.answer}
        lines.append(json.dumps(told) + "\n")
    (folder / "pages.jsonl").write_text("".join(lines), encoding="utf-8")


def write_examples(folder: Path) -> None:
    """Write one page of each kind, and the schema that it is read into."""
    for kind, seed in EXAMPLES.items():
        document = sample_document(random.Random(seed), kind)
        document.page.image.save(folder / f"{kind}.png", optimize=True)
        schema = json.dumps(document.schema, indent=2) + "\n"
        (folder / f"{kind}.schema.json").write_text(schema, encoding="utf-8")
