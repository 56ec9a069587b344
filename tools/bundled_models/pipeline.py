"""The whole run: corpus, tokenizer, target, draft, evaluation, folders."""

import json
import logging
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from tools.bundled_models import configs
from tools.bundled_models.card import Run, model_card
from tools.bundled_models.corpus import Batch, CorpusConfig, batches
from tools.bundled_models.documents import Document, sample_document
from tools.bundled_models.evaluate import (
    Acceptance,
    Accuracy,
    GrammarDecoder,
    acceptance,
    field_accuracy,
)
from tools.bundled_models.tokenizer import train_tokenizer
from tools.bundled_models.train import (
    TrainConfig,
    draft_loss,
    target_loss,
    train,
    use_causal_attention,
)

logger = logging.getLogger(__name__)
_TARGET_SEED, _DRAFT_SEED = 1, 2


@dataclass(frozen=True)
class PipelineConfig:
    """Everything that one run depends on."""

    output: Path
    target: TrainConfig
    draft: TrainConfig
    vocab_size: int = configs.VOCAB_SIZE
    tokenizer_documents: int = 60_000
    heldout_documents: int = 300
    batch_tokens: int = 65_536
    shard: int = 8_192
    workers: int = 0
    tiny: bool = False
    device: str = "cpu"
    resume: Path | None = None


def run_pipeline(config: PipelineConfig) -> None:
    """Make the pair and write `target/`, `draft/`, `heldout.jsonl` and `README.md`."""
    config.output.mkdir(parents=True, exist_ok=True)
    documents = heldout_documents(config.heldout_documents)
    lines = "".join(document.to_json() + "\n" for document in documents)
    (config.output / "heldout.jsonl").write_text(lines, encoding="utf-8")
    tokenizer: PreTrainedTokenizerFast
    if config.resume is not None:
        tokenizer = AutoTokenizer.from_pretrained(config.resume / "target")  # type: ignore[assignment]
    else:
        tokenizer = train_tokenizer(_texts(config.tokenizer_documents), config.vocab_size)
    for name in ("target", "draft"):
        tokenizer.save_pretrained(config.output / name, save_jinja_files=False)
    target_shape, draft_shape = configs.target_config(), configs.draft_config()
    if config.tiny:
        target_shape = draft_shape = configs.tiny_config(config.vocab_size)
    target = _model(config, "target", target_shape, _TARGET_SEED)
    target_result = train(
        target, target_loss(target), _data(config, _TARGET_SEED, config.target), config.target
    )
    _save(target, config.output / "target")
    target.eval()
    draft = _model(config, "draft", draft_shape, _DRAFT_SEED)
    draft_result = train(
        draft, draft_loss(draft, target), _data(config, _DRAFT_SEED, config.draft), config.draft
    )
    _save(draft, config.output / "draft")
    device = torch.cuda.get_device_name() if config.device == "cuda" else "CPU"
    run = Run(target_result, draft_result, target.num_parameters(), draft.num_parameters(), device)
    figures = evaluate_folders(config.output, config.device)
    (config.output / "README.md").write_text(model_card(run, *figures), encoding="utf-8")


def evaluate_folders(output: Path, device: str) -> tuple[Accuracy, Acceptance]:
    """Evaluate the pair in `output` on its `heldout.jsonl` and log the figures."""
    target, draft = (
        LlamaForCausalLM.from_pretrained(output / name, dtype=torch.float32).to(device).eval()  # type: ignore[arg-type]
        for name in ("target", "draft")
    )
    lines = (output / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    documents = [Document(**json.loads(line)) for line in lines]
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(output / "target")  # type: ignore[assignment]
    decoder = GrammarDecoder(tokenizer, target.config.vocab_size)
    outputs = decoder.generate(target, documents)
    accuracy = field_accuracy(documents, [decoder.text(ids) for ids in outputs])
    accepted = acceptance(decoder, draft, documents, outputs)
    for goal, found in accuracy.wrong[:40]:
        logger.info("WRONG %s\n  found: %s", goal, found[:200])
    logger.info("leaf accuracy %.4f, whole documents %.4f", accuracy.fields, accuracy.documents)
    logger.info("by kind %s", {kind: round(x, 3) for kind, x in accuracy.by_kind.items()})
    logger.info("by type %s", {kind: round(x, 3) for kind, x in accuracy.by_type.items()})
    logger.info("tokens per step %.3f, agreement %.3f", accepted.length, accepted.agreement)
    return accuracy, accepted


def heldout_documents(count: int) -> list[Document]:
    """Return the first `count` held-out documents, always the same ones."""
    rng = random.Random("held-out documents")
    return [sample_document(rng, "heldout") for _ in range(count)]


def _texts(count: int) -> Iterator[str]:
    rng = random.Random("tokenizer")
    for _ in range(count):
        document = sample_document(rng)
        # Prompt and answer are tokenized apart, so no token may cross from one to the other.
        yield document.prompt
        yield document.answer


def _data(config: PipelineConfig, seed: int, run: TrainConfig) -> Iterator[Batch]:
    corpus = CorpusConfig(
        tokenizer_file=str(config.output / "target" / "tokenizer.json"),
        # A resumed run sees new documents.
        seed=seed if config.resume is None else seed + 100,
        tokens=config.batch_tokens,
        shard=config.shard,
        workers=config.workers,
    )
    # A document has 60 tokens or more, so this many shards are always enough for the steps.
    shards = math.ceil(run.steps * config.batch_tokens / (60 * config.shard)) + 1
    return islice(batches(corpus, shards), run.steps)


def _model(config: PipelineConfig, name: str, shape: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """Return a fresh model, or the one of the folder to resume from, ready to train."""
    if config.resume is not None:
        model = LlamaForCausalLM.from_pretrained(config.resume / name, dtype=torch.float32)
    else:
        torch.manual_seed(seed)
        model = LlamaForCausalLM(shape)
    model = model.to(config.device)  # type: ignore[arg-type]
    use_causal_attention(model)
    return model  # type: ignore[no-any-return]


def _save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write weights in bf16 and the configs; the tokenizer is in the folder already."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0, do_sample=False)
    copy.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[arg-type]
