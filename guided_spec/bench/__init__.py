"""Measuring: a workload in, tokens per second and forwards per token out."""
