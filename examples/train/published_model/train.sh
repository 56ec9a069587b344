#!/usr/bin/env bash
# Heads for a published model, on its own answers: it writes them once, and both heads read them.
set -euo pipefail

TARGET="${TARGET:-HuggingFaceTB/SmolLM2-135M-Instruct}"
OUTPUT="${OUTPUT:-smollm2-heads}"
SIZE="${DRAFT_VOCAB_SIZE:-16384}"

guided-spec train --algorithm eagle3 \
  --target "$TARGET" --data "${DATA:-xlam}" --output "$OUTPUT/eagle3" \
  --limit 4000 --regenerate --regenerate-batch-size 256 --regenerate-max-tokens 320 \
  --draft-vocab-size "$SIZE" --ttt-steps 5 \
  --batch-tokens 8192 --learning-rate 1e-3 --epochs 5 "$@"

guided-spec train --algorithm dspark \
  --target "$TARGET" --data "$OUTPUT/eagle3/regenerated/part_0_of_1.jsonl" --output "$OUTPUT/dspark" \
  --draft-vocab-size "$SIZE" --num-layers 2 --markov-rank 128 --anchors 64 \
  --batch-tokens 8192 --learning-rate 1e-3 --epochs 5 --num-draft-tokens 7 "$@"
