"""Documents: a page, the question, the answer in JSON and its schema."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.bundled_models.values import Schema
from tools.drawn_documents.forms import draw_form
from tools.drawn_documents.page import DoesNotFit, Page
from tools.drawn_documents.receipts import draw_receipt
from tools.drawn_documents.tables import draw_table

Draw = Callable[[random.Random, Page], tuple[dict[str, Any], Schema]]
KINDS: dict[str, Draw] = {"receipt": draw_receipt, "form": draw_form, "table": draw_table}
_QUESTIONS = (
    "Read the {}.",
    "What does the {} say?",
    "Extract the {}.",
    "Extract the data of this {}.",
    "Please read this {}.",
)


@dataclass(frozen=True)
class Document:
    """One example."""

    kind: str
    page: Page
    question: str
    answer: dict[str, Any]
    schema: Schema

    @property
    def text(self) -> str:
        """The answer as the model learns to write it."""
        return json.dumps(self.answer)


def sample_document(rng: random.Random, kind: str | None = None) -> Document:
    """Sample a document; the same state of `rng` gives the same one."""
    chosen = kind or rng.choice(list(KINDS))
    question = rng.choice(_QUESTIONS).format(rng.choice((chosen, "picture", "document")))
    question = question if rng.random() < 0.8 else ""  # --image and --schema alone
    while True:
        page = Page(paper=rng.randint(225, 255), ink=rng.randint(0, 70))
        try:
            answer, schema = KINDS[chosen](rng, page)
        except DoesNotFit:
            continue
        return Document(chosen, page, question, answer, schema)
