"""The engine: requests in, committed text out, over any stock transformers causal LM."""
