#!/usr/bin/env bash
# EAGLE-3 for a dense target of some 8B parameters, on one GPU.
set -euo pipefail

guided-spec train --algorithm eagle3 \
  --target "${TARGET:-Qwen/Qwen3-8B}" \
  --data "${DATA:-ultrachat}" \
  --output "${OUTPUT:-qwen3-8b-eagle3}" \
  --limit 60000 --regenerate \
  --draft-vocab-size "${DRAFT_VOCAB_SIZE:-32000}" \
  --ttt-steps 5 --ttt-step-loss-decay 0.8 \
  --batch-tokens 8192 --gradient-accumulation 2 \
  --epochs 2 "$@"
