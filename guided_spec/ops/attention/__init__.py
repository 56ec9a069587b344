"""Attention over texts that are kept in blocks: the definition, its kernels, and FlashAttention."""
