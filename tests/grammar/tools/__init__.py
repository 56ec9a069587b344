"""Tests of grammar/tools."""
