"""Command line: `python -m tools.drawn_documents --output guided_spec/assets/reader`."""

import argparse
import logging
import math
import os
from pathlib import Path

import torch
from transformers import Idefics3ForConditionalGeneration

from tools.drawn_documents.corpus import CorpusConfig, batches
from tools.drawn_documents.evaluate import (
    evaluate,
    heldout_documents,
    table_of,
    write_examples,
    write_pages,
)
from tools.drawn_documents.model import make_config, make_tokenizer, save
from tools.drawn_documents.train import Reader, TrainConfig, train

logger = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and make the model."""
    options = _parser().parse_args(arguments)
    if not options.evaluate_only:
        _train(options)
        write_pages(heldout_documents(options.shown), options.output.parent / "pages")
        if options.examples:
            write_examples(options.examples)
    for line in table_of(evaluate(str(options.output), heldout_documents(options.pages))):
        logger.info("%s", line)


def _train(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    if options.device == "cuda":
        torch.set_float32_matmul_precision("high")
    tokenizer = make_tokenizer(options.tokenizer)
    options.output.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(options.output, save_jinja_files=False)
    if options.resume:
        model = Idefics3ForConditionalGeneration.from_pretrained(
            options.resume, dtype=torch.float32
        )
    else:
        model = Idefics3ForConditionalGeneration(make_config(tokenizer))
    reader = Reader(model).to(options.device)
    if options.names and options.names.exists():
        reader.names.load_state_dict(torch.load(options.names))
    corpus = CorpusConfig(
        str(options.output / "tokenizer.json"), options.seed, options.rows, options.workers
    )
    config = TrainConfig(
        options.steps,
        options.seconds,
        learning_rate=options.learning_rate,
        warmup=options.warmup,
        compiled=options.compile,
    )
    steps = train(reader, batches(corpus, options.steps), config, options.device)
    logger.info("%d steps of %d pages", steps, options.rows)
    save(model, tokenizer, options.output)
    if options.names:
        torch.save(reader.names.state_dict(), options.names)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.drawn_documents")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokenizer", default="guided_spec/assets/target")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--rows", type=int, default=192, help="pages of a step")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--warmup", type=int, default=300, help="steps")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", type=Path, help="folder of a model to train on")
    parser.add_argument("--names", type=Path, help="file of what training needs beside the model")
    parser.add_argument("--pages", type=int, default=300, help="held-out pages to evaluate on")
    parser.add_argument("--shown", type=int, default=24, help="of them, that are written as PNG")
    parser.add_argument("--examples", type=Path, help="folder for a page of each kind")
    parser.add_argument(
        "--evaluate-only", action="store_true", help="only evaluate the model in --output"
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    spare = max(1, (os.cpu_count() or 1) - 2) if device == "cuda" else 0
    parser.add_argument("--workers", type=int, default=spare, help="drawing processes")
    parser.add_argument("--device", default=device)
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=device == "cuda"
    )
    return parser


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    main()
