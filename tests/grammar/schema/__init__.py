"""Tests of grammar/schema."""
