"""Tests of grammar/completion."""
