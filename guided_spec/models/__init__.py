"""Stock Hugging Face models as the engine sees them: loading, KV slots, one ragged forward."""
