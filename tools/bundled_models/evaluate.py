"""Evaluation on held-out documents: field accuracy and acceptance length under the grammar."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xgrammar
from transformers import LlamaForCausalLM, LogitsProcessorList, PreTrainedTokenizerFast
from xgrammar.contrib.hf import LogitsProcessor

from tools.bundled_models.documents import Document

_MISSING = object()


@dataclass(frozen=True)
class Accuracy:
    """Leaf values that equal the expected ones, as a share: overall, by document kind, by type."""

    count: int
    fields: float
    documents: float
    by_kind: dict[str, float]
    by_type: dict[str, float]
    wrong: list[tuple[str, str]]


@dataclass(frozen=True)
class Acceptance:
    """Greedy speculation under the grammar.

    `length` is the mean number of tokens per target step (accepted drafts + 1) and
    `agreement` the share of single tokens that draft and target choose alike.
    """

    length: float
    agreement: float


class GrammarDecoder:
    """Greedy decoding of a model under each document's grammar, in plain transformers."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        self._compiler = xgrammar.GrammarCompiler(info)

    def compile(self, document: Document) -> xgrammar.CompiledGrammar:
        """Return the grammar of the document's schema or regex."""
        if document.schema is not None:
            schema = json.dumps(document.schema)
            return self._compiler.compile_json_schema(schema, any_whitespace=False)
        return self._compiler.compile_regex(document.regex or "")

    @torch.inference_mode()
    def generate(
        self, model: LlamaForCausalLM, documents: Sequence[Document], batch: int = 64
    ) -> list[list[int]]:
        """Return for every document the generated token ids, with the end token."""
        outputs: list[list[int]] = []
        decoder: Any = model  # not every version of transformers says what generate is a method of
        for start in range(0, len(documents), batch):
            part = documents[start : start + batch]
            inputs = self.tokenizer([d.prompt for d in part], return_tensors="pt", padding=True)
            ids = decoder.generate(
                input_ids=inputs["input_ids"].to(model.device),
                attention_mask=inputs["attention_mask"].to(model.device),
                do_sample=False,
                max_new_tokens=360,
                logits_processor=LogitsProcessorList(
                    [LogitsProcessor([self.compile(d) for d in part])]
                ),
            )
            outputs += [self._cut(row) for row in ids[:, inputs["input_ids"].shape[1] :].tolist()]
        return outputs

    def text(self, ids: list[int]) -> str:
        """Return the text of generated ids."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _cut(self, ids: list[int]) -> list[int]:
        end = self.tokenizer.eos_token_id
        return ids[: ids.index(end) + 1] if end in ids else ids

    def masks(self, document: Document, ids: list[int]) -> torch.Tensor:
        """Return the packed masks of the tokens allowed at each place of `ids`."""
        matcher = xgrammar.GrammarMatcher(self.compile(document))
        masks = xgrammar.allocate_token_bitmask(len(ids), self.vocab_size)
        for place, token in enumerate(ids):
            matcher.fill_next_token_bitmask(masks, place)
            if not matcher.accept_token(token):
                raise ValueError(f"token {token} at place {place} breaks the grammar")
        return masks


def field_accuracy(documents: Sequence[Document], answers: Iterable[str]) -> Accuracy:
    """Compare generated answers with the expected ones, leaf by leaf."""
    by_kind: dict[str, list[bool]] = defaultdict(list)
    by_type: dict[str, list[bool]] = defaultdict(list)
    exact: list[bool] = []
    wrong = []
    for document, answer in zip(documents, answers, strict=True):
        goal = leaves(_parse(document, document.answer))
        found = leaves(_parse(document, answer))
        marks = {path: found.get(path, _MISSING) == value for path, value in goal.items()}
        for path, mark in marks.items():
            by_kind[document.kind].append(mark)
            by_type[type(goal[path]).__name__].append(mark)
        exact.append(all(marks.values()) and len(found) == len(goal))
        if not exact[-1]:
            wrong.append((document.prompt + document.answer, answer))
    every = [mark for marks_of_kind in by_kind.values() for mark in marks_of_kind]
    return Accuracy(
        len(documents),
        _share(every),
        _share(exact),
        {name: _share(marks_of) for name, marks_of in sorted(by_kind.items())},
        {name: _share(marks_of) for name, marks_of in sorted(by_type.items())},
        wrong,
    )


@torch.inference_mode()
def acceptance(
    decoder: GrammarDecoder,
    draft: LlamaForCausalLM,
    documents: Sequence[Document],
    outputs: Sequence[list[int]],
    drafts_per_step: int = 5,
) -> Acceptance:
    """Return what greedy speculation with `draft` reaches on the target's own greedy `outputs`.

    One forward of the draft over a whole output suffices: speculation with greedy acceptance
    emits exactly the target's tokens, and the draft's choice at a place counts only where all
    tokens before it agree with them.
    """
    tokens = steps = agreed = 0
    for document, ids in zip(documents, outputs, strict=True):
        prompt = decoder.tokenizer(document.prompt)["input_ids"]
        inputs = torch.tensor([[*prompt, *ids]], device=draft.device)
        logits = draft(input_ids=inputs, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        masks = decoder.masks(document, ids).to(logits.device)
        xgrammar.apply_token_bitmask_inplace(logits, masks)
        matches = [a == b for a, b in zip(logits.argmax(-1).tolist(), ids, strict=True)]
        agreed += sum(matches)
        tokens += len(ids)
        steps += count_steps(matches, drafts_per_step)
    return Acceptance(tokens / steps, agreed / tokens)


def count_steps(matches: Sequence[bool], drafts_per_step: int) -> int:
    """Return the number of target steps that emit `len(matches)` tokens."""
    place = steps = 0
    while place < len(matches):
        accepted = 0
        while (
            accepted < drafts_per_step
            and place + accepted < len(matches)
            and matches[place + accepted]
        ):
            accepted += 1
        place += accepted + 1
        steps += 1
    return steps


def _parse(document: Document, answer: str) -> Any:
    if document.schema is None:
        return answer
    try:
        return json.loads(answer)
    except json.JSONDecodeError:
        return None


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """The values in a JSON value, by where they are."""
    if isinstance(value, dict):
        pairs = [(f"{path}.{key}", part) for key, part in value.items()]
    elif isinstance(value, list):
        pairs = [(f"{path}[{place}]", part) for place, part in enumerate(value)]
    else:
        return {path: value}
    return {name: leaf for key, part in pairs for name, leaf in leaves(part, key).items()}


def _share(marks: Sequence[bool]) -> float:
    return sum(marks) / len(marks) if marks else 0.0
