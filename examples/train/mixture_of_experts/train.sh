#!/usr/bin/env bash
# EAGLE-3 for a mixture of experts that no single GPU holds: its states to disk first, then the head
# on as many GPUs as there are, without the target.
set -euo pipefail

OUTPUT="${OUTPUT:-glm-4.5-air-eagle3}"
COMMON=(
  --algorithm eagle3
  --target "${TARGET:-zai-org/GLM-4.5-Air}"
  --data "${DATA:-ultrachat}"
  --features "$OUTPUT/features"
  --limit 30000
  --draft-vocab-size "${DRAFT_VOCAB_SIZE:-32000}"
  --batch-tokens 8192
  --decode-limit 0
)
guided-spec train "${COMMON[@]}" --output "$OUTPUT/first" --device-map auto "$@"

PROCESSES="${PROCESSES:-1}"
TRAIN=(guided-spec train)
if [ "$PROCESSES" -gt 1 ]; then
  TRAIN=(torchrun --nproc-per-node="$PROCESSES" -m guided_spec.cli.main train)
fi
"${TRAIN[@]}" "${COMMON[@]}" --output "$OUTPUT/head" --init "$OUTPUT/first" --epochs 4 "$@"
