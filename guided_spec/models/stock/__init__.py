"""Stock transformers models over KV slots."""
