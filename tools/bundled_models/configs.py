"""Shapes of the two models."""

from transformers import LlamaConfig

VOCAB_SIZE = 4096


def target_config(vocab_size: int = VOCAB_SIZE) -> LlamaConfig:
    """Return the target's shape: 8.2 M parameters, 8 query heads on 2 key-value heads."""
    return _llama(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
    )


def draft_config(vocab_size: int = VOCAB_SIZE) -> LlamaConfig:
    """Return the draft's shape: 1.0 M parameters in two layers."""
    return _llama(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )


def tiny_config(vocab_size: int) -> LlamaConfig:
    """Return the smallest shape that runs, for smoke runs and tests."""
    return _llama(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )


def _llama(**shape: int) -> LlamaConfig:
    return LlamaConfig(
        **shape,  # type: ignore[arg-type]
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        initializer_range=0.02,
        # <|endoftext|> is the tokenizer's first entry and ends every document.
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
