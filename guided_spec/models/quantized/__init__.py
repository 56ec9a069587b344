"""Models whose weights are quantized, loaded as they are stored, without a further package."""
