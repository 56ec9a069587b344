"""Learned draft heads: their layouts, weights, loading and export."""
