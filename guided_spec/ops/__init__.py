"""Tensor operations of the guided step. The plain-torch functions here are the definition."""
