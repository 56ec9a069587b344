"""The tokenizer of a checkpoint, and the ids that end a text; loads no code of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from guided_spec.bundled import named_model
from guided_spec.errors import ModelError
from guided_spec.models.checkpoint import ADAPTER_CONFIG, find_file
from guided_spec.models.gguf import find_gguf, gguf_failure

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENIZER_CONFIG = "tokenizer_config.json"


def load_tokenizer(
    path: str | Path, *, argument: str = "tokenizer", **options: Any
) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or by a hub id; for a LoRA adapter without one, its base's.

    Of a GGUF file it is the file's own, with its chat template.

    argument: its name in errors, as the caller knows it.
    options: further arguments of ``from_pretrained``: revision, trust_remote_code, ...
    Raises ModelError, naming the argument and what to do, when it cannot be loaded.
    """
    gguf = find_gguf(path, TOKENIZER_CONFIG, argument=argument, revision=options.get("revision"))
    try:
        if gguf is None:
            source = _tokenizer_of(path, options)
        else:
            source, options = gguf.source, {**options, **gguf.options}
        # For the others the class depends on the model's config, and with it comes code of models.
        kind = PreTrainedTokenizerFast if source == named_model(None) else AutoTokenizer
        tokenizer = kind.from_pretrained(str(source), **{"trust_remote_code": False, **options})
    except Exception as error:  # transformers raises nearly every class of exception here
        raise gguf_failure(path, argument, error) from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ModelError(f"{argument}={str(path)!r}: the folder or repository has no tokenizer")
    return tokenizer


def end_of_text_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[int, ...]:
    """The ids that end a text, ascending: what model, its generation config and tokenizer name."""
    text_config: Any = model.config.get_text_config(decoder=True)
    sources = (model.generation_config, model.config, text_config, tokenizer)
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return tuple(sorted(found))


_LESS, _MORE = (1024, 0.1), (64, 0.01)  # tokens, and the share of all, that may differ


def check_size(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise ModelError for a tokenizer that is plainly another model's, by its number of tokens.

    vocab_size: of the model. It may be padded, and the tokenizer may have some tokens that the
    model does not write.
    """
    size = len(tokenizer)
    least, share = _LESS if size < vocab_size else _MORE
    if abs(vocab_size - size) > max(least, share * vocab_size):
        raise ModelError(
            f"tokenizer={tokenizer.name_or_path!r}: it has {size} tokens and the model writes "
            f"{vocab_size}, so it is another model's; pass tokenizer= the model's own"
        )


def _tokenizer_of(path: str | Path, options: dict[str, Any]) -> str | Path:
    """Where the tokenizer is: an adapter need not bring it."""
    revision = options.get("revision")
    adapter = find_file(path, ADAPTER_CONFIG, revision)
    if adapter is None or find_file(path, TOKENIZER_CONFIG, revision) is not None:
        return path
    settings = json.loads(Path(adapter).read_text(encoding="utf-8"))
    options.pop("revision", None)  # the adapter's
    if settings.get("revision") is not None:
        options["revision"] = settings["revision"]
    base: str = settings.get("base_model_name_or_path") or str(path)
    return base
