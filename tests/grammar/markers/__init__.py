"""Tests of grammar/markers."""
