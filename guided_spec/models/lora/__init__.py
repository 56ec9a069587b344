"""LoRA adapters next to a base model: each text of a batch is written with its own, or with none."""
