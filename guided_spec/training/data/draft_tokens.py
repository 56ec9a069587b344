"""Which of the target's tokens a draft with a smaller vocabulary scores."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guided_spec.errors import ConfigError
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.models.draft_vocabulary import DraftVocabulary
from guided_spec.ops.bitmask import num_mask_words, only_legal_token
from guided_spec.training.data.grammar_masks import GrammarMasks
from guided_spec.training.data.mask_table import MaskTable

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = [
    "count_tokens",
    "forced_tokens",
    "select_draft_vocabulary",
]

CHUNK = 1024
LONGEST_WALK = 256
CLOSING = b'"]}'  # without a liking for these, a walk never leaves its first string


def count_tokens(dataset: Dataset, vocab_size: int) -> Tensor:
    """int64 [V]: how often each token stands in an answer of ``dataset``.

    Raises ConfigError for a token at or past ``vocab_size``.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    columns = dataset.select_columns(["input_ids", "loss_mask"]).with_format("arrow")
    for table in columns.iter(CHUNK):
        token_ids = _flat(table["input_ids"])[_flat(table["loss_mask"]).astype(bool)]
        if len(token_ids) and token_ids.max() >= vocab_size:
            fix = f"the data holds token {token_ids.max()}: it was tokenized for another target"
            raise ConfigError("vocab_size", vocab_size, fix)
        counts += np.bincount(token_ids, minlength=vocab_size)
    return torch.from_numpy(counts)


def forced_tokens(
    dataset: Dataset, masks: GrammarMasks, *, limit: int, walks: int, seed: int
) -> set[int]:
    """Tokens that grammars of ``dataset`` can force: a draft without them has no legal one there.

    Looked for at every place of the first ``limit`` answers, and on ``walks`` random walks of up to
    256 tokens through each of their grammars. A sample: there may be more of them.
    """
    found: set[int] = set()
    grammars: dict[str, None] = {}
    for row in dataset.select(range(min(limit, len(dataset)))):
        grammar = str(row["grammar"])
        start = int(row["answer_start"])
        table = MaskTable(len(row["input_ids"]) - start, masks.vocabulary.vocab_size)
        masks.fill(table, row["input_ids"], start, grammar)
        found.update(only_legal_token(table.rows()).tolist())
        grammars[grammar] = None
    dice = np.random.default_rng(seed)
    for grammar in grammars:
        compiled = masks.compile(grammar)
        if compiled is not None:
            for _ in range(walks):
                found.update(_walk(compiled, masks.vocabulary, dice))
    return found - {-1}


def select_draft_vocabulary(
    counts: Tensor, size: int, keep: Collection[int] = ()
) -> DraftVocabulary:
    """The ``keep`` tokens and, of the others, the most frequent; of equals the lower id.

    counts: int64 [V], on the CPU. size: D. The target ids ascend. Raises ConfigError for a size
    that does not hold ``keep``, or that is more than V.
    """
    kept = sorted(set(keep))
    if not 1 <= size <= len(counts):
        raise ConfigError("size", size, f"must be between 1 and the vocabulary's {len(counts)}")
    if len(kept) > size:
        raise ConfigError("size", size, f"must be at least {len(kept)}: so many tokens are kept")
    if kept and not 0 <= kept[0] <= kept[-1] < len(counts):
        fix = f"must be tokens of the vocabulary, from 0 to {len(counts) - 1}"
        raise ConfigError("keep", [kept[0], kept[-1]], fix)
    order = torch.sort(counts, descending=True, stable=True).indices
    is_kept = torch.zeros(len(counts), dtype=torch.bool)
    is_kept[kept] = True
    frequent = order[~is_kept[order]][: size - len(kept)]
    is_kept[frequent] = True
    return DraftVocabulary(is_kept.nonzero().flatten(), len(counts))


def _flat(column: object) -> NDArray[np.int64]:
    """The values of an Arrow column of lists, one list after another."""
    flat: NDArray[np.int64] = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)  # type: ignore[attr-defined]
    return flat


def _walk(
    compiled: CompiledGrammar, vocabulary: Vocabulary, dice: np.random.Generator
) -> Sequence[int]:
    """The tokens that were the only legal one along a random text of the grammar."""
    row = np.zeros((1, num_mask_words(vocabulary.vocab_size)), dtype=np.int32)
    closing = [token for token in vocabulary.single_byte_ids[list(CLOSING)] if token >= 0]
    matcher = compiled.new_matcher()
    found: list[int] = []
    for _ in range(LONGEST_WALK):
        if matcher.is_terminated():
            break
        matcher.fill_next_token_bitmask(row, 0)
        bits = np.unpackbits(row.view(np.uint8)[0], bitorder="little")
        legal = np.flatnonzero(bits[: vocabulary.vocab_size])
        if not len(legal):
            break
        if len(legal) == 1:
            found.append(int(legal[0]))
        liked = np.intersect1d(legal, closing) if dice.random() < 0.5 else legal
        token = int(dice.choice(liked if len(liked) else legal))
        if not matcher.accept_token(token):
            break
    return found
