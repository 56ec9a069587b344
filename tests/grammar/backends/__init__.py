"""Tests of grammar/backends."""
