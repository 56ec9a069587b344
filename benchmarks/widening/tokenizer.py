"""A tokenizer with as many tokens as a large model's, which writes texts as the small one does.

Grammars cost what the vocabulary makes them cost: a token without text is struck from every mask by
itself, one with text belongs to a tree that is walked once. So the tokens that fill up have text:
words, as nearly all tokens of a large vocabulary are, put together from pairs of real tokens. No
merge leads to them: nothing is ever tokenized differently.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from guided_spec.errors import ModelError

FILE = "tokenizer.json"
OTHERS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
SPACE = "Ġ"  # what stands for a space in byte-level vocabularies
LONGEST = 16  # characters of a token, as most are in published vocabularies


def write_tokenizer(source: Path, folder: Path, new_ids: range) -> None:
    """Write the tokenizer of ``source`` into ``folder``, with a token for each of ``new_ids``.

    Nothing is written where there is none. Raises ModelError where it is no byte-pair encoding, as
    the bundled one is.
    """
    path = source / FILE
    if not path.is_file():
        return
    content = json.loads(path.read_text(encoding="utf-8"))
    model = content["model"]
    if model["type"] != "BPE" or model.get("ignore_merges"):
        raise ModelError(f"{path}: expected byte-pair encoding by merges, found {model['type']}")
    _fill_up(content, new_ids)
    (folder / FILE).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    for name in OTHERS:
        if (source / name).is_file():
            shutil.copy(source / name, folder)


def _fill_up(content: dict[str, Any], new_ids: range) -> None:
    vocab: dict[str, int] = content["model"]["vocab"]
    special = {token["content"] for token in content["added_tokens"]}
    parts = sorted(token for token in vocab if _is_word(token) and token not in special)
    ends = [token for token in parts if not token.startswith(SPACE)]
    dice = random.Random("tokens that fill up")
    for number in new_ids:
        text = dice.choice(parts) + dice.choice(ends)
        while text in vocab or len(text) > LONGEST:
            text = dice.choice(parts) + dice.choice(ends)
        vocab[text] = number


def _is_word(token: str) -> bool:
    return token.removeprefix(SPACE).isascii() and token.removeprefix(SPACE).isalnum()
