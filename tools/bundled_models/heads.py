"""The bundled draft heads, by one command: `python -m tools.bundled_models.heads`.

It writes documents, trains an EAGLE-3 head, an MTP module and a DSpark head for the bundled target
on them, as `guided-spec train` does, and decodes the held-out documents with each.
"""

import argparse
import json
import logging
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from guided_spec.bundled import bundled_asset
from guided_spec.evaluate.measurement import Measurement, load_workload
from guided_spec.models.loading import load_model
from guided_spec.models.tokenizer import load_tokenizer
from guided_spec.training.options import TrainOptions
from guided_spec.training.run import TrainingReport, train
from guided_spec.training.validation import HeldoutDecoding
from guided_spec.types import SamplingParams
from tools.bundled_models.documents import sample_document
from tools.bundled_models.head_card import head_card

logger = logging.getLogger(__name__)

EMBEDDING = "embed_tokens.weight"
STEPS = 5  # draft tokens, trained and evaluated
TEMPERATURES = (0.0, 0.7, 1.0)


@dataclass(frozen=True)
class Recipe:
    """How one head is made: its vocabulary, its data, and the options of its algorithm.

    documents: how many are drawn; epochs: passes over them.
    """

    draft_vocab_size: int | None
    documents: int
    epochs: int
    learning_rate: float
    options: Mapping[str, Any]


EAGLE3_SHAPE = {
    "aux_layers": [1, 3, 5],
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "intermediate_size": 640,
}
DSPARK_SHAPE = {
    "ttt_steps": 7,
    "ttt_step_loss_decay": 0.78,
    "num_layers": 1,
    "aux_layers": [1, 3, 5],
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "intermediate_size": 640,
    "markov_rank": 64,
    "anchors": 32,
}
HEADS = {
    "eagle3": Recipe(2048, 150_000, 4, 1e-3, EAGLE3_SHAPE),
    "mtp": Recipe(None, 80_000, 5, 2e-3, {}),
    "dspark": Recipe(2048, 30_000, 4, 1e-3, DSPARK_SHAPE),
}


@dataclass(frozen=True)
class HeadsConfig:
    """Everything that one run depends on.

    output: the folders of the heads are written here. work: for documents, logs and checkpoints.
    target: the model to train for. heldout: the documents to decode, at most ``decode_limit``.
    documents: to train on; None is the number of each head's recipe.
    """

    output: Path
    work: Path
    target: str
    heldout: Path
    batch_tokens: int
    grammar_masks: str
    decode_limit: int
    workers: int
    documents: int | None = None
    names: tuple[str, ...] = tuple(HEADS)


def make_heads(config: HeadsConfig) -> dict[str, list[Measurement]]:
    """Train and write the heads; what decoding gave, by head, one item a temperature."""
    config.work.mkdir(parents=True, exist_ok=True)
    figures = {}
    for name in config.names:
        data = config.work / f"{name}.jsonl"
        write_documents(data, config.documents or HEADS[name].documents)
        report = train(_options(config, name, data), _algorithm_options(name))
        folder = config.output / name
        _copy(Path(report.draft), folder, config.target)
        figures[name] = _decode(config, folder)
        card = head_card(name, report, figures[name], TEMPERATURES)
        (folder / "README.md").write_text(card, encoding="utf-8")
        _log(name, report, figures[name])
    return figures


def write_documents(path: Path, count: int) -> None:
    """Write ``count`` training documents as JSON Lines, always the same ones."""
    dice = random.Random("documents for heads")
    with path.open("w", encoding="utf-8") as file:
        file.writelines(sample_document(dice).to_json() + "\n" for _ in range(count))


def _options(config: HeadsConfig, name: str, data: Path) -> TrainOptions:
    recipe = HEADS[name]
    return TrainOptions(
        algorithm=name,
        target=config.target,
        data=[str(data)],
        output=str(config.work / name),
        max_length=512,
        heldout_share=0.005,
        draft_vocab_size=recipe.draft_vocab_size,
        grammar_masks=config.grammar_masks,  # type: ignore[arg-type]  # checked by the parser
        epochs=recipe.epochs,
        batch_tokens=config.batch_tokens,
        learning_rate=recipe.learning_rate,
        clip_norm=1.0,
        weight_decay=0.01,
        log_every=50,
        decode_limit=0,
        target_dtype="float32",
        workers=config.workers,
    )


def _algorithm_options(name: str) -> dict[str, Any]:
    return {"ttt_steps": STEPS, "ttt_step_loss_decay": 1.0, "loss": "kl", **HEADS[name].options}


def _copy(trained: Path, folder: Path, target: str) -> None:
    """Take the checkpoint alone, without the target's own embedding and where the target was."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(trained / "model.safetensors")
    if (own := tensors.get(EMBEDDING)) is not None:
        model: Any = load_model(target, device="cpu")
        weight = model.get_input_embeddings().weight
        if torch.equal(own, weight.detach().to(own.dtype)):
            del tensors[EMBEDDING]  # a head without one has the target's
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((trained / "config.json").read_text(encoding="utf-8"))
    verifier = config.get("speculators_config", {}).get("verifier")
    if isinstance(verifier, Mapping):
        config["speculators_config"]["verifier"] = {**verifier, "name_or_path": None}
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _decode(config: HeadsConfig, folder: Path) -> list[Measurement]:
    target = load_model(config.target, dtype="float32")
    tokenizer = load_tokenizer(config.target)
    items = load_workload(config.heldout, config.decode_limit)
    return [
        HeldoutDecoding(
            target,
            tokenizer,
            items,
            SamplingParams(max_tokens=360, temperature=temperature, seed=0),
            STEPS,
        ).run(folder)
        for temperature in TEMPERATURES
    ]


def _log(name: str, report: TrainingReport, figures: list[Measurement]) -> None:
    logger.info("%s: %d steps, %.0f s, %s", name, report.steps, report.seconds, report.heldout)
    for temperature, found in zip(TEMPERATURES, figures, strict=True):
        logger.info(
            "%s at temperature %s: %.3f tokens per forward, valid %.3f",
            name,
            temperature,
            found.acceptance_length,
            found.valid,
        )


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and make the heads."""
    options = _parser().parse_args(arguments)
    values = {**vars(options), "names": tuple(options.names)}
    make_heads(HeadsConfig(**values))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.bundled_models.heads")
    parser.add_argument("--output", type=Path, required=True, help="here go the heads' folders")
    parser.add_argument("--work", type=Path, required=True, help="documents, logs, checkpoints")
    parser.add_argument("--target", default=bundled_asset("target"))
    parser.add_argument("--heldout", type=Path, default=Path(bundled_asset("heldout.jsonl")))
    parser.add_argument("--documents", type=int, help="another number, for smoke runs")
    parser.add_argument("--batch-tokens", type=int, default=65_536)
    parser.add_argument("--grammar-masks", choices=["loss", "metrics", "off"], default="loss")
    parser.add_argument("--decode-limit", type=int, default=300)
    spare = max(0, (os.cpu_count() or 1) - 3)
    parser.add_argument("--workers", type=int, default=spare)
    parser.add_argument("--names", nargs="+", choices=list(HEADS), default=list(HEADS))
    return parser


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    main()
