"""LoRA adapters next to a base model: each text of a batch has its own, or none."""
