#!/usr/bin/env bash
# One multi-token prediction layer, started as a copy of the target's last layer, and the target's
# checkpoint with it, which is where other engines look.
set -euo pipefail

TARGET="${TARGET:-Qwen/Qwen3-8B}"
OUTPUT="${OUTPUT:-qwen3-8b-mtp}"
guided-spec train --algorithm mtp \
  --target "$TARGET" \
  --data "${DATA:-ultrachat}" \
  --output "$OUTPUT" \
  --limit 60000 --regenerate \
  --ttt-steps 3 --ttt-step-loss-decay 0.8 \
  --batch-tokens 8192 --learning-rate 5e-5 "$@"
if [ -d "$TARGET" ]; then # a folder, not a name of the hub
  guided-spec stitch "$TARGET" "$OUTPUT" "$OUTPUT-stitched"
fi
