"""Measuring on a workload: tokens per second, forwards per token, and valid texts."""
