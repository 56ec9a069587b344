"""Command line: `python -m tools.bundled_models --output guided_spec/assets`."""

import argparse
import logging
import math
import os
from pathlib import Path

import torch

from tools.bundled_models.pipeline import PipelineConfig, evaluate_folders, run_pipeline
from tools.bundled_models.train import TrainConfig


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and make the pair."""
    options = _parser().parse_args(arguments)
    if options.device == "cuda":
        torch.set_float32_matmul_precision("high")
    if options.evaluate_only:
        evaluate_folders(options.output, options.device)
        return
    run_pipeline(
        PipelineConfig(
            output=options.output,
            target=TrainConfig(
                options.target_steps,
                options.target_seconds,
                learning_rate=options.learning_rate,
                compiled=options.compile,
            ),
            draft=TrainConfig(
                options.draft_steps,
                options.draft_seconds,
                learning_rate=1.5 * options.learning_rate,
                compiled=options.compile,
            ),
            batch_tokens=options.batch_tokens,
            tokenizer_documents=options.tokenizer_documents,
            heldout_documents=options.heldout_documents,
            vocab_size=options.vocab_size,
            shard=options.shard,
            workers=options.workers,
            tiny=options.tiny,
            device=options.device,
            resume=options.resume,
        )
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.bundled_models")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--target-steps", type=int, default=8_500)
    parser.add_argument("--target-seconds", type=float, default=math.inf)
    parser.add_argument("--draft-steps", type=int, default=1_800)
    parser.add_argument("--draft-seconds", type=float, default=math.inf)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--batch-tokens", type=int, default=65_536)
    parser.add_argument("--tokenizer-documents", type=int, default=30_000)
    parser.add_argument("--heldout-documents", type=int, default=300)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--shard", type=int, default=8_192, help="documents sorted together")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    spare = max(1, (os.cpu_count() or 1) - 3) if device == "cuda" else 0
    parser.add_argument("--workers", type=int, default=spare, help="document-making processes")
    parser.add_argument("--tiny", action="store_true", help="smallest models, for smoke runs")
    parser.add_argument(
        "--evaluate-only", action="store_true", help="only evaluate the pair in --output"
    )
    parser.add_argument("--resume", type=Path, help="folder with a pair to train on")
    parser.add_argument("--device", default=device)
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=device == "cuda"
    )
    return parser


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    main()
