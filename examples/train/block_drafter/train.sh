#!/usr/bin/env bash
# A DFlash head, which drafts a block of 15 tokens by one forward, for a dense target.
set -euo pipefail

guided-spec train --algorithm dflash \
  --target "${TARGET:-Qwen/Qwen3-8B}" \
  --data "${DATA:-ultrachat}" \
  --output "${OUTPUT:-qwen3-8b-dflash}" \
  --limit 60000 --regenerate \
  --num-draft-tokens 15 \
  --batch-tokens 8192 --gradient-accumulation 2 \
  --learning-rate 3e-4 --epochs 4 "$@"
