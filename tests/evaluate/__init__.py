"""Tests of evaluate."""
